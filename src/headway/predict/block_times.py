"""Time that a model's own blocks take on this very device, forward and backward, as the engine computes them.

Products and attention have rates of their own; the rest of the time is that of elementwise operations and of the host.
The blocks are the first ones, with random weights, on packs of text.
"""

import copy
import hashlib
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import nn

from headway.count import CostModel, Workload
from headway.count.activations import SavedActivations
from headway.devices.ceilings import TORCH_NAMES, cached_ceiling
from headway.devices.measure import Measurement, TimeBudget, sweep
from headway.devices.model_rates import Run, Shape, pack_of
from headway.models.init_weights import init_weights
from headway.models.load import load_model, rope_index
from headway.predict.activations import BFLOAT16
from headway.predict.recipe import State
from headway.predict.speeds import Speeds
from headway.predict.step_time import StepTimes, StepWork
from headway.tracing import trace
from headway.tracing.activations import saved_of_config
from headway.tracing.build import model_on_shapes, with_layers

LAYERS = 2
_BUDGET = TimeBudget(shape_s=1.0, total_s=40.0, min_repeats=3)
_SLOTS = {"cpu": (64, 512, 2048), "cuda": (512, 2048, 8192), "mps": (512, 2048, 8192)}
_SEGMENT = {"cpu": 64, "cuda": 512, "mps": 256}  # mean length, at which attention's rate is measured too


@dataclass(frozen=True)
class TimedBlocks:
    """Forward and backward of a model's first blocks on a device."""

    cost_model: CostModel  # ledger of these blocks
    saved: SavedActivations  # activations that autograd saves of these blocks
    number_bytes: int  # bytes of a weight or an activation
    seconds: Mapping[tuple[int, ...], float]  # best repetition, by the lengths of a pack's segments [s]
    measured_at: datetime  # time in UTC
    is_cached: bool  # true if read from the cache

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "passes": [{"segments": [*segments], "seconds": seconds} for segments, seconds in self.seconds.items()],
            "measured_at": self.measured_at.isoformat(timespec="seconds"),
            "cached": self.is_cached,
        }


def timed_blocks(
    config: Any,
    device: torch.device,
    dtype_name: str,
    *,
    refresh: bool = False,
    warn: Callable[[str], None] = warnings.warn,
) -> TimedBlocks | None:
    """Time a model's first blocks over packs of several sizes, or take the times from the cache.

    Args:
        config: a transformers configuration.
        device: where they run.
        dtype_name: "fp32", "bf16" or "fp16".
        refresh: measure even if the cache has them.
        warn: told why a model's blocks cannot run alone, and what is wrong with the cache.

    Returns:
        The times; None where the blocks cannot run alone.

    Raises:
        TraceError: the model cannot be traced.
    """
    # a few layers are enough, since the blocks of a model are alike
    shallow = with_layers(config, LAYERS)
    dtype = getattr(torch, TORCH_NAMES.get(dtype_name, "float32"))
    cost_model = trace(model_on_shapes(shallow))
    digest = hashlib.sha256(shallow.to_json_string(use_diff=False).encode()).hexdigest()[:12]

    def measure() -> list[Measurement]:
        needed = 2 * cost_model.params.total * dtype.itemsize  # weights and their gradients
        if needed > _room(device):
            raise MemoryError(f"they and their gradients take {needed / 2**30:.1f} GiB, too much of this memory")
        make = partial(_pass, _shallow_model(shallow, device, dtype))
        shapes = [(slots, _SEGMENT[device.type]) for slots in _SLOTS[device.type]]
        return sweep(device, shapes, make, _BUDGET)

    # the cache's key holds the configuration, so that another model of the same type is timed anew
    try:
        timings = cached_ceiling(device, f"blocks-{dtype_name}-{digest}", measure, refresh=refresh, warn=warn)
    except Exception as error:  # noqa: BLE001 - whatever a model's code does with such inputs
        warn(
            f"The blocks of this {config.model_type} cannot run alone ({error}), so elementwise operations go by the "
            "memory's bandwidth."
        )
        return None
    # Bytes that elementwise operations of the same blocks move: neither tower nor what lies around the blocks.
    saved = saved_of_config(shallow, "bfloat16" if dtype.itemsize == BFLOAT16 else "float32")
    rows = (row for row in cost_model.rows if row.block and not row.component.startswith("vision."))
    return TimedBlocks(
        replace(cost_model, rows=tuple(rows)),
        replace(saved, blocks={name: block for name, block in saved.blocks.items() if name}),
        dtype.itemsize,
        {tuple(pack_of(*timing.shape)): min(timing.durations_s) for timing in timings.measurements},
        timings.measured_at,
        timings.is_cached,
    )


def _room(device: torch.device) -> int:
    """Half of a device's free memory, or of all the memory of a host [bytes]."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free // 2
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _shallow_model(config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Build a model with random weights, and without embeddings of words, which the blocks alone do not need."""
    model: Any = load_model(
        copy.deepcopy(config), dtype=dtype, device="meta", random_init=True
    )  # the loading changes a configuration
    for ends in (model.get_input_embeddings(), model.get_output_embeddings()):
        if ends is not None:
            ends.weight, ends.padding_idx = nn.Parameter(ends.weight[:1]), None
    init_weights(model, device)
    return model.train()


def _pass(model: Any, shape: Shape) -> tuple[Run, int]:
    """Forward and backward of a pack through a model without its head."""
    segments = pack_of(*shape)
    slots, (device, dtype) = sum(segments), (model.device, model.dtype)
    width = model.get_input_embeddings().weight.shape[1]
    hidden_1TC = torch.randn(1, slots, width, device=device, dtype=dtype, requires_grad=True)
    positions_1T = torch.cat([torch.arange(length, device=device) for length in segments])[None]
    inputs = {
        "inputs_embeds": hidden_1TC,
        "position_ids": positions_1T if rope_index(model) is None else positions_1T.expand(3, 1, -1),
        "pack_cu_seqlens": torch.tensor([0, *accumulate(segments)], dtype=torch.int32, device=device),
        "pack_max_seqlen": max(segments),
        "use_cache": False,
    }
    learn = [hidden_1TC, *(p for p in model.parameters() if p.requires_grad)]
    slopes_1TC = torch.randn_like(hidden_1TC)

    def run() -> object:
        with torch.inference_mode(mode=False):
            out_1TC = model.base_model(**inputs)[0]
            return torch.autograd.grad(out_1TC, learn, slopes_1TC, allow_unused=True)

    return run, slots


def with_blocks(speeds: Speeds, blocks: TimedBlocks) -> Speeds:
    """Take from the time of a model's blocks what elementwise operations take for a byte, and the host for a module.

    Products and attention have rates of their own. Where the host computes itself, the rest is a line over the bytes
    that the passes move, whose slope and height make the least squares of relative errors, neither below 0. Where it
    runs ahead of the device, the longest pass gives the slope, and the shortest what the host takes at most.

    Args:
        speeds: rates of products and attention, measured at the model's sizes.
        blocks: that took their time on the same device.
    """
    times = StepTimes(blocks.cost_model, blocks.saved, speeds)
    state = State(weight_bytes=blocks.number_bytes, compute_bytes=blocks.number_bytes)
    rows = []
    for segments in blocks.seconds:
        pack = Workload(list(segments))
        work = StepWork(blocks.cost_model.count(pack), pack, packs=1, tokens=pack.tokens)
        computed = sum(cases.expected for cases in times.computed_s(work, state).values())
        rows.append((computed, times.moved_bytes(work, state), times.launches(state, pack.slots, pack.num_segments)))
    took = np.array([*blocks.seconds.values()])
    computed, moved, launches = np.array(rows).T
    if speeds.runs_ahead:
        last = int(moved.argmax())
        per_byte = max(0.0, float((took - computed)[last] / moved[last]))
        per_launch = float(took.min() / launches[0])
    else:
        per_byte, per_launch = _least_squares(np.stack([moved, launches], axis=1) / took[:, None], 1 - computed / took)
    return replace(speeds, elementwise_s=per_byte, host_s=per_launch)


def _least_squares(of: np.ndarray, wanted: np.ndarray) -> tuple[float, float]:
    """Two numbers, none below 0, that solve equations best.

    >>> [round(x, 9) for x in _least_squares(np.array([[1.0, 1.0], [2.0, 1.0]]), np.array([3.0, 5.0]))]
    [2.0, 1.0]
    """
    both = np.linalg.lstsq(of, wanted, rcond=None)[0]
    if both.min() < 0:  # then the best are on an edge
        on_axes = np.maximum(0.0, of.T @ wanted / (of**2).sum(0))
        edges = [np.array([on_axes[0], 0.0]), np.array([0.0, on_axes[1]])]
        both = min(edges, key=lambda edge: float(np.sum((of @ edge - wanted) ** 2)))
    return float(both[0]), float(both[1])
