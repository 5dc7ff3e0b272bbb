"""What counting costs: a pack of 1,000 segments and 100 images on a shipped model, against one FlopCounterMode step.

    .venv/bin/python benchmarks/counting_cost.py         # seconds; run on a quiet machine

Writes benchmarks/results/counting_cost_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from headway import Workload, load_cost_model
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write

MODEL = "qwen3-vl-8b"
NUM_SEGMENTS, NUM_IMAGES = 1000, 100


def main() -> None:
    """Measure, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    lengths = rng.integers(64, 1024, NUM_SEGMENTS)
    grids = np.stack([np.ones(NUM_IMAGES, int), *(2 * rng.integers(4, 24, (2, NUM_IMAGES)))], axis=1)
    cost_model = load_cost_model(MODEL)
    workload = Workload(lengths, images=grids)
    step = tiny_step()

    def counted_step() -> None:
        with FlopCounterMode(display=False):
            step()

    record: dict[str, Any] = {
        "what": "counting_cost",
        "environment": environment(torch.device("cpu")),
        "model": MODEL,
        "segments": NUM_SEGMENTS,
        "images": NUM_IMAGES,
        "flops": cost_model.count(workload).total,
        "us": {
            "workload": microseconds(lambda: Workload(lengths, images=grids), 2000),
            "count": microseconds(lambda: cost_model.count(workload), 2000),
            "workload_and_count": microseconds(lambda: cost_model.count(Workload(lengths, images=grids)), 2000),
            "tiny_step": microseconds(step, 60),
            "tiny_step_under_flop_counter": microseconds(counted_step, 60),
        },
    }
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def tiny_step() -> Callable[[], None]:
    """Make a forward and backward of a two-layer Qwen3 on 64 tokens: as little as FlopCounterMode can be given."""
    config = Qwen3Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    ids_1S = torch.arange(64)[None]

    def step() -> None:
        model(input_ids=ids_1S, labels=ids_1S).loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def microseconds(call: Callable[[], object], repeats: int) -> dict[str, float]:
    """Time a call again and again after a warm-up; median and the middle 90 % [us]."""
    for _ in range(max(3, repeats // 20)):
        call()
    durations = np.empty(repeats)
    for i in range(repeats):
        begin_s = time.perf_counter()
        call()
        durations[i] = time.perf_counter() - begin_s
    low, median, high = np.percentile(1e6 * durations, [5, 50, 95])
    return {"median": float(median), "p5": float(low), "p95": float(high), "repeats": repeats}


def render(record: dict[str, Any]) -> str:
    """Render the Markdown page from the record."""
    names = {
        "workload_and_count": "build the workload and count it",
        "workload": "of this, the workload",
        "count": "of this, counting by component",
        "tiny_step_under_flop_counter": "a tiny step under FlopCounterMode",
        "tiny_step": "the same step without it",
    }
    rows = []
    for key, title in names.items():
        us = record["us"][key]
        rows.append([title, f"{us['median']:,.1f}", f"{us['p5']:,.1f} to {us['p95']:,.1f}", f"{us['repeats']:,}"])
    ratio = record["us"]["tiny_step_under_flop_counter"]["median"] / record["us"]["workload_and_count"]["median"]
    return "\n".join(
        [
            "# What counting a step costs",
            "",
            f"A pack of {record['segments']:,} segments and {record['images']} images on {record['model']}, one "
            "thread. The tiny step is forward and backward of a two-layer Qwen3 (hidden 64) on 64 tokens; "
            "FlopCounterMode must run the step that it counts, and takes longer for a larger model. Headway's cost "
            f"does not depend on the model's size or on the tokens. The counter's step takes {ratio:,.0f} times that.",
            "",
            markdown_table(["", "us, median", "5th to 95th percentile", "repeats"], rows),
            "",
            describe_environment(record),
            "",
        ]
    )


if __name__ == "__main__":
    main()
