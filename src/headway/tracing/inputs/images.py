"""Images whose features the text reads: their places in the text, whatever form they are handed over in.

How many text positions an image takes is asked of the model itself (`probe`). The forms are frames of one fixed size
(`frames`) and patches of images of any size (`patches`).
"""

import inspect
from abc import abstractmethod
from typing import Any, Self

import torch

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
        tokens = [getattr(c, name, None) for c in subconfigs(model.config) for name in _TOKENS]
        self.token: int | None = next((token for token in tokens if token is not None), None)
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


def _vision_config(config: Any) -> Any:
    for name in ("vision_config", "vision_tower_config", "encoder"):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    return config
