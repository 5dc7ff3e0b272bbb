"""The meter against a stopwatch: does it time a step as long as it is, and what does it add to one?

    .venv/bin/python benchmarks/meter_truth.py              # two minutes on a GPU or a CPU
    .venv/bin/python benchmarks/meter_truth.py --tiny       # smoke test

Truth: a loop of real training steps under `headway.Meter`, which waits for nothing (on CUDA its times are device
events), between two readings of a clock at which the device is idle. The meter's step times must add up to what the
stopwatch shows. That is tried with steps whose device work takes longer than the host needs to launch it, with steps
that are launch alone, and with a host that dawdles after every fourth step, so that the device runs dry.

Cost: the same steps with and without the meter, in turns, each round between two readings with an idle device.

Writes meter_truth_<hardware>_<yyyymm>.json and the .md table rendered from it to --out.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from headway import Meter
from headway.count import CostModel, Workload
from headway.devices import peak_for
from headway.tracing import trace
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, spread, write

# hidden size, layers, tokens of a batch, rounds of the pause of the host [s]
SHAPES = {
    "long steps": (2048, 12, 8192, 0.0),
    "short steps": (128, 4, 64, 0.0),
    "a host that dawdles": (1024, 6, 4096, 0.05),
}
TINY = {name: (64, 2, 64, pause_s / 10) for name, (*_, pause_s) in SHAPES.items()}


def main() -> None:
    """Measure, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=24, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=8, help="rounds with and without the meter, in turns")
    parser.add_argument("--tiny", action="store_true", help="small models: a smoke test")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = TINY if options.tiny else SHAPES
    record: dict[str, Any] = {"what": "meter_truth", "environment": environment(device), "steps": options.steps}
    record["loops"] = {
        name: measure(device, *shape, steps=options.steps, rounds=options.rounds) for name, shape in shapes.items()
    }
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def measure(
    device: torch.device, hidden: int, layers: int, tokens: int, pause_s: float, *, steps: int, rounds: int
) -> dict[str, Any]:
    """Run one loop in rounds, metered and bare in turns.

    Args:
        device: where.
        hidden: size of the model's hidden states.
        layers: of the model.
        tokens: of a batch, one row.
        pause_s: that the host sleeps after every fourth step [s].
        steps: of a round.
        rounds: of each kind.
    """
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2048, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64, head_dim=32, attn_implementation="sdpa",
    )  # fmt: skip
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Qwen3ForCausalLM._from_config(config, dtype=dtype).to(device)
    cost_model = trace(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(config.vocab_size, (1, tokens), device=device)

    def step() -> None:
        torch.autograd.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    bare_s, metered_s, ratios = [], [], []
    for turn in range(rounds + 1):
        bare = time_round(step, steps, pause_s, device)
        metered, told = metered_round(step, steps, pause_s, device, cost_model, Workload([tokens]))
        if turn:  # the first warms up
            bare_s.append(bare / steps)
            metered_s.append(metered / steps)
            ratios.append(told / metered)
    added = [one - other for one, other in zip(metered_s, bare_s, strict=True)]
    return {"step_s": spread(bare_s), "added_s": spread(added), "told_of_true": spread(ratios), "rounds": rounds}


def time_round(step: Callable[[], None], steps: int, pause_s: float, device: torch.device) -> float:
    """Seconds that a round takes, from an idle device to an idle device."""
    began_s = _idle_s(device)
    for number in range(steps):
        step()
        _dawdle(number, pause_s)
    return _idle_s(device) - began_s


def metered_round(
    step: Callable[[], None], steps: int, pause_s: float, device: torch.device, cost_model: CostModel, work: Workload
) -> tuple[float, float]:
    """Seconds that a metered round takes by the stopwatch, and by the meter."""
    dtype = "bf16" if device.type == "cuda" else "fp32"
    meter = Meter(cost_model, peak=peak_for(device, dtype), log_every=steps)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        _idle_s(device)
        meter.start()
        began_s = time.perf_counter()
        for number in range(steps):
            step()
            _dawdle(number, pause_s)
            meter.count(work)
            meter.step()
        ended_s = _idle_s(device)
    return ended_s - began_s, meter.close().wall_s


def _dawdle(number: int, pause_s: float) -> None:
    if pause_s and number % 4 == 3:
        time.sleep(pause_s)


def _idle_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def render(record: dict[str, Any]) -> str:
    """Render the Markdown page from the record."""
    rows = []
    for name, loop in record["loops"].items():
        step, added, told = loop["step_s"], loop["added_s"], loop["told_of_true"]
        off = max(abs(told["min"] - 1), abs(told["max"] - 1))
        rows.append(
            [
                name,
                f"{1e3 * step['median']:.2f}",
                f"{100 * told['median']:.2f} %",
                f"{100 * off:.2f} %",
                f"{1e6 * added['median']:+.0f} ({1e6 * added['min']:+.0f} to {1e6 * added['max']:+.0f})",
                f"{100 * added['median'] / step['median']:+.2f} %",
            ]
        )
    mean = statistics.fmean(loop["told_of_true"]["median"] for loop in record["loops"].values())
    rounds = next(iter(record["loops"].values()))["rounds"]
    return "\n".join(
        [
            "# The meter against a stopwatch",
            "",
            markdown_table(
                ["", "step [ms]", "meter / stopwatch", "worst round", "added to a step [us]", "of the step"], rows
            ),
            "",
            f"{rounds} rounds of {record['steps']} steps, metered and bare in turns; each round begins and ends with "
            "an idle device, at which the stopwatch is read. 'Meter / stopwatch' is the sum of the meter's step times "
            f"over the stopwatch's, median of the rounds (mean of the loops {100 * mean:.2f} %); what the meter adds "
            "is the difference of neighbouring rounds, whose noise it carries.",
            "",
            describe_environment(record),
            "",
        ]
    )


if __name__ == "__main__":
    main()
