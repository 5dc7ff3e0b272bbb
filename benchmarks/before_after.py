"""Time of loading, planning and training in another checkout of this repository and in this one, in turn.

    git worktree add --detach ../before COMMIT
    .venv/bin/python benchmarks/before_after.py --before ../before         # about fifteen minutes; any machine

Each checkout runs its own benchmark scripts on its own sources, in a process that stays up; the two are asked for one
short round after the other, so that a drift of the machine meets both, and ratios are taken within a round. Processor
time stands beside wall time, as other work on the machine touches it less.

Writes benchmarks/results/before_after_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from record import RESULTS, describe_environment, environment, markdown_table, result_paths, spread, write

HERE = Path(__file__).resolve().parent.parent
PHOTOGRAPHS, PLANNED = 96, 400_000
STEPS = {"text": (16, 4), "images": (8, 4), "digits": (96, 9)}  # samples a step, and steps; the first warms up
UNITS = {"loading": "image", "planning": "sample"}  # of the others: token


def main() -> None:
    """Measure, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    parser.add_argument("--before", type=Path, help="checkout to compare this one with")
    parser.add_argument("--rounds", type=int, default=8, help="rounds, each of both checkouts in turn")
    parser.add_argument("--cases", nargs="+", default=["loading", "planning", *STEPS], help="what to time")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    if options.before is None:
        parser.error("--before is missing: the folder of a checkout to compare this one with")
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "what": "before_after",
        "environment": environment(torch.device("cpu")),
        "commits": {"before": commit(options.before), "after": commit(HERE)},
        "rounds": options.rounds,
        "steps": STEPS,
        "photographs": PHOTOGRAPHS,
        "planned": PLANNED,
        "cases": {},
    }
    sides = {"before": Side(options.before.resolve()), "after": Side(HERE)}
    for case in options.cases:
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for number in range(options.rounds + 1):  # the first warms up: files are cached, samples are encoded
            for name in sorted(sides, reverse=number % 2 == 1):  # either is the first as often
                found = sides[name].ask(case)
                if number:
                    rounds[name].append(found)
                print(f"{case}, round {number}, {name}: {found['cpu_s']:.2f} s of processor time", flush=True)
        record["cases"][case] = rounds
    for side in sides.values():
        side.end()
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def commit(checkout: Path) -> str:
    """The commit that a checkout is at, with a + where its sources or benchmarks differ from it."""
    git = ["git", "-C", str(checkout)]
    name = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True)
    clean = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "src"], check=False).returncode == 0
    return name.stdout.strip() + ("" if clean else "+")


class Side:
    """A process that times cases in one checkout."""

    def __init__(self, checkout: Path) -> None:
        paths = f"{checkout / 'src'}{os.pathsep}{checkout / 'benchmarks'}"
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--serve", str(checkout)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def ask(self, case: str) -> dict[str, float]:
        """Time a case once."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(case, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, float] = json.loads(line)
                return found
        raise SystemExit(f"The checkout failed at {case}; its error is above.")

    def end(self) -> None:
        """Let the process go."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(checkout: Path) -> None:
    """Time the cases that standard input names, in this checkout."""
    import headway

    assert Path(headway.__file__).is_relative_to(checkout / "src"), headway.__file__
    torch.set_num_threads(1)
    made: dict[str, Callable[[], dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        os.environ["HEADWAY_CACHE"] = str(Path(name) / "cache")
        for line in sys.stdin:
            case = line.strip()
            if case not in made:
                made[case] = training(case) if case in STEPS else {"loading": loading, "planning": planning}[case](name)
            print(json.dumps(made[case]()), flush=True)


def training(name: str) -> Callable[[], dict[str, float]]:
    """Headway's step of the throughput benchmark, after its warm-up steps."""
    import contenders
    import mixes

    batch, steps = STEPS[name]
    mix = getattr(mixes, f"{name}_mix")(batch * steps)
    cpu_s: list[float] = []

    class BothClocks(contenders.Clock):  # type: ignore[misc]  # Any to mypy: the script of another checkout
        def step_ended(self) -> None:
            super().step_ended()
            cpu_s.append(time.process_time())

    contenders.Clock = BothClocks  # type: ignore[misc]  # so that both checkouts tell processor time

    def run() -> dict[str, float]:
        cpu_s.clear()
        timing = contenders.run_headway(mix, contenders.Shape(batch, steps, 1), torch.device("cpu"))
        return {"wall_s": timing.wall_s, "cpu_s": cpu_s[-1] - cpu_s[0], "amount": timing.work.tokens}

    return run


def loading(folder: str) -> Callable[[], dict[str, float]]:
    """The feed of the loading benchmark, in the process itself; processor time holds the index and the plan too."""
    import loading as script

    model = script.write_processor(
        Path(folder) / "model", [script.QUESTION, script.ANSWER], script.PATCH, script.MERGE,
        max_pixels=script.MOST_PIXELS, min_pixels=4 * 28 * 28,
    )  # fmt: skip
    data = script.write_photographs(Path(folder) / "data", PHOTOGRAPHS, model)

    def run() -> dict[str, float]:
        start_s = time.process_time()
        wall_s = script.feed(data, model, 0)
        return {"wall_s": wall_s, "cpu_s": time.process_time() - start_s, "amount": PHOTOGRAPHS}

    return run


def planning(_folder: str) -> Callable[[], dict[str, float]]:
    """The whole plan of the packing benchmark's images."""
    import packing

    return partial(_planned, packing)


def _planned(script: Any) -> dict[str, float]:
    found = script.plan_only("image", PLANNED)
    return {"wall_s": found["wall_s"], "cpu_s": found["cpu_s"], "amount": PLANNED}


def render(record: dict[str, Any]) -> str:
    """Render the Markdown page from the record."""
    rows = []
    for case, rounds in record["cases"].items():
        per = {
            side: spread([1e6 * one["cpu_s"] / one["amount"] for one in found])["median"]
            for side, found in rounds.items()
        }
        rows.append(
            [
                f"{case}, per {UNITS.get(case, 'token')}",
                f"{per['before']:,.4g}",
                f"{per['after']:,.4g}",
                *(_ratio(rounds, clock) for clock in ("cpu_s", "wall_s")),
            ]
        )
    steps = {case: shape for case, shape in record["steps"].items() if case in record["cases"]}
    trained = ", ".join(f"{case}: {count - 1} steps of {batch} samples" for case, (batch, count) in steps.items())
    headings = ["", "us before", "us after", "processor time, after / before", "wall time, after / before"]
    return "\n".join(
        [
            "# Before and after",
            "",
            f"Before: {record['commits']['before']}, after: {record['commits']['after']}.",
            "",
            markdown_table(headings, rows),
            "",
            f"Microseconds are of processor time, medians of {record['rounds']} rounds, each of both in turn; ratios "
            "are taken within a round, median and range, below 1 where the later commit is faster. Training is "
            f"Headway's step of throughput.py after one to warm up ({trained}). loading: the feed of loading.py over "
            f"{record['photographs']} photographs without worker processes; its processor time holds the index and the "
            f"plan. planning: all steps of the plan of packing.py for {record['planned']:,} samples with images.",
            "",
            describe_environment(record),
            "",
        ]
    )


def _ratio(rounds: dict[str, list[dict[str, float]]], clock: str) -> str:
    pairs = zip(rounds["before"], rounds["after"], strict=True)
    ratio = spread([(b[clock] / b["amount"]) / (a[clock] / a["amount"]) for a, b in pairs])
    return f"{ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})"


if __name__ == "__main__":
    main()
