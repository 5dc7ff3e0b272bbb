"""The lines of TorchTitan's page on Qwen3-VL-30B-A3B (8 H200, December 2025), from its numbers and times."""

import csv
from pathlib import Path

TABLE = Path(__file__).parents[1] / "explain" / "titan_page.tsv"


def titan_lines(experiment):
    """The log of one of the six experiments; the page gives three of them as results without a step, loss or time."""
    with TABLE.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t") if row["experiment"] == str(experiment)]
    return "".join(_line(row) for row in rows)


def _line(row):
    stamp = f"2025-12-17 {row['time']} - root - INFO - " if row["time"] else ""
    tflops = f"  tflops: {row['tflops']}" if row["tflops"] else ""
    return (
        f"[rank0]:[titan] {stamp}step: {row['step'] or 1:>2}  loss: ?  memory: {row['memory_gib']}GiB"
        f"({row['memory_percent']}%)  tps: {row['tps']}{tflops}  mfu: {row['mfu_percent']}%\n"
    )
