"""Deal a pack to several processes: which slots each computes, and forward's arguments cut to them.

Each process gets an equal part of the patches that are read, of the tokens that are learnt, of the other text and of
the latent patches. So the tower, the head and both copies of the blocks, also where one is frozen, take equally long on
all of them, wherever images stand, and a patch's features are made where its token is. Text is dealt in turn; patches
in contiguous parts, as the tower's attention takes them in order; and latents too, so that few images are encoded by
more than one process.

Tensor letters as in the package; H slots that a process holds.
"""

from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

_PER_LATENT = ("latents", "noise", "latent_places", "latent_grids")


class PackShare(NamedTuple):
    """A process's part of a pack.

    Attributes:
        arguments: of forward; slots are counted among the process's own.
        patches: those of all processes, blank ones included.
        slots_H: the slots that it holds, in their order.
        order_T: all slots as the processes hold them, one process after the other.
    """

    arguments: dict[str, Any]
    patches: int
    slots_H: torch.Tensor
    order_T: torch.Tensor


def deal(arguments: dict[str, Any], rank: int, degree: int) -> PackShare:
    """Cut forward's arguments to the slots of one process.

    Args:
        arguments: of a whole pack, on the CPU, as `lay_out` makes them and with what its samples hold.
        rank: of the process among those that share the pack.
        degree: processes that share it.
    """
    own = dict(arguments)
    owner_T = _owners(own, degree)
    mine_T = owner_T == rank
    slots_H = mine_T.nonzero()[:, 0]
    place_T = mine_T.cumsum(0) - 1  # place of each slot among the process's own
    for name in ("input_ids", "position_ids"):
        own[name] = own[name][:, slots_H]

    understood = own["understood_slots"]
    mine_U = mine_T[understood]
    row_U = mine_U.cumsum(0) - 1
    own["understood_slots"] = place_T[understood[mine_U]]
    own["supervised_rows"] = _renumbered(own["supervised_rows"], mine_U, row_U)
    patches = 0
    if "image_rows" in own:
        own["image_rows"] = _renumbered(own["image_rows"], mine_U, row_U)
        patches = _cut_patches(own, rank, degree)
    if "latent_slots" in own:
        _cut_latents(own, mine_T, place_T)
    return PackShare(own, patches, slots_H, owner_T.argsort(stable=True))


def _owners(arguments: dict[str, Any], degree: int) -> torch.Tensor:
    """Find the rank that holds each slot, shape (T,): kind by kind, each going on where the last one ended."""
    understood, none = arguments["understood_slots"], torch.zeros(0, dtype=torch.long)
    names = ("image_rows", "supervised_rows", "latent_slots")
    patches, supervised, latents = (arguments.get(name, none) for name in names)
    is_other_U = torch.ones(len(understood), dtype=torch.bool)
    is_other_U[patches] = is_other_U[supervised] = False
    owner_T = torch.empty(arguments["input_ids"].shape[1], dtype=torch.long)
    in_turn_T = torch.arange(len(owner_T)) % degree
    text = torch.cat([understood[supervised], understood[is_other_U]])
    ends = len(patches), len(patches) + len(text)
    owner_T[understood[patches]] = in_turn_T[: ends[0]].sort().values
    owner_T[text] = in_turn_T[ends[0] : ends[1]]
    owner_T[latents] = in_turn_T[ends[1] :].sort().values
    return owner_T


def _renumbered(rows: torch.Tensor, mine: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Keep the rows that are a process's own, as it numbers them."""
    return number[rows[mine[rows]]]


def _cut_patches(arguments: dict[str, Any], rank: int, degree: int) -> int:
    """Leave a process's patches and tell how many all have; where they are fewer than processes, a blank image more.

    The boundaries of images stay those of all.
    """
    pixels, places, ends = arguments["pixel_values"], arguments["image_places"], arguments["image_cu_seqlens"]
    if (blank := degree - len(places)) > 0:
        pixels, places = pad(pixels, (0, 0, 0, blank)), pad(places, (0, blank))
        arguments["image_cu_seqlens"] = torch.cat([ends, ends[-1:] + blank])
        arguments["image_longest"] = max(arguments["image_longest"], blank)
    mine_P = (torch.arange(len(places)) % degree).sort().values == rank
    arguments |= {"pixel_values": pixels[mine_P], "image_places": places[mine_P]}
    return len(places)


def _cut_latents(arguments: dict[str, Any], mine_T: torch.Tensor, place_T: torch.Tensor) -> None:
    """Cut latents to the process's own patches, and the autoencoder's images to the images with such a patch."""
    slots, grids = arguments["latent_slots"], arguments["latent_grids"]
    mine_L = mine_T[slots]
    arguments["drawn_rows"] = _renumbered(arguments["drawn_rows"], mine_L, mine_L.cumsum(0) - 1)
    arguments |= {name: arguments[name][mine_L] for name in _PER_LATENT if name in arguments}
    arguments["latent_slots"] = place_T[slots[mine_L]]
    if "latent_pixels" in arguments:
        own = arguments["latent_grids"].unique().tolist()
        arguments["latent_pixels"] = [arguments["latent_pixels"][number] for number in own]
        if "encoder_noise" in arguments:  # the noise is of whole images
            arguments["encoder_noise"] = arguments["encoder_noise"][
                torch.isin(grids, torch.tensor(own, dtype=grids.dtype))
            ]
        if own:
            arguments["latents_before"] = int(mine_L.int().argmax() - (grids == own[0]).int().argmax())
