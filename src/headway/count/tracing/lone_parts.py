"""Models that take one image, or one clip of a fixed number of frames, with each text."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from headway.count.tracing.image_parts import Frames, Grid, phantom_floats
from headway.count.workload import Workload

if TYPE_CHECKING:
    from typing import Self

    from headway.count.tracing.parts import Floats


class LoneFrames(Frames):
    """One image of a fixed size with each text, where two of them would not cost twice as much.

    The text reads it by cross attention (BLIP), stands after it (GIT), or its images all see each other (PaliGemma). A
    Q-Former's instruction (InstructBLIP) is the segment's source: so many tokens that are read beside each frame.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.in_text = self.token is not None and self.probe.has(self.features)
        self.instructed = "qformer_input_ids" in self.accepted
        self.prefixed = (
            getattr(self.config, "model_type", "") == "paligemma"
        )  # its 0 stands for what all see, 1 for text
        self.length = 4 if self.instructed and not self.probe.has("get_image_features") else 1
        self.drivers = [f"lone:{self.length}:{self.edge}:{self.edge}"]
        self.drivers += ["sources", "source_pairs:full"] if self.instructed else []

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """Read the part from a model's signature: no method that gives features for tokens, or one that asks more."""
        accepted = inspect.signature(model.forward).parameters
        text = not {"input_ids", "decoder_input_ids"}.isdisjoint(accepted)
        apart = any(hasattr(type(m), cls.features) for m in model.modules()) or "image_embeds_position_mask" in accepted
        model_type = getattr(getattr(model, "config", None), "model_type", "")
        shared = "qformer_input_ids" in accepted or model_type == "paligemma"
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
            self._positions[grid] = self.probe.prepended(text) if "input_ids" in self.accepted else 0
        return self._positions[grid]

    def place(self, batch: dict[str, Any], start: int, lengths: list[int]) -> None:
        """Put the image's tokens into the text; or take as many off it, where the image stands before."""
        if self.in_text:
            super().place(batch, start, lengths)
            if self.prefixed:
                batch["token_type_ids"] = 1 - batch["token_type_ids"]
            return
        for name in ("input_ids", "position_ids"):
            batch[name] = batch[name][:, : batch[name].shape[1] - sum(lengths)]

    def pixels(self, grids: list[Grid], floats: Floats, text: Workload) -> dict[str, Any]:
        """Make the frames, and the Q-Former's instruction."""
        made = super().pixels(grids, floats, text)
        if self.length > 1:
            made["pixel_values"] = floats((len(grids), self.length, *made["pixel_values"].shape[1:]))
        if self.instructed:
            made["qformer_input_ids"] = torch.ones((len(grids), int(text.sources.sum())), dtype=torch.long)
        return made
