"""What an automatic profile costs a run of `headway train`: start, stop, file and slower steps.

    .venv/bin/python benchmarks/auto_profile.py                # a quarter of an hour on 2 cores

Runs of 1,000 steps on synthetic digits, whose reader is made for them, with the automatic profile and without it in
turn, of one seed: their losses are to be equal to the bit. The gate is open that keeps short runs without a profile.
What starting, stopping and writing took is what a run's ledger has as idle between steps; what came slower are the
profiled steps less the median of all. Its share is that of the shortest run which is profiled. Beside that stands what
whole runs took, which other work on the machine disturbs more than a profile does.

Writes benchmarks/results/auto_profile_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
import gzip
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from headway.config import parse_config
from headway.log.records import read_records
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
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=128, help="of a pack, one a step")
    parser.add_argument("--pairs", type=int, default=2, help="of runs, one with and one without")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {"what": "auto_profile", "environment": environment(torch.device("cpu"))}
    record["shortest_s"] = profiling.FIRST_S / profiling.LARGEST_SHARE
    gate = patch.multiple(profiling, FIRST_S=0.0, LARGEST_SHARE=1.0)
    with tempfile.TemporaryDirectory() as folder, gate:
        record |= measure(Path(folder), options.steps, options.tokens, options.pairs)
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def measure(folder: Path, steps: int, tokens: int, pairs: int) -> dict[str, Any]:
    """Train in a folder with and without profiles in turn, and read what the runs left there."""
    write_digits(folder / "data", num_one_digit=16, num_train=2000, num_eval=64, renderings=2)
    write_reader(folder / "model")
    runs: list[dict[str, Any]] = []
    losses: list[list[float]] = []
    costs: dict[str, Any] = {}
    for number in range(pairs):
        for is_profiled in (True, False) if number % 2 else (False, True):
            run = folder / f"run-{number}-{'with' if is_profiled else 'without'}"
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            train_once(folder, run, steps, tokens, is_profiled=is_profiled)
            runs.append({
                "is_profiled": is_profiled,
                "wall_s": time.perf_counter() - begin_s,
                "cpu_s": time.process_time() - begin_cpu_s,
                "load": os.getloadavg()[0],
            })  # fmt: skip
            records = read_records(run / "metrics.jsonl")
            losses.append([record["loss"] for record in records if record["kind"] == "step"])
            costs = cost_of(run, steps) if is_profiled else costs
    return {**costs, "runs": runs, "losses_are_equal": all(row == losses[0] for row in losses)}


def train_once(folder: Path, run: Path, steps: int, tokens: int, *, is_profiled: bool) -> None:
    """Train on the data of a folder."""
    train(parse_config({
        "model": {"path": str(folder / "model"), "random_init": True},
        "data": {"train": [{"path": str(folder / "data/train.jsonl")}], "tokens_per_pack": tokens, "workers": 1},
        "optim": {"steps": steps, "lr": 1e-3},
        "checkpoint": {"export": "never"},
        "speed": {"compile": False},
        "run": {
            "folder": str(run), "device": "cpu", "threads": 1, "log_every": 100, "auto_profile": is_profiled,
        },
    }))  # fmt: skip


def cost_of(run: Path, steps: int) -> dict[str, Any]:
    """Read off a run what its profiles took."""
    records = read_records(run / "metrics.jsonl")
    seconds = {record["step"]: record["wall_s"] for record in records if record["kind"] == "step"}
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
    whole = {
        is_profiled: [run["cpu_s"] for run in record["runs"] if run["is_profiled"] is is_profiled]
        for is_profiled in (True, False)
    }
    least, most = (pick(run["load"] for run in record["runs"]) for pick in (min, max))
    same = "equal to the bit" if record["losses_are_equal"] else "NOT equal"
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
        f"Losses of all {len(record['runs'])} runs are {same}. With profiles a run's own time (of the processor) was "
        f"{', '.join(f'{seconds:,.1f}' for seconds in whole[True])} s, without "
        f"{', '.join(f'{seconds:,.1f}' for seconds in whole[False])} s, at a load of {least:.1f} to {most:.1f} on "
        "the machine.",
        "",
        f"Target: {TARGET:.1%} of the run: {'met' if cost <= TARGET * shortest_s else 'missed'}.",
        "",
        describe_environment(record),
        "",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
