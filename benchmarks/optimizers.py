"""One update of a model's parameters by each rule: what is dispatched to the device, and the time it takes.

    .venv/bin/python benchmarks/optimizers.py            # a minute; run on a quiet machine; --device cuda on a GPU

Writes benchmarks/results/optimizers_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headway.config import OptimConfig
from headway.models.parallel.ranks import Ranks
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
# layers, matrices of each and vectors of each
Shapes = list[tuple[int, ...]]
Layers = tuple[int, Shapes, Shapes]
CPU: Layers = (12, [(64, 256), (256, 256), (256, 64), (4, 96, 128)], [(64,), (256,)])
DENSE: Layers = (  # Qwen2.5-7B
    12,
    [(3584, 3584), (512, 3584), (512, 3584), (3584, 3584), (18944, 3584), (18944, 3584), (3584, 18944)],
    [(3584,), (512,), (512,), (3584,), (3584,)],
)
EXPERTS: Layers = (  # Qwen3-VL-30B-A3B
    4,
    [(4096, 2048), (512, 2048), (512, 2048), (2048, 4096), (128, 2048), (128, 2048, 1536), (128, 768, 2048)],
    [(128,), (128,), (2048,), (2048,)],
)
_COPIED = 2**31  # bytes whose copying tells a device's bandwidth


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
    rounds = options.rounds
    if device.type == "cuda":
        runs = [measure(*case, DENSE, "dense", device, rounds) for case in CASES]
        # what a kernel can update in one pass, with it
        in_one_pass = [run for run in CASES if run[0] == "adamw" and "8bit" not in run and run != CASES[0]]
        runs += [measure(*case, DENSE, "dense", device, rounds, one_pass=True) for case in in_one_pass]
        runs += [measure(*CASES[3], EXPERTS, "experts", device, rounds, one_pass=way) for way in (False, True)]
    else:
        runs = [measure(*case, CPU, "small", device, rounds) for case in CASES]
    record: dict[str, Any] = {
        "what": "optimizers",
        "environment": environment(device),
        "copy_bytes_per_s": copy_bandwidth(device, rounds) if device.type == "cuda" else None,
        "runs": runs,
    }
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def copy_bandwidth(device: torch.device, rounds: int) -> float:
    """Bytes read and written a second by a copy within the device, in the best of some rounds."""
    source = torch.ones(_COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best_s = math.inf
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * _COPIED / best_s


def measure(
    rule: str,
    dtype: torch.dtype,
    held: str | None,
    model: Layers,
    name: str,
    device: torch.device,
    rounds: int,
    *,
    one_pass: bool = False,
) -> dict[str, Any]:
    """Take some updates by one rule; `one_pass` lets the kernel take what it can."""
    on_cuda, (layers, matrices, vectors) = device.type == "cuda", model
    shapes = (matrices + vectors if rule == "adamw" else matrices) * layers
    parameters = [torch.nn.Parameter(torch.randn(shape, device=device).to(dtype)) for shape in shapes]
    groups = [{"params": parameters, "rule": rule, "lr_factor": 1.0, "weight_decay": 0.1}]
    optimizer = Optimizer(groups, OptimConfig(steps=1, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, state=held or "auto"))
    if one_pass:
        optimizer.choose_update(Ranks(0, 1))
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
        "model": name,
        "notes": list(optimizer.notes),
        "dtype": str(dtype).removeprefix("torch."),
        "state": held or "auto",
        "num_parameters": len(parameters),
        "numel": sum(p.numel() for p in parameters),
        "num_operations": dispatched.num,
        # weights and moments read and written, gradients read
        "least_bytes": sum(3 * p.nbytes + 2 * optimizer.state_bytes_of(p) for p in parameters),
        "step_s": spread(times_s),
    }


def render(record: dict[str, Any]) -> str:
    """The record as a Markdown table."""
    rows, copied = [], record.get("copy_bytes_per_s")
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
        if copied:
            rows[-1][0] += f", {run['model']}{''.join(f' ({note})' for note in run['notes'])}"
            bytes_per_s = run["least_bytes"] / run["step_s"]["median"]
            rows[-1] += [f"{run['least_bytes'] / 1e9:.1f}", f"{bytes_per_s / copied:.0%}"]
    headings = [
        "",
        "parameters",
        "values",
        "operations dispatched",
        "ms an update (on a CPU, of its time): median (range)",
    ]
    text = f"# One update\n\n{describe_environment(record)}\n"
    if copied:
        headings += ["GB moved at least", "of a copy's bandwidth"]
        text += f"\nA copy within the device reads and writes {copied / 1e12:.2f} TB/s.\n"
    return f"{text}\n{markdown_table(headings, rows)}\n"


if __name__ == "__main__":
    main()
