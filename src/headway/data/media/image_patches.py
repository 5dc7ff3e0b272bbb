"""Images as vision patches of bytes, laid out as a model's own image processor lays out its floats.

Tensor letters: P patches, D values per patch, C channels, H and W pixels.
"""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from headway.data.media.images import Picture, decode_all
from headway.data.samples import Grid
from headway.errors import ConfigError
from headway.models.video import Scale, lay_out, normalised, pixel_scale

# Sides of the picture that a processor must lay out as we do before its layout is ours; no multiples of a patch.
_PROBE_HW = (173, 251)


class ImagePatches:
    """Turns pictures into patches for one model.

    Patches stay bytes where the processor's own result is bytes * scale + shift, which is found out by running both on
    one picture; else they are the processor's floats.

    Args:
        image_processor: the model's own.

    Attributes:
        scale: (scale_D, shift_D) for patches of bytes; None where patches are floats.
    """

    def __init__(self, image_processor: Any) -> None:
        self.processor = image_processor
        self._grids: dict[tuple[int, int], Grid] = {}
        self.scale: Scale | None = None
        if _has_known_layout(image_processor):
            scale = pixel_scale(image_processor)
            if self._agrees(scale):
                self.scale = scale

    def resized(self, image_processor: Any) -> "ImagePatches":
        """The same for a processor that differs in the bounds of its sizes alone."""
        changed = copy.copy(self)
        changed.processor, changed._grids = image_processor, {}
        return changed

    def grid(self, height: int, width: int) -> Grid:
        """(t, h, w) of an image of this size [patches].

        Raises:
            ValueError: the processor refuses the size.
            ConfigError: the processor gives no grids.
        """
        if isinstance(self.processor, Qwen2VLImageProcessorPil) and self.processor.do_resize:
            return _qwen_grid(self.processor, height, width)
        if (height, width) not in self._grids:  # by the processor itself, on a blank picture of the size
            (grid,) = self._by_processor([Pillow.new("RGB", (width, height))])[1]
            self._grids[height, width] = grid
        return self._grids[height, width]

    def patches(self, pictures: Sequence[Picture]) -> torch.Tensor:
        """The patches of pictures, end to end: (P, D), or one frame's bytes where `scale` is set.

        Models that read frames in pairs see a picture twice; `normalised` repeats it on the device.

        Raises:
            DataError: a picture is damaged.
        """
        if self.scale is None:
            return self._by_processor(decode_all(pictures))[0]
        laid_out = [self._of_bytes(picture.decode(), self.grid(*picture.size)) for picture in pictures]
        return laid_out[0] if len(laid_out) == 1 else torch.cat(laid_out)

    def _of_bytes(self, image: Pillow.Image, grid: Grid) -> torch.Tensor:
        ours = self.processor
        size = (grid[2] * ours.patch_size, grid[1] * ours.patch_size)
        resized = image.resize(size, ours.resample)
        planes_CHW = np.empty((3, size[1], size[0]), np.uint8)
        for plane_HW, channel in zip(planes_CHW, resized.split(), strict=True):
            plane_HW[:] = np.asarray(channel)
        return lay_out(planes_CHW[None], ours.patch_size, ours.merge_size, temporal_patch=1)

    def _by_processor(self, images: list[Pillow.Image]) -> tuple[torch.Tensor, list[Grid]]:
        out = self.processor(images=images, return_tensors="pt")
        if "image_grid_thw" not in out:
            raise ConfigError(
                f"The image processor {type(self.processor).__name__} gives no patch grids (image_grid_thw); Headway "
                "packs images of models that do, such as Qwen2-VL, Qwen2.5-VL and Qwen3-VL."
            )
        grids = [(int(t), int(h), int(w)) for t, h, w in out["image_grid_thw"]]
        return torch.as_tensor(out["pixel_values"]).float(), grids

    def _agrees(self, scale: Scale) -> bool:
        """Tell whether bytes * scale + shift gives the processor's result for a picture of noise."""
        noise = np.random.default_rng(0).integers(0, 256, (*_PROBE_HW, 3), dtype=np.uint8)
        image = Pillow.fromarray(noise)
        theirs, (grid,) = self._by_processor([image])
        if grid != self.grid(*_PROBE_HW):
            return False
        ours = normalised(self._of_bytes(image, grid), scale)
        return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=0, atol=1e-5)


def _has_known_layout(processor: Any) -> bool:
    names = ("patch_size", "merge_size", "temporal_patch_size", "resample", "do_rescale", "do_normalize")
    if "image_grid_thw" not in getattr(processor, "model_input_names", ()):
        return False
    return all(getattr(processor, name, None) is not None for name in names) and bool(processor.do_resize)


def _qwen_grid(processor: Any, height: int, width: int) -> Grid:
    """Source: transformers, `Qwen2VLImageProcessorPil.resize`."""
    patch = processor.patch_size
    resized = smart_resize(
        height,
        width,
        factor=patch * processor.merge_size,
        min_pixels=processor.size["shortest_edge"],
        max_pixels=processor.size["longest_edge"],
    )
    return 1, resized[0] // patch, resized[1] // patch
