"""What metering costs a loop: time added per step by Headway's meter and by others, on one and the same loop.

    .venv/bin/python benchmarks/metering.py         # five minutes; run on a quiet machine

Every contender drives the same plain PyTorch loop over the same padded batches, in rounds of a few steps whose order is
shuffled; what it adds is its time per step less that of the bare loop in the same round. On an idle loop (a model of
one number) the additions show to the microsecond; on a real one (a small Qwen3) shows what counts by intercepting
operators. Lightning's monitor runs in Lightning's own loop and is compared with that loop without it.

Writes benchmarks/results/metering_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
import logging
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from metered_loops import ADDED_TO, CONTENDERS, Loop
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write

ROWS, SLOTS, REAL_ROWS, REAL_SLOTS = 8, 4096, 4, 128
TARGET_US, TARGET_SHARE, STEP_S = 50, 0.002, 0.050


def main() -> None:
    """Measure, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    parser.add_argument(
        "--rounds", type=int, default=60, help="rounds on the idle loop; a fifth of them on the real one"
    )
    parser.add_argument("--steps", type=int, default=20, help="steps of each contender in a round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # of Lightning about a loop without workers
    record: dict[str, Any] = {
        "what": "metering",
        "environment": environment(torch.device("cpu")),
        "steps": options.steps,
        "batch": [ROWS, SLOTS],
        "real_batch": [REAL_ROWS, REAL_SLOTS],
        "log_every": 10,
        "idle": measure(Loop(OneNumber(), padded(ROWS, SLOTS)), options.rounds, options.steps),
        "real": measure(Loop(small_qwen3(), padded(REAL_ROWS, REAL_SLOTS)), max(options.rounds // 5, 1), options.steps),
    }
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


class OneNumber(torch.nn.Module):
    """A model that reads its batch, as every model does, and computes as good as nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        return self.weight * (input_ids.sum() + attention_mask.sum() + labels.sum())


def small_qwen3() -> torch.nn.Module:
    """Make a Qwen3 whose step takes some 50 ms on one core."""
    config = Qwen3Config(
        vocab_size=2048, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def padded(rows: int, slots: int) -> dict[str, torch.Tensor]:
    """Make a batch whose rows are padded to one length."""
    mask_BS = (torch.arange(slots) < torch.linspace(slots // 4, slots, rows).long()[:, None]).long()
    ids_BS = torch.randint(3, 2048, (rows, slots)) * mask_BS
    return {"input_ids": ids_BS, "attention_mask": mask_BS, "labels": ids_BS.masked_fill(mask_BS == 0, -100)}


def measure(loop: Loop, rounds: int, steps: int) -> dict[str, Any]:
    """Time every contender against its bare loop; microseconds per step."""
    added: dict[str, list[float]] = {name: [] for name in ADDED_TO}
    bare: dict[str, list[float]] = {name: [] for name in ADDED_TO.values()}
    for number in range(rounds + 1):
        order = list(CONTENDERS)
        random.Random(number).shuffle(order)
        times = {name: time_per_step(CONTENDERS[name], loop, steps) for name in order}
        if number == 0:
            continue  # imports, caches
        for name in ADDED_TO:
            added[name].append(times[name] - times[ADDED_TO[name]])
        for name, alone in bare.items():
            alone.append(times[name])
    return {"added_us": {n: quartiles(added[n]) for n in added}, "bare_us": {n: quartiles(bare[n]) for n in bare}}


def time_per_step(
    contender: Callable[[Loop, int], Iterator[Callable[[], float | None]]], loop: Loop, steps: int
) -> float:
    """Run a contender's loop and return microseconds per step; its set-up and end are outside."""
    run = contextmanager(contender)(loop, steps)
    with run as go:
        start_s = time.perf_counter()
        told_s = go()
        return (time.perf_counter() - start_s if told_s is None else told_s) / steps * 1e6


def quartiles(values: list[float]) -> dict[str, float]:
    """Median and the middle half."""
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return {"q1": low, "median": median, "q3": high}


def render(record: dict[str, Any]) -> str:
    """Render the table from a record."""

    def cell(numbers: dict[str, float]) -> str:
        return f"{numbers['median']:,.1f} ({numbers['q1']:,.1f} to {numbers['q3']:,.1f})"

    idle, real = record["idle"], record["real"]
    names = sorted(idle["added_us"], key=lambda name: idle["added_us"][name]["median"])
    rows = [[name, cell(idle["added_us"][name]), cell(real["added_us"][name])] for name in names]
    ours = {name: idle["added_us"][name]["median"] for name in names if name.startswith("headway")}
    verdicts = [
        f"{name} adds {us:,.1f} us, {us / 1e6 / STEP_S:.2%} of such a step: {'met' if us < TARGET_US else 'missed'}"
        for name, us in ours.items()
    ]
    rows_, slots = record["batch"]
    return "\n".join(
        [
            "# What metering adds to a step",
            "",
            f"Microseconds per step, median and middle half of the rounds; a window every {record['log_every']} steps, "
            f"its cost included. Idle loop: batches of {rows_} x {slots} padded slots, a bare step of "
            f"{idle['bare_us']['bare loop']['median']:,.0f} us. Real loop: a small Qwen3, a bare step of "
            f"{real['bare_us']['bare loop']['median'] / 1000:,.1f} ms, whose noise hides what is below some 100 us.",
            "",
            markdown_table(["", "added to an idle step [us]", "added to a real step [us]"], rows),
            "",
            f"Target: under {TARGET_US} us a step, {TARGET_SHARE:.1%} of a {STEP_S * 1000:.0f} ms step being "
            f"{TARGET_SHARE * STEP_S * 1e6:.0f} us. {'; '.join(verdicts)}.",
            "",
            "mfu-tracker synchronises the GPU in every step (`track`) or records events (its wrapper); on this machine "
            "without a GPU those calls are empty stand-ins, so its rows show its Python alone. It, FlopCounterMode's "
            "users and Lightning's monitor bill a constant per step or what operators report; only Headway and the "
            "Megatron-style accumulator look at what the batch holds.",
            "",
            describe_environment(record),
            "",
        ]
    )


if __name__ == "__main__":
    main()
