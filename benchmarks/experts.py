"""Forward and backward of one layer of experts: transformers' implementations and Headway's, on the same routing.

    .venv/bin/python benchmarks/experts.py               # a minute; run on a quiet machine; --device cuda on a GPU

Writes benchmarks/results/experts_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from headway.models.experts import NAME, register_experts
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, spread, write

IMPLEMENTATIONS = ("eager", "grouped_mm", NAME)
# slots, experts a slot, experts, hidden size, size inside an expert
CPU_SHAPES = ((1024, 8, 32, 256, 128), (512, 2, 8, 512, 1024), (2048, 8, 128, 256, 96))
CUDA_SHAPES = ((8192, 8, 128, 2048, 768), (32768, 8, 128, 2048, 768), (8192, 2, 8, 4096, 14336))


def main() -> None:
    """Measure, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu (float32, one thread) or cuda (bfloat16)")
    parser.add_argument("--rounds", type=int, default=9, help="times that each implementation has its turn")
    parser.add_argument("--scale", type=int, default=1, help="divide the slots by this, for a quick try")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    register_experts()
    device = torch.device(options.device)
    shapes = CUDA_SHAPES if device.type == "cuda" else CPU_SHAPES
    record: dict[str, Any] = {
        "what": "experts",
        "environment": environment(device),
        "dtype": "bfloat16" if device.type == "cuda" else "float32",
        "layers": [measure(shape, device, options.rounds, options.scale) for shape in shapes],
    }
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def measure(shape: tuple[int, int, int, int, int], device: torch.device, rounds: int, scale: int) -> dict[str, Any]:
    """Time one shape; the implementations take turns, so that what else the machine does falls on all of them."""
    slots, width, experts, hidden, inside = shape[0] // scale, *shape[1:]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=inside, num_experts=experts)
    layer = Qwen3MoeExperts(config).to(device, dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    rows_TD = torch.randn(slots, hidden, device=device, dtype=dtype, requires_grad=True)
    weights_TK, chosen_TK = torch.randn(slots, experts, device=device).softmax(-1).topk(width, -1)
    weights_TK = weights_TK.to(dtype).requires_grad_()
    times: dict[str, list[float]] = {name: [] for name in IMPLEMENTATIONS}
    norms: dict[str, float] = {}
    for turn in range(rounds + 1):
        for name in IMPLEMENTATIONS:
            config._experts_implementation = name
            layer.zero_grad()
            begin_s = _now_s(device)
            layer(rows_TD, chosen_TK, weights_TK).backward(rows_TD.detach())
            if turn:  # the first warms up
                times[name].append(1e3 * (_now_s(device) - begin_s))
            norms[name] = layer.down_proj.grad.double().norm().item()
    sizes = {"slots": slots, "experts_per_slot": width, "experts": experts, "hidden": hidden, "inside": inside}
    return {**sizes, "ms": {name: spread(values) for name, values in times.items()}, "grad_norm": norms}


def _now_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def render(record: dict[str, Any]) -> str:
    """Render the Markdown page from the record."""
    rows = []
    for layer in record["layers"]:
        shape = f"{layer['slots']:,} x {layer['experts_per_slot']} of {layer['experts']}"
        sizes = f"{layer['hidden']:,} x {layer['inside']:,}"
        times = [f"{ms['median']:,.1f} ({ms['min']:,.1f} to {ms['max']:,.1f})" for ms in layer["ms"].values()]
        rows.append([shape, sizes, *times])
    return "\n".join(
        [
            "# One layer of experts, forward and backward",
            "",
            f"{record['dtype']}, random routing; milliseconds, median and range of turns.",
            "",
            markdown_table(["slots x experts", "hidden x inside", *record["layers"][0]["ms"]], rows),
            "",
            describe_environment(record),
            "",
        ]
    )


if __name__ == "__main__":
    main()
