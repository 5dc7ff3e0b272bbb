"""A chat's media, opened for one model: sizes and placeholders from headers, pixels and features when asked for.

`ImagePatches` lays images out as vision patches of bytes, as a model's own image processor lays out its floats.

Tensor letters: P patches, D values per patch, C channels, H and W pixels.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow
from transformers import PreTrainedTokenizerBase
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from headway.count.modalities import MODALITIES, Modality
from headway.data.media.audio import SoundFeatures
from headway.data.media.images import Picture, decode_all
from headway.data.media.joining import Joinable
from headway.data.media.processor_images import ProcessedImages, reads_processed_images
from headway.data.media.sizes import MediaSizes
from headway.data.media.tensors import LAYOUTS, MediaTensors
from headway.data.media.videos import VideoPatches, clip_of
from headway.data.samples import Chat, Grid, Media
from headway.errors import ConfigError, DataError, foreign
from headway.models.video import Scale, VideoProcessor, lay_out, metadata_of, normalised, pixel_scale

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


@dataclass(frozen=True, slots=True)
class OpenedKind:
    """A chat's items of one kind, opened: sizes from their headers.

    Attributes:
        sizes: of each item, or of each of its tiles: (t, h, w) [patches], or feature frames [frames].
        written: text that stands for each.
        features: decodes them into what the model reads; None where `processed` holds that.
        processed: tensors by the model's own names, where they are as its processor gives them.
        positions: what the model's rule of positions takes beside the sizes.
    """

    sizes: tuple[Any, ...]
    written: Sequence[str]
    features: Callable[[], torch.Tensor] | None = None
    processed: Mapping[str, Joinable] = field(default_factory=dict)
    positions: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OpenedMedia:
    """A chat's media, opened.

    Attributes:
        kinds: of each kind that there is, by the names of `headway.count.modalities`.
    """

    kinds: Mapping[str, OpenedKind] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, tuple[Any, ...]]:
        """Sizes of the items of each kind that has sizes: a picture's tokens may need none."""
        return {name: opened.sizes for name, opened in self.kinds.items() if opened.sizes}

    @property
    def written(self) -> dict[str, list[str]]:
        """Text that stands for each item, by the names of placeholders."""
        return {MODALITIES[name].kind: list(opened.written) for name, opened in self.kinds.items()}

    @property
    def processed(self) -> dict[str, Joinable]:
        """Tensors of all media that are as the model's processor gives them."""
        return {name: joinable for opened in self.kinds.values() for name, joinable in opened.processed.items()}

    def tensors(self) -> dict[str, MediaTensors]:
        """Decode all media.

        Raises:
            DataError: one is damaged.
        """
        return {
            name: MediaTensors(torch.tensor(opened.sizes), None if opened.features is None else opened.features())
            for name, opened in self.kinds.items()
            if opened.sizes
        }

    def rope_arguments(self) -> dict[str, Any]:
        """The sizes, and what goes with them, as the model's rule of positions takes them."""
        arguments: dict[str, Any] = {}
        for name, opened in self.kinds.items():
            if opened.sizes:
                arguments |= {LAYOUTS[name].rope_argument: torch.tensor(opened.sizes), **opened.positions}
        return arguments


@dataclass(frozen=True)
class Opening:
    """Where the media of a chat are opened, and for what.

    Attributes:
        where: the chat's place, for messages.
        files: closes the files.
        decodes: whether images that the model's processor reads are decoded at once, which gives their tensors too.
        max_pixels: larger images and frames are refused [pixels].
        processor: the model's.
    """

    where: str
    files: ExitStack
    decodes: bool
    max_pixels: int
    processor: Any


Opener = Callable[[Sequence[Media], Opening], OpenedKind]
"""Opens items of one kind of a chat."""


def _open_patches(images: ImagePatches, media: Sequence[Media], at: Opening) -> OpenedKind:
    """Open images that the model reads as patches with their grids."""
    pictures = tuple(at.files.enter_context(Picture(item, at.where, at.max_pixels)) for item in media)
    with foreign(partial(refused, at.where, "an image")):  # an image may be too narrow to resize
        grids = tuple(images.grid(*picture.size) for picture in pictures)
        inputs = {"image_grid_thw": np.asarray(grids)}
        words = [at.processor.replace_image_token(inputs, image_idx=i) for i in range(len(grids))]
    return OpenedKind(grids, words, partial(images.patches, pictures))


def _open_processed(processed: ProcessedImages, media: Sequence[Media], at: Opening) -> OpenedKind:
    """Open images whose tensors are as the model's processor gives them."""
    pictures = tuple(at.files.enter_context(Picture(item, at.where, at.max_pixels)) for item in media)
    tensors: Mapping[str, Joinable] = {}
    with foreign(partial(refused, at.where, "an image")):
        if at.decodes:
            lengths, tensors = processed.read(decode_all(pictures))
        else:
            lengths = processed.lengths([picture.size for picture in pictures])
    return OpenedKind(lengths.grids, lengths.written, processed=tensors)


def _open_videos(videos: VideoPatches, media: Sequence[Media], at: Opening) -> OpenedKind:
    """Open videos, which the model reads as patches with their grids."""
    opened = [clip_of(item, at.where, at.max_pixels) for item in media]
    with foreign(partial(refused, at.where, "a video")):  # frames may be too narrow to resize
        clips = tuple(videos.sample(clip) for clip in opened)
        grids = tuple(clip.grid for clip in clips)
        clip_metadata = [metadata_of(own.clip.num_frames, own.clip.fps, own.places) for own in clips]
        seconds = {}
        if "second_per_grid_ts" in at.processor.model_input_names:  # time that a patch spans [s]
            spans = tuple(videos.rules.temporal_patch_size / own.sampled_fps for own in clip_metadata)
            seconds = {"second_per_grid_ts": spans}
        inputs = {"video_grid_thw": np.asarray(grids), "video_metadata": clip_metadata}
        words = [at.processor.replace_video_token(inputs, video_idx=i) for i in range(len(clips))]
    return OpenedKind(grids, words, partial(videos.patches, clips), positions=seconds)


def _open_sounds(sounds: SoundFeatures, media: Sequence[Media], at: Opening) -> OpenedKind:
    """Open sounds, which the model reads as features of frames."""
    with foreign(partial(refused, at.where, "a sound")):
        opened = tuple(sounds.open(item, at.where) for item in media)
        frames = tuple(sounds.frames(sound) for sound in opened)
        return OpenedKind(frames, sounds.written(opened), partial(sounds.features, opened))


def _sounds_of(processor: Any) -> Opener | None:
    return partial(_open_sounds, SoundFeatures(processor)) if SoundFeatures.can_read(processor) else None


OPENERS: dict[str, Callable[[Any], Opener | None]] = {"audio": _sounds_of}
"""For kinds of media but images and videos, what makes of a model's processor that which opens them; None where the
model does not read such."""
_NOUNS = {"audio": "sounds"}  # kinds of media whose name is no plural


class MediaReader:
    """Opens the media of chats for one model.

    Args:
        processor: the model's processor, or its tokenizer if it reads text alone.
        max_image_pixels: larger images and frames are refused [pixels].
        patch: side of a patch of the model's vision tower [pixels]; None where that is not known.

    Attributes:
        images: how the model reads images as patches with their grids; None where it does not.
        processed: how the model reads images otherwise, by its own processor; None where it does not.
        videos: how the model reads videos; None where it does not.
    """

    def __init__(self, processor: Any, max_image_pixels: int, patch: int | None = None) -> None:
        self._processor, self._max_pixels = processor, max_image_pixels
        self._image_error: ConfigError | None = None
        self.images: ImagePatches | None = None
        self.processed: ProcessedImages | None = None
        self.videos: VideoPatches | None = None
        self._others: dict[str, Opener] = {}
        if isinstance(processor, PreTrainedTokenizerBase):
            return
        if reads_processed_images(processor):
            try:
                self.processed = ProcessedImages(processor, patch)
            except ConfigError as error:  # text can be trained all the same
                self._image_error = error
        elif hasattr(processor, "image_processor"):
            self.images = ImagePatches(processor.image_processor)
            self._image_error = _beyond_patches(processor)
        rules = getattr(processor, "video_processor", None)
        if isinstance(rules, VideoProcessor):
            self.videos = VideoPatches(rules, None if self.images is None else self.images.scale)
        opened = {name: opener_of(processor) for name, opener_of in OPENERS.items()}
        self._others = {name: opener for name, opener in opened.items() if opener is not None}

    def resized(self, sizes: MediaSizes) -> "MediaReader":
        """The reader of samples whose media have bounds of their own.

        Raises:
            ConfigError: the model's processor has no such bounds.
        """
        processor = sizes.written_into(self._processor)
        changed = copy.copy(self)
        changed._processor = processor
        if self.images is not None:
            changed.images = self.images.resized(processor.image_processor)
        if self.videos is not None:
            changed.videos = self.videos.resized(processor.video_processor)
        return changed

    def open(self, sample: Chat, stack: ExitStack, decodes: bool) -> OpenedMedia:
        """Read the headers of a chat's media; files stay open until the stack is closed.

        Args:
            sample: the chat.
            stack: closes the files.
            decodes: whether images that the model's processor reads are decoded at once, which gives their tensors too.

        Raises:
            DataError: media that cannot be read, or that the model does not take.
            ConfigError: images that nothing here can hand to the model.
        """
        at = Opening(sample.where, stack, decodes, self._max_pixels, self._processor)
        openers = self._openers()
        kinds: dict[str, OpenedKind] = {}
        for name, row in MODALITIES.items():
            media = sample.media(row.kind)
            if not media:
                continue
            if name == "images" and self._image_error is not None:
                raise self._image_error
            if name not in openers:
                raise self._refusal(sample.where, row, len(media))
            kinds[name] = openers[name](media, at)
        return OpenedMedia(kinds)

    def _openers(self) -> "dict[str, Opener]":
        """Openers of each kind of media that the model reads, by the names of `headway.count.modalities`."""
        openers: dict[str, Opener] = {}
        if self.processed is not None:
            openers["images"] = partial(_open_processed, self.processed)
        elif self.images is not None:
            openers["images"] = partial(_open_patches, self.images)
        if self.videos is not None:
            openers["videos"] = partial(_open_videos, self.videos)
        return openers | self._others

    def _refusal(self, where: str, row: Modality, number: int) -> DataError:
        reads = [_NOUNS.get(name, name) for name in self._openers()]
        kind = _NOUNS.get(row.name, row.name)
        model = f"the model reads {', '.join(['text', *reads])}" if reads else "the model reads text alone"
        return DataError(
            f"the chat holds {number} {kind}, but {model} here. Choose another model, or a dataset without "
            f"{kind}. The processor is {type(self._processor).__name__}; docs/models.md lists what each family reads.",
            where=where,
        )


def _beyond_patches(processor: Any) -> ConfigError | None:
    """Error for a processor that hands the model more of images than patches, grids and token types."""
    names = {*processor.image_processor.model_input_names, *getattr(processor, "model_input_names", ())}
    images = {name for name in names if name.startswith("image_")} - {"image_grid_thw"}
    types = {name for name in names if name.endswith("_token_type_ids")} - {"mm_token_type_ids"}
    if not (images or types):
        return None
    return ConfigError(
        f"The processor {type(processor).__name__} hands the model {', '.join(sorted(images | types))} with its "
        "images, which packs do not carry, so images of this model cannot be trained (docs/models.md lists families "
        "that can)."
    )


def refused(where: str, what: str, reason: str) -> DataError:
    """Say that a model's processor, whose settings anybody may have written, fails at a sample's media.

    Args:
        where: the sample.
        what: of its media, such as "an image".
        reason: the processor's own words.
    """
    return DataError(f"the model's processor refuses {what}: {reason}", where=where)
