"""Memory of the cases of benchmarks/engine_gpu.py: what the plan says, what the allocator had, which layers fit."""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from engine_setups import Setup, without_data
from headway.config import TrainConfig
from headway.count import CostModel, Workload
from headway.count.activations import SavedActivations, shipped_activations
from headway.count.models import load_cost_model
from headway.data.collate import Batch
from headway.errors import PlanError
from headway.predict.fitting import room_in
from headway.predict.memory import MemoryPlan
from headway.predict.predictor import Predictor
from headway.predict.recipe import precision_of
from headway.predict.saved import learning_model
from headway.tracing import trace
from headway.tracing.activations import saved_of_config

Planned = TypeVar("Planned")
SMALL_ROOM = 4 * 2**30  # memory of a machine without a CUDA device, for small sizes [bytes]


class Memory:
    """What the plan says, and what the allocator had at most."""

    def __init__(self, device: torch.device, batches: Sequence[Batch], predicted: MemoryPlan) -> None:
        self._device = device
        self._predicted = predicted
        self._packs_bytes = sum(map(_batch_bytes, batches))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def record(self) -> dict[str, Any]:
        """Bytes; None for what a CPU does not tell."""
        is_cuda = self._device.type == "cuda"
        return {
            "memory": {
                "predicted": self._predicted.to_dict(),
                "packs": self._packs_bytes,
                "allocated": torch.cuda.max_memory_allocated(self._device) if is_cuda else None,
                "reserved": torch.cuda.max_memory_reserved(self._device) if is_cuda else None,
                "device": torch.cuda.get_device_properties(self._device).total_memory if is_cuda else None,
            }
        }


def _batch_bytes(batch: Batch) -> int:
    values = (*(getattr(batch, f.name) for f in fields(batch)), *batch.vision.values())
    return sum(t.numel() * t.element_size() for t in values if isinstance(t, torch.Tensor))


def predicted_memory(
    setup: Setup, config: TrainConfig, cost_model: CostModel, layers: int, packs: Sequence[Workload], *, is_small: bool
) -> MemoryPlan:
    """Plan the memory of a case on one device, as `headway train --dry-run` does.

    Args:
        setup: of the case.
        config: its recipe, as it trains.
        cost_model: of its model.
        layers: language layers of that model.
        packs: that it is measured on.
        is_small: whether the model is shrunk, so that nothing ships of it.
    """
    saved = saved_of(setup, config, layers, is_small=is_small)
    slots, patches = max(pack.slots for pack in packs), max(pack.patches for pack in packs)
    of_segments = [[*map(int, pack.segments)] for pack in packs]
    of_pictures = [[math.prod(map(int, grid)) for grid in pack.grids] for pack in packs]
    tokens_padded, patches_padded = (
        max(len(lengths) * max(lengths, default=0) for lengths in of_packs) for of_packs in (of_segments, of_pictures)
    )
    predictor = Predictor(learning_model(config.model, cost_model), saved)
    return predictor.memory(config, 1, (slots, patches), (tokens_padded, patches_padded))


def saved_of(setup: Setup, config: TrainConfig, layers: int, *, is_small: bool) -> dict[str, SavedActivations]:
    """What autograd saves of a set-up's model of so many layers, by the precision in which its recipe computes."""
    precision = precision_of(config, 1)
    if is_small:
        return {precision: saved_of_config(setup.config(layers=layers, is_small=True), precision)}
    return {precision: with_layers(shipped_activations(setup.model, precision), layers)}


def cost_model_of(setup: Setup, layers: int) -> CostModel:
    """The ledger of a set-up's model of full size with so many language layers."""
    if layers == setup.layers(is_small=False):
        return load_cost_model(setup.model)
    return trace(without_data(setup.config(layers=layers, is_small=False)))


def with_layers(saved: SavedActivations, layers: int) -> SavedActivations:
    """What a model with its first language layers alone saves."""

    def stays(name: str) -> bool:
        stack, _, number = name.rpartition(".")
        return "visual" in stack or not number.isdecimal() or int(number) < layers

    return SavedActivations({name: block for name, block in saved.blocks.items() if stays(name)}, saved.left_out)


def fullest(plan: Callable[[str], tuple[Planned, float]], room_bytes: float) -> Planned:
    """Plan with the most activations that fit: as `speed.recompute=memory:SIZE`, SIZE in whole GiB.

    Args:
        plan: from a value of `speed.recompute` to a plan and its peak [bytes].
        room_bytes: what the peak may take.

    Raises:
        PlanError: no size fits.
    """
    low, high, fits = 0, int(room_bytes / 2**30), None  # activations [GiB]
    while high - low > 1:
        size = (low + high) // 2
        try:
            planned, peak_bytes = plan(f"memory:{size}GiB")
        except PlanError:  # even if all blocks are computed again, more is kept
            low = size
            continue
        if peak_bytes <= room_bytes:
            low, fits = size, planned
        else:
            high = size
    if fits is None:
        raise PlanError(
            f"no size of activations fits {room_bytes / 2**30:.1f} GiB. Take shorter packs or fewer layers."
        )
    return fits


def fullest_recompute(
    setup: Setup, settings: dict[str, Any], packs: Sequence[Workload], layers: int, folder: Path, *, is_small: bool
) -> str:
    """The `speed.recompute=memory:SIZE` with which a case keeps the most activations that the plan fits."""
    cost_model = (
        trace(without_data(setup.config(layers=layers, is_small=True))) if is_small else cost_model_of(setup, layers)
    )
    model_config = setup.config(layers=layers, is_small=is_small)

    def plan(recompute: str) -> tuple[str, float]:
        config = setup.recipe_for(folder, model_config, settings | {"speed.recompute": recompute})
        return recompute, predicted_memory(setup, config, cost_model, layers, packs, is_small=is_small).peak

    is_cuda = torch.cuda.is_available()
    return fullest(plan, room_in(torch.cuda.get_device_properties(0).total_memory) if is_cuda else SMALL_ROOM)


DIVIDED = (1, 2, 3, 4, 6, 8)
"""Packs that a recipe's pack is divided into, before layers are left out, until the whole model fits."""


def fitting(
    setup: Setup, settings: dict[str, Any], num_packs: int, room_bytes: int, folder: Path, divided: Sequence[int]
) -> tuple[int, int]:
    """Divide each pack until the whole model fits; where none is short enough, leave out language layers.

    Args:
        setup: of the case.
        settings: of its recipe.
        num_packs: that are drawn, undivided.
        room_bytes: what the plan may take.
        folder: for the model's configuration.
        divided: packs that one may become, ascending.

    Returns:
        Packs that one becomes, and language layers.
    """
    whole = setup.layers(is_small=False)
    half, most = whole // 2, (0, 0)
    cost_models = {layers: cost_model_of(setup, layers) for layers in (whole, half)}
    for parts in divided:
        shorter = setup.with_packs_of(setup.packing_length // parts)
        packs = [batch.work(skips_unlabelled=True) for batch in shorter.batches(num_packs * parts, is_small=False)[0]]
        packing = {
            "data.tokens_per_pack": shorter.packing_length,
            "optim.accumulation": parts * settings["optim.accumulation"],
        }
        needed = {}
        for layers, cost_model in cost_models.items():
            config = shorter.recipe_for(folder, setup.config(layers=layers, is_small=False), settings | packing)
            needed[layers] = predicted_memory(shorter, config, cost_model, layers, packs, is_small=False).peak
            if needed[whole] <= room_bytes:
                return parts, whole
        # the plan is a sum over layers that are alike: made for all of them and for half, the rest is a line
        a_layer = (needed[whole] - needed[half]) / (whole - half)
        layers = max(1, whole - math.ceil((needed[whole] - room_bytes) / a_layer))
        most = max(most, (layers, -parts))  # of as many layers, in the longest packs
    return -most[1], most[0]
