"""Frames of a video that a model reads, and their size, by the settings in its folder; needs no torchvision.

transformers' own video processors are made of torchvision, which many installations lack, and read a whole video at
once. This one follows the same rules, so that tokens and patches are the same, and frames can be decoded one by one.

Tensor letters: F frames, C channels, H and W pixels, P patches, D values per patch.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import BatchFeature
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.utils.hub import PushToHubMixin, cached_file
from transformers.video_utils import VideoMetadata, make_batched_metadata, make_batched_videos

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


VIDEO_PROCESSORS = {
    "Qwen2VLProcessor": "Qwen2VLVideoProcessor",
    "Qwen2_5_VLProcessor": "Qwen2VLVideoProcessor",
    "Qwen3VLProcessor": "Qwen3VLVideoProcessor",
}
"""Video processor by the class of the processor around it, where the folder does not name one."""

_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_COMMON = {
    "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255, "temporal_patch_size": 2, "merge_size": 2,
    "min_frames": 4, "max_frames": 768, "num_frames": None, "fps": None, "cap_pixels_per_frame": None,
}  # fmt: skip
# Source: the class attributes of transformers' Qwen2VLVideoProcessor and Qwen3VLVideoProcessor, 5.23.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen2VLVideoProcessor": {
        **_COMMON, **_CLIP, "patch_size": 14, "max_video_tokens": 128000,
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
    },
    "Qwen3VLVideoProcessor": {
        **_COMMON, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 16, "max_video_tokens": 768,
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
    },
}  # fmt: skip
FPS = 2.0
"""Frames per second read of a video where the folder does not say. Source: qwen-vl-utils, `FPS`, and Qwen3-VL's own."""


class VideoSettings(PushToHubMixin):
    """A folder's settings for videos that Headway does not read, kept so that they are saved again.

    They are attributes too, as processors ask some of them of their video processor (MiniCPM-V).
    """

    _auto_class = None
    model_input_names: ClassVar[list[str]] = []  # a list, as transformers joins those of the parts

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["settings"][name]
        except KeyError:
            raise AttributeError(f"the video processor's settings have no {name}") from None

    def to_dict(self) -> dict[str, Any]:
        """The settings, as they stand in a processor's folder."""
        return dict(self.settings)


class VideoProcessor(VideoSettings):
    """Rules for videos of Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

    Frames are read at `fps`, or `num_frames` of them, between `min_frames` and `max_frames`; both sides become
    multiples of the patches that one token stands for, within `size` [pixels]: of each frame for Qwen2-VL, of the whole
    video for Qwen3-VL. A video of fewer frames than a patch in time repeats its last.

    Args:
        settings: of the folder.
        kind: "Qwen2VLVideoProcessor" or "Qwen3VLVideoProcessor".

    Source: transformers 5.23, video_processing_qwen2_vl.py and video_processing_qwen3_vl.py, `sample_frames`, `resize`.
    """

    model_input_names: ClassVar[list[str]] = ["pixel_values_videos", "video_grid_thw"]

    def __init__(self, settings: Mapping[str, Any], kind: str) -> None:
        merged = {**_DEFAULTS[kind], **{name: value for name, value in settings.items() if value is not None}}
        size = dict(merged["size"])  # older folders bound the pixels in two settings of their own
        size["shortest_edge"] = merged.pop("min_pixels", None) or size["shortest_edge"]
        size["longest_edge"] = merged.pop("max_pixels", None) or size["longest_edge"]
        for name in ("image_processor_type", "processor_class"):
            merged.pop(name, None)
        super().__init__({**merged, "size": size, "video_processor_type": kind})
        self.per_video = kind == "Qwen3VLVideoProcessor"
        self.patch_size: int = merged["patch_size"]
        self.temporal_patch_size: int = merged["temporal_patch_size"]
        self.merge_size: int = merged["merge_size"]
        self.do_rescale, self.do_normalize = bool(merged["do_rescale"]), bool(merged["do_normalize"])
        self.rescale_factor: float = merged["rescale_factor"]
        self.image_mean, self.image_std = merged["image_mean"], merged["image_std"]
        self.min_pixels, self.max_pixels = int(size["shortest_edge"]), int(size["longest_edge"])

    def with_settings(
        self,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        fps: float | None = None,
        max_frames: int | None = None,
    ) -> "VideoProcessor":
        """The same rules with other bounds [pixels], rate [1/s] or most frames; a rate takes the place of a number."""
        size = {
            "shortest_edge": self.min_pixels if min_pixels is None else min_pixels,
            "longest_edge": self.max_pixels if max_pixels is None else max_pixels,
        }
        settings = self.settings | {"size": size}
        if fps is not None:
            settings |= {"fps": fps, "num_frames": None}
        if max_frames is not None:
            settings |= {"max_frames": max_frames}
            if settings["num_frames"] is not None:
                settings["num_frames"] = min(settings["num_frames"], max_frames)
        return VideoProcessor(settings, settings["video_processor_type"])

    def sample(self, num_frames: int, fps: float) -> list[int]:
        """The places of the frames that the model reads, in order; at least `temporal_patch_size` of them."""
        indices = self._sample_qwen3(num_frames, fps) if self.per_video else self._sample_qwen2(num_frames, fps)
        return indices + indices[-1:] * (self.temporal_patch_size - len(indices))

    def _sample_qwen3(self, total: int, fps: float) -> list[int]:
        wanted = self.settings["num_frames"]
        if wanted is None:
            wanted = max(int(total / fps * (self.settings["fps"] or FPS)), self.settings["min_frames"])
            wanted = min(wanted, self.settings["max_frames"])
        return [int(i) for i in np.linspace(0, total - 1, min(wanted, total)).round()]

    def _sample_qwen2(self, total: int, fps: float) -> list[int]:
        factor = self.temporal_patch_size
        if total < factor:
            return [0]
        wanted = self.settings["num_frames"]
        if wanted is not None:
            wanted = min(round(wanted / factor), total // factor) * factor
        else:
            most = math.floor(min(self.settings["max_frames"], total) / factor) * factor
            by_rate = min(max(total / fps * (self.settings["fps"] or FPS), self.settings["min_frames"]), most, total)
            wanted = math.floor(by_rate / factor) * factor
        wanted = max(wanted, factor)
        return [int(i) for i in torch.arange(0, total, total / wanted).int().tolist()[:wanted]]

    def resized(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """(height, width) at which the model reads each of `num_frames` sampled frames [pixels].

        Raises:
            ValueError: one side is more than 200 times the other.
        """
        factor, most = self.patch_size * self.merge_size, self.max_pixels
        if not self.per_video:
            if self.settings["cap_pixels_per_frame"]:
                total = int(self.settings["max_video_tokens"] * factor * factor * 0.9)
                share = total * self.temporal_patch_size // num_frames
                most = max(min(most, share), int(self.min_pixels * 1.05))
            resized: tuple[int, int] = smart_resize(height, width, factor, self.min_pixels, most)
            return resized
        if self.settings["cap_pixels_per_frame"]:
            cap = self.settings["max_video_tokens"] * factor * factor
            most = max(min(cap, most // num_frames), int(self.min_pixels * 1.05)) * num_frames
        return _resized_video(num_frames, height, width, self.temporal_patch_size, factor, self.min_pixels, most)

    def grid(self, num_frames: int, height: int, width: int) -> tuple[int, int, int]:
        """(t, h, w) of `num_frames` sampled frames of this size [patches].

        Raises:
            ValueError: as `resized`.
        """
        new_height, new_width = self.resized(num_frames, height, width)
        grid_t = -(-num_frames // self.temporal_patch_size)
        return grid_t, new_height // self.patch_size, new_width // self.patch_size

    def resize(self, frame_HWC: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
        """One frame at another size, (C, H, W): bicubic with antialiasing, on bytes, as torchvision resizes tensors."""
        frame_1CHW = torch.from_numpy(np.ascontiguousarray(frame_HWC)).permute(2, 0, 1)[None]
        if frame_1CHW.shape[2:] == (height, width):
            return frame_1CHW[0].numpy()
        resized_1CHW = torch.nn.functional.interpolate(
            frame_1CHW, (height, width), mode="bicubic", align_corners=False, antialias=True
        )
        return resized_1CHW[0].numpy()

    def __call__(self, videos: Any, video_metadata: Any = None, **options: Any) -> BatchFeature:
        """Patches of decoded videos, as the model reads them; the call that a processor makes of its video processor.

        Args:
            videos: frames of each, (F, H, W, C) or (F, C, H, W) bytes.
            video_metadata: of each, with `fps`; frames are sampled by it unless `do_sample_frames` is False.
            options: `do_sample_frames`; others cannot be had here and are the folder's.
        """
        clips = [np.asarray(video) for video in make_batched_videos(videos)]
        clip_metadata = make_batched_metadata(clips, video_metadata=video_metadata)
        patches, grids, scale = [], [], pixel_scale(self)
        for frames, metadata in zip(clips, clip_metadata, strict=True):
            last = frames.shape[-1] in (1, 3, 4)
            frames_FHWC = frames if last else frames.transpose(0, 2, 3, 1)
            places = list(range(len(frames)))
            if options.get("do_sample_frames", True):
                places = self.sample(len(frames), metadata.fps or 24)
            metadata.frames_indices = places
            size = self.resized(len(places), *frames_FHWC.shape[1:3])
            frames_FCHW = np.stack([self.resize(frames_FHWC[place], *size) for place in places])
            patches.append(self.lay_out(frames_FCHW) * scale[0] + scale[1])
            grids.append(self.grid(len(places), *frames_FHWC.shape[1:3]))
        features = {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}
        return BatchFeature({**features, "video_metadata": clip_metadata})

    def lay_out(self, frames_FCHW: NDArray[np.uint8]) -> torch.Tensor:
        """Frames of their final size as patches of bytes, (P, D)."""
        contiguous_FCHW = np.ascontiguousarray(frames_FCHW)
        return lay_out(contiguous_FCHW, self.patch_size, self.merge_size, self.temporal_patch_size)


def video_processor(name: str, processor_class: str) -> VideoSettings:
    """Read a folder's settings for videos: a `VideoProcessor` where its rules are known, else the settings alone.

    Settings come from processor_config.json, video_preprocessor_config.json or preprocessor_config.json, the first that
    has them, as in transformers.

    Args:
        name: a model folder or Hub name.
        processor_class: name of the class of the processor around it.
    """
    settings: dict[str, Any] = {}
    for file in ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json"):
        path = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
        if path is None:
            continue
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if file == "processor_config.json":
            content = content.get("video_processor")
        if content:
            settings = content
            break
    kind = settings.get("video_processor_type") or VIDEO_PROCESSORS.get(processor_class)
    return VideoProcessor(settings, kind) if kind in _DEFAULTS else VideoSettings(settings)


def metadata_of(num_frames: int, fps: float, indices: Sequence[int]) -> VideoMetadata:
    """A sampled video as transformers' processors describe it."""
    return VideoMetadata(total_num_frames=num_frames, fps=fps, frames_indices=list(indices))


def _resized_video(
    num_frames: int, height: int, width: int, temporal_patch: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Source: transformers, video_processing_qwen3_vl.py, `smart_resize`."""
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) / min(height, width) > 200:
        raise ValueError(f"the aspect ratio must be below 200, but the frames have {height} x {width} pixels")
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    pixels = round(num_frames / temporal_patch) * temporal_patch * new_height * new_width
    if pixels > max_pixels:
        shrink = math.sqrt(num_frames * height * width / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif pixels < min_pixels:
        grow = math.sqrt(min_pixels / (num_frames * height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width
