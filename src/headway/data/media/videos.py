"""Videos by PyAV: length, rate and size from the header, and the frames that a model reads when asked for.

Tensor letters: F frames, C channels, H and W pixels, P patches, D values per patch.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headway.data.media.images import Picture, media_error, reading_media
from headway.data.samples import Grid, Media
from headway.errors import ConfigError, DataError
from headway.models.video import Scale, VideoProcessor, pixel_scale
from headway.version import install_command
from headway.words import Argument

# A playlist could name other files or addresses; nothing but the file itself is opened.
_OPTIONS = {"protocol_whitelist": "none"}


@contextmanager
def av_container(media: Media) -> Iterator[Any]:
    """A file opened by PyAV, of which the header has been read.

    PyAV is imported here, where a video or sound is first opened: text and images are trained without it.

    Raises:
        ConfigError: PyAV is not installed. What PyAV raises on a damaged file is for `reading_media`.
    """
    try:
        import av
    except ModuleNotFoundError as error:
        raise ConfigError(
            "reading videos and sounds needs PyAV, which is not installed. Install it with `pip install av`, or the "
            f"extra that brings it, {install_command('train')}"
        ) from error
    with media.open() as file, av.open(file, options=_OPTIONS) as container:
        yield container


def first_stream(container: Any, kind: str) -> Any:
    """The first video or audio stream of a container, decoded by one thread.

    Raises:
        ValueError: there is none, or nothing that decodes it.
    """
    stream = next(iter(getattr(container.streams, kind)), None)
    if stream is None:
        raise ValueError(f"it has no {kind} stream")
    if stream.codec_context is None:
        raise ValueError(f"its {kind} stream is of a kind that nothing here decodes")
    stream.codec_context.thread_count = 1  # workers share the cores among samples, not within one
    return stream


class Clip:
    """A video, of which the header and the first frame have been read.

    Frames are counted as they are shown, one after the other, whatever their times; frames per second are the mean.
    Rotations by quarter turns are applied.

    Args:
        media: the file or its bytes.
        where: the sample's place, for messages.
        max_pixels: larger frames are refused [pixels].

    Attributes:
        num_frames: frames in the video.
        fps: their mean rate [1/s].
        size: (height, width) of the first frame, upright [pixels].

    Raises:
        DataError: the file is missing, damaged, has no video or larger frames; the message names sample and file.
    """

    def __init__(self, media: Media, where: str, max_pixels: int) -> None:
        self._media, self._where = media, where
        with reading_media(media, where, "video"):
            with av_container(media) as container:
                self.num_frames, self.fps, self.size = self._header(container, max_pixels)
            if self.num_frames == 0:
                with av_container(media) as container:
                    self.num_frames = _count_frames(container)
        if self.num_frames == 0:
            raise self._unusable("it has no frames. Delete the sample, or copy the file again")

    def _header(self, container: Any, max_pixels: int) -> tuple[int, float, tuple[int, int]]:
        """Frames, 0 where the header does not tell; their rate; their size."""
        stream = first_stream(container, "video")
        first = next(container.decode(stream), None)
        if first is None:
            raise self._unusable("none of its frames can be decoded. Copy it again, or delete the sample")
        rate = stream.average_rate or stream.guessed_rate
        if not rate:
            raise self._unusable("its header tells no frame rate. Convert it anew")
        if first.width * first.height > max_pixels:
            raise self._unusable(
                f"its frames have {first.width} x {first.height} pixels, more than the limit of {max_pixels}. Shrink "
                f"it, or raise {Argument('max_image_pixels')}"
            )
        turned = round(first.rotation / 90) % 2 == 1
        size = (first.width, first.height) if turned else (first.height, first.width)
        return int(stream.frames), float(rate), size

    def sample(self, rules: VideoProcessor) -> list[int]:
        """The places of the frames that a model reads."""
        return rules.sample(self.num_frames, self.fps)

    def frames(self, places: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
        """The frames at places in rising order, a place as often as it is named: (H, W, 3), upright.

        Raises:
            DataError: fewer frames can be decoded than the header promises.
        """
        wanted = iter(places)
        place = next(wanted, None)
        decoded = 0
        with reading_media(self._media, self._where, "video"), av_container(self._media) as container:
            from av.video.reformatter import VideoReformatter

            converter = VideoReformatter()  # one for all frames: making one costs more than converting a frame
            for number, frame in enumerate(container.decode(first_stream(container, "video"))):
                if place is None:
                    return
                decoded = number + 1
                # Frames between two places are decoded, as later ones depend on them, but not converted.
                if number < place:
                    continue
                shown_HWC: Any = converter.reformat(frame, format="rgb24").to_ndarray()
                # A phone's film says by how much it is turned; the model reads it upright.
                frame_HWC: NDArray[np.uint8] = np.rot90(shown_HWC, round(frame.rotation / 90))
                while place == number:
                    yield frame_HWC
                    place = next(wanted, None)
        if place is not None:
            raise self._unusable(
                f"{decoded} frames can be decoded, but frame {place + 1} of {self.num_frames} is needed; it was cut "
                "off or is damaged. Copy it again, or delete the sample"
            )

    def _unusable(self, reason: str) -> DataError:
        return media_error(self._media, self._where, "video", reason)


class PictureClip:
    """A video as pictures of its frames, of which the headers have been read. A model reads all of them.

    Args:
        media: the pictures and their rate.
        where: the sample's place, for messages.
        max_pixels: larger frames are refused [pixels].

    Attributes:
        num_frames: frames in the video.
        fps: their rate [1/s].
        size: (height, width) of each, upright [pixels].

    Raises:
        DataError: a picture is missing, damaged, too large or of another size than the first.

    Source: qwen-vl-utils 0.0.14, `fetch_video`: what is a list of frames is not sampled again.
    """

    def __init__(self, media: Media, where: str, max_pixels: int) -> None:
        self._media, self._where, self._max_pixels = media, where, max_pixels
        self.num_frames, self.fps = len(media.frames), media.frames_per_s
        sizes = []
        for frame in media.frames:
            with Picture(frame, where, max_pixels) as picture:
                sizes.append(picture.size)
        self.size = sizes[0]
        for number, size in enumerate(sizes, start=1):
            if size != self.size:
                raise media_error(
                    media,
                    where,
                    "video",
                    f"frame {number} has {size[1]} x {size[0]} pixels and the first {self.size[1]} x {self.size[0]}. "
                    "Give frames of one size",
                )

    def sample(self, rules: VideoProcessor) -> list[int]:
        """The places of all frames; a single one as often as a patch in time needs it."""
        places = list(range(self.num_frames))
        return places + places[-1:] * (rules.temporal_patch_size - len(places))

    def frames(self, places: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
        """The frames at places in rising order: (H, W, 3), upright.

        Raises:
            DataError: one is damaged.
        """
        for place in places:
            with Picture(self._media.frames[place], self._where, self._max_pixels) as picture:
                yield np.array(picture.decode())  # a copy, as torch takes none that cannot be written


def clip_of(media: Media, where: str, max_pixels: int) -> Clip | PictureClip:
    """A video, opened: a file, or pictures of its frames.

    Raises:
        DataError: it cannot be used; the message names sample and file.
    """
    return (PictureClip if media.frames else Clip)(media, where, max_pixels)


def _count_frames(container: Any) -> int:
    """Frames of the first video stream, by its packets; nothing is decoded."""
    packets = container.demux(first_stream(container, "video"))
    return sum(1 for packet in packets if packet.size and not packet.is_discard)


@dataclass(frozen=True, slots=True)
class SampledClip:
    """A video and what the model reads of it.

    Attributes:
        clip: the video.
        places: the frames read, in order.
        grid: (t, h, w) [patches].
    """

    clip: Clip | PictureClip
    places: tuple[int, ...]
    grid: Grid


class VideoPatches:
    """Turns videos into patches for one model.

    Args:
        rules: how the model reads videos.
        image_scale: (scale_D, shift_D) of image patches; patches of videos are bytes where their scale is the same.
    """

    def __init__(self, rules: VideoProcessor, image_scale: Scale | None) -> None:
        self.rules = rules
        self._scale = pixel_scale(rules)
        self._in_bytes = image_scale is not None and all(
            torch.equal(ours, theirs) for ours, theirs in zip(self._scale, image_scale, strict=True)
        )

    def resized(self, rules: VideoProcessor) -> "VideoPatches":
        """The same by rules that differ in their bounds alone."""
        changed = copy.copy(self)
        changed.rules = rules
        return changed

    def sample(self, clip: Clip | PictureClip) -> SampledClip:
        """Choose the frames that the model reads.

        Raises:
            ValueError: the rules refuse the video's size.
        """
        places = clip.sample(self.rules)
        return SampledClip(clip, tuple(places), self.rules.grid(len(places), *clip.size))

    def patches(self, sampled: Sequence[SampledClip]) -> torch.Tensor:
        """The patches of videos, end to end: (P, D), bytes or the model's own values.

        Raises:
            DataError: a video is damaged.
        """
        laid_out = torch.cat([self._patches(clip) for clip in sampled])
        return laid_out if self._in_bytes else laid_out * self._scale[0] + self._scale[1]

    def _patches(self, sampled: SampledClip) -> torch.Tensor:
        height, width = (side * self.rules.patch_size for side in sampled.grid[1:])
        frames_FCHW = np.empty((len(sampled.places), 3, height, width), np.uint8)
        for place, frame_HWC in enumerate(sampled.clip.frames(sampled.places)):
            frames_FCHW[place] = self.rules.resize(frame_HWC, height, width)
        return self.rules.lay_out(frames_FCHW)
