"""One update of a model's parameters by each rule: what is dispatched to the device, and the time it takes.

    .venv/bin/python benchmarks/optimizers.py            # a minute; run on a quiet machine; --device cuda on a GPU

Writes benchmarks/results/optimizers_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headway.config.optim import MuonConfig
from headway.optim import Optimizer
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, spread, write

# rule, type of the parameters, how moments are held
CASES = (
    ("adamw", torch.float32, None),
    ("adamw", torch.float32, "bfloat16"),
    ("adamw", torch.float32, "8bit"),
    ("adamw", torch.bfloat16, None),
    ("adamw", torch.bfloat16, "float32"),
    ("adamw", torch.bfloat16, "8bit"),
    ("muon", torch.float32, None),
    ("muon", torch.bfloat16, None),
    ("muon", torch.float32, "8bit"),
)
CPU_LAYERS, CPU_SHAPES = 12, [(64, 256), (256, 256), (256, 64), (64,), (256,), (4, 96, 128)]
CUDA_LAYERS, CUDA_SHAPES = (
    12,
    [(3584, 3584), (512, 3584), (512, 3584), (3584, 3584), (18944, 3584), (3584, 18944), (3584,)],
)


class Dispatched(TorchDispatchMode):
    """Counts the operations that reach the device; those that only look at memory in another way do not."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = function._schema
        is_view = not schema.is_mutable and any(one.alias_info is not None for one in schema.arguments)
        self.num += not is_view and "profiler" not in str(function) and "_unsafe_view" not in str(function)
        return function(*args, **(kwargs or {}))


def main() -> None:
    """Measure, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu (one thread) or cuda")
    parser.add_argument("--rounds", type=int, default=5, help="updates that are timed")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    record: dict[str, Any] = {
        "what": "optimizers",
        "environment": environment(device),
        "runs": [measure(*case, device, options.rounds) for case in CASES],
    }
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def measure(rule: str, dtype: torch.dtype, held: str | None, device: torch.device, rounds: int) -> dict[str, Any]:
    """Take some updates by one rule."""
    on_cuda = device.type == "cuda"
    layers, shapes = (CUDA_LAYERS, CUDA_SHAPES) if on_cuda else (CPU_LAYERS, CPU_SHAPES)
    shapes = [shape for shape in shapes if rule == "adamw" or len(shape) > 1] * layers
    parameters = [torch.nn.Parameter(torch.randn(shape, device=device).to(dtype)) for shape in shapes]
    groups = [{"params": parameters, "rule": rule, "lr_factor": 1.0, "weight_decay": 0.1}]
    optimizer = Optimizer(groups, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, muon=MuonConfig(), moment_type=held)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    clock = time.perf_counter if on_cuda else time.process_time
    times_s = []
    for number in range(rounds + 1):
        if on_cuda:
            torch.cuda.synchronize()
        start_s = clock()
        optimizer.step()
        if on_cuda:
            torch.cuda.synchronize()
        if number:  # the first one makes the state
            times_s.append(clock() - start_s)
    with Dispatched() as dispatched:
        optimizer.step()
    return {
        "rule": rule,
        "dtype": str(dtype).removeprefix("torch."),
        "state": held or "auto",
        "num_parameters": len(parameters),
        "numel": sum(p.numel() for p in parameters),
        "num_operations": dispatched.num,
        "step_s": spread(times_s),
    }


def render(record: dict[str, Any]) -> str:
    """The record as a Markdown table."""
    rows = []
    for run in record["runs"]:
        step = {name: f"{value * 1e3:.1f}" for name, value in run["step_s"].items()}
        rows.append(
            [
                f"{run['rule']}, {run['dtype']} weights, state {run['state']}",
                f"{run['num_parameters']}",
                f"{run['numel'] / 1e6:.1f} M",
                f"{run['num_operations']}",
                f"{step['median']} ({step['min']} to {step['max']})",
            ]
        )
    headings = [
        "",
        "parameters",
        "values",
        "operations dispatched",
        "ms an update (on a CPU, of its time): median (range)",
    ]
    return f"# One update\n\n{describe_environment(record)}\n\n{markdown_table(headings, rows)}\n"


if __name__ == "__main__":
    main()
