"""Predicted steps beside those that benchmarks/engine_gpu.py measured, line by line where a step was profiled.

    .venv/bin/python benchmarks/plan_measured.py      # half a minute; nothing is trained

Packs are those of the record (benchmarks/engine_setups.py draws them again), settings as its cases say. Lines of a
profile are those of `headway explain`, with the kernels of attention and of other products taken apart by their names.
Writes benchmarks/results/plan_measured_<hardware>_<yyyymm>.json and the .md table.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from engine_memory import with_layers
from engine_setups import SETUPS, without_data
from headway.count import CostModel, Workload
from headway.count.activations import shipped_activations
from headway.count.models import load_cost_model
from headway.devices import named_device
from headway.predict.dry_run import memory_plan, precision_of, recompute_of, state_of
from headway.predict.speeds import Speeds
from headway.predict.step_time import StepTimes, StepWork
from headway.tracing import trace
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write

MEASURED = RESULTS / "engine_gpu_nvidia-h200_202611.json"
PACKS = 3  # that engine_gpu.py draws
PROFILES: dict[str, dict[str, float]] = {
    "text, liger, compiled": {
        "products": 6050, "attention": 1035, "memory": 601, "optimizer": 325, "the rest": 43,
    },
    "vqa, torch, compiled": {
        "products": 303, "attention": 198, "memory": 215, "optimizer": 691, "the rest": 47,
    },
}  # fmt: skip
"""Milliseconds of a profiled step, on the first pack; profiles of 2026-11-26."""


def main() -> None:
    """Predict every case, write the record and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    options = parser.parse_args()
    cases = json.loads(MEASURED.read_text(encoding="utf-8"))["cases"].values()
    drawn = {setup: packs_of(setup) for setup in {case["setup"] for case in cases}}
    rows = [{**row_of(case), **predicted(case, drawn[case["setup"]])} for case in cases]
    record = {"what": "plan_measured", "environment": environment(torch.device("cpu")), "measured": MEASURED.name,
              "packs": {name: list(map(sizes_of, packs)) for name, packs in drawn.items()}, "rows": rows}  # fmt: skip
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def packs_of(setup: str) -> list[Workload]:
    """The packs of a set-up, as the engine's benchmark draws them."""
    return [batch.workload for batch in SETUPS[setup].batches(PACKS, is_small=False)]


def sizes_of(pack: Workload) -> dict[str, Any]:
    """Segments [tokens] and pictures [patches] of a pack, in plain types."""
    return {"segments": [*map(int, pack.segments)], "images": [[*map(int, grid)] for grid in pack.images]}


def row_of(case: dict[str, Any]) -> dict[str, Any]:
    """Facts of a measured case."""
    memory = case["memory"]
    return {
        "case": case["case"], "layers": case["layers"], "recompute": case["recompute"], "step_s": case["step_s"],
        "allocated": memory["allocated"] - memory["packs"], "profile_ms": PROFILES.get(case["case"]),
    }  # fmt: skip


def predicted(case: dict[str, Any], packs: list[Workload]) -> dict[str, Any]:
    """Predict a case's mean step [s], its lines [ms] on the first pack, and its memory [bytes]."""
    setup, layers, attention = SETUPS[case["setup"]], case["layers"], "cudnn" if "cudnn" in case["case"] else "auto"
    settings = {
        "run.device": "cuda", "run.dtype": case["dtype"], "speed.kernels": case["kernels"], "speed.compile": "true",
        "speed.recompute": case["recompute"], "speed.attention": attention, "optim.accumulation": 1,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        config = setup.recipe_for(Path(folder), setup.config(layers=layers, is_small=False), settings)
    is_whole = layers == case["of_layers"]
    cost_model = (
        load_cost_model(setup.model) if is_whole else trace(without_data(setup.config(layers=layers, is_small=False)))
    )
    precision = precision_of(config, 1)
    saved = {precision: with_layers(shipped_activations(setup.model, precision), layers)}
    state = state_of(config, precision, recompute_of(config, cost_model, saved, config.parallel.mesh_shape(1)))
    times = StepTimes(
        cost_model,
        saved[precision],
        Speeds.of_device(named_device("H200"), "bf16", attention=attention),
        update="separate",
    )
    steps = [times.predict(work_of(cost_model, pack), state) for pack in packs]
    lines = {line.key: line.seconds.expected for line in steps[0].lines}
    computed = times.computed_s(work_of(cost_model, packs[0]), state)
    attended = sum(seconds.expected for name, seconds in computed.items() if name.endswith(".attention"))
    most = [max(pack.tokens for pack in packs), max(pack.patches for pack in packs)]
    padded = [
        max(len(sizes) * max(sizes, default=0) for sizes in lengths)
        for lengths in (
            [[*map(int, pack.segments)] for pack in packs],
            [[int(t * h * w) for t, h, w in pack.images] for pack in packs],
        )
    ]
    memory = memory_plan(config, cost_model, saved, 1, most[0], most[1], (padded[0], padded[1]))
    return {
        "predicted_s": sum(step.step_s for step in steps) / len(steps),
        "lines_ms": {
            "products": 1e3 * (sum(seconds.expected for seconds in computed.values()) - attended),
            "attention": 1e3 * attended,
            "memory": 1e3 * lines["memory"],
            "optimizer": 1e3 * lines["optimizer"],
        },
        "predicted_bytes": int(memory.peak),
    }


def work_of(cost_model: CostModel, pack: Workload) -> StepWork:
    """A step of one pack on one device."""
    return StepWork(cost_model.count(pack), pack, packs=1, tokens=pack.tokens)


def render(record: dict[str, Any]) -> str:
    """The record as Markdown tables."""
    cells, lines = [], []
    for row in record["rows"]:
        took, said, held, planned = row["step_s"], row["predicted_s"], row["allocated"], row["predicted_bytes"]
        cells.append([row["case"], str(row["layers"]), row["recompute"], f"{took:.3f}", f"{said:.3f}",
                      f"{100 * (said / took - 1):+.1f} %", f"{held / 2**30:.1f}", f"{planned / 2**30:.1f}",
                      f"{100 * (planned / held - 1):+.1f} %"])  # fmt: skip
        profile = row["profile_ms"] or {}
        for name, milliseconds in {
            **row["lines_ms"],
            **dict.fromkeys(profile.keys() - row["lines_ms"].keys(), 0.0),
        }.items():
            lines.append([row["case"], name, f"{profile[name]:,.0f}" if profile else "-", f"{milliseconds:,.0f}"])
    headings = ["case", "layers", "recompute", "step [s]", "predicted [s]", "error", "allocated [GiB]",
                "predicted [GiB]", "error"]  # fmt: skip
    return (
        f"# Predicted steps beside measured ones on an H200\n\n{describe_environment(record)}\n\nMeasured by "
        f"benchmarks/engine_gpu.py ({record['measured']}), predicted by `headway plan`'s own functions on the same "
        f"packs. Attention's rates were fitted to single layers of these packs, the 0.8 of them that a step reaches, "
        f"the bytes of an update and the rate of experts to the two profiles.\n\n{markdown_table(headings, cells)}\n\n"
        "Lines on the first pack [ms]:\n\n"
        f"{markdown_table(['case', 'line', 'profiled', 'predicted'], lines)}\n"
    )


if __name__ == "__main__":
    main()
