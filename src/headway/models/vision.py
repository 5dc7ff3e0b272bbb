"""Positions and boundaries that a vision tower derives from image grids, computed with the pack instead.

transformers' towers work out positions, attention boundaries, windows and interpolation from the grids with loops and
reads that make the host wait for the device. They take all of it ready-made as well, under names with the prefix
"image_" or "video_"; the functions that compute it are transformers' own.

Tensor letters: M images, P patches, N attention segments.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from headway.plugins import family_hook
from headway.tracing.build import subconfigs

# Vision configurations whose towers, and the models around them, take everything ready-made: what their classes call
# themselves, as a saved configuration may carry an older name ("qwen2_5_vl" for "qwen2_5_vl_vision").
_KNOWN = ("qwen2_vl_vision", "qwen2_5_vl_vision", "qwen3_vl_vision", "qwen3_vl_moe_vision")
_PADDING_SIDE = 32  # side of the squares that padding patches form [patches]; whole images would cost attention


@dataclass(frozen=True, slots=True)
class VisionGeometry:
    """Layout of patches in a model's vision tower.

    Attributes:
        merge_size: patches per side that one token stands for [patches].
        image_token: id of the placeholder of an image's tokens.
        video_token: id of the placeholder of a video's tokens.
        patch_size: side of a patch [pixels].
        patch_values: numbers that the tower reads of a patch.
        window_size: side of the attention windows [pixels]; None without windows.
        table_side: side of the learnt position table that is resampled to each grid; None without one.
        interpolation: how it is resampled.
        align_corners: whether its corners meet the grid's.
    """

    merge_size: int
    image_token: int
    video_token: int
    patch_size: int
    patch_values: int
    window_size: int | None = None
    table_side: int | None = None
    interpolation: str = "bilinear"
    align_corners: bool = True

    def inputs(self, grids_M3: torch.Tensor, prefix: str) -> dict[str, Any]:
        """Positions and boundaries of the grids, as keyword arguments of the model.

        Args:
            grids_M3: (t, h, w) of each image or video [patches], on the CPU.
            prefix: "image_" or "video_".
        """
        cu_seqlens_N = get_vision_cu_seqlens(grids_M3)
        arguments: dict[str, Any] = {
            "position_ids": self._position_ids(grids_M3),
            "cu_seqlens": cu_seqlens_N,
            "max_seqlen": int(cu_seqlens_N.diff().max()),
        }
        if self.window_size is not None:
            index, cu_windows_N = get_vision_window_index(grids_M3, self.merge_size, self.window_size, self.patch_size)
            arguments |= {"window_index": index, "cu_window_seqlens": cu_windows_N}
            arguments["max_window_seqlen"] = int(cu_windows_N.diff().max())
        if self.table_side is not None:
            arguments["interp_indices"], arguments["interp_weights"] = get_vision_interpolation_indices_and_weights(
                grids_M3,
                self.table_side,
                mode=self.interpolation,
                align_corners=self.align_corners,
                spatial_merge_size=self.merge_size,
            )
        return {prefix + name: value for name, value in arguments.items()}

    def _position_ids(self, grids_M3: torch.Tensor) -> torch.Tensor:
        """Row and column of each patch, shape (P, 2); images of one size are worked out once."""
        sizes, grid_of_M = torch.unique(grids_M3, dim=0, return_inverse=True)
        positions = [get_vision_position_ids(size[None], self.merge_size) for size in sizes]
        return torch.cat([positions[number] for number in grid_of_M.tolist()])

    def padding_grids(self, patches: int) -> torch.Tensor:
        """Grids of blank images that fill a patch buffer, shape (M, 3).

        Args:
            patches: how many to fill, a multiple of the patches of one token [patches].
        """
        squares, remainder = divmod(patches, _PADDING_SIDE**2)
        strip = (1, remainder // self.merge_size, self.merge_size)
        grids = [(squares, _PADDING_SIDE, _PADDING_SIDE)] * bool(squares) + [strip] * bool(remainder)
        return torch.tensor(grids, dtype=torch.long).reshape(-1, 3)


def vision_tower(model: PreTrainedModel) -> PreTrainedModel | None:
    """A model's vision tower; None where it has none, or one that takes no precomputed positions."""
    for tower in model.modules():
        if isinstance(tower, PreTrainedModel) and getattr(tower.config_class, "model_type", None) in _KNOWN:
            return tower
    return None


def tower_of_all(model: PreTrainedModel) -> torch.nn.Module | None:
    """The vision tower that runs on a pack of every process or of none, by blank images; None without such a one."""
    of_family = family_hook(model.config, "vision_tower")
    return vision_tower(model) if of_family is None else of_family(model)


def patch_size_of(config: PreTrainedConfig) -> int | None:
    """Side of a patch of a model's vision tower [pixels], by its configuration; None where it names none."""
    side = next((part.patch_size for part in subconfigs(config) if getattr(part, "patch_size", None)), None)
    return int(side[0] if isinstance(side, list | tuple) else side) if side else None


def vision_geometry(model: PreTrainedModel) -> VisionGeometry | None:
    """The geometry of a model's vision tower; None where `vision_tower` finds none."""
    tower = vision_tower(model)
    if tower is None:
        return None
    config: Any = tower.config
    model_config: Any = model.config
    return VisionGeometry(
        merge_size=config.spatial_merge_size,
        image_token=model_config.image_token_id,
        video_token=model_config.video_token_id,
        patch_size=config.patch_size,
        patch_values=config.in_channels * config.temporal_patch_size * config.patch_size**2,
        window_size=getattr(tower, "window_size", None),
        table_side=getattr(tower, "num_grid_per_side", None),
        interpolation=getattr(tower, "interpolation_mode", "bilinear"),
        align_corners=getattr(tower, "interpolation_align_corners", True),
    )
