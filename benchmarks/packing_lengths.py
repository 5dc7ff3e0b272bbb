"""MFU and memory against packing length for LMMs-Engine's text, image and video recipes on 32 A800, as predicted.

    .venv/bin/python benchmarks/packing_lengths.py     # a minute; nothing is measured, so any machine will do
    .venv/bin/python benchmarks/packing_lengths.py --draw docs/packing-lengths.svg
    .venv/bin/python benchmarks/packing_lengths.py --render benchmarks/results/packing_lengths_*.json --draw lengths.svg

Writes benchmarks/results/packing_lengths_<hardware>_<yyyymm>.json and the .md table rendered from it; `--draw` draws
the recipes of Qwen2.5; the dashed upright line is LMMs-Engine's length.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from headway.cli.tune import search_of
from headway.config import load_config
from headway.errors import HeadwayError
from headway.predict.prediction import Prediction
from headway.predict.tune.space import Space
from headway.report.charts import ChartMark, DrawnLine, lines_chart
from headway.report.page import svg_file
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write

RECIPES = (
    "qwen2.5-7b-text-81920",
    "qwen2.5-vl-7b-image-61440",
    "qwen3-vl-8b-image-61440",
    "qwen2.5-vl-7b-video-51200",
    "qwen3-vl-8b-video-51200-sp2",
)
LENGTHS = (20_480, 30_720, 40_960, 51_200, 61_440, 81_920, 102_400)
DRAWN = {RECIPES[0]: "text", RECIPES[1]: "images", RECIPES[3]: "videos"}
MORE_DROPPED = 0.001
"""Share of the tokens beyond which a length that drops them is no better one."""

GIB = 2**30


def main() -> None:
    """Plan every length of every recipe, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    parser.add_argument("--render", type=Path, help="plan nothing; print the table of this earlier record")
    parser.add_argument("--draw", type=Path, help="picture to draw, SVG")
    options = parser.parse_args()
    if options.render:
        record = json.loads(options.render.read_text(encoding="utf-8"))
    else:
        runs = [run_of(name, tokens) for name in RECIPES for tokens in LENGTHS]
        record = {"what": "packing_lengths", "environment": environment(torch.device("cpu")), "runs": runs}
        write(result_paths(options.out, record), record, render(record))
    print(render(record))
    if options.draw:
        draw(record, options.draw)


def run_of(name: str, tokens: int) -> dict[str, Any]:
    """One recipe at one packing length and one pack a step: as it recomputes, and by the fastest choice that fits."""
    config = load_config(Path(f"recipes/{name}.yaml"), (f"data.tokens_per_pack={tokens}",))
    search = search_of(config, None, None, [])[0]
    ranks = search.devices // config.parallel.sequence
    axes: dict[str, Any] = {"accumulations": (1,), "sequences": (config.parallel.sequence,), "chunks": (2048,)}
    search.space = Space(ranks * tokens, recomputes=search.space.recomputes, limits_patches=False, **axes)
    run: dict[str, Any] = {"recipe": name, "tokens_per_pack": tokens, "room_bytes": search.room_bytes}
    own = search.own()
    run["dropped"] = own.packs.counts.tokens_dropped / (own.packs.counts.tokens + own.packs.counts.tokens_dropped)
    run["own"] = row_of(own)
    try:
        run["best"] = row_of(search.run().ranked[0])
    except HeadwayError as error:
        run["best"] = None
        run["why"] = str(error)
    return run


def row_of(one: Prediction) -> dict[str, Any]:
    """The numbers of a choice."""
    seconds: Any = one.time
    return {
        "recompute": one.config.speed.recompute,
        "peak_bytes": one.memory.peak,
        "step_s": one.step_s,
        "mfu": [*seconds.mfu],
        "balance": one.packs.report.balance,
        "fill": one.packs.report.fill,
    }


def render(record: dict[str, Any]) -> str:
    """The record as a Markdown table."""
    rows = []
    for run in record["runs"]:
        own, best, room = run["own"], run["best"], run["room_bytes"]
        stands = own_length(run["recipe"]) == run["tokens_per_pack"]
        rows.append(
            [
                run["recipe"],
                f"{run['tokens_per_pack']:,}" + (" (LMMs-Engine)" if stands else ""),
                f"{100 * run['dropped']:.2f} %",
                f"{own['balance']:.3f}",
                own["recompute"],
                f"{own['peak_bytes'] / GIB:.1f}" + ("" if own["peak_bytes"] <= room else " (too much)"),
                f"{100 * own['mfu'][1]:.1f} %",
                "-" if best is None else best["recompute"],
                "-" if best is None else f"{best['peak_bytes'] / GIB:.1f}",
                "-" if best is None else f"{100 * best['mfu'][1]:.1f} %",
            ]
        )
    headings = ["recipe", "pack", "tokens dropped", "balance", "recompute", "GiB", "MFU"]
    headings += ["fastest that fits", "GiB", "MFU"]
    return (
        "# Packing length, memory and MFU\n\n"
        f"{describe_environment(record)}\n\n"
        "32 A800-SXM4-80GB, one pack a step and rank, typical lengths of each recipe, 67.1 GiB of 74.5 GiB allowed. "
        "Predicted, by shares of the datasheet and with the exchanges that computing does not hide on the printed "
        "links; MFU is the expected case, with the vision tower.\n\n"
        f"{markdown_table(headings, rows)}\n"
    )


def own_length(recipe: str) -> int:
    """Packing length in a recipe's name, which is LMMs-Engine's [tokens]."""
    return int(recipe.removesuffix("-sp2").rpartition("-")[2])


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw MFU and memory against packing length, for each kind of data.

    Args:
        record: as it is written.
        path: SVG file.
    """
    charts = {}
    for recipe, kind in DRAWN.items():
        runs = [run for run in record["runs"] if run["recipe"] == recipe]
        whole = [run for run in runs if run["dropped"] <= MORE_DROPPED]
        best = max((run for run in whole if run["best"]), key=lambda run: run["best"]["mfu"][1])
        room_gib = runs[0]["room_bytes"] / GIB
        name = f"{kind}, {recipe.rpartition('-')[0]}"
        at_best = f"best {100 * best['best']['mfu'][1]:.1f} % at {best['tokens_per_pack']:,} tokens"
        for what, value, limit in (
            (f"{name}: MFU [%], predicted, {at_best}", lambda row: 100 * row["mfu"][1], None),
            (
                f"{name}: memory [GiB], planned, of at most {room_gib:.1f}",
                lambda row: row["peak_bytes"] / GIB,
                room_gib,
            ),
        ):
            lines = [
                DrawnLine(label, [run["tokens_per_pack"] for run in shown], [value(run[key]) for run in shown])
                for key, label in (("best", "fastest that fits"), ("own", "recomputing as the recipe"))
                if (shown := [run for run in whole if run[key]])
            ]
            if limit is not None:
                lines.append(DrawnLine("limit", [run["tokens_per_pack"] for run in whole], [limit] * len(whole)))
            mark = own_length(recipe)
            charts[what] = lines_chart(what, lines, form="plain", x_name="tokens of a pack", marks=[ChartMark(mark)])
    path.write_text(svg_file(charts), encoding="utf-8")


if __name__ == "__main__":
    main()
