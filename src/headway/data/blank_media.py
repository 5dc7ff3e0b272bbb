"""Blank (dummy) images and videos for packs that have none, so that a vision tower runs on every rank or on none.

Processes that share their weights gather them together, tower by tower: one whose pack has no image must not sit the
tower out. A blank stands in the padding segment, which nothing attends to and which has no targets, so its gradients
are exactly zero. It is counted as slots, never as work.

Tensor letters as in `collate`.
"""

from dataclasses import replace

import torch
from torch.nn.functional import pad

from headway.count import Workload
from headway.count.modalities import MODALITIES
from headway.data.collate import PADDING_TOKEN, Batch, Collator
from headway.data.media.tensors import MediaTensors
from headway.models.attention.splits import SplitMask
from headway.models.losses import IGNORED

Kinds = frozenset[str]
"""Kinds of media in a pack for which a vision tower runs, by the names of `headway.count.modalities`."""


def vision_kinds(batch: Batch) -> Kinds:
    """Kinds of media in one pack for which a vision tower runs, blanks included."""
    return frozenset(name for name in batch.media if MODALITIES[name].tower == "vision")


def with_blanks(batch: Batch, wanted: Kinds, collator: Collator) -> Batch:
    """Add a blank image or video to a pack that lacks one.

    Args:
        batch: the pack, on the CPU.
        wanted: kinds of media that it must have, those of all ranks' packs.
        collator: the pack's collator; one without a vision geometry or a blank image leaves the pack as it is.
    """
    # Every rank must run the same towers in a step, so a pack lacks what any other rank's pack has.
    geometry, lacking = collator.geometry, wanted - vision_kinds(batch)
    # A family's own layout knows how to hold an image that nobody sees; its grid is one patch.
    if batch.family_inputs is not None:
        if "images" not in lacking:
            return batch
        pixels_PD, family_inputs = batch.family_inputs.with_blank_image()
        blank_images = MediaTensors(torch.ones(1, 3, dtype=torch.long), pixels_PD)
        return replace(batch, media={**batch.media, "images": blank_images}, family_inputs=family_inputs)
    # A tower that a processor feeds takes a whole encoded picture: its placeholders, grid and tensors.
    if collator.blank is not None and "images" in lacking:
        blank = collator.blank
        padded = _with_tokens(batch, blank.input_ids_S, collator)
        tensors = {name: joinable.tensor_X for name, joinable in blank.processed.items()}
        return replace(padded, media={**batch.media, **blank.media}, processed=tensors)
    if geometry is None or not lacking:
        return batch
    # A tower of patches takes zeros: a bucket of them, so that shapes stay few, or those of one token.
    patches = collator.bucket_patches or geometry.merge_size**2
    blanks = MediaTensors(geometry.padding_grids(patches), torch.zeros(patches, geometry.patch_values))
    # Positions and boundaries of the blank patches, by kind, and the kind's placeholder token.
    media, vision, ids = dict(batch.media), dict(batch.vision), []
    for name, row in MODALITIES.items():
        if name in lacking:
            media[name] = blanks
            vision |= geometry.inputs(blanks.sizes, f"{row.kind}_")
            ids.append(getattr(geometry, f"{row.kind}_token"))
    # One placeholder per merged square of merge_size**2 patches, in the pack's padding.
    tokens_S = torch.tensor(ids).repeat_interleave(patches // geometry.merge_size**2)
    padded = _with_tokens(batch, tokens_S, collator)
    return replace(padded, media=media, vision=vision, placeholders=collator.placeholders(padded.input_ids_1T))


def _with_tokens(batch: Batch, tokens_S: torch.Tensor, collator: Collator) -> Batch:
    """Write placeholders into a pack's padding segment, which grows by whole buckets where they find no room."""
    # The new tail: padding up to the next bucket, with the placeholders in its first free slots.
    start = int(batch.workload.tokens)
    tail_S = batch.input_ids_1T[0, start:]
    bucket = collator.bucket_tokens or 1
    missing = max(0, len(tokens_S) - int((tail_S == PADDING_TOKEN).sum()))
    tail_S = torch.cat([tail_S, torch.full((-(-missing // bucket) * bucket,), PADDING_TOKEN)])
    free = (tail_S == PADDING_TOKEN).nonzero()[: len(tokens_S), 0]
    tail_S[free] = tokens_S
    more = start + len(tail_S) - batch.slots

    # All that describes the pack follows: labels, positions, segments, and slots that are no work.
    boundaries_N = [*batch.cu_seqlens_N.tolist()[: batch.num_segments + 1], start + len(tail_S)]
    positions_R1T = torch.arange(len(tail_S)).expand(batch.position_ids_R1T.shape[0], 1, -1)
    types_1T = batch.token_types_1T
    if types_1T is not None:
        types_1T = torch.cat([types_1T[:, :start], collator.types(tail_S)[None]], dim=1)
    workload = batch.workload + Workload(slots=more)
    return replace(
        batch,
        input_ids_1T=torch.cat([batch.input_ids_1T[:, :start], tail_S[None]], dim=1),
        labels_1T=pad(batch.labels_1T, (0, more), value=IGNORED),
        labelled_K=None,  # other slots may be this process's now
        position_ids_R1T=torch.cat([batch.position_ids_R1T[..., :start], positions_R1T], dim=2),
        cu_seqlens_N=torch.tensor(boundaries_N, dtype=torch.int32),
        max_seqlen=max(batch.max_seqlen, len(tail_S)),
        token_types_1T=types_1T,
        source_ids_N=pad(batch.source_ids_N[: batch.num_segments], (0, 1)),
        workload=workload,
        splits=None if batch.splits is None else SplitMask.of(workload),
    )
