"""The parts of a multimodal model's inputs: which workloads exercise a tower, and which arguments carry its inputs."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headway.count.workload import Workload

    Floats = Callable[[Sequence[int]], torch.Tensor]  # makes an input of floats of a shape: phantoms, or random numbers

WINDOW_SIDES = range(2, 65)  # window sizes of vision attention that are tried [patches]


class Part(ABC):
    """How one tower of a model takes its inputs.

    Attributes:
        takes: the forward argument that carries them, such as `pixel_values`.
        drivers: what its tower's costs may be proportional to.
        strided: drivers that count what the tower's convolutions make of its frames, up to the slash.
    """

    takes: ClassVar[str]
    drivers: Sequence[str]
    strided: Sequence[str] = ()

    @classmethod
    @abstractmethod
    def of(cls, model: Any) -> Part | None:
        """Read the part from a model's signature and configuration; None where the model takes no such input."""

    @abstractmethod
    def sizes(self, run: int) -> dict[str, Any]:
        """Give the workload's arguments for run 0, 1, 2 or 3, such as `{"images": [(1, 12, 20)]}`."""

    @abstractmethod
    def positions(self, workload: Workload) -> int:
        """Count the text positions that the inputs take."""

    @abstractmethod
    def fill(self, batch: dict[str, Any], start: int, workload: Workload, floats: Floats) -> None:
        """Add the arguments, and the tokens from `batch["input_ids"][0, start]` on."""


class Grids(Part):
    """Images as flat patches [patches, features] with `image_grid_thw`: the Qwen-VL family and those like it.

    Attributes:
        features: floats of a patch.
        merge: patches along a side that merge into one token.
        token: number of the token that an image's positions hold.
    """

    takes = "pixel_values"

    def __init__(self, features: int, merge: int, token: int) -> None:
        self.features = features
        self.merge = merge
        self.token = token
        self.drivers = ["patches", "patch_pairs:frame", "patch_pairs:grid"]
        self.drivers += [f"patches/{merge**2}"] if merge > 1 else []
        self.drivers += [f"patch_pairs:window:{side}" for side in WINDOW_SIDES]
        self.drivers += ["grids", "frames"]

    @classmethod
    def of(cls, model: Any) -> Grids | None:
        """Read the part from a model's signature and vision configuration."""
        accepted = inspect.signature(model.forward).parameters
        vision: Any = getattr(getattr(model, "config", None), "vision_config", None)
        if "pixel_values" not in accepted or "image_grid_thw" not in accepted or vision is None:
            return None
        names = ("in_channels", "in_chans", "num_channels")
        channels = next((getattr(vision, k) for k in names if hasattr(vision, k)), 3)
        features = channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
        return cls(features, vision.spatial_merge_size, model.config.image_token_id)

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

    def positions(self, workload: Workload) -> int:
        """Count merged patches."""
        return workload.patches // self.merge**2

    def fill(self, batch: dict[str, Any], start: int, workload: Workload, floats: Floats) -> None:
        """Add pixels, grids and the images' tokens."""
        if not len(workload.grids):
            return
        ids = batch["input_ids"]
        ids[:, start : start + self.positions(workload)] = self.token
        batch["pixel_values"] = floats((workload.patches, self.features))
        batch["image_grid_thw"] = torch.from_numpy(workload.grids.copy())
        batch["mm_token_type_ids"] = (ids == self.token).int()


def plain_token(config: Any) -> int:
    """Pick a token number that means nothing special to the model, nor to any tower of it."""
    parts: list[Any] = [config] if config is not None else []
    special: set[int] = set()
    while parts:
        part = parts.pop()
        special |= {
            v for k, v in vars(part).items() if k.endswith(("_token_id", "_token_index")) and isinstance(v, int)
        }
        parts += [sub for key in getattr(part, "sub_configs", ()) if (sub := getattr(part, key, None)) is not None]
    return next(token for token in range(len(special) + 1) if token not in special)
