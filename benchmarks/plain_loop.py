"""MFU of a plain bf16 loop on a Qwen2.5-1.5B, eager and compiled, as Headway and as mfu-tracker print it; with energy.

    .venv/bin/python benchmarks/plain_loop.py         # some minutes on one NVIDIA GPU with 40 GiB or more

Random weights, causal attention through SDPA, one flat row of real tokens per sample. mfu-tracker is used as its page
shows it: FLOPs profiled on one row of the batch, then again on the whole batch. Where it is not installed, and on a
CPU, where it has no number, its columns stay empty; `--tiny` runs the same code on a CPU.

Writes benchmarks/results/plain_loop_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from headway import Meter
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write

# config.json of Qwen/Qwen2.5-1.5B
QWEN25_15B = {
    "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 32768,
}  # fmt: skip
TINY = QWEN25_15B | {"vocab_size": 256, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}


def main() -> None:
    """Measure, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=40, help="counted steps, after a quarter as many that are not")
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers, on a CPU as well")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        parser.error("there is no CUDA device here; --tiny runs the same code on a CPU")
    torch.manual_seed(0)
    record: dict[str, Any] = {
        "what": "plain_loop",
        "environment": environment(device),
        "model": "two small layers" if options.tiny else "Qwen2.5-1.5B",
        "batch": [options.rows, options.tokens],
        "steps": options.steps,
        "runs": {},
    }
    for name in ("eager", "compiled"):
        record["runs"][name] = run(
            device, TINY if options.tiny else QWEN25_15B, options, is_compiled=name == "compiled"
        )
        torch.cuda.empty_cache()
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def run(
    device: torch.device, config: dict[str, Any], options: argparse.Namespace, *, is_compiled: bool
) -> dict[str, Any]:
    """Train for some steps and return what each meter says of them."""
    model = Qwen2ForCausalLM._from_config(Qwen2Config(**config), dtype=torch.bfloat16).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    ids = torch.randint(config["vocab_size"], (options.rows, options.tokens), device=device)
    batch = {"input_ids": ids, "labels": ids}
    has_theirs = device.type == "cuda" and find_spec("mfu_tracker") is not None
    theirs = Theirs(model, batch) if has_theirs else None
    meter = Meter(model, log_every=options.steps * 2, num_warmup_steps=max(options.steps // 4, 2))
    trained = torch.compile(model) if is_compiled else model
    tracked: list[Any] = []
    for _ in range(options.steps + meter.num_warmup_steps):
        meter.count(batch)
        optimizer.zero_grad()
        trained(**batch).loss.backward()
        optimizer.step()
        meter.step()
    window = meter.close()
    if theirs is not None:
        # apart from the metered steps, as its `track` waits for the GPU twice a step
        for _ in range(options.steps):
            tracked.append(theirs.step(trained, optimizer, batch))
    return {
        "headway": window.to_dict(),
        "mfu_tracker": None if theirs is None else theirs.numbers(tracked),
    }


class Theirs:
    """mfu-tracker as its page uses it."""

    def __init__(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> None:
        import mfu_tracker

        self.tool = mfu_tracker
        one_row = {"input_ids": batch["input_ids"][:1]}
        self.flops = {
            "one row": mfu_tracker.profile_flops(model, kwargs=one_row, with_backward=True),
            "whole batch": mfu_tracker.profile_flops(model, kwargs=dict(batch), with_backward=True),
        }
        self.bytes = mfu_tracker.param_bytes(model)
        self.spec = mfu_tracker.get_gpu_spec()

    def step(self, model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> float:
        """Take a step and return its seconds."""
        optimizer.zero_grad()
        with self.tool.track(self.flops["one row"], self.bytes, dtype="bf16", spec=self.spec) as result:
            model(**batch).loss.backward()
        optimizer.step()
        return float(result.elapsed_sec)

    def numbers(self, seconds: list[float]) -> dict[str, Any]:
        """Return its MFU by what was profiled; the optimizer's time is outside, as on its page."""
        mean_s = sum(seconds) / len(seconds)
        peak = self.spec.peak_tflops("bf16") * 1e12
        return {
            "mfu": {name: flops / mean_s / peak for name, flops in self.flops.items()},
            "flops": self.flops,
            "peak_flops_per_s": peak,
            "forward_and_backward_s": mean_s,
        }


def render(record: dict[str, Any]) -> str:
    """Render the table from a record."""

    def share(value: float | None) -> str:
        return "-" if value is None or math.isnan(value) else f"{100 * value:.1f} %"

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else f"{value:{form}}"

    rows = []
    for name, run_ in record["runs"].items():
        ours, theirs = run_["headway"], run_["mfu_tracker"]
        their_mfu = theirs["mfu"] if theirs else {}
        rows.append(
            [
                name, f"{1000 * ours['step_s']:,.1f} ms", f"{ours['tokens_per_s']:,.0f}", share(ours["mfu"]),
                share(ours.get("mbu")), number(ours["joules_per_token"], ".4f"), share(their_mfu.get("one row")),
                share(their_mfu.get("whole batch")),
            ]
        )  # fmt: skip
    headings = [
        "",
        "step",
        "tokens/s",
        "MFU",
        "MBU",
        "J/token",
        "mfu-tracker, one row profiled",
        "whole batch profiled",
    ]
    first = next(iter(record["runs"].values()))["headway"]
    batch_rows, tokens = record["batch"]
    return "\n".join(
        [
            f"# A plain loop: {record['model']}, bf16, {batch_rows} rows of {tokens:,} tokens",
            "",
            f"{record['steps']} steps after the warm-up. Headway: convention {first['convention']}, peak "
            f"{first['peak_flops_per_s']:.4g} FLOP/s in {first['peak_dtype']} ({first['peak_source']}), the whole step "
            "timed. mfu-tracker: causal attention in full, three times the forward, its own peak, the optimizer's time "
            "outside.",
            "",
            markdown_table(headings, rows),
            "",
            describe_environment(record),
            "",
        ]
    )


if __name__ == "__main__":
    main()
