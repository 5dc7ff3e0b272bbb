"""Pixels as vision patches of bytes, in the order that Qwen2-VL and its successors read.

Tensor letters: F frames, C channels, H and W pixels, P patches, D values per patch (channel, frame, row, column).
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_CHANNELS = 3

Scale = tuple[torch.Tensor, torch.Tensor]
"""(scale_D, shift_D): the model reads bytes * scale + shift."""


def lay_out(frames_FCHW: NDArray[np.uint8], patch: int, merge: int, temporal_patch: int) -> torch.Tensor:
    """Lay frames out as patches of bytes in Qwen2-VL's order.

    Patches that one token stands for are neighbours; within a patch come channel, frame, row and column. Frames are
    repeated to fill the last patch in time.

    Args:
        frames_FCHW: frames of one picture or video; contiguous.
        patch: side of a patch [pixels].
        merge: patches per side that one token stands for.
        temporal_patch: frames per patch.

    Returns:
        (P, D) bytes.

    Source: transformers, `Qwen2VLImageProcessorPil.patchify` and `Qwen2VLVideoProcessor.patchify`.
    """
    missing = -len(frames_FCHW) % temporal_patch
    num_frames, channels, height, width = frames_FCHW.shape
    h, w = height // patch, width // patch
    row = np.dtype((np.void, patch))  # a patch's row of pixels moves as one element
    rows = frames_FCHW.view(row).reshape(num_frames, channels, h // merge, merge, patch, w // merge, merge)
    grid_t = (num_frames + missing) // temporal_patch
    out = np.empty((grid_t, h // merge, w // merge, merge, merge, channels, temporal_patch, patch), row)
    for place in range(grid_t * temporal_patch):
        frame = rows[min(place, num_frames - 1)].transpose(1, 4, 2, 5, 0, 3)
        out[place // temporal_patch, ..., place % temporal_patch, :] = frame
    return torch.from_numpy(out.view(np.uint8).reshape(grid_t * h * w, channels * temporal_patch * patch * patch))


def normalised(pixels_PD: torch.Tensor, scale: Scale) -> torch.Tensor:
    """Rescale patches of bytes to the model's floats; patches of one frame are repeated to fill the patch in time.

    Args:
        pixels_PD: patches, (P, D), or (P, D / frames) where there is one frame only.
        scale: (scale_D, shift_D).

    Returns:
        (P, D), float32.
    """
    scale_D, shift_D = scale
    frames = len(scale_D) // pixels_PD.shape[1]
    if frames > 1:
        one_PCFX = pixels_PD.view(len(pixels_PD), _CHANNELS, 1, pixels_PD.shape[1] // _CHANNELS)
        pixels_PD = one_PCFX.expand(-1, -1, frames, -1).reshape(len(pixels_PD), -1)
    return torch.addcmul(shift_D, pixels_PD.float(), scale_D)


def pixel_scale(processor: Any) -> Scale:
    """Scale and shift (scale_D, shift_D) from bytes to the model's floats, by a processor's settings."""
    scale_C, shift_C = np.ones(3), np.zeros(3)
    if processor.do_rescale:
        scale_C *= processor.rescale_factor
    if processor.do_normalize:
        std_C = np.asarray(processor.image_std, np.float64)
        scale_C, shift_C = scale_C / std_C, -np.asarray(processor.image_mean, np.float64) / std_C
    repeats = processor.temporal_patch_size * processor.patch_size**2
    scale_D, shift_D = (torch.from_numpy(np.repeat(v, repeats).astype(np.float32)) for v in (scale_C, shift_C))
    return scale_D, shift_D
