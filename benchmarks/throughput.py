"""Real tokens per second: Headway's packs against transformers.Trainer's padded batches, in one interleaved run.

    .venv/bin/python benchmarks/throughput.py            # about ten minutes on 2 cores; run on a quiet machine
    .venv/bin/python benchmarks/throughput.py --mix text --rounds 1 --steps 6

Writes benchmarks/results/throughput_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch

from contenders import Shape, Timing, compare_first_losses, run_headway, run_trainer
from mixes import Mix, digits_mix, text_mix
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, spread, write

POOL_STEPS = 64  # samples for this many steps are at hand: group_by_length needs many to group well
CONTENDERS = ("trainer", "headway", "trainer_grouped")
TITLES = {
    "trainer": "Trainer, padded to the longest",
    "headway": "Headway, packed",
    "trainer_grouped": "Trainer, group_by_length",
}


def main() -> None:
    """Measure, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mix", choices=["text", "digits", "all"], default="all", help="data to compare on")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds of every contender")
    parser.add_argument(
        "--steps", type=int, default=12, help="optimizer steps a round of the text mix, warm-up included"
    )
    parser.add_argument("--digits-steps", type=int, default=42, help="the same of the digits, whose steps are short")
    parser.add_argument("--warmup", type=int, default=2, help="first steps of a round that are not timed")
    parser.add_argument("--batch", type=int, default=16, help="samples per optimizer step of the text mix")
    parser.add_argument("--digits-batch", type=int, default=96, help="samples per optimizer step of the digits")
    parser.add_argument("--threads", type=int, help="CPU threads of both sides; PyTorch's own choice if not given")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    parser.add_argument("--render", type=Path, help="only render this JSON record again")
    options = parser.parse_args()
    if options.render:
        print(render(json.loads(options.render.read_text(encoding="utf-8"))))
        return
    text = Shape(options.batch, options.steps, options.warmup)
    digits = Shape(options.digits_batch, options.digits_steps, options.warmup)
    for shape in (text, digits):
        if not 1 <= shape.warmup < shape.steps <= POOL_STEPS:
            parser.error(f"need 1 <= warm-up {shape.warmup} < steps {shape.steps} <= {POOL_STEPS}")
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    record: dict[str, Any] = {"what": "throughput", "environment": environment(device), "rounds": options.rounds}
    record["mixes"] = []
    if options.mix in ("text", "all"):
        record["mixes"].append(measure(text_mix(POOL_STEPS * text.batch), text, options.rounds, device))
    if options.mix in ("digits", "all"):
        record["mixes"].append(measure(digits_mix(POOL_STEPS * digits.batch), digits, options.rounds, device))
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def measure(mix: Mix, shape: Shape, num_rounds: int, device: torch.device) -> dict[str, Any]:
    """Run every contender in turn, round after round, so that a drift of the machine meets all of them."""
    ours, theirs = compare_first_losses(mix, shape.batch)
    if not math.isclose(ours, theirs, rel_tol=1e-4):
        raise SystemExit(f"{mix.name}: the sides do not compute the same: first losses are {ours} and {theirs}")
    timings: dict[str, list[Timing]] = {name: [] for name in CONTENDERS}
    for number in range(num_rounds):
        for name in CONTENDERS:
            timing = run(name, mix, shape, device)
            timings[name].append(timing)
            print(f"{mix.name}, round {number + 1}, {TITLES[name]}: {timing.tokens_per_s:,.0f} tokens/s", flush=True)
    baseline = timings["trainer"]
    return {
        "name": mix.name,
        "description": mix.description,
        "samples_per_step": shape.batch,
        "timed_steps": shape.steps - shape.warmup,
        "first_loss": {"headway": ours, "trainer": theirs},
        "contenders": {
            name: {
                "tokens_per_s": spread([timing.tokens_per_s for timing in rounds]),
                "ratio_to_trainer": spread(
                    [timing.tokens_per_s / base.tokens_per_s for timing, base in zip(rounds, baseline, strict=True)]
                ),
                "padding_share": 1 - rounds[0].tokens / rounds[0].slots,
                "rounds": [{"wall_s": t.wall_s, "tokens": t.tokens, "slots": t.slots} for t in rounds],
            }
            for name, rounds in timings.items()
        },
    }


def run(name: str, mix: Mix, shape: Shape, device: torch.device) -> Timing:
    """Run one contender for one round."""
    if name == "headway":
        return run_headway(mix, shape, device)
    sampling = "group_by_length" if name == "trainer_grouped" else "sequential"
    return run_trainer(mix, shape, device, sampling=sampling)


def render(record: dict[str, Any]) -> str:
    """Render the Markdown page from the record."""
    parts = ["# Real tokens per second: packed against padded", ""]
    for mix in record["mixes"]:
        rows = []
        for name in CONTENDERS:
            entry = mix["contenders"][name]
            rate, ratio = entry["tokens_per_s"], entry["ratio_to_trainer"]
            rows.append(
                [
                    TITLES[name],
                    f"{rate['median']:,.0f}",
                    f"{rate['min']:,.0f} to {rate['max']:,.0f}",
                    f"{ratio['median']:.2f}x ({ratio['min']:.2f} to {ratio['max']:.2f})",
                    f"{100 * entry['padding_share']:.1f} %",
                ]
            )
        headings = ["", "tokens/s, median", "range", "against the Trainer", "padding"]
        losses = mix["first_loss"]
        parts += [
            f"## {mix['name']}",
            "",
            f"{mix['description']}. {mix['samples_per_step']} samples per optimizer step, {mix['timed_steps']} timed "
            f"steps a round. First loss: Headway {losses['headway']:.6f}, Trainer {losses['trainer']:.6f}.",
            "",
            markdown_table(headings, rows),
            "",
        ]
    parts += [
        f"{record['rounds']} rounds, contenders interleaved within each; the ratio is taken within a round. Only real "
        "tokens count. Both sides: the same samples encoded beforehand and held in memory, the same initial weights, "
        "the same number of samples per optimizer step (and, except for group_by_length, the same ones), fused AdamW "
        "with decay groups, clipping at 1.0, the same threads, batches made in the main thread (the Trainer's "
        "dataloader has 0 workers). The Trainer: transformers.Trainer with sdpa attention and a collator that pads to "
        "the longest sample of the batch; no logging, saving or evaluation on either side. fp32 on a CPU, "
        "bf16 autocast on CUDA.",
        "",
        describe_environment(record),
        "",
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    main()
