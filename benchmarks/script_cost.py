"""What `headway run` adds to a step: processor time of a loop's thread with its watch, less without it.

    .venv/bin/python benchmarks/script_cost.py         # three minutes

One process trains models that compute as good as nothing, in rounds of steps, each without the watch and then with it,
as `headway run` installs it: hooks, data loader, file of records. The steps in which the watch looks for the model are
outside. Processor time leaves out what other programs take of a shared machine.

Writes benchmarks/results/script_cost_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
import os
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from headway.integrations.script import ScriptWatch
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write

if TYPE_CHECKING:
    from collections.abc import Iterator

TARGET = 0.01  # share of a step
WARM = 13  # steps before the measured ones: two of the search, then those with a record each
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
STEP_S = 0.010


class Loop:
    """A training loop that says nothing of Headway, of a model that computes as good as nothing.

    Args:
        num_layers: linear layers; those of a Qwen3 where it is below 0.
    """

    def __init__(self, num_layers: int) -> None:
        torch.manual_seed(0)
        rows: Any = torch.randn(4096, 4)
        self.is_text = num_layers < 0
        if self.is_text:
            self.model: Any = Qwen3ForCausalLM(
                Qwen3Config(vocab_size=64, num_hidden_layers=-num_layers, **SIZES)
            ).train()
            rows = torch.randint(64, (4096, 8))
        else:
            self.model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-9, foreach=True)
        loader = torch.utils.data.DataLoader(rows, batch_size=4)
        self.batches: Iterator[Any] = (batch for _ in range(10**6) for batch in loader)

    def train(self, steps: int) -> float:
        """Take some steps; processor time of this thread for one [s]."""
        start_s = time.thread_time()
        for batch in islice(self.batches, steps):
            if self.is_text:
                self.model(input_ids=batch, attention_mask=torch.ones_like(batch), labels=batch).loss.backward()
            else:
                self.model(batch).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return (time.thread_time() - start_s) / steps


def measure(num_layers: int, rounds: int, steps: int) -> dict[str, Any]:
    """Take rounds of steps, each without the watch and with it."""
    loop, bare_s, added_s = Loop(num_layers), [], []
    loop.train(WARM)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            alone_s = loop.train(steps)
            options: Any = {"log_to": (), "profile": False, "since_ns": time.monotonic_ns(), "report": print}
            watch = ScriptWatch(Path(folder, str(number)), **options)
            loop.train(WARM)
            added_s.append(loop.train(steps) - alone_s)
            watch.close(is_whole=True)
            bare_s.append(alone_s)
    num_parameters = sum(1 for _ in loop.model.parameters())
    return {"parameters": num_parameters, "bare_s": quartiles(bare_s), "added_s": quartiles(added_s)}


def quartiles(values: list[float]) -> list[float]:
    """Return the median, and the ends of the middle half."""
    low, middle, high = statistics.quantiles(values, n=4)
    return [middle, low, high]


def render(record: dict[str, Any]) -> str:
    """Render the table from a record."""

    def cell(seconds: list[float]) -> str:
        middle, low, high = (1e6 * value for value in seconds)
        return f"{middle:,.0f} ({low:,.0f} to {high:,.0f})"

    rows = [
        [
            name,
            str(case["parameters"]),
            cell(case["bare_s"]),
            cell(case["added_s"]),
            f"{case['added_s'][0] / STEP_S:.1%}",
        ]
        for name, case in record["cases"].items()
    ]
    return "\n".join(
        [
            "# What `headway run` adds to a step",
            "",
            f"One idle loop over a DataLoader, {record['rounds']} rounds of {record['steps']} steps without the watch "
            "and with it; the median and the middle half of the rounds. Processor time of the loop's thread.",
            "",
            markdown_table(["model", "parameters", "a bare step [us]", "added [us]", "of a step of 10 ms"], rows),
            "",
            f"Target: under {TARGET:.0%} of a step of 10 ms: "
            f"{'met' if all(case['added_s'][0] < TARGET * STEP_S for case in record['cases'].values()) else 'missed'}. "
            "Other work kept the cores busy if the load below is above their number, and the same then takes longer.",
            "",
            describe_environment(record),
            "",
        ]
    )


def main() -> None:
    """Measure, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each model")
    parser.add_argument("--steps", type=int, default=200, help="steps of a round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("HEADWAY_PEAK_FLOPS", "1e12")  # nothing is measured at the start of each round
    layers = {"3 linear layers": 3, "24 linear layers": 24, "75 linear layers": 75, "4 layers of Qwen3": -4}
    cases = {name: measure(number, options.rounds, options.steps) for name, number in layers.items()}
    record: dict[str, Any] = {
        "what": "script_cost",
        "environment": environment(torch.device("cpu")),
        "rounds": options.rounds,
        "steps": options.steps,
        "cases": cases,
    }
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


if __name__ == "__main__":
    main()
