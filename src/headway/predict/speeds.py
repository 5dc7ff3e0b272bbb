"""Speed of a device at the parts of a step: measured at the model's own shapes, or a share of its peak."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from headway.devices import Device
from headway.devices.model_rates import ModelRates
from headway.errors import PlanError

Shape = tuple[int, int, int]
"""(m, k, n) of a product of an m x k and a k x n matrix."""


class Cases(NamedTuple):
    """A number that is not known exactly: from its best case to its worst."""

    best: float
    expected: float
    worst: float

    @classmethod
    def exact(cls, value: float) -> "Cases":
        """A number that is known."""
        return cls(value, value, value)

    def __add__(self, other: "Cases") -> "Cases":  # type: ignore[override]  # sums, where a tuple would join
        return Cases(*(a + b for a, b in zip(self, other, strict=True)))

    def __sub__(self, other: "Cases") -> "Cases":
        """Differences case by case: the rest of a sum without one of its parts."""
        return Cases(*(a - b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> "Cases":
        """Each case times a factor."""
        return Cases(*(factor * value for value in self))


# Assumed where the table of devices has no shares of a device's own. `headway ceiling` gives yours.
PRODUCTS = Cases(0.8, 0.65, 0.45)
# FlashAttention-2 reaches 50 to 73 % of an A100's peak and 35 % of an H100's, FlashAttention-3 75 % of an H100's;
# backward reaches less than forward.
# Source: Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608.
ATTENTION = Cases(0.65, 0.45, 0.25)
HEAD_SIZE = 128
"""Size of a head if it is unknown."""
KERNELS = {"auto": "fa2", "torch": "fa2", "flash-attn": "fa2", "fa3": "fa3", "cudnn": "cudnn"}
"""Kernel of attention that each value of `speed.attention` is predicted as; auto as what every machine has, since a
plan does not know the packages of the machine that trains."""


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """Rate of a kernel by its work.

    A tile of queries takes a time of its own and one for each key that it sees, so that a query of n keys is computed
    at n / (n + m) of the rate of long segments. Heads are filled up to a size that the kernel is built for.

    Attributes:
        forward_keys: m of forward [keys].
        backward_keys: m of backward, which also adds up gradients of queries in float32 and casts them [keys].
        forward_rate: rate of forward over that of forward and backward together, in long segments.
        head_multiple: heads take the time of the next multiple of this size.
    """

    forward_keys: float
    backward_keys: float
    forward_rate: float
    head_multiple: int

    @property
    def backward_rate(self) -> float:
        """Rate of backward, which has twice the FLOPs of forward, over that of both together."""
        return 2 / (3 - 1 / self.forward_rate)

    def slowdowns(self, keys: float, head_size: int) -> tuple[float, float]:
        """Time of a FLOP of forward and of backward, over that of both together in long segments with full heads.

        Args:
            keys: that a query sees on average.
            head_size: of queries and keys.

        >>> forward, backward = FLASH_2.slowdowns(1e9, 128)
        >>> round((forward + 2 * backward) / 3, 3)
        1.0
        """
        filled = -(-head_size // self.head_multiple) * self.head_multiple / head_size
        forward = filled * (1 + self.forward_keys / keys) / self.forward_rate
        return forward, filled * (1 + self.backward_keys / keys) / self.backward_rate


# Fitted to rates of one layer alone on a H200. Fitted to every other shape, the rest is within 4 and 7 % in the median
# (FlashAttention-2 forward), 14 and 6 % (backward), 8 and 12 % (cuDNN forward), 4 and 13 % (backward). Not of cuDNN:
# windows of 64, which leave half of its tiles empty, and segments of 585 tokens, where the host took longer.
# Source: benchmarks/results/attention_gpu_nvidia-h200_202611.json.
FLASH_2 = AttentionKernel(forward_keys=370, backward_keys=500, forward_rate=1.26, head_multiple=32)
CUDNN = AttentionKernel(forward_keys=280, backward_keys=600, forward_rate=1.27, head_multiple=128)
# FlashAttention-1 has a share that was fitted to long segments alone; 3 has the tiles of cuDNN's kernel, 128 queries
# or more, and heads of 64, 128 and 256.
ATTENTION_KERNELS = {"fa1": FLASH_2, "fa2": FLASH_2, "fa3": replace(CUDNN, head_multiple=64), "cudnn": CUDNN}
"""Form of each kernel's rate."""
CUDNN_SLOTS, CUDNN_KEYS = 16_384, 256
"""Slots of a pack, and mean keys of a query, from which cuDNN's kernel is taken if somebody asks for it.

Source: `headway.models.attention.ragged.suits`, which asks for segments of 512 tokens on average.
"""
GROUPED_ROWS = 170
"""Rows by which grouped products are slower: experts with m rows each reach m / (m + this) of the rate.

Source: a profile of Qwen3-VL-30B-A3B on a H200, 512 rows for each of 128 experts: 512 TFLOP/s, others 693; 2026-11-26.
"""
FLOAT8 = 0.9
"""Share of its float8 peak that a device reaches in products over that of its bfloat16 peak.

Source: Bekman, Machine Learning Engineering, compute/accelerator, tables of achieved matrix products, read 2026-11-26:
0.709 over 0.803 on H100, 0.734 on H200, 0.776 over 0.838 on GH200, 0.763 over 0.776 on B200.
"""
# Assumed likewise.
BANDWIDTH = Cases(0.9, 0.8, 0.6)
# Steps of small models on a CPU took 0.87 to 1.40 times as long as what was measured of their parts foretold.
# Source: two runs, benchmarks/results/plan_time_amd-epyc-1threads_202611.md and benchmarks/log.md, 2026-11-23.
MEASURED = Cases(0.87, 1.0, 1.4)
"""Time of a step over that of its measured parts."""
LAUNCH_S = 5e-6
"""Time that the host takes for an operator of PyTorch that launches a kernel [s], where nothing was measured.

Source: 2,226 launches of a training step of eager PyTorch on MI300X, a public trace of AMD's TraceLens
(mi300x-resnet-recompute-ddp8): one every 3.4 us at the 10th percentile, 4.1 to 5.0 us at the 30th and 8 us in the
median, where the host waits at times; read 2026-11-30.
"""
LAUNCH = Cases(0.7, 1.0, 1.6)
"""Time for a launch over `LAUNCH_S`, by the same percentiles."""
HOST_BYTES_PER_S = 32e9
"""Rate between a device and its host's memory where the table has none: PCIe 4.0 with 16 lanes [byte/s]."""
HOST_MEMORY = Cases(80e9, 50e9, 25e9)
"""Share of the host's memory bandwidth that each of eight devices has while the host updates [byte/s]; assumed: two
sockets of eight channels of DDR5-4800 have 614 GB/s."""


@dataclass(frozen=True)
class Speeds:
    """Rates of a device.

    Attributes:
        name: of the device.
        peak_flops_per_s: dense, in the precision of the products [FLOP/s].
        bytes_per_s: of its memory [byte/s].
        source: where these numbers are from, as a sentence.
        products: measured rates of matrix products by their shape [FLOP/s].
        attention: measured rates of causal attention over packs, forward and backward, by the length of their segments
            [FLOP/s].
        elementwise_s: that a byte of elementwise operations takes [s]; None for what the memory takes.
        board_power_w: what a device draws at most [W]; None where it is not known.
        host_s: that the host takes to launch an operator, with the code around it [s].
        runs_ahead: whether the host launches while the device computes; a CPU does one after the other.
        product_shares: of the peak that products reach, where none was measured.
        attention_shares: of `products_flops_per_s` that attention of long segments reaches, where none was measured.
        attention_kernel: form of its rate.
        host_bytes_per_s: of the way to its host's memory, one way, as printed [byte/s].
        short_attention: the same of the kernel that runs where cuDNN's does not suit a pack; None where one runs them
            all.
        products_flops_per_s: peak of products in the precision of the forward; None where it is `peak_flops_per_s`,
            which is that of float8 where blocks multiply in float8 [FLOP/s].
    """

    name: str
    peak_flops_per_s: float
    bytes_per_s: Cases
    source: str
    products: Mapping[Shape, float] = field(default_factory=dict)
    attention: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    elementwise_s: float | None = None
    board_power_w: float | None = None
    host_s: float = LAUNCH_S
    runs_ahead: bool = True
    product_shares: Cases = PRODUCTS
    attention_shares: Cases = ATTENTION
    attention_kernel: AttentionKernel = FLASH_2
    host_bytes_per_s: float = HOST_BYTES_PER_S
    short_attention: tuple[Cases, AttentionKernel] | None = None
    products_flops_per_s: float | None = None

    @property
    def is_measured(self) -> bool:
        """True if the rates were measured on this device at the model's own shapes."""
        return bool(self.products)

    @classmethod
    def of_device(
        cls, device: Device, dtype: str, *, attention: str = "auto", float8: bool = False, power_w: float | None = None
    ) -> "Speeds":
        """Take the rates of a device from the table.

        Args:
            device: of the table.
            dtype: of the products, such as "bf16".
            attention: kernel of attention, as in `speed.attention`.
            float8: whether blocks multiply in float8, so that its peak is the one that MFU refers to.
            power_w: limit that is set below the board's own [W]; None for the board's own.

        Raises:
            PlanError: the table has no peak in that precision, no bandwidth, or no power that the limit is below.
        """
        # Numbers that the table must have of the device.
        bandwidth = device.memory_bytes_per_s
        for name in (dtype, *(["fp8"] if float8 else [])):
            if name not in device.peak_flops_per_s:
                raise _unknown(device, f"its dense peak in {name}")
        if bandwidth is None:
            raise _unknown(device, "the bandwidth of its memory")
        clock = 1.0 if power_w is None else _clock(device, power_w)
        # shares of the peak that products and attention reach, by kernel
        products = Cases(*(clock * share for share in device.product_shares or PRODUCTS))
        kernel = KERNELS[attention]
        share = device.attention_shares.get(kernel)
        if share is None and device.attention_shares and attention != "auto":
            raise PlanError(
                f"speed.attention = {attention!r} does not run on {device.title}, of whose kernels the table of "
                f"devices has {', '.join(device.attention_shares)}. Set speed.attention=auto."
            )

        def shares_of(kernel: str) -> Cases:
            share = device.attention_shares.get(kernel)
            spread = ATTENTION if share is None else ATTENTION.times(share / ATTENTION.expected)
            return Cases(*(clock * min(1.0, case) for case in spread))

        of_rates = "usual shares" if device.rates_source is None else "shares, by published runs or products,"
        source = f"{of_rates} of the printed peak and bandwidth of {device.title} (`headway devices` has their source)"
        peak = device.peak_flops_per_s[dtype]
        return cls(
            device.title,
            device.peak_flops_per_s["fp8"] if float8 else peak,
            Cases(*(share * bandwidth for share in BANDWIDTH)),
            source if clock == 1.0 else f"{source}, its clock lowered to {clock:.0%} by a limit of {power_w:g} W",
            board_power_w=device.board_power_w if power_w is None else power_w,
            product_shares=products,
            attention_shares=shares_of(kernel),
            attention_kernel=ATTENTION_KERNELS[kernel],
            short_attention=(shares_of("fa2"), ATTENTION_KERNELS["fa2"]) if kernel == "cudnn" else None,
            host_bytes_per_s=device.host_bytes_per_s,
            products_flops_per_s=peak,
        )

    @classmethod
    def measured(cls, name: str, peak_flops_per_s: float, rates: ModelRates, *, runs_ahead: bool) -> "Speeds":
        """Take the rates that a device was measured to reach at the model's own sizes.

        Args:
            name: of the device.
            peak_flops_per_s: best of what was measured elsewhere [FLOP/s]; a faster product here takes its place.
            rates: at the model's sizes.
            runs_ahead: whether the host launches while the device computes.
        """
        peak_flops_per_s = max(peak_flops_per_s, *rates.products.values())
        source = f"measured at the model's sizes on {name}, {rates.measured_at:%Y-%m-%d}"
        return cls(
            name,
            peak_flops_per_s,
            Cases(*(rates.copied_bytes_per_s / longer for longer in MEASURED)),
            source,
            rates.products,
            rates.attention,
            runs_ahead=runs_ahead,
        )

    @cached_property
    def ceiling_flops_per_s(self) -> float:
        """The best rate of a product that was measured, or the peak [FLOP/s]."""
        return max(self.products.values(), default=self.peak_flops_per_s)

    @property
    def _peak_of_products(self) -> float:
        return self.products_flops_per_s or self.peak_flops_per_s

    @cached_property
    def _logs(self) -> list[tuple[tuple[float, ...], float]]:
        return [(tuple(map(math.log, shape)), rate) for shape, rate in self.products.items()]

    def grouped_s(self, flops: float, rows: float) -> Cases:
        """Predict the time of products of experts, with so many rows for each expert on average [s]."""
        slowdown = 1.0 if self.is_measured else 1 + GROUPED_ROWS / rows
        return self.product_s(slowdown * flops, None, 0)

    def product_s(
        self,
        flops: float,
        shape: Shape | None,
        number_bytes: int,
        *,
        float8: float | None = None,
        casts: float = 0.0,
    ) -> Cases:
        """Predict the time of matrix products [s].

        Args:
            flops: of all of them.
            shape: of each; None where it is not known.
            number_bytes: of each number of the factors and the product.
            float8: rate in float8 over that of one scale a tensor; None where the products are not in float8.
            casts: bytes that casts and scales of each product move besides.
        """
        if not self.products:
            peak = self._peak_of_products if float8 is None else float8 * FLOAT8 * self.peak_flops_per_s
            computed = Cases(*(flops / (share * peak) for share in self.product_shares))
            if shape is None:
                return computed
            m, k, n = shape
            count = flops / (2 * m * k * n)
            moved = self.memory_s(count * (m * k + k * n + m * n) * number_bytes)
            return Cases(*map(max, computed, moved)) + self.memory_s(count * casts)
        return MEASURED.times(flops / (self.ceiling_flops_per_s if shape is None else self._rate(shape)))

    def _rate(self, shape: Shape) -> float:
        """Rate of the four measured shapes nearest to one, each weighted by its nearness in sizes' logarithms."""
        if shape in self.products:
            return self.products[shape]
        at = tuple(math.log(max(size, 1)) for size in shape)
        near = sorted((math.dist(at, there), rate) for there, rate in self._logs)[:4]
        weights = [1 / (distance + 1e-9) ** 2 for distance, _ in near]
        return math.exp(sum(w * math.log(rate) for w, (_, rate) in zip(weights, near, strict=True)) / sum(weights))

    def of_pack(self, slots: float, pairs_per_query: float) -> "Speeds":
        """Rates with the kernel of attention that runs over a pack of so many slots, or patches of a tower."""
        if self.short_attention is None or (slots >= CUDNN_SLOTS and pairs_per_query >= CUDNN_KEYS):
            return self
        shares, kernel = self.short_attention
        return replace(self, attention_shares=shares, attention_kernel=kernel, short_attention=None)

    def attention_s(self, forward: float, backward: float, pairs_per_query: float, head_size: int = HEAD_SIZE) -> Cases:
        """Predict the time of attention [s].

        Args:
            forward: FLOPs of forward.
            backward: FLOPs of backward.
            pairs_per_query: keys that a query sees on average: half the length of a causal segment.
            head_size: of queries and keys.
        """
        if not self.attention:
            slow_forward, slow_backward = self.attention_kernel.slowdowns(pairs_per_query, head_size)
            flops = slow_forward * forward + slow_backward * backward
            return Cases(*(flops / (share * self._peak_of_products) for share in self.attention_shares))
        length = 2 * pairs_per_query - 1
        rates = [_rate_at({at: rate[i] for at, rate in self.attention.items()}, length) for i in (0, 1)]
        return MEASURED.times(forward / rates[0] + backward / rates[1])

    def moving_s(self, num_bytes: float) -> Cases:
        """Predict the time of elementwise operations that move so many bytes [s]."""
        if self.elementwise_s is None:
            return self.memory_s(num_bytes)
        return MEASURED.times(num_bytes * self.elementwise_s)

    def launching_s(self, launches: float) -> Cases:
        """Predict the time that the host takes to launch so many operators [s]."""
        return (MEASURED if self.is_measured else LAUNCH).times(launches * self.host_s)

    def host_memory_s(self, num_bytes: float) -> Cases:
        """Predict the time in which the host moves so many bytes of its own memory [s]."""
        return Cases(*(num_bytes / rate for rate in HOST_MEMORY))

    def memory_s(self, num_bytes: float) -> Cases:
        """Predict the time in which so many bytes are moved [s]."""
        return Cases(*(num_bytes / rate for rate in self.bytes_per_s))


def host_copy_s(num_bytes: float, bytes_per_s: float) -> Cases:
    """Predict the time of copies between a device and its host's memory, one way, at a printed rate [s]."""
    return Cases(*(num_bytes / (share * bytes_per_s) for share in BANDWIDTH))


def _unknown(device: Device, lacks: str) -> PlanError:
    return PlanError(
        f"{device.title}: {lacks} is not known, without which a step has no time. Put it into your own table "
        "($HEADWAY_PEAKS; docs/devices.md), or name another device."
    )


def _clock(device: Device, power_w: float) -> float:
    """Clock under a power limit over that under the board's own.

    Dynamic power grows as the clock times the voltage squared, and the voltage as the clock, so that the clock goes
    with the cube root of the power.
    """
    board_w = device.board_power_w
    if board_w is None:
        raise _unknown(device, "its board's power, which plan.power_w limits,")
    if power_w > board_w:
        raise PlanError(
            f"plan.power_w = {power_w:g}: {device.title} draws {board_w:g} W at most. Give less, or leave it out."
        )
    return float((power_w / board_w) ** (1 / 3))


def _rate_at(rates: Mapping[int, float], length: float) -> float:
    """Rate of attention over segments of a length, from the rates of the lengths around it.

    Time per token lies on a line between them, since it is that of moving a token plus that of its pairs; beyond the
    longest the rate stays.

    >>> round(_rate_at({9: 10.0, 99: 50.0}, 54), 3)  # 1 s and 2 s for ten or a hundred FLOPs per token
    36.667
    """
    lengths = sorted(rates)
    if length >= lengths[-1]:
        return rates[lengths[-1]]
    token_s = float(np.interp(length, lengths, [(n + 1) / rates[n] for n in lengths]))
    return (length + 1) / token_s
