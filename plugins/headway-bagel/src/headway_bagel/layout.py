"""Lay the parts of samples out as a pack: the places of tokens, their mask, and the workload that this is."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from headway.count import Workload
from headway.errors import DataError
from headway.packing.parts import MODE_OF_PART, SamplePart
from headway_bagel.configuration import BagelConfig


@dataclass
class _Pack:
    """The slots, rows and places of a pack, collected slot by slot."""

    slot: int = 0
    positions: list[int] = field(default_factory=list)
    understood: list[int] = field(default_factory=list)  # slots
    supervised: list[int] = field(default_factory=list)  # rows of understood tokens
    image_rows: list[int] = field(default_factory=list)
    image_places: list[int] = field(default_factory=list)
    latent_slots: list[int] = field(default_factory=list)
    latent_places: list[int] = field(default_factory=list)
    latent_grids: list[int] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)  # rows of latent patches

    def text(self, tokens: int) -> None:
        """Take slots for understood tokens."""
        self.understood += range(self.slot, self.slot + tokens)
        self.slot += tokens


def lay_out(
    samples: Sequence[Sequence[SamplePart]], config: BagelConfig, slots: int | None = None
) -> tuple[dict[str, Any], Workload]:
    """Lay samples end to end.

    Args:
        samples: the parts of each segment, in order.
        config: of the model.
        slots: length of the pack, filled up with text that nothing sees; as many as there are tokens when None.

    Returns:
        Forward's arguments that say where things lie, on the CPU; and the workload, whose splits are the mask.

    Raises:
        DataError: an image with more rows or columns than the model has positions for, or text of no token.

    Source: data/dataset_base.py of ByteDance-Seed/Bagel: the tokens of an image share one rotary position, and what
    follows a drawn image continues from the position that it had.
    """
    # parts in their order: slots, and positions, of which all of an image's tokens share one
    pack, splits = _Pack(), []
    grids: dict[str, list[tuple[int, int, int]]] = {"image": [], "clean": [], "noised": []}
    # largest side of an image, where it is not that of latents [patches]
    sides = {"image": config.image_side}
    for parts in samples:
        position, runs = 0, []
        for part in parts:
            start = pack.slot
            position += part.skipped
            if part.kind == "text":
                _check_text(part)
                pack.text(part.tokens)
                # a token is learnt from the row of the one before it
                last = len(pack.understood)
                pack.supervised += range(last - 1 - part.supervised, last - 1)
                pack.positions += range(position, position + part.tokens)
                position += part.tokens
            else:
                _image(pack, part, sides.get(part.kind, config.max_latent_size), grids)
                pack.positions += [position] * (pack.slot - start)
                position += part.kind != "noised"  # a drawn image's position is used again
            runs.append((MODE_OF_PART[part.kind], pack.slot - start))
        splits.append(runs)

    # the work of it, then text that nothing sees up to the length of the pack
    ends = np.cumsum([0, *(h * w for _, h, w in grids["image"])])
    workload = Workload(
        splits=splits,
        images=grids["image"],
        latents=grids["noised"],
        references=grids["clean"],
        supervised=len(pack.supervised),
        slots=slots,
        packs=1,
    )
    padding = workload.slots - pack.slot
    pack.text(padding)
    pack.positions += range(padding)

    # forward's arguments, of images only where there are some
    arguments: dict[str, Any] = {
        "position_ids": torch.tensor([pack.positions]),
        "understood_slots": torch.tensor(pack.understood),
        "supervised_rows": torch.tensor(pack.supervised, dtype=torch.long),
    }
    if grids["image"]:
        arguments |= {
            "image_rows": torch.tensor(pack.image_rows),
            "image_places": torch.tensor(pack.image_places),
            "image_cu_seqlens": torch.tensor(ends, dtype=torch.int32),
            "image_longest": int(np.diff(ends).max()),
        }
    if pack.latent_slots:
        arguments |= {
            "latent_slots": torch.tensor(pack.latent_slots),
            "latent_places": torch.tensor(pack.latent_places),
            "latent_grids": torch.tensor(pack.latent_grids),
            "drawn_rows": torch.tensor(pack.drawn, dtype=torch.long),
        }
    return arguments, workload


def _check_text(part: SamplePart) -> None:
    if part.tokens < 1 or not 0 <= part.supervised < part.tokens:
        raise DataError(
            f"A part of text has {part.tokens} tokens, {part.supervised} of them supervised: give 1 token or more, and "
            "fewer supervised ones, as nothing predicts the first."
        )


def _image(pack: _Pack, part: SamplePart, side: int, grids: dict[str, list[tuple[int, int, int]]]) -> None:
    """Take slots for an image between its two tokens."""
    if not (1 <= part.rows <= side and 1 <= part.columns <= side):
        raise DataError(
            f"An image to {part.kind} has {part.rows} x {part.columns} patches, and the model has positions for 1 to "
            f"{side} along each side: resize it."
        )
    places = [row * side + column for row in range(part.rows) for column in range(part.columns)]
    pack.text(1)
    if part.kind == "image":
        first = len(pack.understood)
        pack.image_rows += range(first, first + len(places))
        pack.image_places += places
        pack.text(len(places))
    else:
        first, number = len(pack.latent_slots), len(grids["noised"]) + len(grids["clean"])
        pack.latent_slots += range(pack.slot, pack.slot + len(places))
        pack.latent_places += places
        pack.latent_grids += [number] * len(places)
        pack.drawn += range(first, first + len(places)) if part.kind == "noised" else ()
        pack.slot += len(places)
    pack.text(1)
    grids[part.kind].append((1, part.rows, part.columns))
