"""What a step of each recipe would reach on an H200, with one more of the engine's means at a time, as planned.

    .venv/bin/python benchmarks/plan_roofline.py      # a minute; nothing is trained

Packs and models are those of benchmarks/engine_gpu.py and gpu_all.sh; plan_measured_*.md has what was measured of this.
Writes benchmarks/results/plan_roofline_<hardware>_<yyyymm>.json and the .md table.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine_forecast import ONE_PASS_NOTE, PlannedCase, packs_of
from engine_memory import fullest
from engine_setups import SETUPS
from headway.count import Workload
from headway.devices import named_device
from headway.predict.fitting import room_of
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write

DEVICE = "NVIDIA H200"
ROOM_BYTES = room_of(named_device(DEVICE))
STEPS = 3
SHORTER_PACKS = {"text": (4, 20480), "image": (3, 20480), "video": (2, 25600)}
"""Packs of a step and their tokens, for the same tokens a step as the recipe's one pack."""
LAYERS = {"vqa": 24}  # language layers, where the whole model (of 48 there) does not fit one device
FA2 = ["Attention on CUDA: PyTorch's variable-length FlashAttention-2"]
CUDNN = ["Attention on CUDA: cuDNN's ragged attention (cudnn)"]
MEANS: dict[str, dict[str, Any]] = {
    "FlashAttention-2, AdamW in separate passes": {"notes": FA2},
    "cuDNN's ragged attention": {"notes": CUDNN},
    "AdamW in one pass": {"notes": [*CUDNN, ONE_PASS_NOTE]},
    "what fits is not computed again": {"recompute": "memory:SIZE"},
}
"""Changes of each row, which also has those of the rows before it."""
REVIEWED = {"text": (46, 52), "image": (38, 47), "video": (39, 48), "vqa": (22, 25)}
"""Estimates of 25 November 2026, by rates taken from publications: with the first row's means, and with all [%]."""


def main() -> None:
    """Plan every step of every recipe, write the record and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    options = parser.parse_args()
    record = {"what": "plan_roofline", "environment": environment(torch.device("cpu")), "device": DEVICE,
              "recipes": {name: planned_steps(name) for name in SETUPS}}  # fmt: skip
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def planned_steps(setup: str) -> list[dict[str, Any]]:
    """Plan the mean step of a recipe's packs with each of `MEANS`."""
    layers = LAYERS.get(setup, SETUPS[setup].layers(is_small=False))
    case: dict[str, Any] = {"setup": setup, "layers": layers, "dtype": "bfloat16-params", "kernels": "torch",
                            "compiled": True, "recompute": None}  # fmt: skip
    means = dict(MEANS)
    if setup in SHORTER_PACKS:
        count, length = SHORTER_PACKS[setup]
        means[f"{count} packs of {length:,} a step"] = {"accumulation": count, "tokens_per_pack": length}
    rows = []
    for name, change in means.items():
        case |= change
        rows.append({"means": name} | _mean_step(case))
    return rows


def _mean_step(case: dict[str, Any]) -> dict[str, Any]:
    """Plan `STEPS` steps of a case: mean seconds of a step, rates, and bytes at the fullest moment."""
    count, peak = case.get("accumulation", 1), named_device(DEVICE).peak_flops_per_s["bf16"]
    packs = packs_of(case["setup"], STEPS * count, case.get("tokens_per_pack"))
    planned = _fullest(case, packs) if case["recompute"] else PlannedCase.of(case, DEVICE, packs)
    flops = [planned.cost_model.count(pack, recompute=planned.state.recompute) for pack in packs]
    steps = [packs[first : first + count] for first in range(0, len(packs), count)]
    total_s = sum(planned.lines(step).step_s for step in steps)
    return {
        "step_s": total_s / STEPS,
        "bytes": int(planned.memory.peak),
        "mfu": sum(flop.total for flop in flops) / total_s / peak,
        "hfu": sum(flop.total + flop.recompute for flop in flops) / total_s / peak,
    }


def _fullest(case: dict[str, Any], packs: Sequence[Workload]) -> PlannedCase:
    """Plan a case with the most activations that fit the device."""

    def plan(recompute: str) -> tuple[PlannedCase, float]:
        planned = PlannedCase.of(case | {"recompute": recompute}, DEVICE, packs)
        return planned, planned.memory.peak

    return fullest(plan, ROOM_BYTES)


def render(record: dict[str, Any]) -> str:
    """The record as a Markdown table."""
    cells = []
    for recipe, rows in record["recipes"].items():
        for number, row in enumerate(rows):
            estimate = {0: REVIEWED[recipe][0], len(MEANS) - 1: REVIEWED[recipe][1]}.get(number)
            cells.append([recipe, ("" if number == 0 else "+ ") + row["means"], f"{row['step_s']:.3f}",
                          f"{100 * row['mfu']:.1f} %", f"{100 * row['hfu']:.1f} %", f"{row['bytes'] / 2**30:.1f}",
                          "-" if estimate is None else f"{estimate} %"])  # fmt: skip
    headings = ["recipe", "means", "step [s]", "MFU useful/1", "HFU", "planned [GiB]", "review's estimate"]
    return (
        f"# Steps of the recipes on one H200, planned\n\n{describe_environment(record)}\n\nEach row has what the rows "
        "above it have as well. Planned by `headway plan`'s own functions at its rates of an H200, on the packs of "
        "benchmarks/engine_gpu.py; blocks are compiled, weights and moments bfloat16. VQA: "
        f'{LAYERS["vqa"]} of 48 layers. From "what fits" on, a step keeps as many activations as '
        f"{ROOM_BYTES / 2**30:.0f} GiB hold "
        "(`speed.recompute=memory:SIZE`). Rows with shorter packs have the same tokens a step. "
        "The review's estimates (25 November 2026) took rates from publications.\n\n"
        f"{markdown_table(headings, cells)}\n"
    )


if __name__ == "__main__":
    main()
