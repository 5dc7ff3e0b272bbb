"""Images of any size, as patches or as pixels, beside the argument that carries their grids, shapes, places or sizes.

`Grids` are patches with `image_grid_thw`, as the Qwen-VL family takes them. The images of one run of `Patches` have one
size, since most of those forms pad to the largest, and padding is no work that counts.
"""

import inspect
from collections.abc import Callable
from typing import Any, Self

import torch

from headway.count.cost_model import SINGLE_FRAMES
from headway.count.workload import Workload
from headway.tracing.inputs.form import WINDOW_SIDES, Floats
from headway.tracing.inputs.images import Grid, Images, has_tower, side
from headway.tracing.phantom import phantom_floats

_UNIT = 12  # patches: towers merge 2, 3, 4 or 6 of them along a side
# settings that hold the patches along a side, and the frames, of which one token is made
_MERGES = ("spatial_merge_size", "merge_size", "merge_kernel_size")
_TEMPORAL = ("temporal_patch_size", "patch_temporal")


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
    """Patches [1, patches of all images, features], without their shapes (Fuyu)."""
    return {"pixel_values": floats((1, sum(h * w for _, h, w in grids), part.channels * part.patch**2))}


def _blocks(part: Images, grids: list[Grid], floats: Floats) -> dict[str, Any]:
    """Patches [patches, frames, height, width, channels], without their shapes (Inkling)."""
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
        self.is_read = "decoder_input_ids" in self.accepted
        self.drivers = [*self.drivers, "pairs:cross"] if self.is_read else self.drivers
        self.placed = not self.is_read

    def sizes(self, run: int) -> dict[str, Any]:
        """Give one image, whose patches the text reads where it has them as sources."""
        (image, *_) = super().sizes(run)["images"]
        return {"images": [image]} | ({"sources": [image[1] * image[2]]} if self.is_read else {})

    def fill(self, batch: dict[str, Any], start: int, workload: Workload, floats: Floats) -> None:
        """Add patches; the segment is a decoder's, where there is one."""
        super().fill(batch, start, workload, floats)
        if self.is_read:
            batch.setdefault("decoder_input_ids", batch["input_ids"])


def _towers(model: Any) -> list[Any]:
    """List the modules below the modules that place features in the text."""
    return [module for module in model.modules() if not hasattr(type(module), Images.features) and module is not model]


class Grids(Images):
    """Patches with the grids that they come from."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        names = [getattr(self.vision, name) for name in _MERGES if hasattr(self.vision, name)]
        self.merge = side(names[0], 1) if names else 2  # patches along a side that merge into one token
        self.temporal = next((getattr(self.vision, n) for n in _TEMPORAL if hasattr(self.vision, n)), 1)
        self.layout, self.deep = self._ask()  # whether one grid may hold several frames
        if not self.deep:
            self.notes = SINGLE_FRAMES
        self.drivers = ["patches", "patch_pairs:frame", "patch_pairs:grid"]
        if self.merge > 1:
            self.drivers += [f"patches/{self.merge**2}", f"text_tokens/{self.merge**2}"]
        self.drivers += [f"patch_pairs:window:{side}" for side in WINDOW_SIDES]
        self.drivers += ["grids", "frames"]

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """Read the form off a model's signature."""
        return super().of(model) if "image_grid_thw" in inspect.signature(model.forward).parameters else None

    def _ask(self) -> tuple[Callable[..., dict[str, Any]], bool]:
        """Find the first layout that the tower accepts, of a grid with frames if it takes one."""
        refusal: Exception | None = None
        for frames in (2, 1):
            grids = [(frames, 4 * self.merge, 6 * self.merge)] * 2
            for layout in (self._flat, self._squares, self._blocks):
                try:
                    self.probe.rows(self.features, layout(grids, phantom_floats))
                except (RuntimeError, ValueError, IndexError) as error:
                    refusal = refusal or error
                else:
                    return layout, frames > 1
        assert refusal is not None
        raise refusal

    def _flat(self, grids: list[Grid], floats: Floats) -> dict[str, Any]:
        """Patches [patches, channels x frames x height x width] (Qwen-VL)."""
        features = self.channels * self.temporal * self.patch**2
        return self._arguments(floats((_patches(grids), features)), grids)

    def _squares(self, grids: list[Grid], floats: Floats) -> dict[str, Any]:
        """Patches [patches, channels, height, width] (Kimi-VL, PaddleOCR-VL)."""
        return self._arguments(floats((_patches(grids), self.channels, self.patch, self.patch)), grids)

    def _blocks(self, grids: list[Grid], floats: Floats) -> dict[str, Any]:
        """Squares of patches that merge [tokens, height, width, channels], with grids of such squares (Inkling-2)."""
        merged = [(t, h // self.merge, w // self.merge) for t, h, w in grids]
        edge = self.merge * self.patch
        return self._arguments(floats((_patches(merged), edge, edge, self.channels)), merged)

    def _arguments(self, pixels: torch.Tensor, grids: list[Grid]) -> dict[str, Any]:
        merges = torch.full((len(grids),), self.merge)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids), "image_merge_sizes": merges}

    def pixels(self, grids: list[Grid], floats: Floats, _text: Workload) -> dict[str, Any]:
        """Make patches and grids, in the layout that the tower takes."""
        return self.layout(grids, floats)

    def positions_of(self, grid: Grid) -> int:
        """Ask the model how many text positions a grid takes; one of several frames takes as many for each."""
        frames = grid[0] if not self.deep else 1
        return frames * super().positions_of((grid[0] // frames, *grid[1:]))

    def fill(self, batch: dict[str, Any], start: int, workload: Workload, floats: Floats) -> None:
        """Add the grids; frame by frame where the tower takes no other."""
        grids = self.grids(workload)
        if not self.deep:
            grids = [(1, h, w) for t, h, w in grids for _ in range(t)]
        super().fill(batch, start, Workload(workload.segments, images=grids, sources=workload.sources), floats)

    def positions(self, workload: Workload) -> int:
        """Count the grids' text positions, and one after each grid, or frame, that keeps it apart."""
        frames = sum(t for t, _, _ in self.grids(workload)) if not self.deep else len(workload.grids)
        return sum(self.positions_of(grid) for grid in self.grids(workload)) + frames if self.placed else 0

    def sizes(self, run: int) -> dict[str, Any]:
        """Give one to three grids of several frames and proportions."""
        m = self.merge
        grids = (
            [(1, 6 * m, 10 * m)],
            [(1, 14 * m, 4 * m), (1, 6 * m, 10 * m)],
            [(3, 10 * m, 6 * m), (1, 4 * m, 4 * m)],
            [(1, 4 * m, 8 * m), (2, 8 * m, 6 * m), (1, 6 * m, 6 * m)],
        )
        return {"images": grids[run]}


def _patches(grids: list[Grid]) -> int:
    return sum(t * h * w for t, h, w in grids)
