"""Sizes at which images and videos are read, and numbers of frames, where that is to differ from the model's folder.

transformers' processors bound what they read in ways of their own: by the pixels of an image (Qwen-VL, GLM-V and what
follows them), by edges, tiles or tokens. Which one bounds pixels is found out by running it, not by its name.
"""

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from PIL import Image as Pillow

from headway.errors import ConfigError

_BOUNDS = {"min_pixels": ("min_pixels", "shortest_edge"), "max_pixels": ("max_pixels", "longest_edge")}
"""Keys of a processor's `size` that may bound pixels from below and from above, the first that it has."""

_TRIED_SIDE = 224  # side of the square by which a processor is tried, a multiple of most processors' units [pixels]
_OF_SIZE = ("size", "crop_size", "do_resize", "do_center_crop")


@dataclass(frozen=True)
class MediaSizes:
    """Bounds on what a model reads of images and videos; None for those of its folder.

    Attributes:
        min_pixels: least of an image, as its processor counts them; smaller ones are enlarged [pixels].
        max_pixels: most of an image, likewise; larger ones are shrunk [pixels].
        video_min_pixels: least of a video, of each frame or of all as its processor counts them [pixels].
        video_max_pixels: most of a video, likewise [pixels].
        fps: frames read of a second of a video [1/s].
        max_frames: most frames read of a video [frames].
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    video_min_pixels: int | None = None
    video_max_pixels: int | None = None
    fps: float | None = None
    max_frames: int | None = None

    def __bool__(self) -> bool:
        return self != _NONE

    @property
    def changes(self) -> dict[str, int | float]:
        """The bounds that are set, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def of(cls, settings: Any) -> "MediaSizes":
        """The bounds among settings that have more."""
        return cls(**{part.name: getattr(settings, part.name) for part in fields(cls)})

    def write_into(self, processor: Any) -> None:
        """Give a processor the bounds, as its own: whatever it reads, and saves, follows them.

        Raises:
            ConfigError: a bound that the processor does not have, or that cannot hold beside its others.
        """
        changes = self.changes
        if {"min_pixels", "max_pixels"} & changes.keys():
            processor.image_processor = self._images(processor)
        if changes.keys() - {"min_pixels", "max_pixels"}:
            processor.video_processor = self._videos(processor)

    def written_into(self, processor: Any) -> Any:
        """A copy of a processor that has the bounds; the processor stays as it is.

        Raises:
            ConfigError: as `write_into`.
        """
        changed = copy.copy(processor)
        self.write_into(changed)
        return changed

    def _images(self, processor: Any) -> Any:
        images = getattr(processor, "image_processor", None)
        wanted = {name: value for name, value in self.changes.items() if name in _BOUNDS}
        if images is None:
            raise ConfigError(f"{_listed(wanted)} cannot take effect: the model has no image processor. Leave it out.")
        if not _bounds_pixels(images):
            raise ConfigError(
                f"{_listed(wanted)} cannot take effect: {type(images).__name__} does not bound the pixels of an image. "
                f"It has instead {_own_settings(images)}, in the preprocessor_config.json or processor_config.json of "
                "the model's folder. Leave it out, and change those in a copy of the folder."
            )
        changed = _with_size(images, wanted)
        least, most = (_bound(changed.size, name) for name in _BOUNDS)
        _check_order(wanted, "min_pixels", least, "max_pixels", most)
        return changed

    def _videos(self, processor: Any) -> Any:
        """A copy of the video processor, with its settings changed."""
        wanted = {name: value for name, value in self.changes.items() if name not in _BOUNDS}
        rules: Any = getattr(processor, "video_processor", None)
        if not hasattr(rules, "with_settings"):  # a processor whose rules Headway does not know lacks the method
            raise ConfigError(
                f"{_listed(wanted)} cannot take effect: no videos of this model are read ({type(processor).__name__}). "
                "Leave it out; docs/data.md lists what is read."
            )
        own = {name.removeprefix("video_"): value for name, value in wanted.items()}
        changed = rules.with_settings(**own)
        _check_order(wanted, "video_min_pixels", changed.min_pixels, "video_max_pixels", changed.max_pixels)
        return changed


_NONE = MediaSizes()  # bounds of the model's folder alone


def _listed(wanted: Mapping[str, Any]) -> str:
    return " and ".join(f"{name} {value}" for name, value in wanted.items())


def _check_order(wanted: Mapping[str, Any], low: str, least: int, high: str, most: int) -> None:
    if {low, high} & wanted.keys() and least > most:
        raise ConfigError(
            f"{_listed(wanted)} cannot hold: {low} would be {least} and {high} {most}, with what the model's folder "
            f"says where nothing else does. Give both, {low} not above {high}."
        )


def _bound(size: Any, name: str) -> int:
    return int(next(value for key in _BOUNDS[name] if (value := _entry(size, key)) is not None))


def _entry(size: Any, key: str) -> Any:
    return size.get(key) if isinstance(size, dict) else getattr(size, key, None)


def _with_size(images: Any, bounds: Mapping[str, Any]) -> Any:
    """A copy of an image processor with other bounds in its `size`."""
    changed, size = copy.copy(images), images.size
    entries = {
        next(key for key in _BOUNDS[name] if _entry(size, key) is not None): int(value)
        for name, value in bounds.items()
    }
    changed.size = {**size, **entries} if isinstance(size, dict) else replace(size, **entries)
    return changed


def _bounds_pixels(images: Any) -> bool:
    """Tell whether an image processor makes patches with their grid, and bounds in its `size` limit the patches.

    A grey square is read with room for all of it, for a quarter, and with a bound from below of four times as much.
    """
    if "image_grid_thw" not in getattr(images, "model_input_names", ()):
        return False
    square = Pillow.fromarray(np.full((_TRIED_SIDE, _TRIED_SIDE, 3), 127, dtype=np.uint8))
    area = _TRIED_SIDE**2
    tried = ((1, 16 * area), (1, area // 4), (4 * area, 64 * area))
    try:
        unbounded, shrunk, enlarged = (
            _patches(_with_size(images, {"min_pixels": least, "max_pixels": most}), square) for least, most in tried
        )
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, StopIteration):
        return False  # the processor has no such bounds
    return shrunk < unbounded < enlarged


def _patches(images: Any, picture: Pillow.Image) -> int:
    return int(np.prod(np.asarray(images(images=[picture], return_tensors="np")["image_grid_thw"])))


def _own_settings(images: Any) -> str:
    """The settings of an image processor that say how large it reads, as its own class names them."""
    from transformers.processing_utils import ImagesKwargs

    own = getattr(getattr(images, "valid_kwargs", None), "__annotations__", {}).keys() - ImagesKwargs.__annotations__
    settings = images.to_dict()
    names = [name for name in (*_OF_SIZE, *sorted(own)) if settings.get(name) is not None]
    return ", ".join(f"{name}: {settings[name]}" for name in names) or "no setting of its size"
