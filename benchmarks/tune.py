"""Hold `headway tune` against an exhaustive search: every choice is trained, on one thread of a CPU.

    .venv/bin/python benchmarks/tune.py            # ten minutes; no wall time counts, so other work may go on

Each choice trains some steps through the real loop, whose clock is replaced by the processor's time; of its steps the
least disturbed counts, since what shares a core slows them by up to half. Writes
benchmarks/results/tune_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from headway.cli.tune import search_of
from headway.config import TrainConfig, parse_config
from headway.data.sources import open_source
from headway.log.records import read_records
from headway.packing.lengths import LengthTable
from headway.predict.tune.space import Space, admitted
from headway.synthetic.new_model import write_new_model
from headway.train.run import train
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write

STEP_TOKENS, TOLERANCE = 4096, 0.1
SPACE: dict[str, Any] = {
    "accumulations": (1, 2, 4, 8, 16),
    "recomputes": ("none", "full"),
    "chunks": (64, 2048, None),
}
_WARM_UP, _STEPS = 2, 6
_WORDS = 300
TOP = 3


def main() -> None:
    """Measure every choice, predict every choice, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2, help="times that every choice is measured")
    parser.add_argument("--size", type=int, default=1_000_000, help="parameters of the model, about")
    parser.add_argument("--measured", type=Path, help="take the rates of this earlier record, and predict alone")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("HEADWAY_PEAK_FLOPS", "1e11")  # or each run would measure it anew
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config, parameters = setup(folder, options.size)
        record: dict[str, Any] = {"what": "tune", "environment": environment(torch.device("cpu"))}
        search = search_of(config, None, None, [str(folder / "data.jsonl")])[0]
        search.space = Space(STEP_TOKENS, tolerance=TOLERANCE, **SPACE)
        start_s, cpu_s = time.perf_counter(), time.process_time()
        found = search.run()
        record |= {"parameters": parameters, "step_tokens": STEP_TOKENS}
        record |= {"tune_s": time.perf_counter() - start_s, "tune_cpu_s": time.process_time() - cpu_s}
        if options.measured is None:
            start_s = time.perf_counter()
            measured = exhaustive(config, search.lengths[1], folder, options.rounds)
            record["exhaustive_s"] = time.perf_counter() - start_s
        else:
            earlier = json.loads(options.measured.read_text(encoding="utf-8"))
            record |= {"environment": earlier["environment"], "exhaustive_s": earlier["exhaustive_s"]}
            measured = {name_of(one): one["measured_flops_per_s"] for one in earlier["choices"]}
        record["choices"] = [
            {
                "rank": rank,
                **choice_of(one.config),
                "predicted_flops_per_s": one.flops_per_s,
                "measured_flops_per_s": measured[name_of(choice_of(one.config))],
            }
            for rank, one in enumerate(found.ranked, start=1)
        ]
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def setup(folder: Path, size: int) -> tuple[TrainConfig, int]:
    """A model with random weights, made-up documents of lognormal lengths, and the recipe that trains on them."""
    rng = random.Random(0)
    words = ["".join(rng.choice("abcdefghijklmnop") for _ in range(rng.randint(3, 7))) for _ in range(_WORDS)]
    with (folder / "data.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(4000):
            length = min(180, max(4, round(rng.lognormvariate(3.6, 0.7))))
            file.write(json.dumps({"text": " ".join(rng.choices(words, k=length))}) + "\n")
    source = open_source(str(folder / "data.jsonl"))
    made = write_new_model(folder / "model", [source], like="qwen3", size=size, vocab_size=1024, seed=0)
    raw = {
        "model": {"path": str(folder / "model"), "random_init": True},
        "data": {
            "train": str(folder / "data.jsonl"),
            "tokens_per_pack": STEP_TOKENS,
            "workers": 0,
            "overlong": "drop",
        },
        "optim": {"steps": _WARM_UP + _STEPS, "lr": 1e-3},
        "speed": {"compile": False},
        "checkpoint": {"export": "never"},
        "run": {"folder": str(folder / "run"), "device": "cpu", "threads": 1, "watchdog_s": None},
    }
    return parse_config(raw), made.parameters


def choice_of(config: TrainConfig) -> dict[str, Any]:
    """The settings that choices differ in."""
    return {
        "tokens_per_pack": config.data.tokens_per_pack,
        "accumulation": config.optim.accumulation,
        "recompute": config.speed.recompute,
        "loss_chunk": config.speed.loss_chunk,
    }


def name_of(choice: dict[str, Any]) -> str:
    """A choice's name."""
    return "{tokens_per_pack} x {accumulation}, {recompute}, {loss_chunk}".format(**choice)


def exhaustive(config: TrainConfig, lengths: LengthTable, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Train every choice of the space in each round, in another order each time.

    Returns:
        Useful FLOPs per second of processor time, a value for each round, by choice.
    """
    space = Space(STEP_TOKENS, tolerance=TOLERANCE, **SPACE)
    choices = [
        admitted(config, {**packing, "speed.recompute": recompute, "speed.loss_chunk": chunk})
        for packing in space.packings(config, 1, lengths)
        for recompute in space.recomputes
        for chunk in space.chunks
    ]
    rates: dict[str, list[float]] = {}
    for turn in range(rounds):
        for number, choice in enumerate(random.Random(turn).sample(choices, len(choices))):
            assert choice is not None
            run = folder / f"run-{turn}-{number}"
            rates.setdefault(name_of(choice_of(choice)), []).append(measured_rate(choice, run))
    return rates


def measured_rate(config: TrainConfig, run: Path) -> float:
    """Useful FLOPs per second of processor time of the least disturbed step behind the warm-up."""
    placed = admitted(config, {"run.folder": str(run)})
    assert placed is not None
    with patch("headway.meter.clock.now_ns", time.process_time_ns):
        train(placed)
    steps = [one for one in read_records(run / "metrics.jsonl") if one["kind"] == "step"][_WARM_UP:]
    return max(float(one["flops_per_s"]) for one in steps)


def render(record: dict[str, Any]) -> str:
    """The record as a Markdown table."""
    choices = record["choices"]
    rates = [max(one["measured_flops_per_s"]) for one in choices]
    best = max(rates)
    top = max(rates[:TOP])
    order = sorted(range(len(rates)), key=lambda i: -rates[i])
    place = {i: number for number, i in enumerate(order, start=1)}
    rows = [
        [
            f"{one['rank']}",
            f"{one['tokens_per_pack']:,} x {one['accumulation']}",
            one["recompute"],
            "all" if one["loss_chunk"] is None else f"{one['loss_chunk']:,}",
            f"{one['predicted_flops_per_s'] / 1e9:.2f}",
            " ".join(f"{rate / 1e9:.2f}" for rate in one["measured_flops_per_s"]),
            f"{place[i]}",
            f"{100 * rates[i] / best:.1f} %",
        ]
        for i, one in enumerate(choices)
    ]
    headings = ["rank", "pack", "recompute", "chunk", "predicted", "measured", "its place", "of the best"]
    spreads = [max(each) / min(each) - 1 for each in (one["measured_flops_per_s"] for one in choices)]
    return (
        "# Tune against an exhaustive run\n\n"
        f"{describe_environment(record)}\n\n"
        f"{len(choices)} choices for a model of {record['parameters'] / 1e6:.2f} M parameters, "
        f"{record['step_tokens']:,} tokens a step, one thread. Rates are useful GFLOPs per second of processor time of "
        "the least disturbed step of each round; the better round counts. Rounds of one choice differ "
        f"by {100 * statistics.median(spreads):.1f} % in the median.\n\n"
        f"The best of the first {TOP} reaches {100 * top / best:.1f} % of the best of all. Tune took "
        f"{record['tune_s']:.1f} s, the exhaustive run {record['exhaustive_s']:.0f} s "
        f"({record['exhaustive_s'] / record['tune_s']:.0f} times as long). The rank correlation of predicted and "
        f"measured rates is {rank_correlation(rates):.2f}.\n\n"
        f"{markdown_table(headings, rows)}\n"
    )


def rank_correlation(rates: list[float]) -> float:
    """Spearman's coefficient of the order of a list, the first being predicted the highest, and its values."""
    count = len(rates)
    order = sorted(range(count), key=lambda i: -rates[i])
    places = {i: number for number, i in enumerate(order)}
    return 1 - 6 * sum((i - places[i]) ** 2 for i in range(count)) / (count * (count**2 - 1))


if __name__ == "__main__":
    main()
