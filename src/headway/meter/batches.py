"""Read a workload off the tensors of a batch; tensors on an accelerator are copied aside, and read on arrival."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from headway.count import CostModel, Generation, Workload
from headway.count.cost_model import DENOISES, PIXELS
from headway.count.integers import NONE, Ints, boundaries_of
from headway.errors import WorkloadError
from headway.meter.clock import HostCopy

_BOUNDARIES = ("cu_seq_lens_q", "cu_seqlens_q", "cu_seqlens")
# the tensors whose values, not only shapes, are read
_READ = (
    *_BOUNDARIES,
    "cu_seqlens_argmin",
    "cu_seqlens_unpadded",
    "cu_seqlens_unpadded_argmin",
    "attention_mask",
    "position_ids",
    "image_grid_thw",
    "video_grid_thw",
    "decoder_attention_mask",
    "encoder_attention_mask",
    "encoder_hidden_states_mask",
)
_NUM_LABELS = "num_labels"  # entry of copies
_IDS = ("input_ids", "inputs_embeds", "tokens")


def input_gradients_of(batch: Mapping[str, Any]) -> tuple[str, ...]:
    """Name the arguments of a forward that require a gradient, since something in front of the model is trained."""
    return tuple(name for name, value in batch.items() if getattr(value, "requires_grad", False))


class _Shape:
    """The shape of a tensor whose values are not read; the tensor itself is not kept alive."""

    def __init__(self, tensor: Any) -> None:
        self.shape = tuple(tensor.shape)
        self.ndim = len(self.shape)


def read_or_copy(batch: Any, cost_model: CostModel) -> Workload | Generation | Mapping[str, Any]:
    """Read the workload of a batch on the CPU; begin to copy a CUDA device's batch, as far as `workload_of` reads it.

    Nothing waits for the device. The copies have come when it has passed any later point.

    Returns:
        The workload, or the copies, for `workload_of`; of tensors that it does not read, only shapes.

    Raises:
        WorkloadError: as for `workload_of`.
    """
    if isinstance(batch, Workload | Generation):
        return batch
    devices = {name: getattr(getattr(value, "device", None), "type", "cpu") for name, value in batch.items()}
    if all(device == "cpu" for device in devices.values()):
        return workload_of(batch, cost_model)
    import torch

    names = (*_READ, "labels") if "source" in cost_model.towers else _READ
    copies: dict[str, Any] = {}
    labels = batch.get("labels")
    if labels is not None and devices["labels"] == "cuda" and "labels" not in names:  # one number of them is read
        copies[_NUM_LABELS] = HostCopy((labels.detach()[..., 1:] >= 0).sum()[None])
    for name, value in batch.items():
        if name not in names or devices[name] == "cpu":
            copies[name] = value if name in names or not hasattr(value, "shape") else _Shape(value)
            continue
        pinned = torch.empty(value.shape, dtype=value.dtype, pin_memory=devices[name] == "cuda")
        copies[name] = pinned.copy_(value.detach(), non_blocking=devices[name] == "cuda")
    return copies if "cuda" in devices.values() else workload_of(copies, cost_model)


def workload_of(batch: Workload | Generation | Mapping[str, Any], cost_model: CostModel | None = None) -> Workload:
    """Build the workload of whatever `Meter.count` takes: a forward's arguments, as transformers names them, mostly.

    A `Workload` is given back, and a `Generation` computes its own.

    What counts as a segment is read from the first of these that the batch has: a `workload`, boundaries
    (`cu_seq_lens_q`), positions that restart, a padding mask; without any, each row of `input_ids` is one segment.

    Args:
        batch: what was counted. A forward's arguments lie on the CPU: `input_ids` (batch, slots), `inputs_embeds` or
            `tokens`, and what else it has of `attention_mask`, `position_ids`, `cu_seq_lens_q`, `image_grid_thw`,
            `video_grid_thw`, `pixel_values` (alone, for a model that reads nothing else); `decoder_input_ids` or
            `labels` where the model reads an encoder. Megatron's `cu_seqlens_argmin`, `cu_seqlens_unpadded` and
            `cu_seqlens_unpadded_argmin` go with `cu_seqlens`, and `context_parallel_size` says over how many ranks the
            slots of each row are split.
        cost_model: of the model; needed where the shape of an image is the tower's own.

    Raises:
        WorkloadError: the batch lies on an accelerator, holds no token ids, masks that name no segments, or boundaries
            that reach past its slots.

    >>> import numpy as np
    >>> workload_of({"input_ids": np.zeros((2, 4), int), "attention_mask": np.array([[1, 1, 1, 0], [1, 1, 1, 1]])})
    Workload(2 segments, 7 tokens, 8 slots)
    """
    if isinstance(batch, Workload | Generation):
        return batch if isinstance(batch, Workload) else batch.workload
    if cost_model is not None and DENOISES in cost_model.source and "workload" not in batch:
        return _denoised(batch, cost_model)
    reads_encoder = cost_model is not None and "source" in cost_model.towers
    if isinstance(workload := batch.get("workload"), Workload):
        if not reads_encoder:  # the ids of a model with an encoder are the encoder's
            _check_slots(workload, batch)
        return workload
    grids = {name: batch[key] for name, key in _GRIDS.items() if batch.get(key) is not None}
    if "images" not in grids and batch.get("pixel_values") is not None:
        grids["images"] = _frames(batch["pixel_values"], cost_model)
    if reads_encoder:
        return _decoded(batch, grids)
    if "images" in grids and cost_model is not None and _sees_alone(cost_model) and not _has_ids(batch):
        _check_side(batch["pixel_values"], cost_model)
        return Workload(images=grids["images"])  # a classifier of pictures: no text, and so no segments
    shape = _shape(batch)
    return _segments(batch, shape, grids).with_counts(supervised=_num_labels(batch), logits=_num_logits(batch, shape))


def _num_labels(batch: Mapping[str, Any]) -> int | None:
    """Count the tokens whose next token has a label; labels below 0 are left out by transformers' losses."""
    if isinstance(copy := batch.get(_NUM_LABELS), HostCopy):
        return round(copy.read()[0])
    labels = batch.get("labels")
    if labels is None or isinstance(labels, _Shape) or not hasattr(labels, "ndim") or not labels.ndim:
        return None
    is_label = _on_host(labels) >= 0  # all at once, which is faster than all but the first
    return int(np.count_nonzero(is_label) - np.count_nonzero(is_label[..., :1]))


def _num_logits(batch: Mapping[str, Any], shape: tuple[int, int]) -> int | None:
    """Count the real tokens that the head runs on, where transformers' `logits_to_keep` leaves some out."""
    rows, slots = shape
    last = batch.get("logits_to_keep")
    if not isinstance(last, int) or not last:
        return None
    mask = batch.get("attention_mask")
    if mask is None or mask.ndim != 2:
        return rows * min(last, slots)
    return int((_on_host(mask)[:, -last:] > 0).sum())


def _on_host(values: Any) -> Any:
    """Give the array of a CPU tensor of whole numbers, so that no operation of torch is dispatched."""
    return values.numpy() if hasattr(values, "numpy") else np.asarray(values)


def _check_slots(workload: Workload, batch: Mapping[str, Any]) -> None:
    """Refuse a workload that bills other tokens than the batch beside it holds."""
    if not _has_ids(batch):
        return
    rows, slots = _shape(batch)
    if workload.slots != rows * slots:
        raise WorkloadError(
            f"the batch's workload bills {workload.slots} slots, but its tensors hold {rows} x {slots} = "
            f"{rows * slots}. Build the workload from this very batch, or leave it out and the batch is read instead."
        )


def _has_ids(batch: Mapping[str, Any]) -> bool:
    return any(batch.get(key) is not None for key in _IDS)


def _check_side(pixels: Any, cost_model: CostModel) -> None:
    """Refuse pictures of another size than the ledger was traced on, which a convolutional model takes."""
    side = cost_model.source.get(PIXELS)
    height, width = pixels.shape[-2:]
    if side is not None and (str(height), str(width)) != (side, side):
        raise WorkloadError(
            f"the pictures have {height} x {width} pixels, and {cost_model.name} was counted on {side} x {side}. Trace "
            "it on such pictures: headway.trace(model, inputs={'pixel_values': ...}), with a Workload of each batch."
        )


def _sees_alone(cost_model: CostModel) -> bool:
    """Tell whether pictures of one size are all that a model's costs depend on."""
    return all(row.driver.startswith("frames:") for row in cost_model.rows)


_GRIDS = {"images": "image_grid_thw", "videos": "video_grid_thw"}


def _shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    ids = next((batch[key] for key in _IDS if batch.get(key) is not None), None)
    if ids is None:
        raise WorkloadError(
            f"the batch holds {', '.join(map(str, batch)) or 'nothing'}, and none of {', '.join(_IDS)}: what it asks "
            "the model to compute is not known. Pass a Workload instead, or add one to the batch as `workload`."
        )
    rows, slots = ids.shape[:2] if len(ids.shape) > 1 else (1, ids.shape[0])
    return int(rows), int(slots) * int(batch.get("context_parallel_size", 1))


def _segments(batch: Mapping[str, Any], shape: tuple[int, int], grids: dict[str, Any]) -> Workload:
    rows, slots = shape
    padded, real = _boundaries(batch)
    if padded.size > 1:
        if padded[-1] > rows * slots:
            raise WorkloadError(
                f"the boundaries end at {padded[-1]}, but the batch holds {rows} x {slots} slots: other tokens would "
                "be billed than it holds. Hand over the boundaries of this very batch; where ranks split its rows "
                "between them, say so with context_parallel_size."
            )
        return Workload.from_cu_seqlens(padded, unpadded=real, slots=rows * slots, **grids)
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if mask is not None and mask.ndim != 2:
        mask = None if positions is not None else mask
    if positions is not None and _fits(positions, shape):
        return Workload.from_position_ids(positions, attention_mask=mask, **grids)
    if mask is not None and not _is_full(mask, shape):
        return Workload.from_attention_mask(mask, **grids)
    return Workload([slots] * rows, **grids) if grids else _full(rows, slots)


def _is_full(mask: Any, shape: tuple[int, int]) -> bool:
    """Say whether a mask has a 1 for each slot of a batch; not of one on a device, which is not waited for."""
    if tuple(mask.shape) != shape or getattr(getattr(mask, "device", None), "type", "cpu") != "cpu":
        return False
    values = _on_host(mask)
    return values.dtype.kind in "iub" and values.size > 0 and values.tobytes() == _ones(values.dtype.str, values.size)


@functools.lru_cache(maxsize=8)
def _ones(dtype: str, size: int) -> bytes:
    """Make the bytes of so many ones, which a mask is compared with in a fraction of a reduction's time."""
    return np.ones(size, dtype).tobytes()


@functools.lru_cache(maxsize=256)
def _full(rows: int, slots: int) -> Workload:
    """Make the workload of rows without padding, which most steps of a loop share."""
    return Workload([slots] * rows)


def _boundaries(batch: Mapping[str, Any]) -> tuple[Ints, Ints | None]:
    """Read the boundaries of a pack's segments, and of their real tokens if the batch separates them."""
    values = next((batch[key] for key in _BOUNDARIES if batch.get(key) is not None), None)
    padded = NONE if values is None else boundaries_of(values, batch.get("cu_seqlens_argmin"), "cu_seqlens")
    if batch.get("cu_seqlens_unpadded") is None:
        return padded, None
    real = boundaries_of(batch["cu_seqlens_unpadded"], batch.get("cu_seqlens_unpadded_argmin"), "cu_seqlens_unpadded")
    return (padded, real) if padded.size > 1 else (real, None)


def _fits(positions: Any, shape: tuple[int, int]) -> bool:
    """Say whether positions cover every row; one row for all (a model's default) shows nothing of a row."""
    return tuple(positions.shape[-2:]) == shape or (positions.ndim == 1 and shape[0] == 1)


def _decoded(batch: Mapping[str, Any], grids: dict[str, Any]) -> Workload:
    """Build the workload of an encoder-decoder: segments are the decoder's, sources the encoder's."""
    target = next((batch[key] for key in ("decoder_input_ids", "labels") if batch.get(key) is not None), None)
    if target is None:
        raise WorkloadError(
            "the model reads an encoder, but the batch holds neither decoder_input_ids nor labels: how much the "
            "decoder computes is not known. Pass a Workload with sources instead."
        )
    rows, slots = target.shape
    lengths = [slots] * rows
    if batch.get("decoder_attention_mask") is not None:
        lengths = (batch["decoder_attention_mask"] > 0).sum(-1).tolist()
    elif "decoder_input_ids" not in batch and target is not None:
        # labels of padding are -100, and so are labels in front that nobody learns, which the decoder runs through
        lengths = ((_on_host(target) >= 0) * np.arange(1, slots + 1)).max(-1, initial=0).tolist()
    speech = batch.get("input_features")
    if speech is None and batch.get("attention_mask") is not None:
        sources = batch["attention_mask"].sum(-1).tolist()
    else:
        sources = [(speech if speech is not None else batch["input_ids"]).shape[-1]] * rows
    return Workload(lengths, slots=rows * slots, sources=sources, **grids)


def _denoised(batch: Mapping[str, Any], cost_model: CostModel) -> Workload:
    """Build the workload of latents: a segment of patches for each sample, whose source is the text beside it."""
    name, layout, *sides = cost_model.source[DENOISES].split()
    latents = batch.get(name)
    if latents is None:
        raise WorkloadError(
            f"the batch holds {', '.join(map(str, batch)) or 'nothing'}, and no {name}, the latents of "
            f"{cost_model.name}: count the arguments of its forward by their names, or a Workload."
        )
    # pixels of the latents along frames, height and width, and the patches that they are cut into
    samples, *shape = map(int, latents.shape)
    pixels = {
        "packed": [1, 1, shape[0]],
        "images": [1, *shape[1:]],
        "videos": shape[1:],
        "clips": [shape[0], *shape[2:]],
    }[layout]
    grid = tuple(n // int(side) for n, side in zip(pixels, sides, strict=True))
    text = batch.get("encoder_hidden_states") if "source" in cost_model.towers else None
    sources: Any = ()
    if text is not None:
        masks = [batch.get(key) for key in ("encoder_attention_mask", "encoder_hidden_states_mask")]
        mask = next((m for m in masks if m is not None and len(m.shape) == 2), None)  # others are added to scores
        sources = [int(text.shape[1])] * samples if mask is None else (mask > 0).sum(-1).tolist()
    images, videos = ([grid] * samples, ()) if grid[0] == 1 else ((), [grid] * samples)
    return Workload([math.prod(grid)] * samples, images, videos, sources=sources)


def _frames(pixels: Any, cost_model: CostModel | None) -> list[tuple[int, int, int]]:
    """Read frames of one size off pixels [..., channels, height, width] for a tower that takes no other."""
    rows = cost_model.rows if cost_model is not None else ()
    fixed = [row.driver for row in rows if row.driver.startswith("frames:")]
    if not fixed:
        raise WorkloadError(
            "the batch holds pixel_values without image_grid_thw, and the cost model does not say how large an image "
            "is: add the grids to the batch, or pass a Workload."
        )
    height, width = map(int, fixed[0].split(":")[1:])
    return [(1, height, width)] * math.prod(pixels.shape[:-3])


def refuse_cached_keys(name: str, arguments: Mapping[str, Any]) -> None:
    """Refuse a forward that goes on from cached keys and values.

    Raises:
        WorkloadError: it does.
    """
    past = arguments.get("past_key_values")
    if past is not None and past.get_seq_length():
        raise WorkloadError(
            f"{name} goes on from cached keys and values while it trains: it generates, and that is not counted from "
            "its forwards. If it is no part of training, switch the model to eval() for it; else count the step "
            "yourself: Meter.count with a headway.Generation, in a Meter.phase."
        )
