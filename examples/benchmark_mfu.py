"""Measure GPT-2 training steps over batch sizes, attention, compiling and checkpointing.

A row has MFU, HFU, the share of the memory bandwidth that reading the weights takes, and tokens/s.

    python examples/benchmark_mfu.py --help
    python examples/benchmark_mfu.py --model gpt2 --dtype bf16 --seq-len 1024

Weights and tokens are random, so nothing is downloaded. On a CPU, MFU is a share of the best matmul rate that was
measured on the CPU, and the compiled rows are left out.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from headway.compat.mfu_tracker import UtilizationResult, get_gpu_spec, profile_flops, track

SIZES = {  # layers, heads, width
    "tiny": (6, 8, 512),
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
ON_CPU = DEVICE.type == "cpu"


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    batch_size: int
    attention: str
    compiles: bool = False
    checkpoints: bool = False

    def __str__(self) -> str:
        parts = [f"batch {self.batch_size:2}", self.attention]
        parts += ["compiled"] if self.compiles else []
        parts += ["checkpointed"] if self.checkpoints else []
        return ", ".join(parts)


SETTINGS = [
    Setting(1, "eager"),
    Setting(4, "eager"),
    Setting(8, "eager"),
    Setting(8, "sdpa"),
    Setting(8, "sdpa", compiles=True),
    Setting(8, "sdpa", checkpoints=True),
    Setting(8, "sdpa", compiles=True, checkpoints=True),
    Setting(16, "sdpa", compiles=True),
]


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        choices=SIZES,
        default="tiny" if ON_CPU else "gpt2-medium",
        help="size of the model (default here: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="fp32" if ON_CPU else "bf16",
        help="of the weights (default here: %(default)s)",
    )
    parser.add_argument(
        "--seq-len", type=int, default=64 if ON_CPU else 512, help="[tokens] (default here: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=30, help="steps measured per row (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=10, help="steps before them (default: %(default)s)")
    return parser.parse_args()


def build(setting: Setting, args: argparse.Namespace) -> GPT2LMHeadModel:
    """Make a model with random weights."""
    layers, heads, width = SIZES[args.model]
    config = GPT2Config(
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        n_positions=max(args.seq_len, 1024),
        use_cache=False,
        attn_implementation=setting.attention,
    )
    model = GPT2LMHeadModel(config).to(DEVICE, DTYPES[args.dtype]).train()
    if setting.checkpoints:
        model.activation_checkpointing_enable()
    return model


def measure(setting: Setting, args: argparse.Namespace) -> list[UtilizationResult]:
    """Train for some steps and return what was measured of those after the warm-up."""
    model = build(setting, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    sample = torch.zeros((1, args.seq_len), dtype=torch.long, device=DEVICE)
    flops = profile_flops(model, kwargs={"input_ids": sample})  # one row is enough: blocks count what they run
    run = torch.compile(model) if setting.compiles else model
    results = []
    for step in range(args.warmup + args.steps):
        ids = torch.randint(model.config.vocab_size, (setting.batch_size, args.seq_len), device=DEVICE)
        optimizer.zero_grad()
        with track(flops, dtype=args.dtype) as result:
            run(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        if step >= args.warmup:
            results.append(result)
    return results


def main() -> None:
    """Print one row per setting."""
    args = parse_args()
    spec = get_gpu_spec(DEVICE)
    print(f"device   {spec.name}, {spec.peak_tflops(args.dtype):.4g} TFLOP/s in {args.dtype}")
    print(f"model    {args.model}, {args.dtype}, {args.seq_len} tokens per row")
    print(f"steps    {args.steps} measured after {args.warmup}; medians; forward and backward, without the optimizer")
    print()
    print(f"{'':38} {'MFU':>7} {'HFU':>7} {'weights':>7} {'tokens/s':>10} {'ms':>9} {'TFLOP':>8}")
    for setting in SETTINGS:
        if setting.compiles and ON_CPU:
            continue
        try:
            results = measure(setting, args)
        except torch.OutOfMemoryError:
            print(f"{setting!s:38} out of memory")
            continue
        columns = [[r.mfu, r.hfu, r.mbu, r.tokens_per_sec, r.elapsed_sec * 1e3] for r in results]
        mfu, hfu, weights, rate, ms = (statistics.median(column) for column in zip(*columns, strict=True))
        tflop = results[0].flops / 1e12
        print(f"{setting!s:38} {mfu:7.1%} {hfu:7.1%} {weights:7.1%} {rate:10,.0f} {ms:9.1f} {tflop:8.3f}", flush=True)


if __name__ == "__main__":
    main()
