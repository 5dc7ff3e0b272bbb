"""Predicted steps beside those that benchmarks/engine_gpu.py measured, line by line where a step was profiled.

    .venv/bin/python benchmarks/plan_measured.py      # half a minute; nothing is trained

Packs are those of the record (benchmarks/engine_setups.py draws them again), settings and optimizer as its cases say.
Lines of a profile are those of `headway explain`.
Writes benchmarks/results/plan_measured_<hardware>_<yyyymm>.json and the .md table.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from engine_forecast import PlannedCase, as_run, measured_lines, packs_of
from engine_setups import SETUPS
from gpu_report import explained
from headway.count import Workload
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write

MEASURED = RESULTS / "engine_gpu_nvidia-h200_202611.json"
PACKS = 3  # that engine_gpu.py draws


def main() -> None:
    """Predict every case, write the record and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    parser.add_argument(
        "--profiles", type=Path, nargs="*", default=[], help="folders that engine_gpu.py wrote; else as read last"
    )
    options = parser.parse_args()
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    cases, device = measured["cases"].values(), measured["environment"]["device"]
    drawn = {setup: packs_of(setup, PACKS) for setup in SETUPS if any(case["setup"] == setup for case in cases)}
    profiles = profiled([case["case"] for case in cases], options.profiles)
    rows = [
        {**row_of(case), **predicted(case, device, drawn[case["setup"]]), "profile_s": profiles.get(case["case"])}
        for case in cases
    ]
    record = {"what": "plan_measured", "environment": environment(torch.device("cpu")), "measured": MEASURED.name,
              "packs": {name: list(map(sizes_of, packs)) for name, packs in drawn.items()}, "rows": rows}  # fmt: skip
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def profiled(cases: list[str], folders: list[Path]) -> dict[str, dict[str, float]]:
    """Lines of the profiles in some folders, beside those that the committed record has [s]."""
    lines = {}
    for path in RESULTS.glob("plan_measured_*.json"):
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        lines |= {row["case"]: row["profile_s"] for row in rows if row.get("profile_s")}
    for case in cases:
        explanation = explained(case, folders)
        if explanation is not None:
            lines[case] = measured_lines(explanation.steps[-1]).by_kind()
    return lines


def sizes_of(pack: Workload) -> dict[str, Any]:
    """Segments [tokens] and pictures [patches] of a pack, in plain types."""
    return {"segments": [*map(int, pack.segments)], "images": [[*map(int, grid)] for grid in pack.images]}


def row_of(case: dict[str, Any]) -> dict[str, Any]:
    """Facts of a measured case."""
    memory = case["memory"]
    return {
        "case": case["case"], "layers": case["layers"], "recompute": case["recompute"], "step_s": case["step_s"],
        "allocated": memory["allocated"] - memory["packs"],
    }  # fmt: skip


def predicted(case: dict[str, Any], device: str, packs: list[Workload]) -> dict[str, Any]:
    """Predict a case's mean step [s], its lines on the first pack [s], and its memory [bytes]."""
    packs = as_run(case, packs)
    planned = PlannedCase.of(case, device, packs)
    steps = [planned.lines([pack]) for pack in packs]
    return {
        "predicted_s": sum(step.step_s for step in steps) / len(steps),
        "lines_s": steps[0].by_kind(),
        "predicted_bytes": int(planned.memory.peak),
    }


def render(record: dict[str, Any]) -> str:
    """The record as Markdown tables."""
    cells, lines = [], []
    for row in record["rows"]:
        step_s, said, held, planned = row["step_s"], row["predicted_s"], row["allocated"], row["predicted_bytes"]
        cells.append([row["case"], str(row["layers"]), row["recompute"], f"{step_s:.3f}", f"{said:.3f}",
                      f"{100 * (said / step_s - 1):+.1f} %", f"{held / 2**30:.1f}", f"{planned / 2**30:.1f}",
                      f"{100 * (planned / held - 1):+.1f} %"])  # fmt: skip
        profile = row["profile_s"]
        for name, seconds in row["lines_s"].items():
            lines.append(
                [row["case"], name, f"{1e3 * profile[name]:,.0f}" if profile else "-", f"{1e3 * seconds:,.0f}"]
            )
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
