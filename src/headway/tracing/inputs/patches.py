"""Images of any size, as patches or as pixels beside their sizes, by the argument that carries the shape or place.

All images of a run have one size, since most of these forms pad to the largest, and padding is no work that counts.
"""

import inspect
from collections.abc import Callable
from typing import Any, Self

import torch

from headway.count.workload import Workload
from headway.tracing.inputs.form import WINDOW_SIDES, Floats
from headway.tracing.inputs.images import Grid, Images, has_tower

_UNIT = 12  # patches: towers merge 2, 3, 4 or 6 of them along a side


def _shapes(part: Images, grids: list[Grid], floats: Floats) -> dict[str, Any]:
    """Patches [images, patches, features] with the shape of each image and a mask (SigLIP-2, LFM2-VL)."""
    patches = max(h * w for _, h, w in grids)
    return {
        "pixel_values": floats((len(grids), patches, part.channels * part.patch**2)),
        "spatial_shapes": torch.tensor([[h, w] for _, h, w in grids]),
        "pixel_attention_mask": torch.tensor([[i < h * w for i in range(patches)] for _, h, w in grids]).long(),
    }


def _places(part: Images, grids: list[Grid], floats: Floats) -> dict[str, Any]:
    """Patches [images, patches, features] with the column and row of each (Gemma-4)."""
    places = [[(x, y) for y in range(h) for x in range(w)] for _, h, w in grids]
    features = part.channels * part.patch**2
    return {
        "pixel_values": floats((*torch.tensor(places).shape[:2], features)),
        "image_position_ids": torch.tensor(places),
    }


def _flat(part: Images, grids: list[Grid], floats: Floats) -> dict[str, Any]:
    """Patches [patches of all images, features] with the shape of each image (Nemotron Omni)."""
    shapes = torch.tensor([[h, w] for _, h, w in grids])
    return {"pixel_values": floats((int(shapes.prod(1).sum()), part.channels * part.patch**2)), "image_grid_hw": shapes}


def _strip(part: Images, grids: list[Grid], floats: Floats) -> dict[str, Any]:
    """Patches side by side in one strip [1, channels, patch, patch x patches], with the shapes (MiniCPM-V)."""
    shapes = torch.tensor([[h, w] for _, h, w in grids], dtype=torch.int32)
    width = part.patch * int(shapes.prod(1).sum())
    return {"pixel_values": floats((1, part.channels, part.patch, width)), "target_sizes": shapes}


def _pictures(part: Images, grids: list[Grid], floats: Floats) -> dict[str, Any]:
    """Pixels [images, channels, height, width] with the size of each image (Pixtral)."""
    sizes = torch.tensor([[h * part.patch, w * part.patch] for _, h, w in grids])
    return {"pixel_values": floats((len(grids), part.channels, *sizes.max(0).values.tolist())), "image_sizes": sizes}


def _sequence(part: Images, grids: list[Grid], floats: Floats) -> dict[str, Any]:
    """Patches [1, patches of all images, features], of no told shape (Fuyu)."""
    return {"pixel_values": floats((1, sum(h * w for _, h, w in grids), part.channels * part.patch**2))}


def _blocks(part: Images, grids: list[Grid], floats: Floats) -> dict[str, Any]:
    """Patches [patches, frames, height, width, channels], of no told shape (Inkling)."""
    patches, frames = sum(h * w for _, h, w in grids), part.vision.temporal_patch_size
    return {"pixel_values": floats((patches, frames, part.patch, part.patch, part.channels))}


def _flattened(part: Images, grids: list[Grid], floats: Floats) -> dict[str, Any]:
    """Patches [images, patches, row, column and features] (Kosmos-2.5, Pix2Struct)."""
    places = [[(y + 1, x + 1) for y in range(h) for x in range(w)] for _, h, w in grids]
    pixels = floats((len(grids), len(places[0]), part.channels * part.patch**2))
    return {"flattened_patches": torch.cat([torch.tensor(places).to(pixels.dtype), pixels], dim=-1)}


# an argument that tells the form -> its maker; the first that a forward, or its tower's method, names is taken
_FORMS: dict[str, Callable[[Images, list[Grid], Floats], dict[str, Any]]] = {
    "spatial_shapes": _shapes,
    "image_position_ids": _places,
    "image_grid_hw": _flat,
    "target_sizes": _strip,
    "image_sizes": _pictures,
    "image_patches": _sequence,
    "audio_input_ids": _blocks,
    "flattened_patches": _flattened,
}


class Patches(Images):
    """Images of any size, in one of the forms above."""

    def __init__(self, model: Any, form: str) -> None:
        super().__init__(model)
        self._form = _FORMS[form]
        self.drivers = ["patches", "patch_pairs:frame", *(f"patches/{n**2}" for n in (2, 3, 4, 6))]
        self.drivers += [f"patch_pairs:window:{side}" for side in WINDOW_SIDES]
        self.drivers += [f"patch_pairs:frame/{n**2}" for n in (2, 3, 4, 6)]
        self.drivers += ["frames"]

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """Read the form off the arguments of a model's forward, and of the method that runs its tower."""
        accepted = set(inspect.signature(model.forward).parameters)
        if "pixel_values" not in accepted or not has_tower(model):
            return None
        methods = [m.get_image_features for m in model.modules() if hasattr(type(m), cls.features)]
        for method in methods[-1:]:
            accepted |= set(inspect.signature(method).parameters)
        if not any("image_sizes" in inspect.signature(m.forward).parameters for m in _towers(model)):
            accepted.discard("image_sizes")  # taken for the towers that need it, of which this model has none
        form = next((form for form in _FORMS if form in accepted), None)
        return cls(model, form) if form is not None else None

    def sizes(self, run: int) -> dict[str, Any]:
        """Give one to four images of one size in each run."""
        images, height, width = ((1, 2, 4), (2, 4, 1), (4, 3, 2), (3, 1, 5))[run]
        return {"images": [(1, height * _UNIT, width * _UNIT)] * images}

    def pixels(self, grids: list[Grid], floats: Floats, _text: Workload) -> dict[str, Any]:
        """Make the arguments of the model's form."""
        return self._form(self, grids, floats)


class FlattenedPatches(Patches):
    """Patches [images, patches, row and column and features] of an image of any size (Kosmos-2.5, Pix2Struct).

    Each text has one; where a decoder reads its patches, they are its sources.
    """

    takes = "flattened_patches"

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """Read the form off a model's signature."""
        return cls(model, cls.takes) if cls.takes in inspect.signature(model.forward).parameters else None

    def __init__(self, model: Any, form: str) -> None:
        super().__init__(model, form)
        self.read = "decoder_input_ids" in self.accepted
        self.drivers = [*self.drivers, "pairs:cross"] if self.read else self.drivers
        self.placed = not self.read

    def sizes(self, run: int) -> dict[str, Any]:
        """Give one image, whose patches the text reads where it has them as sources."""
        (image, *_) = super().sizes(run)["images"]
        return {"images": [image]} | ({"sources": [image[1] * image[2]]} if self.read else {})

    def fill(self, batch: dict[str, Any], start: int, workload: Workload, floats: Floats) -> None:
        """Add patches; the segment is a decoder's, where there is one."""
        super().fill(batch, start, workload, floats)
        if self.read:
            batch.setdefault("decoder_input_ids", batch["input_ids"])


def _towers(model: Any) -> list[Any]:
    """List the modules below those that place features in the text."""
    return [module for module in model.modules() if not hasattr(type(module), Images.features) and module is not model]
