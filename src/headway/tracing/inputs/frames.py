"""Frames: images of the one size that a tower takes, and the ways in which models are handed several of them.

A tower of one fixed size does the same work on every frame, however it does it, so all of its costs are driven by the
number of frames.
"""

import copy
from collections.abc import Mapping
from typing import Any, Self

import torch

from headway.count.cost_model import PIXELS
from headway.count.workload import Workload
from headway.errors import TraceError
from headway.tracing import build
from headway.tracing.inputs.form import Floats
from headway.tracing.inputs.images import Grid, Images, side
from headway.tracing.phantom import phantom_floats


class Frames(Images):
    """Images or tiles [frames, channels, height, width] of the one size that the tower takes."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.size = side(getattr(self.vision, "image_size", None), 224)  # pixels along a frame's side
        self.edge = max(self.size // self.patch, 1)  # patches along a frame's side
        self.drivers = [f"frames:{self.edge}:{self.edge}"]
        # counted off pixels alone, of any size or this
        if {"input_ids", "decoder_input_ids"}.isdisjoint(self.accepted):
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
        arguments = {"pixel_values": self.frames(grids, floats)}
        if hasattr(self.config, "high_res_vision_config"):
            fine = self.config.high_res_vision_config.image_size
            arguments["high_res_pixel_values"] = floats((len(grids), self.channels, fine, fine))
        return arguments


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
    def _fits(cls, model: Any, _accepted: Mapping[str, Any]) -> bool:
        return has_video_tower(model)

    def sizes(self, run: int) -> dict[str, Any]:
        """Give clips of one length in each run."""
        clips, frames = ((1, 4), (1, 3), (2, 5), (3, 2))[run]
        return {"videos": [(frames, self.edge, self.edge)] * clips}

    def pixels(self, grids: list[Grid], floats: Floats, _text: Workload) -> dict[str, Any]:
        """Make the frames of each clip."""
        return {self.takes: floats((len(grids), grids[0][0], self.channels, self.size, self.size))}


class NestedFrames(Frames):
    """Images [texts, images of a text, channels, height, width], with a mask of real pixels (Idefics-2, SmolVLM).

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
    def _fits(cls, model: Any, accepted: Mapping[str, Any]) -> bool:
        nested = "pixel_attention_mask" in accepted and "spatial_shapes" not in accepted
        return super()._fits(model, accepted) and nested

    def pixels(self, grids: list[Grid], floats: Floats, _text: Workload) -> dict[str, Any]:
        """Make frames of one text, all of them real; where tiles are masked whole, a mask of tiles."""
        frames = self.frames(grids, floats, 1)
        # whole tiles, or cameras, are masked
        by_tile = not {"tile_fine_mask", "actions"}.isdisjoint(self.accepted)
        masked = frames.shape[:2] if by_tile else (*frames.shape[:2], *frames.shape[3:])
        return {"pixel_values": frames, "pixel_attention_mask": torch.ones(masked, dtype=torch.bool), **self.route}


class RobotFrames(NestedFrames):
    """Cameras' pictures beside a robot's state, and the actions that are denoised after the text (pi0)."""

    @classmethod
    def _fits(cls, model: Any, accepted: Mapping[str, Any]) -> bool:
        return super()._fits(model, accepted) and "actions" in accepted

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
    def _fits(cls, model: Any, accepted: Mapping[str, Any]) -> bool:
        pinpoints = getattr(getattr(model, "config", None), "image_grid_pinpoints", None)
        return super()._fits(model, accepted) and bool(pinpoints)

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
            raise TraceError(
                f"an image of {unknown} tiles, but this model cuts an image into {', '.join(map(str, self.cuts))}."
            )
        most = max(t for t, _, _ in grids)
        return {
            "pixel_values": floats((len(grids), most, self.channels, self.size, self.size)),
            "image_sizes": torch.tensor([self.cuts[t] for t, _, _ in grids]),
        }


class CrossAttentionFrames(Frames):
    """Images that the text reads by cross attention (Idefics, Llama-3.2 vision); a source is a frame that is read."""

    @classmethod
    def _fits(cls, model: Any, accepted: Mapping[str, Any]) -> bool:
        return super()._fits(model, accepted) and not {"image_attention_mask", "aspect_ratio_ids"}.isdisjoint(accepted)

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
            mask = torch.ones((1, text.tokens, len(grids)), dtype=torch.long)
            return {"pixel_values": floats((1, len(grids), *shape)), "image_attention_mask": mask}
        return {
            "pixel_values": floats((1, len(grids), self.tiles, *shape)),
            "aspect_ratio_ids": torch.ones((1, len(grids)), dtype=torch.long),
            "aspect_ratio_mask": torch.ones((1, len(grids), self.tiles), dtype=torch.long),
            "cross_attention_mask": torch.ones((1, text.tokens, len(grids), self.tiles), dtype=torch.long),
        }


class SingleImages(Frames):
    """One image of a fixed size with each text, where two of them would not cost twice as much.

    The text reads it by cross attention (BLIP), stands after it (GIT), or its images all see each other (PaliGemma). A
    Q-Former's instruction (InstructBLIP) is the segment's source: so many tokens that are read beside each frame.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.decodes = {"decoder_input_ids", "encoder_outputs"} <= self.accepted.keys()
        self.placed = True  # if not in the text, then before it, or read by it
        self.instructed = "qformer_input_ids" in self.accepted
        self.length = 1
        if self.instructed and not self.probe.has(self.features):  # InstructBLIP for videos: clips of four frames
            self.length, self.features = 4, "get_video_features"
            self.token = getattr(self.config, "video_token_index", None)
        self.in_text = self.token is not None and self.probe.has(self.features)
        # PaliGemma's token types are 0 for what all of the text sees, 1 for the rest
        self.prefixed = getattr(self.config, "model_type", "") == "paligemma"
        self.drivers = [f"lone:{self.length}:{self.edge}:{self.edge}"]
        self.drivers += ["sources", "source_pairs:full"] if self.instructed else []

    @classmethod
    def _fits(cls, model: Any, accepted: Mapping[str, Any]) -> bool:
        text = not {"input_ids", "decoder_input_ids"}.isdisjoint(accepted)
        apart = any(hasattr(type(m), cls.features) for m in model.modules()) or "image_embeds_position_mask" in accepted
        model_type = getattr(getattr(model, "config", None), "model_type", "")
        shared = not {"qformer_input_ids", "image_token_pooling"}.isdisjoint(accepted) or model_type == "paligemma"
        return super()._fits(model, accepted) and text and (shared or not apart)

    def sizes(self, run: int) -> dict[str, Any]:
        """Give one image, and an instruction of another length in each run."""
        sources = {"sources": [(23, 31, 47, 37)[run]]} if self.instructed else {}
        return {"images": [(self.length, self.edge, self.edge)], **sources}

    def positions(self, workload: Workload) -> int:
        """Count the positions in the text, or before it, where these count as the segment's too."""
        return sum(self.positions_of(grid) for grid in self.grids(workload))

    def positions_of(self, grid: Grid) -> int:
        """Ask the model how many positions its image takes, in the text or before it."""
        if self.in_text:
            return super().positions_of(grid)
        if grid not in self._positions:
            text = {"input_ids": torch.zeros((1, 8), dtype=torch.long), "use_cache": False}
            text |= self.pixels([grid], phantom_floats, Workload([8]))
            self._positions[grid] = 0 if self.decodes else self.probe.prepended(text)
        return self._positions[grid]

    def place(self, batch: dict[str, Any], start: int, lengths: list[int]) -> None:
        """Put the image's tokens into the text; or take as many off it, where the image stands before."""
        if self.in_text:
            super().place(batch, start, lengths)
            if self.prefixed:
                batch["token_type_ids"] = 1 - batch["token_type_ids"]
            return
        if self.decodes:  # the segment is the decoder's; an encoder takes the image alone
            batch.setdefault("decoder_input_ids", batch["input_ids"])
            del batch["input_ids"]
            return
        for name in ("input_ids", "position_ids"):
            batch[name] = batch[name][:, : batch[name].shape[1] - sum(lengths)]

    def pixels(self, grids: list[Grid], floats: Floats, text: Workload) -> dict[str, Any]:
        """Make the frames, and the Q-Former's instruction."""
        arguments = super().pixels(grids, floats, text)
        if self.length > 1:
            arguments["pixel_values"] = floats((len(grids), self.length, *arguments["pixel_values"].shape[1:]))
        if "image_token_pooling" in self.accepted:
            arguments |= self._pooled(len(grids), floats)
        if self.instructed:
            arguments["qformer_input_ids"] = torch.ones((len(grids), int(text.sources.sum())), dtype=torch.long)
        return arguments

    def _pooled(self, images: int, floats: Floats) -> dict[str, Any]:
        """Make each picture's one crop, whose squares of 2 x 2 patches, partial ones too, become tokens (Molmo2)."""
        edge, half = self.edge, -(-self.edge // 2)
        corners = [(2 * y, 2 * x) for y in range(half) for x in range(half)]
        square = ((0, 0), (0, 1), (1, 0), (1, 1))
        pooling = [
            [(y + b) * edge + x + a if y + b < edge and x + a < edge else -1 for b, a in square] for y, x in corners
        ]
        return {
            "pixel_values": floats((images, edge**2, self.channels * self.patch**2)),
            "image_token_pooling": torch.tensor(pooling).repeat(images, 1),
            "image_grids": torch.tensor([[half, half, 0, 0]] * images),
            "image_num_crops": torch.ones(images, dtype=torch.long),
        }


class EncoderFrames(Frames):
    """Frames whose features take the places of tokens in the encoder's text (Florence-2).

    The length of a source counts the tokens of its text and of its images.
    """

    @classmethod
    def _fits(cls, model: Any, accepted: Mapping[str, Any]) -> bool:
        apart = any(hasattr(type(module), cls.features) for module in model.modules())
        fits = apart and {"input_ids", "decoder_input_ids", "encoder_outputs"} <= accepted.keys()
        return super()._fits(model, accepted) and fits

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.drivers = [*self.drivers, "sources", "source_pairs:full", "pairs:cross"]
        self.reach = max(build.window_lengths(model, False)[0], default=0)

    def sizes(self, run: int) -> dict[str, Any]:
        """Give frames, and sources that hold them beside text of another length in each run, beyond any window."""
        images = super().sizes(run)["images"]
        inside = sum(self.positions_of(grid) + 1 for grid in images)
        return {"images": images, "sources": [inside + (149, 283, 571, 409)[run] + (self.reach if run else 0)]}

    def positions(self, _workload: Workload) -> int:
        """Give none: the segment is the decoder's, and holds no image."""
        return 0

    def fill(self, batch: dict[str, Any], _start: int, workload: Workload, floats: Floats) -> None:
        """Add pixels, and the encoder's tokens beside the decoder's."""
        segment = batch["decoder_input_ids"]
        length = int(workload.sources.sum())
        batch["input_ids"], batch["position_ids"] = segment[:, :1].repeat(1, length), torch.arange(length)[None]
        super().fill(batch, 0, workload, floats)


class PageFrames(Frames):
    """A picture of a page after the page's words, each of which has a bounding box (UDOP).

    The length of a source counts its words and the patches of the picture. A patch under a word joins the word, and its
    place is left empty; transformers computes empty places too.
    """

    @classmethod
    def _fits(cls, _model: Any, accepted: Mapping[str, Any]) -> bool:
        return {"bbox", "visual_bbox", cls.takes, "decoder_input_ids"} <= accepted.keys()

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.drivers = [f"lone:1:{self.edge}:{self.edge}"]

    def sizes(self, run: int) -> dict[str, Any]:
        """Give one page, and sources that hold it after text of another length in each run."""
        return {"images": [(1, self.edge, self.edge)], "sources": [self.edge**2 + (149, 283, 571, 409)[run]]}

    def positions(self, _workload: Workload) -> int:
        """Give none: the segment is the decoder's, and holds no image."""
        return 0

    def fill(self, batch: dict[str, Any], _start: int, workload: Workload, floats: Floats) -> None:
        """Add pixels, take the picture's places off the words, and give these a box each."""
        grids = self.grids(workload)
        batch |= self.pixels(grids, floats, workload) if grids else {}
        words = int(workload.sources.sum()) - len(grids) * self.edge**2
        batch["input_ids"] = batch["input_ids"][:, :words]
        batch["bbox"] = torch.tensor([0.25, 0.25, 0.5, 0.5]).repeat(1, words, 1)
        places = torch.arange(self.edge**2)
        corner = torch.stack([places % self.edge, places // self.edge], dim=-1)[None]
        batch["visual_bbox"] = torch.cat([corner, corner + 1], dim=-1) / self.edge


def has_video_tower(model: Any) -> bool:
    """Say whether a model has a tower for videos alone."""
    return any(path.rpartition(".")[2] == "video_tower" for path, _ in model.named_modules())
