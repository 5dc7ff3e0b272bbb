"""Condition dropout: leaves conditions of a drawn image out of a sample's tensors, and out of its lengths alike."""

from dataclasses import replace

import numpy as np
import torch

from headway.data.encoded import EncodedSample
from headway.data.media.tensors import MediaTensors
from headway.data.samples import Origin, SampleLengths
from headway.packing.parts import KINDS, Dropout, Numbers, PartTable, SamplePart


def lengths_without(lengths: SampleLengths, origin: Origin, dropout: Dropout | None, epoch: int) -> SampleLengths:
    """The lengths of a sample after condition dropout in an epoch.

    Args:
        lengths: of the whole sample.
        origin: where it came from.
        dropout: of its conditions; None for the whole.
        epoch: how often it has played before.
    """
    if dropout is None or not lengths.parts:
        return lengths
    part_mask = _part_mask(lengths.parts, origin, dropout, epoch)
    if part_mask.all():
        return lengths
    parts = tuple(part for part, stays in zip(lengths.parts, part_mask, strict=True) if stays)
    sizes = np.array([part[1] for part in lengths.parts])
    gone, ends = int(sizes[~part_mask].sum()), sizes.cumsum()
    before = int(sizes[~part_mask & (ends <= lengths.first_target)].sum())
    reads = part_mask[[part[0] == KINDS.index("image") for part in lengths.parts]]
    grids = tuple(grid for grid, stays in zip(lengths.media.get("images", ()), reads, strict=True) if stays)
    return replace(
        lengths,
        parts=parts,
        tokens=lengths.tokens - gone,
        first_target=lengths.first_target - before,
        media_end=lengths.tokens - gone,  # a sample that draws is never cut
        media={"images": grids} if grids else {},
    )


def sample_without(sample: EncodedSample, dropout: Dropout | None, epoch: int) -> EncodedSample:
    """A sample after condition dropout in an epoch; arguments as `lengths_without`.

    An image that is left out keeps its rotary position, and a text does not.

    Source: `PackedDataset.pack_sequence` of ByteDance-Seed/Bagel, data/dataset_base.py.
    """
    if dropout is None or not sample.parts:
        return sample
    part_mask = _part_mask([part.numbers for part in sample.parts], sample.origin, dropout, epoch)
    if part_mask.all():
        return sample
    parts: list[SamplePart] = []
    skipped = shift = 0  # positions of images that are gone since the last part, and those of texts that are
    shifts = []
    # A dropped text moves later positions back by its tokens; a dropped image leaves its one position empty.
    for part, stays in zip(sample.parts, part_mask.tolist(), strict=True):
        shifts += [shift] * part.length
        if stays:
            parts.append(replace(part, skipped=part.skipped + skipped))
            skipped = 0
        elif part.kind == "text":
            shift += part.tokens
        else:
            skipped += 1
    # Tokens of parts that stay, and the patches of the images among them that are read.
    stays_S = torch.from_numpy(np.repeat(part_mask, [part.length for part in sample.parts]))
    media = {}
    grids_M3, pixels_PD = sample.media.get("images", (None, None))
    if grids_M3 is not None and pixels_PD is not None:
        patches = [(part.rows * part.columns, stays) for part, stays in _of(sample, part_mask, "image")]
        sizes, which = zip(*patches, strict=True)
        if any(which):
            patch_mask_P = torch.from_numpy(np.repeat(which, sizes))
            media["images"] = MediaTensors(grids_M3[torch.tensor(which)], pixels_PD[patch_mask_P])
    # Images to draw lose the same parts.
    images = zip(sample.latent_images, _of(sample, part_mask, "clean", "noised"), strict=True)
    return replace(
        sample,
        input_ids_S=sample.input_ids_S[stays_S],
        labels_S=sample.labels_S[stays_S],
        position_ids_RS=(sample.position_ids_RS - torch.tensor(shifts))[:, stays_S],
        media=media,
        media_end=int(stays_S.sum()),
        parts=tuple(parts),
        latent_images=tuple(image for image, (_, stays) in images if stays),
    )


def _of(sample: EncodedSample, part_mask: Numbers, *kinds: str) -> list[tuple[SamplePart, bool]]:
    """The parts of some kinds, and whether each stays."""
    return [(part, stays) for part, stays in zip(sample.parts, part_mask.tolist(), strict=True) if part.kind in kinds]


def _part_mask(
    parts: "list[tuple[int, ...]] | tuple[tuple[int, ...], ...]", origin: Origin, dropout: Dropout, epoch: int
) -> Numbers:
    table = PartTable(np.array([0, len(parts)]), np.array(parts), np.array([origin.key]))
    return dropout.kept(table, np.array([epoch]), origin.source)
