"""Images and videos as patches with `image_grid_thw`: the Qwen-VL family, and those that lay patches out otherwise."""

import inspect
from collections.abc import Callable
from typing import Any, Self

import torch

from headway.count.cost_model import SINGLE_FRAMES
from headway.count.workload import Workload
from headway.tracing.inputs.form import WINDOW_SIDES, Floats
from headway.tracing.inputs.images import Grid, Images, side
from headway.tracing.phantom import phantom_floats

_MERGES = ("spatial_merge_size", "merge_size", "merge_kernel_size")
_TEMPORAL = ("temporal_patch_size", "patch_temporal")


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
        return self._told(floats((_patches(grids), features)), grids)

    def _squares(self, grids: list[Grid], floats: Floats) -> dict[str, Any]:
        """Patches [patches, channels, height, width] (Kimi-VL, PaddleOCR-VL)."""
        return self._told(floats((_patches(grids), self.channels, self.patch, self.patch)), grids)

    def _blocks(self, grids: list[Grid], floats: Floats) -> dict[str, Any]:
        """Squares of patches that merge [tokens, height, width, channels], with grids of such squares (Inkling-2)."""
        merged = [(t, h // self.merge, w // self.merge) for t, h, w in grids]
        edge = self.merge * self.patch
        return self._told(floats((_patches(merged), edge, edge, self.channels)), merged)

    def _told(self, pixels: torch.Tensor, grids: list[Grid]) -> dict[str, Any]:
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
