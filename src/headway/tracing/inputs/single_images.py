"""Models that take one image, or one clip of a fixed number of frames, with each text."""

import inspect
from typing import Any, Self

import torch

from headway.count.workload import Workload
from headway.tracing.inputs.form import Floats
from headway.tracing.inputs.images import Frames, Grid
from headway.tracing.phantom import phantom_floats


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
    def of(cls, model: Any) -> Self | None:
        """Read the form off a model's signature: no method that gives features for tokens, or one that asks more."""
        accepted = inspect.signature(model.forward).parameters
        text = not {"input_ids", "decoder_input_ids"}.isdisjoint(accepted)
        apart = any(hasattr(type(m), cls.features) for m in model.modules()) or "image_embeds_position_mask" in accepted
        model_type = getattr(getattr(model, "config", None), "model_type", "")
        shared = not {"qformer_input_ids", "image_token_pooling"}.isdisjoint(accepted) or model_type == "paligemma"
        return super().of(model) if text and (shared or not apart) else None

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
        made = super().pixels(grids, floats, text)
        if self.length > 1:
            made["pixel_values"] = floats((len(grids), self.length, *made["pixel_values"].shape[1:]))
        if "image_token_pooling" in self.accepted:
            made |= self._pooled(len(grids), floats)
        if self.instructed:
            made["qformer_input_ids"] = torch.ones((len(grids), int(text.sources.sum())), dtype=torch.long)
        return made

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
