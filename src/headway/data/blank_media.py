"""Blank (dummy) images and videos for packs that have none, so that a vision tower runs on every rank or on none.

Processes that share their weights gather them together, tower by tower: one whose pack has no image must not sit the
tower out. A blank stands in the padding segment, which nothing attends to and which has no targets, so its gradients
are exactly zero. It is counted as slots, never as work.

Tensor letters as in `collate`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from headway.count import Workload
from headway.data.collate import PADDING_TOKEN, Batch, Collator
from headway.models.losses import IGNORED


class Modalities(NamedTuple):
    """Kinds of media in a pack, which tell the vision towers that it runs.

    Attributes:
        images: whether it has an image.
        videos: whether it has a video.
    """

    images: bool
    videos: bool

    @classmethod
    def of(cls, batch: Batch) -> "Modalities":
        """Kinds of media in one pack, blanks included."""
        return cls(batch.grids_M3 is not None, batch.video_grids_M3 is not None)

    @classmethod
    def union(cls, packs: Sequence["Modalities"]) -> "Modalities":
        """Kinds of media that at least one of several packs has."""
        return cls(any(pack.images for pack in packs), any(pack.videos for pack in packs))


def with_blanks(batch: Batch, wanted: Modalities, collator: Collator) -> Batch:
    """Add a blank image or video to a pack that lacks one.

    Args:
        batch: the pack, on the CPU.
        wanted: kinds of media that it must have, those of all ranks' packs.
        collator: the pack's collator; one without a vision geometry or a blank image leaves the pack as it is.
    """
    # Every rank must run the same towers in a step, so a pack lacks what any other rank's pack has.
    geometry, has = collator.geometry, Modalities.of(batch)
    lacking = Modalities(wanted.images and not has.images, wanted.videos and not has.videos)
    # A family's own layout knows how to hold an image that nobody sees; its grid is one patch.
    if batch.family_inputs is not None:
        if not lacking.images:
            return batch
        pixels_PD, family_inputs = batch.family_inputs.with_blank_image()
        grids_M3 = torch.ones(1, 3, dtype=torch.long)
        return replace(batch, pixels_PD=pixels_PD, grids_M3=grids_M3, family_inputs=family_inputs)
    # A tower that a processor feeds takes a whole encoded picture: its placeholders, grid and tensors.
    if collator.blank is not None and lacking.images:
        blank = collator.blank
        padded = _with_tokens(batch, blank.input_ids_S, collator)
        tensors = {name: joinable.tensor_X for name, joinable in blank.processed.items()}
        return replace(padded, grids_M3=blank.grids_M3, processed=tensors)
    if geometry is None or not any(lacking):
        return batch
    # A tower of patches takes zeros: a bucket of them, so that shapes stay few, or those of one token.
    patches = collator.bucket_patches or geometry.merge_size**2
    grids_M3 = geometry.padding_grids(patches)
    pixels_PD = torch.zeros(patches, geometry.patch_values)
    # Positions and boundaries of the blank patches, by kind, and the kind's placeholder token.
    vision, ids = dict(batch.vision), []
    if lacking.images:
        vision |= geometry.inputs(grids_M3, "image_")
        ids.append(geometry.image_token)
    if lacking.videos:
        vision |= geometry.inputs(grids_M3, "video_")
        ids.append(geometry.video_token)
    # One placeholder per merged square of merge_size**2 patches, in the pack's padding.
    tokens_S = torch.tensor(ids).repeat_interleave(patches // geometry.merge_size**2)
    padded = _with_tokens(batch, tokens_S, collator)
    return replace(
        padded,
        pixels_PD=pixels_PD if lacking.images else batch.pixels_PD,
        grids_M3=grids_M3 if lacking.images else batch.grids_M3,
        video_pixels_PD=pixels_PD if lacking.videos else batch.video_pixels_PD,
        video_grids_M3=grids_M3 if lacking.videos else batch.video_grids_M3,
        vision=vision,
        placeholders=collator.placeholders(padded.input_ids_1T),
    )


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
    return replace(
        batch,
        input_ids_1T=torch.cat([batch.input_ids_1T[:, :start], tail_S[None]], dim=1),
        labels_1T=pad(batch.labels_1T, (0, more), value=IGNORED),
        position_ids_R1T=torch.cat([batch.position_ids_R1T[..., :start], positions_R1T], dim=2),
        cu_seqlens_N=torch.tensor(boundaries_N, dtype=torch.int32),
        max_seqlen=max(batch.max_seqlen, len(tail_S)),
        token_types_1T=types_1T,
        source_ids_N=pad(batch.source_ids_N[: batch.num_segments], (0, 1)),
        workload=batch.workload + Workload(slots=more),
    )
