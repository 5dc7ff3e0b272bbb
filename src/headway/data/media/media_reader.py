"""A chat's media, opened for one model: sizes and placeholders from headers, pixels and features when asked for."""

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from headway.data.media.audio import Sound, SoundFeatures
from headway.data.media.image_patches import ImagePatches
from headway.data.media.images import Picture, decode_all
from headway.data.media.joining import Joinable
from headway.data.media.processor_images import ProcessedImages, reads_processed_images
from headway.data.media.sizes import MediaSizes
from headway.data.media.videos import SampledClip, VideoPatches, clip_of
from headway.data.samples import Chat, Grid, Media
from headway.errors import ConfigError, DataError
from headway.models.foreign import foreign
from headway.models.video import VideoProcessor, metadata_of


@dataclass(frozen=True, slots=True)
class OpenedMedia:
    """A chat's media, opened: sizes from their headers.

    Attributes:
        pictures: its images.
        image_grids: (t, h, w) of each, or of each of its tiles [patches].
        processed: tensors of its images, where these are as the model's processor gives them.
        clips: its videos.
        sounds: its sounds.
        audio_lengths: feature frames of each [frames].
        written: for each kind, what stands in the text for each.
        seconds_per_patch: time that a patch of each video spans, for models whose positions are times [s].
    """

    pictures: tuple[Picture, ...] = ()
    image_grids: tuple[Grid, ...] = ()
    processed: dict[str, Joinable] = field(default_factory=dict)
    clips: tuple[SampledClip, ...] = ()
    sounds: tuple[Sound, ...] = ()
    audio_lengths: tuple[int, ...] = ()
    written: dict[str, list[str]] = field(default_factory=dict)
    seconds_per_patch: tuple[float, ...] | None = None

    @property
    def video_grids(self) -> tuple[Grid, ...]:
        """(t, h, w) of each video [patches]."""
        return tuple(clip.grid for clip in self.clips)


class MediaReader:
    """Opens the media of chats for one model.

    Args:
        processor: the model's processor, or its tokenizer if it reads text alone.
        max_image_pixels: larger images and frames are refused [pixels].
        patch: side of a patch of the model's vision tower [pixels]; None where that is not known.

    Attributes:
        images: how the model reads images as patches with their grids; None where it does not.
        processed: how the model reads images otherwise, by its own processor; None where it does not.
        videos, sounds: how the model reads each; None where it does not.
    """

    def __init__(self, processor: Any, max_image_pixels: int, patch: int | None = None) -> None:
        self._processor, self._max_pixels = processor, max_image_pixels
        self._image_error: ConfigError | None = None
        self.images: ImagePatches | None = None
        self.processed: ProcessedImages | None = None
        self.videos: VideoPatches | None = None
        self.sounds: SoundFeatures | None = None
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
        if SoundFeatures.can_read(processor):
            self.sounds = SoundFeatures(processor)

    def resized(self, sizes: MediaSizes) -> "MediaReader":
        """The reader of samples that have bounds of their own on what is read of their media.

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
        where = sample.where
        if not (sample.images or sample.videos or sample.audio):
            return OpenedMedia()
        pictures, image_grids, image_words, processed = self._open_images(sample.images, where, stack, decodes)
        clips, video_words, seconds = self._open_videos(sample.videos, where)
        sounds, frames, audio_words = self._open_sounds(sample.audio, where)
        written = {"image": image_words, "video": video_words, "audio": audio_words}
        return OpenedMedia(pictures, image_grids, processed, clips, sounds, frames, written, seconds)

    def _open_images(
        self, images: Sequence[Media], where: str, stack: ExitStack, decodes: bool
    ) -> tuple[tuple[Picture, ...], tuple[Grid, ...], list[str], dict[str, Joinable]]:
        if not images:
            return (), (), [], {}
        if self._image_error is not None:
            raise self._image_error
        if self.images is None and self.processed is None:
            raise self._refusal(where, "images", len(images))
        pictures = tuple(stack.enter_context(Picture(media, where, self._max_pixels)) for media in images)
        if self.processed is not None:
            with foreign(partial(refused, where, "an image")):
                if decodes:
                    lengths, tensors = self.processed.read(decode_all(pictures))
                else:
                    lengths, tensors = self.processed.lengths([picture.size for picture in pictures]), {}
            return pictures, lengths.grids, list(lengths.written), tensors
        assert self.images is not None
        with foreign(partial(refused, where, "an image")):  # as one too narrow to resize
            grids = tuple(self.images.grid(*picture.size) for picture in pictures)
            inputs = {"image_grid_thw": np.asarray(grids)}
            words = [self._processor.replace_image_token(inputs, image_idx=i) for i in range(len(grids))]
        return pictures, grids, words, {}

    def _open_videos(
        self, videos: Sequence[Media], where: str
    ) -> tuple[tuple[SampledClip, ...], list[str], tuple[float, ...] | None]:
        if not videos:
            return (), [], None
        if self.videos is None:
            raise self._refusal(where, "videos", len(videos))
        opened = [clip_of(media, where, self._max_pixels) for media in videos]
        with foreign(partial(refused, where, "a video")):  # as frames too narrow to resize
            clips = tuple(self.videos.sample(clip) for clip in opened)
            clip_metadata = [metadata_of(own.clip.num_frames, own.clip.fps, own.places) for own in clips]
            seconds = None
            if "second_per_grid_ts" in self._processor.model_input_names:
                seconds = tuple(self.videos.rules.temporal_patch_size / own.sampled_fps for own in clip_metadata)
            inputs = {"video_grid_thw": np.asarray([own.grid for own in clips]), "video_metadata": clip_metadata}
            words = [self._processor.replace_video_token(inputs, video_idx=i) for i in range(len(clips))]
        return clips, words, seconds

    def _open_sounds(self, audio: Sequence[Media], where: str) -> tuple[tuple[Sound, ...], tuple[int, ...], list[str]]:
        if not audio:
            return (), (), []
        if self.sounds is None:
            raise self._refusal(where, "sounds", len(audio))
        with foreign(partial(refused, where, "a sound")):
            opened = tuple(self.sounds.open(media, where) for media in audio)
            return opened, tuple(self.sounds.frames(sound) for sound in opened), self.sounds.written(opened)

    def pixels(self, opened: OpenedMedia) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Patches of all images, and of all videos, (P, D) each; None without any.

        Raises:
            DataError: one is damaged.
        """
        images = self.images.patches(opened.pictures) if self.images is not None and opened.pictures else None
        videos = self.videos.patches(opened.clips) if self.videos is not None and opened.clips else None
        return images, videos

    def features(self, opened: OpenedMedia) -> torch.Tensor | None:
        """(A, M, F) features of all sounds; None without any.

        Raises:
            DataError: one is damaged.
        """
        return self.sounds.features(opened.sounds) if self.sounds is not None and opened.sounds else None

    def _refusal(self, where: str, kind: str, number: int) -> DataError:
        reads = [
            name
            for name, part in (
                ("images", self.images or self.processed),
                ("videos", self.videos),
                ("sounds", self.sounds),
            )
            if part
        ]
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
