"""MFU and memory against packing length for LMMs-Engine's text, image and video recipes on 32 A800, as predicted.

    .venv/bin/python benchmarks/packing_lengths.py     # a minute; nothing is measured, so any machine will do

Writes benchmarks/results/packing_lengths_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from headway.cli.tune import search_of
from headway.errors import HeadwayError
from headway.train.config import load_config
from headway.train.tune import Candidate
from headway.train.tune.space import LEFT, Space
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write

RECIPES = (
    "qwen2.5-7b-text-81920",
    "qwen2.5-vl-7b-image-61440",
    "qwen3-vl-8b-image-61440",
    "qwen2.5-vl-7b-video-51200",
    "qwen3-vl-8b-video-51200-sp2",
)
LENGTHS = (20_480, 30_720, 40_960, 51_200, 61_440, 81_920, 102_400)
GIB = 2**30


def main() -> None:
    """Plan every length of every recipe, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    options = parser.parse_args()
    runs = [run_of(name, tokens) for name in RECIPES for tokens in LENGTHS]
    record = {"what": "packing_lengths", "environment": environment(torch.device("cpu")), "runs": runs}
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def run_of(name: str, tokens: int) -> dict[str, Any]:
    """One recipe at one packing length and one pack a step: as it recomputes, and recomputing as little as fits."""
    config = load_config(Path(f"recipes/{name}.yaml"), (f"data.tokens_per_pack={tokens}",))
    search = search_of(config, None, None, [])[0]
    ranks = search.devices // config.parallel.sequence
    axes: dict[str, Any] = {"accumulations": (1,), "sequences": (config.parallel.sequence,), "chunks": (2048,)}
    search.space = Space(
        ranks * tokens, recomputes=("none", config.speed.recompute, LEFT), limits_patches=False, **axes
    )
    run: dict[str, Any] = {"recipe": name, "tokens_per_pack": tokens, "room_bytes": search.room_bytes}
    own = search.own()
    run["dropped"] = own.packs.counts.tokens_dropped / (own.packs.counts.tokens + own.packs.counts.tokens_dropped)
    run["own"] = row_of(own)
    try:
        run["least"] = row_of(search.run().ranked[0])
    except HeadwayError as error:
        run["least"] = None
        run["why"] = str(error)
    return run


def row_of(one: Candidate) -> dict[str, Any]:
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
        own, least, room = run["own"], run["least"], run["room_bytes"]
        stands = int(run["recipe"].removesuffix("-sp2").rpartition("-")[2]) == run["tokens_per_pack"]
        rows.append(
            [
                run["recipe"],
                f"{run['tokens_per_pack']:,}" + (" (LMMs-Engine)" if stands else ""),
                f"{100 * run['dropped']:.2f} %",
                f"{own['balance']:.3f}",
                own["recompute"],
                f"{own['peak_bytes'] / GIB:.1f}" + ("" if own["peak_bytes"] <= room else " (too much)"),
                f"{100 * own['mfu'][1]:.1f} %",
                "-" if least is None else least["recompute"],
                "-" if least is None else f"{least['peak_bytes'] / GIB:.1f}",
                "-" if least is None else f"{100 * least['mfu'][1]:.1f} %",
            ]
        )
    headings = ["recipe", "pack", "tokens dropped", "balance", "recompute", "GiB", "MFU"]
    headings += ["as little as fits", "GiB", "MFU"]
    return (
        "# Packing length, memory and MFU\n\n"
        f"{describe_environment(record)}\n\n"
        "32 A800-SXM4-80GB, one pack a step and rank, typical lengths of each recipe, 67.1 GiB of 74.5 GiB allowed. "
        "Predicted, by shares of the datasheet, without the time of communication; MFU is the expected case, with "
        "the vision tower.\n\n"
        f"{markdown_table(headings, rows)}\n"
    )


if __name__ == "__main__":
    main()
