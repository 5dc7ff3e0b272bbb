"""What the phases of a step cost: processor time that sampling, hooks, collections and looks at the code add.

    .venv/bin/python benchmarks/phases.py         # two minutes

A linear layer trains under two meters that differ in `phases` alone, in rounds whose order is shuffled. What counts is
the processor time of the whole process, its threads included, which other processes on the machine do not change much;
the clock says little of some microseconds. Once every step is sampled, once every sixteenth, as short ones are. Another
table has what looks at the code take of a loop that holds Python's lock all the time. Losses are compared to the bit.

Writes benchmarks/results/phases_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
import random
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import headway
from headway import Workload
from headway.log.boundary import ErrorBoundary
from headway.meter.pauses import PlaceSampler
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write

COST_MODEL = headway.load_cost_model("qwen3-0.6b")  # of which only the additions at the end of a window are run
PEAK = headway.Peak("one CPU thread", flops_per_s=1e15, dtype="fp32", source="assumed")
STEP_S, TARGET = 0.010, 0.005  # a step's length [s], and the largest share of it that phases may cost
SAMPLED = {
    "no phases": None,
    "every step sampled": 0.0,
    "every sixteenth step sampled": 1e9,
}  # from which length on [s]


def main() -> None:
    """Measure, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--steps", type=int, default=80, help="of each loop in a round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "what": "phases",
        "environment": environment(torch.device("cpu")),
        "steps": options.steps,
        "rounds": options.rounds,
        **measure(options.rounds, options.steps),
        "looks": looks(options.rounds),
    }
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def measure(rounds: int, steps: int) -> dict[str, Any]:
    """Time the loops against each other [us of processor time a step], and compare their losses."""
    taken: dict[str, list[float]] = {name: [] for name in SAMPLED}
    losses: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        order = list(SAMPLED)
        random.Random(number).shuffle(order)
        times = {}
        for name in order:
            times[name], losses[name] = run(steps, SAMPLED[name])
        if number:  # the first round imports and fills caches
            for name, us in times.items():
                taken[name].append(us)
    return {
        "added_us": {name: min(us) - min(taken["no phases"]) for name, us in taken.items() if name != "no phases"},
        "step_us": min(taken["no phases"]),
        "equal_losses": len({tuple(values) for values in losses.values()}) == 1,
    }


def run(steps: int, sampled_from_s: float | None) -> tuple[float, list[float]]:
    """Train; returns the processor time of a step [us] and the losses."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x_BD, work = torch.randn(2, 8), Workload([16])
    losses = []
    limit = 1e9 if sampled_from_s is None else sampled_from_s
    with (
        patch("headway.meter.phases._LONG_S", limit),
        headway.Meter(model, cost_model=COST_MODEL, peak=PEAK, phases=sampled_from_s is not None) as meter,
    ):
        for number, _ in enumerate(meter.batches(range(steps + 10))):
            if number == 10:
                begin_s = time.process_time()
            meter.count(work)
            loss = model(x_BD).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            meter.step()
        took_s = time.process_time() - begin_s
    return took_s / steps * 1e6, [loss.item() for loss in losses]


class Gap:
    """A loop that is always between two phases."""

    border, is_over = " backward", False


def looks(rounds: int) -> float:
    """Processor time that looks at the code take in a second of a loop that never waits [us]."""
    sampler = PlaceSampler(Gap(), ErrorBoundary())  # type: ignore[arg-type]
    clock = time.pthread_getcpuclockid(sampler._thread.ident or 0)
    begin_s, cpu_s = time.perf_counter(), time.clock_gettime(clock)
    for _ in range(10 * rounds):
        sum(range(1_000_000))
    took_s, passed_s = time.clock_gettime(clock) - cpu_s, time.perf_counter() - begin_s
    sampler.close()
    return took_s / passed_s * 1e6


def render(record: dict[str, Any]) -> str:
    """Render the table from a record."""
    looks_us = record["looks"] * STEP_S
    rows = []
    for name, us in record["added_us"].items():
        share = (us + looks_us) / 1e6 / STEP_S
        rows.append([name, f"{us:,.1f}", f"{looks_us:,.1f}", f"{share:.2%}"])
    verdict = (record["added_us"]["every sixteenth step sampled"] + looks_us) / 1e6 / STEP_S <= TARGET
    return "\n".join([
        "# What the phases of a step cost",
        "",
        f"Processor time of the whole process, added to a step of {record['step_us']:,.0f} us: the least of "
        f"{record['rounds']} rounds of {record['steps']} steps, which other work on the machine slows least.",
        "",
        markdown_table(
            ["", "hooks, marks, sums [us]", "looks at the code [us]", f"of a step of {STEP_S * 1e3:.0f} ms"], rows
        ),
        "",
        f"Steps of 20 ms or more are all sampled, shorter ones every sixteenth time. Target: {TARGET:.1%} of a step of "
        f"{STEP_S * 1e3:.0f} ms: {'met' if verdict else 'missed'}. Losses with and without phases are "
        f"{'equal to the bit' if record['equal_losses'] else 'NOT equal'}.",
        "",
        describe_environment(record),
        "",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
