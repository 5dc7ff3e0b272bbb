"""Rates at a model's own sizes on this very device: matrix products and attention.

Measured as eager PyTorch runs them, with results that are allocated anew, and attention as the caller computes it over
packs; kept beside the ceilings.
"""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from headway.devices.ceilings import TORCH_NAMES, cached_ceiling, copy_ceiling
from headway.devices.measure import TimeBudget, sweep
from headway.errors import UnknownDeviceError

if TYPE_CHECKING:
    import torch

    Attend = Callable[..., tuple[torch.Tensor, None]]

Run = Callable[[], object]

Shape = tuple[int, ...]
_PRODUCTS = TimeBudget(shape_s=0.15, total_s=90.0, min_repeats=3)
_OTHERS = TimeBudget(shape_s=0.5, total_s=20.0, min_repeats=3)
_LENGTHS = {"cpu": (16, 64, 256, 1024), "cuda": (128, 512, 2048, 8192), "mps": (64, 256, 1024, 4096)}
_PACK = {"cpu": 1024, "cuda": 16384, "mps": 4096}  # slots of a pack of such segments, or twice the longest
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class ModelRates:
    """Rates of a device at a model's sizes: the best repetition of each, which nothing interrupted.

    Attributes:
        products: by (m, k, n) [FLOP/s].
        attention: forward and backward of causal attention over packs, by the mean length of their segments [FLOP/s].
        copied_bytes_per_s: of copies of large tensors [byte/s].
        measured_at: when, in UTC.
        is_cached: whether it was read from the cache.
    """

    products: dict[tuple[int, int, int], float]
    attention: dict[int, tuple[float, float]]
    copied_bytes_per_s: float
    measured_at: datetime
    is_cached: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "products": [{"shape": [*shape], "flops_per_s": rate} for shape, rate in self.products.items()],
            "attention": [
                {"length": length, "forward_flops_per_s": forward, "backward_flops_per_s": backward}
                for length, (forward, backward) in self.attention.items()
            ],
            "copied_bytes_per_s": self.copied_bytes_per_s,
            "measured_at": self.measured_at.isoformat(timespec="seconds"),
            "cached": self.is_cached,
        }


def model_rates(
    device: "torch.device | str",
    dtype_name: str,
    shapes: Sequence[tuple[int, int, int]],
    heads: tuple[int, int],
    attend: "Attend",
    *,
    refresh: bool = False,
    warn: Callable[[str], None] = warnings.warn,
) -> ModelRates:
    """Measure the rates of a model's sizes, or take them from the cache.

    Args:
        device: a torch.device or its string; "cpu", "cuda" or "mps".
        dtype_name: "fp32", "bf16" or "fp16".
        shapes: (m, k, n) of its products; those that do not fit into the time are left out, the largest first.
        heads: number and size of its attention's heads.
        attend: attention over packs, as transformers' models call it.
        refresh: measure even if the cache has them.
        warn: told what is wrong with the cache.

    Raises:
        UnknownDeviceError: a device or dtype that is not measured.
    """
    import torch

    where = torch.device(device)
    if where.type not in _LENGTHS or dtype_name not in ("fp32", "bf16", "fp16"):
        raise UnknownDeviceError(
            "Headway measures the rates of a model on cpu, cuda and mps in fp32, bf16 and fp16, but not on "
            f"{where.type} in {dtype_name!r}."
        )
    dtype = getattr(torch, TORCH_NAMES.get(dtype_name, "float32"))

    # the problems of each kind in ascending work, so that the largest are left out where time ends
    ordered = sorted(shapes, key=lambda shape: (shape[0] * shape[1] * shape[2], shape))
    lengths = [(*heads, max(_PACK[where.type], 2 * length), length) for length in _LENGTHS[where.type]]
    problems: dict[str, tuple[Sequence[Shape], Callable[[Shape], tuple[Run, int]], TimeBudget]] = {
        "products": (ordered, partial(_product, where, dtype), _PRODUCTS),
        "packed": (lengths, partial(_attention, where, dtype, attend, backward=False), _OTHERS),
        "packed-backward": (lengths, partial(_attention, where, dtype, attend, backward=True), _OTHERS),
    }

    # a file of the cache for each list of problems
    ceilings = {}
    for name, (problem_shapes, make, budget) in problems.items():
        digest = hashlib.sha256(repr(problem_shapes).encode()).hexdigest()[:12]
        what = f"{name}-{dtype_name}-{digest}"
        measure = partial(sweep, where, problem_shapes, make, budget)
        ceilings[name] = cached_ceiling(where, what, measure, refresh=refresh, warn=warn)

    # best repetitions; attention that has no time for its backward has no rate
    by_shape = {name: {m.shape: m for m in ceiling.measurements} for name, ceiling in ceilings.items()}
    return ModelRates(
        products={(m, k, n): product.best_per_s for (m, k, n), product in by_shape["products"].items()},
        attention={
            shape[-1]: (forward.best_per_s, by_shape["packed-backward"][shape].best_per_s)
            for shape, forward in by_shape["packed"].items()
            if shape in by_shape["packed-backward"]
        },
        copied_bytes_per_s=copy_ceiling(where, refresh=refresh, warn=warn).best.best_per_s,
        measured_at=ceilings["products"].measured_at,
        is_cached=all(ceiling.is_cached for ceiling in ceilings.values()),
    )


def _product(device: "torch.device", dtype: "torch.dtype", shape: Shape) -> "tuple[Run, int]":
    import torch

    from headway.devices.cpu_products import product

    m, k, n = shape
    a_MK = torch.randn(m, k, device=device, dtype=dtype)
    b_KN = torch.randn(n, k, device=device, dtype=dtype).t()  # a weight lies so
    return lambda: product(a_MK, b_KN), 2 * m * k * n


def _attention(
    device: "torch.device", dtype: "torch.dtype", attend: "Attend", shape: Shape, *, backward: bool
) -> "tuple[Run, int]":
    """Make causal attention over a pack, or its gradients, with the FLOPs of the pairs that the mask leaves."""
    import torch

    heads, size, slots, length = shape
    segments = pack_of(slots, length)
    slots = sum(segments)
    if device.type == "cuda" and dtype == torch.float32:
        dtype = torch.bfloat16  # kernels over packs have no float32 there: a run in float32 computes it so as well
    q, k, v = (torch.randn(1, heads, slots, size, device=device, dtype=dtype, requires_grad=backward) for _ in "qkv")
    boundaries = torch.tensor([0, *accumulate(segments)], dtype=torch.int32, device=device)
    packed = {"pack_cu_seqlens": boundaries, "pack_max_seqlen": max(segments), "is_causal": True}
    forward = 4 * heads * size * sum(tokens * (tokens + 1) // 2 for tokens in segments)
    if not backward:
        return lambda: attend(torch.nn.Module(), q, k, v, None, **packed), forward
    out = attend(torch.nn.Module(), q, k, v, None, **packed)[0]
    slopes = torch.randn_like(out)

    def run() -> object:
        with torch.inference_mode(mode=False):
            return torch.autograd.grad(out, (q, k, v), slopes, retain_graph=True)

    return run, 2 * forward


def pack_of(slots: int, length: int) -> list[int]:
    """List lengths of segments that fill a pack and differ by up to a quarter from their mean, as real packs' do.

    >>> pack_of(100, 16)
    [12, 17, 14, 19, 16, 13, 9]
    """
    segments: list[int] = []
    while (left := slots - sum(segments)) > 0:
        spread = 0.75 + 0.5 * (len(segments) * _GOLDEN % 1)  # multiples of the golden ratio fill any range evenly
        segments.append(min(left, max(1, round(spread * length))))
    return segments
