"""Kernels of attention over packs on one CUDA device: PyTorch's FlashAttention-2 and faster ones.

    .venv/bin/python benchmarks/attention_gpu.py            # under a minute on an H200

Each shape is attention of a recipe of benchmarks/engine_gpu.py (language model or vision tower) on one of its packs,
in bfloat16. Errors are those of values and gradients against the same in float32 on a shorter pack, relative in norm.
Times are of CUDA events, the median of some repetitions; rates count the work that the mask leaves, backward twice
forward. The first call of a shape is timed by itself, by the host's clock: cuDNN builds a plan for each.

Writes attention_gpu_<hardware>_<yyyymm>.json and the .md table rendered from it to --out.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine_setups import SETUPS
from headway.errors import HeadwayError
from headway.models.attention.cuda_kernel import FASTER, choose_kernel, cuda_kernel
from headway.models.attention.segments import segment_attention
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write

HEAD_SIZES = (64, 72, 80, 96, 128)
CHECKED = (200, 1, 77, 300)  # lengths of the segments on which values are held against float32 [tokens]


@dataclass(frozen=True)
class Shape:
    """One layer's attention over a pack.

    Attributes:
        name: which.
        lengths: of the segments [tokens or patches].
        heads: of the queries.
        kv_heads: of keys and values.
        size: of a head.
        causal: whether a query sees only what is before it.
        window: keys that a query sees at most, itself included; None for all.
        layers: of the recipe's model that attend so; 0 for a shape that no recipe has.
    """

    name: str
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    size: int
    causal: bool = True
    window: int | None = None
    layers: int = 0

    @property
    def flops(self) -> float:
        """Forward work that the mask leaves, products alone."""
        pairs = sum(self._pairs(length) for length in self.lengths)
        return 4.0 * pairs * self.heads * self.size

    def _pairs(self, length: int) -> int:
        if not self.causal:
            return length**2
        reach = min(length, self.window or length)
        return reach * (reach + 1) // 2 + (length - reach) * reach


def main() -> None:
    """Time every kernel that this machine has on every shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10, help="timed calls of each kernel")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    device = torch.device("cuda")
    record: dict[str, Any] = {"what": "attention_gpu", "environment": environment(device), "kernels": {}, "shapes": []}
    paths = result_paths(options.out, record)
    shapes = recipe_shapes()
    record["shapes"] = [{**vars(shape), "flops": shape.flops, "kernels": {}} for shape in shapes]
    for kernel in ("torch", *FASTER):
        try:
            (record["kernels"][kernel],) = choose_kernel(kernel, device)
        except HeadwayError as error:
            record["kernels"][kernel] = str(error)
            continue
        for shape, row in zip(shapes, record["shapes"], strict=True):
            try:
                row["kernels"][kernel] = measure(shape, options.repeats)
            except Exception as error:  # noqa: BLE001 - a shape that a kernel does not take is a row of the table
                row["kernels"][kernel] = {"error": f"{type(error).__name__}: {error}"[:500]}
            print(shape.name, kernel, row["kernels"][kernel], flush=True)
            write(paths, record, render(record))
    print(render(record))


def recipe_shapes() -> list[Shape]:
    """Attention of the recipes' models on the first pack of each, and a window that no recipe has."""
    found = []
    for setup in SETUPS.values():
        config = setup.config(layers=1, is_small=False)
        text = config.get_text_config()
        (batch,), _ = setup.batches(1, is_small=False)
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        heads = text.num_attention_heads, text.num_key_value_heads, size
        lengths = tuple(batch.cu_seqlens_N.diff().tolist())
        layers = setup.layers(is_small=False)
        found.append(Shape(f"{setup.name}, language", lengths, *heads, layers=layers))
        if setup.name == "text":
            found.append(Shape("text, in one segment", (sum(lengths),), *heads))
            found.append(Shape("text, window of 1,024", lengths, *heads, window=1024))
            # sizes of heads between which kernels pad, at one width in all
            found += [Shape(f"heads of {n}", (4096,) * 16, 2304 // n, 2304 // n, n, causal=False) for n in HEAD_SIZES]
        vision = getattr(config, "vision_config", None)
        for name, what in (("cu_seqlens", "tower"), ("cu_window_seqlens", "tower's windows")):
            for boundaries_N in (tensor for key, tensor in batch.vision.items() if key.endswith(f"_{name}")):
                head = vision.num_heads, vision.num_heads, vision.hidden_size // vision.num_heads
                patches = tuple(boundaries_N.diff().tolist())
                layers = _tower_layers(vision, in_windows=name == "cu_window_seqlens")
                found.append(Shape(f"{setup.name}, {what}", patches, *head, causal=False, layers=layers))
    return found


def _tower_layers(vision: Any, *, in_windows: bool) -> int:
    """Layers of a vision tower that attend within windows, or to whole pictures."""
    whole = len(getattr(vision, "fullatt_block_indexes", range(vision.depth)))
    return int(vision.depth - whole if in_windows else whole)


def fastest_kernels(shapes: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The kernel whose attention takes the layers of each recipe the least time, forward and backward.

    Args:
        shapes: rows of a record; of a kernel that does not take one of a recipe's shapes, no time is known.
    """
    found = {}
    for setup in SETUPS:
        rows = [row for row in shapes if row["name"].startswith(f"{setup}, ") and row.get("layers")]
        seconds = {}
        for kernel in rows[0]["kernels"] if rows else ():
            times = [row["kernels"].get(kernel, {}).get("both_s") for row in rows]
            if None not in times:
                seconds[kernel] = sum(row["layers"] * time_s for row, time_s in zip(rows, times, strict=True))
        if seconds:
            found[setup] = min(seconds, key=lambda kernel: seconds[kernel])
    return found


def measure(shape: Shape, repeats: int) -> dict[str, Any]:
    """Errors against float32, and times of forward and of forward with backward."""
    checked = Shape("", CHECKED, shape.heads, shape.kv_heads, shape.size, shape.causal, shape.window and 50)
    attend, inputs = prepare(checked)
    wide = [x.detach().cpu().float().requires_grad_() for x in inputs]
    cu_N = boundaries(checked).cpu()
    expected = segment_attention(*wide, cu_N, checked.causal, checked.window, shape.size**-0.5, None)
    out = attend()
    weight = torch.randn_like(out)
    found = [out, *torch.autograd.grad(out, inputs, weight)]
    wanted = [expected, *torch.autograd.grad(expected, wide, weight.cpu().float())]
    names = ("values", "of queries", "of keys", "of values")
    errors = {name: relative(got, want) for name, got, want in zip(names, found, wanted, strict=True)}
    del wide, expected, found, wanted, out

    attend, inputs = prepare(shape)
    gradient = torch.randn_like(inputs[0])

    def both() -> None:
        torch.autograd.grad(attend(), inputs, gradient)

    began_s = time.perf_counter()
    both()
    torch.cuda.synchronize()
    first_s = time.perf_counter() - began_s
    with torch.no_grad():
        forward_s = timed(attend, repeats)
    both_s = timed(both, repeats)
    began_s = time.perf_counter()
    both()
    host_s = time.perf_counter() - began_s  # the device had nothing to do before: what the host takes to launch them
    torch.cuda.synchronize()
    return {
        "errors": errors,
        "first_s": first_s,
        "host_s": host_s,
        "forward_s": forward_s,
        "both_s": both_s,
        "forward_flops_per_s": shape.flops / forward_s,
        "both_flops_per_s": 3 * shape.flops / both_s,
        "memory": torch.cuda.max_memory_allocated(),
    }


def prepare(shape: Shape) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    """The call that attends, and queries, keys and values."""
    torch.cuda.reset_peak_memory_stats()
    total = sum(shape.lengths)
    inputs = [
        torch.randn(total, heads, shape.size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    ]
    cu_N, longest, scale = boundaries(shape), max(shape.lengths), shape.size**-0.5

    def attend() -> torch.Tensor:
        return cuda_kernel()(*inputs, cu_N, longest, shape.causal, shape.window, scale, None)  # type: ignore[arg-type]

    return attend, inputs


def boundaries(shape: Shape) -> torch.Tensor:
    """Where segments begin and end, on the device."""
    return torch.tensor([0, *shape.lengths], device="cuda").cumsum(0).int()


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference from the expected tensor over the norm of that tensor."""
    return float((got.cpu().float() - wanted).norm() / wanted.norm())


def timed(call: Callable[[], Any], repeats: int) -> float:
    """Seconds of a call on the device, the median of some."""
    for _ in range(2):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks))


def render(record: dict[str, Any]) -> str:
    """Render the Markdown page."""
    headings = ["", "segments", "longest", "heads", "kernel", "forward [ms]", "with backward [ms]", "forward", "both"]
    headings += ["largest error", "first call [s]", "host [ms]"]
    rows = []
    for shape in record["shapes"]:
        for kernel, found in shape["kernels"].items():
            about = [shape["name"], f"{len(shape['lengths']):,}", f"{max(shape['lengths']):,}"]
            about += [f"{shape['heads']}/{shape['kv_heads']} x {shape['size']}", kernel]
            rows.append([*about, *_numbers(found)])
    notes = [f"* {name}: {note}" for name, note in record["kernels"].items()]
    notes += [f"* fastest for {setup}: {kernel}" for setup, kernel in fastest_kernels(record["shapes"]).items()]
    title = ["# Attention over packs on CUDA", "", "Rates in TFLOP/s of the work that masks leave.", ""]
    table: Sequence[str] = [markdown_table(headings, rows), "", *notes, "", describe_environment(record), ""]
    return "\n".join([*title, *table])


def _numbers(found: dict[str, Any]) -> list[str]:
    if "error" in found:
        return [found["error"].partition("\n")[0][:120], *["-"] * 6]
    return [
        f"{1e3 * found['forward_s']:.2f}",
        f"{1e3 * found['both_s']:.2f}",
        f"{found['forward_flops_per_s'] / 1e12:.0f}",
        f"{found['both_flops_per_s'] / 1e12:.0f}",
        f"{max(found['errors'].values()):.1e}",
        f"{found['first_s']:.2f}",
        f"{1e3 * found['host_s']:.2f}",
    ]


if __name__ == "__main__":
    main()
