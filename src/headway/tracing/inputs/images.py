"""Images whose features the text reads: where they stand in it, and how one frame after another is handed over.

A tower of one fixed size (`Frames`) does the same work on every frame, however it does it, so all of its costs are
driven by the number of frames. How many text positions an image takes is asked of the model itself (`probe`).
"""

import copy
import inspect
from abc import abstractmethod
from typing import Any, Self

import torch

from headway.count.cost_model import PIXELS
from headway.count.workload import Workload
from headway.errors import TraceError
from headway.tracing.build import subconfigs
from headway.tracing.inputs.form import Floats, InputForm
from headway.tracing.inputs.probe import Probe
from headway.tracing.phantom import phantom_floats

Grid = tuple[int, int, int]
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
        named = [getattr(c, name, None) for c in subconfigs(model.config) for name in _TOKENS]
        self.token: int | None = next((token for token in named if token is not None), None)
        self._positions: dict[Grid, int] = {}

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """Read the form off a model's signature."""
        takes = "pixel_values" in inspect.signature(model.forward).parameters and has_tower(model)
        return cls(model) if takes else None

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
                f"the configuration of {type(self.config).__name__} does not say which token stands for an image: "
                f"set its {' or '.join(_TOKENS[:2])}."
            )
        kinds = {name for name in self.accepted if name.endswith("mm_token_type_ids")}
        batch |= dict.fromkeys(kinds | {"mm_token_type_ids", "token_type_ids"}, shown)


class Frames(Images):
    """Images or tiles [frames, channels, height, width] of the one size that the tower takes."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.size = side(getattr(self.vision, "image_size", None), 224)  # pixels along a frame's side
        self.edge = max(self.size // self.patch, 1)  # patches along a frame's side
        self.drivers = [f"frames:{self.edge}:{self.edge}"]
        if {"input_ids", "decoder_input_ids"}.isdisjoint(
            self.accepted
        ):  # counted off pixels alone, of any size or this
            self.notes = {PIXELS: str(self.size)}
        if self.shown == "grids" and has_video_tower(model):
            self.shown, self.drivers = "images", [f"image_frames:{self.edge}:{self.edge}"]

    def sizes(self, run: int) -> dict[str, Any]:
        """Give numbers of frames that grow out of proportion with the text."""
        return {"images": [(1, self.edge, self.edge)] * (1, 2, 4, 3)[run]}

    def frames(self, grids: list[Grid], floats: Floats, *before: int) -> torch.Tensor:
        """Make all frames of the grids, with dimensions before."""
        return floats((*before, sum(t for t, _, _ in grids), self.channels, self.size, self.size))

    def pixels(self, grids: list[Grid], floats: Floats, _text: Workload) -> dict[str, Any]:
        """Make frames, one after another; for a second tower in its resolution too."""
        made = {"pixel_values": self.frames(grids, floats)}
        if hasattr(self.config, "high_res_vision_config"):
            fine = self.config.high_res_vision_config.image_size
            made["high_res_pixel_values"] = floats((len(grids), self.channels, fine, fine))
        return made


class VideoFrames(Frames):
    """Clips [clips, frames, channels, height, width] for a tower of their own (Video-LLaVA)."""

    takes = "pixel_values_videos"
    features = "get_video_features"
    shown = "videos"

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.token = self.config.video_token_id
        self.drivers = [f"video_frames:{self.edge}:{self.edge}"]

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """Read the form off a model's modules."""
        return cls(model) if has_video_tower(model) else None

    def sizes(self, run: int) -> dict[str, Any]:
        """Give clips of one length in each run."""
        clips, frames = ((1, 4), (1, 3), (2, 5), (3, 2))[run]
        return {"videos": [(frames, self.edge, self.edge)] * clips}

    def pixels(self, grids: list[Grid], floats: Floats, _text: Workload) -> dict[str, Any]:
        """Make the frames of each clip."""
        return {self.takes: floats((len(grids), grids[0][0], self.channels, self.size, self.size))}


class NestedFrames(Frames):
    """Images [texts, images of a text, channels, height, width], with a mask of what is real (Idefics-2, SmolVLM).

    Some may take a finer way to the text instead, with more tokens for each (Granite-Docling).
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.routes = [name for name in ("tile_fine_mask",) if name in self.accepted]
        self.route: dict[str, Any] = {}

    def along(self, route: str) -> Self:
        """Copy the form so that all tiles of its text take the route."""
        other = copy.copy(self)
        other.route, other._positions = {route: torch.ones(1, dtype=torch.bool)}, {}
        return other

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """Read the form off a model's signature."""
        accepted = inspect.signature(model.forward).parameters
        nested = "pixel_attention_mask" in accepted and "spatial_shapes" not in accepted
        return super().of(model) if nested else None

    def pixels(self, grids: list[Grid], floats: Floats, _text: Workload) -> dict[str, Any]:
        """Make frames of one text, all of them real; where tiles are masked whole, a mask of tiles."""
        frames = self.frames(grids, floats, 1)
        whole = not {"tile_fine_mask", "actions"}.isdisjoint(self.accepted)  # whole tiles, or cameras, are masked
        masked = frames.shape[:2] if whole else (*frames.shape[:2], *frames.shape[3:])
        return {"pixel_values": frames, "pixel_attention_mask": torch.ones(masked, dtype=torch.bool), **self.route}


class RobotFrames(NestedFrames):
    """Cameras' pictures beside a robot's state, and the actions that are denoised after the text (pi0)."""

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """Read the form off a model's signature."""
        return super().of(model) if "actions" in inspect.signature(model.forward).parameters else None

    def positions_of(self, grid: Grid) -> int:
        """Ask the tower, which takes pictures one after another."""
        if grid not in self._positions:
            self._positions[grid] = self.probe.rows(
                self.features, Frames.pixels(self, [grid], phantom_floats, Workload())
            )
        return self._positions[grid]

    def pixels(self, grids: list[Grid], floats: Floats, text: Workload) -> dict[str, Any]:
        """Make pictures, a state, and noise in the place of actions."""
        c = self.config
        state = {"state": floats((1, c.max_state_dim)), "timestep": floats((1,))}
        return super().pixels(grids, floats, text) | state | {"noise": floats((1, c.chunk_size, c.max_action_dim))}


class TiledFrames(Frames):
    """Images cut into tiles [images, tiles, channels, height, width], with their sizes (LLaVA-NeXT and -OneVision).

    A grid is one image: its frames are the tiles, the small picture of the whole included.
    """

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """Read the form off a model's configuration, which lists the sizes that images are cut from."""
        pinpoints = getattr(getattr(model, "config", None), "image_grid_pinpoints", None)
        return super().of(model) if pinpoints else None

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.cuts: dict[int, tuple[int, int]] = {}  # tiles of an image -> its size in pixels
        for height, width in self.config.image_grid_pinpoints:
            self.cuts.setdefault(height // self.size * (width // self.size) + 1, (height, width))

    def sizes(self, run: int) -> dict[str, Any]:
        """Give images of several numbers of tiles."""
        few, many = min(self.cuts), max(self.cuts)
        tiles = ([few], [few, many], [few, few, many, many], [many, few, many])[run]
        return {"images": [(t, self.edge, self.edge) for t in tiles]}

    def pixels(self, grids: list[Grid], floats: Floats, _text: Workload) -> dict[str, Any]:
        """Make tiles, padded to the most of any image, which the model cuts off by the images' sizes."""
        unknown = next((t for t, _, _ in grids if t not in self.cuts), None)
        if unknown is not None:
            raise TraceError(f"an image of {unknown} tiles: this model cuts one into {', '.join(map(str, self.cuts))}.")
        most = max(t for t, _, _ in grids)
        return {
            "pixel_values": floats((len(grids), most, self.channels, self.size, self.size)),
            "image_sizes": torch.tensor([self.cuts[t] for t, _, _ in grids]),
        }


class CrossAttentionFrames(Frames):
    """Images that the text reads by cross attention (Idefics, Llama-3.2 vision); a source is a frame that is read."""

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """Read the form off a model's signature."""
        accepted = inspect.signature(model.forward).parameters
        return super().of(model) if not {"image_attention_mask", "aspect_ratio_ids"}.isdisjoint(accepted) else None

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.tiles = getattr(self.vision, "max_num_tiles", 1)
        self.drivers = [*self.drivers, "pairs:cross"]
        self.placed = False

    def sizes(self, run: int) -> dict[str, Any]:
        """Give images whose tiles are all computed, and read by the text."""
        images = (1, 2, 4, 3)[run]
        return {"images": [(self.tiles, self.edge, self.edge)] * images, "sources": [self.tiles * images]}

    def pixels(self, grids: list[Grid], floats: Floats, text: Workload) -> dict[str, Any]:
        """Make frames that every token sees."""
        shape = (self.channels, self.size, self.size)
        if "image_attention_mask" in self.accepted:
            seen = torch.ones((1, text.tokens, len(grids)), dtype=torch.long)
            return {"pixel_values": floats((1, len(grids), *shape)), "image_attention_mask": seen}
        return {
            "pixel_values": floats((1, len(grids), self.tiles, *shape)),
            "aspect_ratio_ids": torch.ones((1, len(grids)), dtype=torch.long),
            "aspect_ratio_mask": torch.ones((1, len(grids), self.tiles), dtype=torch.long),
        }


def has_video_tower(model: Any) -> bool:
    """Say whether a model has a tower for videos alone."""
    return any(path.rpartition(".")[2] == "video_tower" for path, _ in model.named_modules())


def _vision_config(config: Any) -> Any:
    for name in ("vision_config", "vision_tower_config", "encoder"):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    return config
