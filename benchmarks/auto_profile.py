"""What an automatic profile costs a run of `headway train`: start, stop, file and slower steps.

    .venv/bin/python benchmarks/auto_profile.py                # some minutes on 2 cores

One short run on synthetic digits, whose reader is made for it, with the gate open that keeps short runs without a
profile. What starting, stopping and writing took is what the run's ledger has as idle between steps; what came slower
are the profiled steps less the median of all. Its share is that of the shortest run which is profiled.

Writes benchmarks/results/auto_profile_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
import gzip
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from headway.config import parse_config
from headway.meter.goodput_report import read_goodput
from headway.synthetic.digits import write_digits, write_reader
from headway.train import profiling
from headway.train.run import train
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write

TARGET = 0.005


def main() -> None:
    """Train, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=512, help="of a pack, one a step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {"what": "auto_profile", "environment": environment(torch.device("cpu"))}
    record["shortest_s"] = profiling.FIRST_S / profiling.LARGEST_SHARE
    gate = patch.multiple(profiling, FIRST_S=0.0, LARGEST_SHARE=1.0)
    with tempfile.TemporaryDirectory() as folder, gate:
        record |= measure(Path(folder), options.steps, options.tokens)
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def measure(folder: Path, steps: int, tokens: int) -> dict[str, Any]:
    """Train in a folder, and read what the run left there."""
    write_digits(folder / "data", num_one_digit=16, num_train=2000, num_eval=64, renderings=2)
    write_reader(folder / "model")
    run = folder / "run"
    train(parse_config({
        "model": {"path": str(folder / "model"), "random_init": True},
        "data": {"train": [{"path": str(folder / "data/train.jsonl")}], "tokens_per_pack": tokens, "workers": 1},
        "optim": {"steps": steps, "lr": 1e-3},
        "checkpoint": {"export": "never"},
        "speed": {"compile": False},
        "run": {"folder": str(run), "device": "cpu", "threads": 1, "log_every": 100},
    }))  # fmt: skip
    lines = (run / "metrics.jsonl").read_text().splitlines()
    seconds = {line["step"]: line["wall_s"] for line in map(json.loads, lines) if line["kind"] == "step"}
    usual_s = statistics.median(seconds.values())
    files = sorted((run / "profile").glob("*.json.gz")) if (run / "profile").exists() else []
    profiled = []
    for path in files:
        with gzip.open(path) as file:
            profiled += [int(step) for step in json.load(file)["headway"]["steps"]]
    return {
        "steps": steps,
        "step_s": usual_s,
        "run_s": sum(seconds.values()),
        "profiled": profiled,
        "slower_s": sum(seconds[step] - usual_s for step in profiled),
        "switching_s": read_goodput(run).ns.get("idle", 0) / 1e9,
        "file_bytes": [path.stat().st_size for path in files],
    }


def render(record: dict[str, Any]) -> str:
    """Render the table from a record."""
    number, shortest_s = max(1, len(record["file_bytes"])), record["shortest_s"]
    parts = {
        "starting, stopping and writing": record["switching_s"] / number,
        "two slower steps": record["slower_s"] / number,
    }
    rows = [[name, f"{seconds:,.2f}", f"{seconds / shortest_s:.2%}"] for name, seconds in parts.items()]
    cost = sum(parts.values())
    rows.append(["all", f"{cost:,.2f}", f"{cost / shortest_s:.2%}"])
    sizes = ", ".join(f"{size / 1e3:,.0f} kB" for size in record["file_bytes"]) or "none"
    return "\n".join([
        "# What an automatic profile costs a run",
        "",
        f"{record['steps']:,} steps of {record['step_s'] * 1e3:,.0f} ms (median), of which steps "
        f"{', '.join(map(str, record['profiled'])) or 'none'} were profiled by themselves. Files: {sizes}. The "
        f"shortest run that is profiled takes {shortest_s:,.0f} s: 1,000 steps of {shortest_s:,.0f} ms.",
        "",
        markdown_table(["a profile", "s", "of the shortest run"], rows),
        "",
        f"Target: {TARGET:.1%} of the run: {'met' if cost <= TARGET * shortest_s else 'missed'}.",
        "",
        describe_environment(record),
        "",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
