"""Images whose features the text reads: their places in the text, and the forms of images of any size.

How many text positions an image takes is asked of the model itself. Images of any size come as patches or as pixels,
beside the argument that carries their grids, shapes, places or sizes. `Grids` are patches with `image_grid_thw`, as the
Qwen-VL family takes them. The images of one run of `Patches` have one size, since most of those forms pad to the
largest, and padding is no work that counts. The forms of frames of one fixed size are in `frames`.
"""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch

from headway.count.cost_model import SINGLE_FRAMES
from headway.count.workload import Workload
from headway.errors import TraceError
from headway.tracing.build import subconfigs
from headway.tracing.inputs.form import WINDOW_SIDES, Floats, InputForm, Probe
from headway.tracing.phantom import phantom_floats

Grid = tuple[int, int, int]
_UNIT = 12  # patches: towers merge 2, 3, 4 or 6 of them along a side
# settings that hold the patches along a side, and the frames, of which one token is made
_MERGES = ("spatial_merge_size", "merge_size", "merge_kernel_size")
_TEMPORAL = ("temporal_patch_size", "patch_temporal")
_TOKENS = ("image_token_id", "image_token_index", "image_patch_id")


def side(value: Any, default: int) -> int:
    """Read a size that configurations give as a number, or as one for each direction."""
    value = value[0] if isinstance(value, list | tuple) and value else value
    return int(value) if value else default


def has_tower(model: Any) -> bool:
    """Say whether a model of transformers has its vision tower: some leave it out where its configuration is None."""
    config = getattr(model, "config", None)
    return getattr(config, "vision_config", config) is not None


class Images(InputForm):
    """Images whose features take the places of tokens in the text, or stand before it."""

    takes = "pixel_values"
    features = "get_image_features"
    shown = "grids"

    def __init__(self, model: Any) -> None:
        self.config: Any = model.config
        # the tower's configuration
        self.vision: Any = next(
            (c for c in subconfigs(model.config) if getattr(c, "patch_size", None)), _vision_config(model.config)
        )
        self.accepted = inspect.signature(model.forward).parameters  # the arguments of its forward
        self.probe = Probe(model)  # asks the model
        self.patch = side(getattr(self.vision, "patch_size", None), 16)
        self.channels = side(getattr(self.vision, "num_channels", None), 3)
        # whether the features stand in the text; else the text, if there is one, has a tower of its own
        self.placed = "input_ids" in self.accepted and not self.probe.has("get_text_features")
        tokens = [getattr(c, name, None) for c in subconfigs(model.config) for name in _TOKENS]
        self.token: int | None = next((token for token in tokens if token is not None), None)
        self._positions: dict[Grid, int] = {}

    @classmethod
    def _fits(cls, model: Any, accepted: Mapping[str, Any]) -> bool:
        return "pixel_values" in accepted and has_tower(model)

    @abstractmethod
    def pixels(self, grids: list[Grid], floats: Floats, text: Workload) -> dict[str, Any]:
        """Make the arguments that carry the images in a text."""

    def grids(self, workload: Workload) -> list[Grid]:
        """List the grids of a workload that this form carries: all, or those of images or of videos alone."""
        return [tuple(grid) for grid in getattr(workload, self.shown).tolist()]

    def positions_of(self, grid: Grid) -> int:
        """Ask the model how many text positions one image takes."""
        if "image_embeds_position_mask" in self.accepted:
            return int(self.config.latent_query_num)  # the queries of a resampler that no method runs alone
        if grid not in self._positions:
            self._positions[grid] = self.probe.rows(
                self.features, self.pixels([grid], phantom_floats, Workload([8], sources=[8]))
            )
        return self._positions[grid]

    def positions(self, workload: Workload) -> int:
        """Count the images' text positions, and one after each that keeps it apart from the next."""
        return sum(self.positions_of(grid) + 1 for grid in self.grids(workload)) if self.placed else 0

    def fill(self, batch: dict[str, Any], start: int, workload: Workload, floats: Floats) -> None:
        """Add pixels, whatever describes them, and the images' tokens."""
        grids = self.grids(workload)
        if grids:
            batch |= self.pixels(grids, floats, workload)
            if self.placed:
                self.place(batch, start, [self.positions_of(grid) for grid in grids])

    def place(self, batch: dict[str, Any], start: int, lengths: list[int]) -> None:
        """Put the images' tokens, and what else tells them from text, into the batch."""
        ids = batch["input_ids"]
        shown = torch.zeros_like(ids)
        for length in lengths:
            shown[:, start : start + length] = 1
            start += length + 1
        if "image_embeds_position_mask" in self.accepted:
            batch["image_embeds_position_mask"] = shown.bool()
        elif self.token is not None:
            ids[shown.bool()] = self.token
        else:
            raise TraceError(
                f"the configuration of {type(self.config).__name__} does not say which token stands for an image. "
                f"Set its {' or '.join(_TOKENS[:2])}."
            )
        kinds = {name for name in self.accepted if name.endswith("mm_token_type_ids")}
        batch |= dict.fromkeys(kinds | {"mm_token_type_ids", "token_type_ids"}, shown)


def _vision_config(config: Any) -> Any:
    for name in ("vision_config", "vision_tower_config", "encoder"):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    return config


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
    def _fits(cls, model: Any, accepted: Mapping[str, Any]) -> bool:
        return super()._fits(model, accepted) and "image_grid_thw" in accepted

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
