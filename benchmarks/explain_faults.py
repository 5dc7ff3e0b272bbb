"""What `headway explain` says of faults that are planted in real loops, by a profile and by records alone.

    .venv/bin/python benchmarks/explain_faults.py                       # half an hour on 2 quiet cores
    .venv/bin/python benchmarks/explain_faults.py eager_attention healthy_plain --keep /tmp/runs
    .venv/bin/python benchmarks/explain_faults.py --again --keep /tmp/runs   # ask again of runs that were kept
    .venv/bin/python benchmarks/explain_faults.py --of more             # ten faults on which no rule was made
    .venv/bin/python benchmarks/explain_faults.py --of rl               # loops of reinforcement learning, by records

Each case runs in a process of its own (of several ranks, one each), on one thread, under the public meter (`Meter`,
`HeadwayCallback`, `headway train`): a loop without its fault and with it in turn, three times, and once with a profile
of three steps. The truth is the time by which the step grows, of the quickest runs of both, on steps outside of the
profile and without what the main thread waits for a core. Then `headway explain` is asked of the profile, and of
`metrics.jsonl` alone. A case is "right" where the first finding names the fault with a size within a fifth of the
truth, as a share of the step or in milliseconds: where other processes stretch what is computed, a wait keeps its
length and loses its share. Of a small truth 3 points of the step are allowed. What is found of the machine is left out:
`shared-cores`, and a changing speed of loops whose steps all do the same (`--of rl`).

Writes benchmarks/results/explain_faults_<hardware>_<yyyymm>.json and the .md table rendered from it, if all cases ran.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from explain_faults_cases import CASES as TRAINING_CASES
from explain_faults_loops import ranks_of
from explain_faults_more import MORE
from explain_faults_rl import RL_CASES
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write

LONGEST_S = 300  # of a case
NO_CAUSE = {"largest-loss", "first-steps"}  # findings that name no cause, or what passes by itself
POINTS = 0.03  # of the step
# Processes of cases keep the memory that they have had once; see `explain_faults_loops`.
# Source: mallopt(3), M_TRIM_THRESHOLD and M_MMAP_THRESHOLD.
KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
SOURCES = ("profile", "records")


@dataclass(frozen=True)
class Group:
    """Cases that are run and told together.

    Attributes:
        record: how the names of their record and table begin.
        cases: by name.
        sources: what `headway explain` is asked of.
        of_the_machine: findings that are true wherever other processes compute too, and no fault of the loops.
    """

    record: str
    cases: dict[str, Any]
    sources: tuple[str, ...]
    of_the_machine: frozenset[str]


# Steps of the loops of reinforcement learning all do the same work: a speed that changes is the machine's.
SPEED = {"unstable-steps", "slow-steps", "changed-speed", "falling-rate", "first-steps"}
GROUPS = {
    "training": Group("explain_faults", TRAINING_CASES, SOURCES, frozenset({"shared-cores"})),
    "more": Group("explain_faults_more", MORE, SOURCES, frozenset({"shared-cores"})),
    "rl": Group("explain_faults_rl", RL_CASES, ("records",), frozenset({"shared-cores", *SPEED})),
}
CASES: dict[str, Any] = {**TRAINING_CASES, **MORE, **RL_CASES}


def main() -> None:
    """Run the cases, print the table; within a case's own process, run that."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help="names, or their beginnings; all if none")
    parser.add_argument("--of", choices=GROUPS, default="training", help="group of the cases")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    parser.add_argument("--keep", type=Path, help="folder in which the runs are kept")
    parser.add_argument("--again", action="store_true", help="ask again of kept runs, and run what is missing")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time; more disturb each other's times")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    group = GROUPS[options.of]
    names = [name for name in group.cases if not options.cases or name.startswith(tuple(options.cases))]
    if options.list:
        print("\n".join(f"{name:28} {CASES[name].fault}" for name in names))
        return
    if options.run:
        run_case(options.cases[0], options.run)
        return
    record: dict[str, Any] = {
        "what": "explain_faults",
        "sources": group.sources,
        "environment": environment(torch.device("cpu")),
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        waiting, running = list(names), {}
        while waiting or running:
            while waiting and len(running) < options.jobs:
                name = waiting.pop(0)
                is_there = options.again and (folder / name / "truth.json").exists()
                running[name] = [] if is_there else start(name, folder / name)
            for name, processes in list(running.items()):
                if all(process.poll() is not None for process in processes):
                    del running[name]
                    record["rows"].append(judged(name, folder / name, group))
                    print(json.dumps(record["rows"][-1]), file=sys.stderr, flush=True)
            time.sleep(0.1)
    record["rows"].sort(key=lambda row: list(CASES).index(row["case"]))
    table = render(record)
    print(table)
    if len(names) == len(group.cases):
        write(result_paths(options.out, {**record, "what": group.record}), record, table)


def start(name: str, folder: Path) -> list[subprocess.Popen[bytes]]:
    """Start the processes of a case, which write into its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.rglob("*.json*"):
        old.unlink()
    num_ranks = CASES[name].num_ranks
    single = [{**os.environ, "WORLD_SIZE": "1"}]
    environments = list(ranks_of(num_ranks)) if num_ranks > 1 else single
    processes = []
    for rank, variables in enumerate(environments):
        with (folder / f"output-{rank}.txt").open("wb") as output:
            command = ["timeout", str(LONGEST_S), sys.executable, __file__, name, "--run", str(folder)]
            command += ["--of", next(key for key, group in GROUPS.items() if name in group.cases)]
            processes.append(subprocess.Popen(
                command,
                env={**variables, **KEEPS_MEMORY, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
                stdout=output, stderr=subprocess.STDOUT,
            ))  # fmt: skip
    return processes


def run_case(name: str, folder: Path) -> None:
    """Run a case in this process, and write the share that its fault takes."""
    torch.set_num_threads(1)
    planted = CASES[name]
    healthy_s, faulty_s = planted.run(planted.make, folder)
    if os.environ.get("RANK", "0") == "0":
        (folder / "truth.json").write_text(
            json.dumps({"share": 1 - healthy_s / faulty_s, "ms": (faulty_s - healthy_s) * 1e3})
        )


def judged(name: str, folder: Path, group: Group) -> dict[str, Any]:
    """Ask `headway explain` of a case's runs, and judge its answers."""
    row: dict[str, Any] = {"case": name, "fault": CASES[name].fault, "truth": None}
    if not (folder / "truth.json").exists():
        return {**row, **{source: {"verdict": "did not run", "findings": []} for source in group.sources}}
    row["truth"] = json.loads((folder / "truth.json").read_text())
    for source, paths in (
        ("profile", sorted((folder / "profile").glob("*.json.gz"))),
        ("records", [folder / "metrics.jsonl"]),
    ):
        if source not in group.sources:
            continue
        command = [sys.executable, "-m", "headway", "explain", *map(str, paths), "--json"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode:
            row[source] = {"verdict": "error", "findings": [], "error": answer.stderr[-300:]}
            continue
        findings = [
            (finding["id"], round(finding["share"], 4), round(finding["ns"] / 1e6, 2))
            for finding in json.loads(answer.stdout)["findings"]
            if finding["id"] not in group.of_the_machine
        ]
        row[source] = {"verdict": verdict(name, row["truth"], findings), "findings": findings}
    return row


def verdict(name: str, truth: dict[str, float], findings: list[tuple[str, float, float]]) -> str:
    """Judge findings: right, named first with another size, named behind others, or not; of a healthy run none."""
    names = CASES[name].names
    causes = [finding for finding, _, _ in findings if finding not in NO_CAUSE]
    if not names:
        return "false alarm" if causes else "right"
    if not any(finding in names for finding, _, _ in findings):
        return "not named"
    finding, share, ms = findings[0]
    if finding not in names:
        return "named, not first"
    is_right = (
        abs(share - truth["share"]) <= max(truth["share"] / 5, POINTS) or abs(ms - truth["ms"]) <= truth["ms"] / 5
    )
    return "right" if is_right else "named first, other size"


def render(record: dict[str, Any]) -> str:
    """Render the cases as a table, with how many are right."""
    sources = record.get("sources", SOURCES)  # older records have both
    rows = []
    for row in record["rows"]:
        answers = []
        for source in sources:
            findings = row[source]["findings"]
            answers += [
                f"{findings[0][0]} {findings[0][1]:.1%}, {findings[0][2]:,.0f} ms" if findings else "none",
                row[source]["verdict"],
            ]
        truth = (
            "-"
            if row["truth"] is None or _is_healthy(row)
            else f"{row['truth']['share']:.1%}, {row['truth']['ms']:,.0f} ms"
        )
        rows.append([row["fault"], truth, *answers])
    headings = ["fault", "truth", *(f for source in sources for f in (f"first, by {source}", "verdict"))]
    lines = ["# Planted faults, and what `headway explain` says first", "", markdown_table(headings, rows), ""]
    planted = [row for row in record["rows"] if not _is_healthy(row)]
    sound = [row for row in record["rows"] if _is_healthy(row)]
    for source in sources:
        right = sum(row[source]["verdict"] == "right" for row in planted)
        first = sum(row[source]["verdict"] in ("right", "named first, other size") for row in planted)
        alarms = sum(row[source]["verdict"] == "false alarm" for row in sound)
        lines.append(
            f"By {source}: {first} of {len(planted)} faults are named first, {right} of them with a size within a "
            f"fifth of the truth (of small ones within {POINTS:.0%} of the step); {alarms} false alarms in "
            f"{len(sound)} healthy runs."
        )
    return "\n".join([*lines, "", describe_environment(record), ""])


def _is_healthy(row: dict[str, Any]) -> bool:
    return str(row["case"]).startswith("healthy_")  # older records have cases that are no more


if __name__ == "__main__":
    main()
