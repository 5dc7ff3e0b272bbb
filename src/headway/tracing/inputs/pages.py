"""Images in the source of an encoder-decoder, among its text or after it (Florence-2, UDOP)."""

import inspect
from typing import Any, Self

import torch

from headway.count.workload import Workload
from headway.tracing import build
from headway.tracing.inputs.form import Floats
from headway.tracing.inputs.images import Frames


class EncoderFrames(Frames):
    """Frames whose features take the places of tokens in the encoder's text (Florence-2).

    The length of a source counts the tokens of its text and of its images.
    """

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """Read the form off a model's signature: ids for an encoder and a decoder, and features in one of them."""
        accepted = inspect.signature(model.forward).parameters
        apart = any(hasattr(type(module), cls.features) for module in model.modules())
        fits = apart and {"input_ids", "decoder_input_ids", "encoder_outputs"} <= accepted.keys()
        return super().of(model) if fits else None

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.drivers = [*self.drivers, "sources", "source_pairs:full", "pairs:cross"]
        self.reach = max(build.window_lengths(model, False), default=0)

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
    def of(cls, model: Any) -> Self | None:
        """Read the form off a model's signature: boxes of words, and of what is seen."""
        accepted = inspect.signature(model.forward).parameters
        return cls(model) if {"bbox", "visual_bbox", cls.takes, "decoder_input_ids"} <= accepted.keys() else None

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
