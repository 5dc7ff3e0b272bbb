"""What a profile costs a loop: a window that is closed, one that is open, and torch.profiler alone.

    .venv/bin/python benchmarks/profiling.py         # two minutes; run on a quiet machine

Every contender drives the same loop, a small Qwen3 under Headway's meter, in rounds of a few steps whose order is
shuffled; its cost is its CPU time per step over that of the metered loop without a profile in the same round. CPU time
of one thread is what other processes disturb least. Starting the profiler and writing the file are timed apart, by the
clock: no step is charged for them.

Writes benchmarks/results/profiling_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import headway
from headway.devices import Peak
from metering import padded, quartiles, small_qwen3
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write

ROWS, SLOTS = 4, 128
PEAK = Peak("any", 1e30, "fp32", "an MFU that no step can pass")
NEVER = range(10**6, 10**6 + 1)


@dataclass
class Loop:
    """A model that is metered, the batch of each step, and what was noted beside the steps' time."""

    model: torch.nn.Module
    batch: dict[str, torch.Tensor]
    cost_model: headway.CostModel
    noted: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def meter(self) -> headway.Meter:
        """Make a meter of this model."""
        return headway.Meter(self.model, cost_model=self.cost_model, peak=PEAK)

    def train(self, meter: headway.Meter, steps: int) -> None:
        """Take some steps."""
        for _ in range(steps):
            meter.count(self.batch)
            self.model(**self.batch).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            meter.step()

    def note(self, name: str, value: float) -> None:
        """Note a number of this round."""
        self.noted.setdefault(name, []).append(value)


def metered(loop: Loop, steps: int) -> Iterator[headway.Meter]:
    """No profile."""
    del steps
    yield loop.meter()


def closed(loop: Loop, steps: int) -> Iterator[headway.Meter]:
    """A profile whose window the loop does not reach."""
    del steps
    with tempfile.TemporaryDirectory() as folder, headway.profile(meter := loop.meter(), folder, steps=NEVER) as window:
        yield meter
        window.__exit__(RuntimeError, None, None)  # ends it without the warning that it was not reached


def opened(loop: Loop, steps: int) -> Iterator[headway.Meter]:
    """A profile whose window all steps are in."""
    with tempfile.TemporaryDirectory() as folder:
        meter = loop.meter()
        with headway.profile(meter, folder, steps=range(1, steps + 2), report=lambda _: None) as window:
            begin_s = time.perf_counter()
            meter.start()
            loop.note("start_s", time.perf_counter() - begin_s)
            yield meter
            begin_s = time.perf_counter()
        loop.note("stop_s", time.perf_counter() - begin_s)
        assert window.path is not None
        loop.note("file_kb_per_step", window.path.stat().st_size / steps / 1e3)


def torch_alone(loop: Loop, steps: int) -> Iterator[headway.Meter]:
    """torch.profiler as Headway starts it, without names of steps, phases and modules."""
    del steps
    meter = loop.meter()
    meter.start()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True):
        yield meter


CONTENDERS: dict[str, Callable[[Loop, int], Iterator[headway.Meter]]] = {
    "no profile": metered,
    "headway.profile, window closed": closed,
    "torch.profiler alone": torch_alone,
    "headway.profile, window open": opened,
}


def main() -> None:
    """Measure, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    parser.add_argument("--rounds", type=int, default=24, help="rounds, each with all contenders")
    parser.add_argument("--steps", type=int, default=8, help="steps of each contender in a round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = small_qwen3().train()
    loop = Loop(model, padded(ROWS, SLOTS), headway.trace(model))
    record: dict[str, Any] = {
        "what": "profiling",
        "environment": environment(torch.device("cpu")),
        "rounds": options.rounds,
        "steps": options.steps,
        "batch": [ROWS, SLOTS],
        **measure(loop, options.rounds, options.steps),
    }
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def measure(loop: Loop, rounds: int, steps: int) -> dict[str, Any]:
    """Time every contender; milliseconds per step, and the ratio to the loop without a profile."""
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for number in range(rounds + 1):
        order = list(CONTENDERS)
        random.Random(number).shuffle(order)
        for name in order:
            times[name].append(ms_per_step(CONTENDERS[name], loop, steps))
    base = times["no profile"][1:]  # the first round imports and fills caches
    return {
        "step_ms": {name: quartiles(found[1:]) for name, found in times.items()},
        "ratio": {
            name: quartiles([one / plain for one, plain in zip(found[1:], base, strict=True)])
            for name, found in times.items()
        },
        "noted": {name: quartiles(found[1:]) for name, found in loop.noted.items()},
    }


def ms_per_step(contender: Callable[[Loop, int], Iterator[headway.Meter]], loop: Loop, steps: int) -> float:
    """Run a contender's loop; its set-up and end are outside [ms of CPU time]."""
    with contextmanager(contender)(loop, steps) as meter:
        begin_s = time.process_time()
        loop.train(meter, steps)
        step_s = (time.process_time() - begin_s) / steps
    meter._let_go()
    return step_s * 1e3


def render(record: dict[str, Any]) -> str:
    """Render the table from a record."""

    def cell(numbers: dict[str, float], digits: int) -> str:
        return f"{numbers['median']:,.{digits}f} ({numbers['q1']:,.{digits}f} to {numbers['q3']:,.{digits}f})"

    rows = [[name, cell(record["step_ms"][name], 1), cell(record["ratio"][name], 3)] for name in record["step_ms"]]
    noted = record["noted"]
    rows_, slots = record["batch"]
    return "\n".join(
        [
            "# What a profile adds to a step",
            "",
            f"A small Qwen3 on {rows_} x {slots} padded slots under Headway's meter, {record['rounds']} rounds of "
            f"{record['steps']} steps, all contenders in each round; CPU time, median and middle half of the rounds. "
            "The ratio is to the loop without a profile in the same round.",
            "",
            markdown_table(["", "step [ms]", "ratio"], rows),
            "",
            f"No step's time: starting the profiler {cell(noted['start_s'], 3)} s; stopping it, counting the steps and "
            f"writing the file {cell(noted['stop_s'], 2)} s. The file has {cell(noted['file_kb_per_step'], 0)} kB a "
            "step, compressed.",
            "",
            describe_environment(record),
            "",
        ]
    )


if __name__ == "__main__":
    main()
