"""Time and memory of `headway explain` beside HolisticTraceAnalysis and TraceLens, on the same files in one run.

    .venv/bin/python benchmarks/trace_tools.py TRACE.json.gz ... --hta HTA/bin/python --tracelens TRACELENS/bin/python

The other two have virtual environments of their own (`pip install HolisticTraceAnalysis`; TraceLens from a checkout).
Each file is read by each tool in a process of its own, all pinned to one core, one after the other and in turn, so that
what else the machine does falls on all three alike; the first round is not counted. Each tool is asked to divide the
device's time: `headway explain --json` (waterfall and findings); HTA's temporal breakdown, overlap of communication and
idle time; TraceLens's timeline and its summary of kernels by category. What counts is the process's own time (user and
system) and its largest memory, as the system has them: the least of the rounds. Of a file that a tool cannot read there
is no number.

Writes benchmarks/results/trace_tools_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write

HTA = """
import logging, sys
from hta.trace_analysis import TraceAnalysis
logging.disable(logging.CRITICAL)
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="/")
analysis.get_temporal_breakdown(visualize=False)
for ask in (
    lambda: analysis.get_comm_comp_overlap(visualize=False),
    lambda: analysis.get_idle_time_breakdown(ranks=[0], visualize=False),
):
    try:
        ask()
    except Exception as error:  # of traces without communication, as it happens
        print(error, file=sys.stderr)
"""
TRACELENS = """
import sys
from TraceLens import TreePerfAnalyzer
analyzer = TreePerfAnalyzer.from_file(sys.argv[1])
analyzer.get_df_gpu_timeline()
try:
    analyzer.get_df_kernel_launchers_summary_by_category(analyzer.get_df_kernel_launchers())
except Exception as error:
    print(error, file=sys.stderr)
"""
# Starts a command from a process of 10 MB: what a process holds when it starts another counts as the other's memory.
LAUNCHER = """
import os, sys
nowhere = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=nowhere)
_, status, usage = os.wait4(child, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
"""
LONGEST_S = 240


def main() -> None:
    """Run the tools in turn, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path, help="files of torch.profiler")
    parser.add_argument("--hta", type=Path, required=True, help="Python that has HolisticTraceAnalysis")
    parser.add_argument("--tracelens", type=Path, required=True, help="Python that has TraceLens")
    parser.add_argument("--rounds", type=int, default=3, help="that count; one more is run before them")
    parser.add_argument("--core", type=int, default=0, help="that all processes are pinned to")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.core})
    commands = {
        "Headway": [sys.executable, "-m", "headway", "explain", "--json"],
        "HTA": [str(options.hta), "-c", HTA],
        "TraceLens": [str(options.tracelens), "-c", TRACELENS],
    }
    record: dict[str, Any] = {
        "what": "trace_tools",
        "environment": environment(torch.device("cpu")),
        "rounds": options.rounds,
        "versions": {
            "HTA": version(options.hta, "HolisticTraceAnalysis"),
            "TraceLens": version(options.tracelens, "TraceLens"),
        },
        "rows": [],
    }
    for path in options.traces:
        measured: dict[str, list[dict[str, float] | None]] = {name: [] for name in commands}
        for number in range(options.rounds + 1):
            for name, command in commands.items():
                is_counted = number and (number == 1 or measured[name][0] is not None)
                if not number or is_counted:
                    outcome = run([*command, str(path.resolve())])
                    measured[name] += [outcome] if number else []
        row = {"trace": path.name, "bytes": path.stat().st_size, "tools": {}}
        for name, outcomes in measured.items():
            known = [outcome for outcome in outcomes if outcome is not None]
            row["tools"][name] = {key: min(outcome[key] for outcome in known) for key in known[0]} if known else None
        record["rows"].append(row)
        print(row, file=sys.stderr, flush=True)
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def version(python: Path, package: str) -> str:
    """Version of a package that a Python has."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def run(command: list[str]) -> dict[str, float] | None:
    """Run a command to its end.

    Returns:
        Its own time, user's and the system's [s], and its largest memory [bytes]; None where it failed.
    """
    launch = ["timeout", str(LONGEST_S), sys.executable, "-I", "-S", "-c", LAUNCHER, *command]
    answer = subprocess.run(launch, capture_output=True, text=True, check=False)
    if answer.returncode or not answer.stdout.startswith("0 "):
        return None
    _, cpu_s, memory_kib = answer.stdout.split()
    return {"cpu_s": float(cpu_s), "memory_bytes": int(memory_kib) * 1024}


def render(record: dict[str, Any]) -> str:
    """Render the table from a record."""
    names = ["Headway", "HTA", "TraceLens"]
    rows = []
    ratios: dict[tuple[str, str], list[float]] = {}
    for row in record["rows"]:
        own = row["tools"]["Headway"]
        cells = [row["trace"], f"{row['bytes'] / 1e6:.2f}"]
        for key, scale, digits in (("cpu_s", 1.0, 2), ("memory_bytes", 1e6, 0)):
            for name in names:
                other = row["tools"][name]
                cells.append("-" if other is None else f"{other[key] / scale:,.{digits}f}")
                if other is not None and own is not None:
                    ratios.setdefault((name, key), []).append(other[key] / own[key])
        rows.append(cells)
    headings = ["trace", "MB", *(f"{name} [s]" for name in names), *(f"{name} [MB]" for name in names)]
    lines = ["# `headway explain` beside HolisticTraceAnalysis and TraceLens", "", markdown_table(headings, rows), ""]
    for name in names[1:]:
        times, memory = (ratios.get((name, key), []) for key in ("cpu_s", "memory_bytes"))
        if times:
            lines.append(
                f"{name} {record['versions'][name]} takes {statistics.median(times):.1f} times Headway's time "
                f"({min(times):.1f} to {max(times):.1f}, {len(times)} files) and {statistics.median(memory):.1f} times "
                f"its memory ({min(memory):.1f} to {max(memory):.1f})."
            )
    about = (
        f"Time is the process's own (user and system), the least of {record['rounds']} rounds, start included; all "
        "processes on one core, in turn."
    )
    return "\n".join([*lines, "", about, "", describe_environment(record), ""])


if __name__ == "__main__":
    main()
