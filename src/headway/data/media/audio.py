"""Sound by PyAV: decoded, mixed to one channel, resampled to a model's rate, and read by its own feature extractor.

Tensor letters: A sounds, M mel bands, F feature frames.
"""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import BatchFeature, WhisperFeatureExtractor

from headway.data.media.images import media_error, reading_media
from headway.data.media.videos import av_container, first_stream
from headway.data.samples import Media
from headway.errors import DataError


class Sound:
    """A sound, of which the length is known.

    Headers of PCM and FLAC tell it exactly. Those of compressed kinds only estimate it, so these are decoded.

    Args:
        media: the file or its bytes; of a video, its sound.
        where: the sample's place, for messages.
        rate: samples per second that the model reads [1/s].

    Attributes:
        num_samples: length at the model's rate [samples].

    Raises:
        DataError: the file is missing, damaged or has no sound; the message names sample and file.
    """

    def __init__(self, media: Media, where: str, rate: int) -> None:
        self._media, self._where, self._rate = media, where, rate
        with reading_media(media, where, "sound"), av_container(media) as container:
            stream = first_stream(container, "audio")
            codec = stream.codec_context.name
            file_samples: int
            if stream.duration is not None and (codec == "flac" or codec.startswith("pcm_")):
                file_samples = round(stream.duration * stream.time_base * stream.rate)
            else:
                file_samples = sum(frame.samples for frame in container.decode(stream))
            self.num_samples: int = -(-file_samples * rate // stream.rate)
        if self.num_samples == 0:
            raise media_error(media, where, "sound", "it holds no samples. Copy it again, or delete the sample")

    def decode(self) -> NDArray[np.float32]:
        """The waveform at the model's rate, one channel, -1 to 1: (num_samples,).

        Raises:
            DataError: the file is damaged, or shorter than its header promises.
        """
        with reading_media(self._media, self._where, "sound"), av_container(self._media) as container:
            stream = first_stream(container, "audio")
            from av import AudioResampler

            # Resampled as it is decoded; None flushes what the filter holds back.
            resampler = AudioResampler(format="fltp", rate=self._rate)
            pieces, file_samples = [], 0
            for frame in container.decode(stream):
                file_samples += frame.samples
                pieces += resampler.resample(frame)
            pieces += resampler.resample(None)
            # Samples at the model's rate, rounded up, as the header promised at opening.
            expected = -(-file_samples * self._rate // stream.rate)
        if expected != self.num_samples:
            raise media_error(
                self._media,
                self._where,
                "sound",
                f"{expected} of the {self.num_samples} samples that its header promises can be decoded; it was cut "
                "off. Copy it again, or delete the sample",
            )
        # The mean, as feature extractors are trained on; a resampler's own mix keeps power, and can clip.
        channels = np.concatenate([piece.to_ndarray() for piece in pieces], axis=1)[:, : self.num_samples]
        waveform: NDArray[np.float32] = channels.mean(axis=0)
        return np.pad(waveform, (0, self.num_samples - len(waveform)))  # the resampler keeps back a few samples


class SoundFeatures:
    """Turns sounds into Whisper's features, for one model that reads such clips, for example Qwen2-Audio.

    Args:
        processor: the model's own.
    """

    def __init__(self, processor: Any) -> None:
        self.extractor: WhisperFeatureExtractor = processor.feature_extractor
        self.rate = int(self.extractor.sampling_rate)
        self._options = dict(getattr(processor, "audio_kwargs", {}))
        self._writer = copy.copy(processor)  # the real rule of placeholders, on lengths alone
        self._writer.feature_extractor = _LengthsOnly(self.extractor)

    @staticmethod
    def can_read(processor: Any) -> bool:
        """Tell whether a model's sounds are read this way."""
        takes_mask = "feature_attention_mask" in getattr(processor, "model_input_names", ())
        return takes_mask and isinstance(getattr(processor, "feature_extractor", None), WhisperFeatureExtractor)

    def open(self, media: Media, where: str) -> Sound:
        """A sound of at most the model's longest clip.

        Raises:
            DataError: it is longer, or cannot be read.
        """
        sound = Sound(media, where, self.rate)
        most = int(self.extractor.n_samples)
        if sound.num_samples > most:
            raise media_error(
                media,
                where,
                "sound",
                f"it lasts {sound.num_samples / self.rate:.1f} s, but the model reads {most / self.rate:.0f} s. Cut it "
                "into parts",
            )
        return sound

    def frames(self, sound: Sound) -> int:
        """Feature frames of a sound [frames]. Source: transformers, `WhisperFeatureExtractor.__call__`."""
        hop: int = self.extractor.hop_length
        return -(-sound.num_samples // hop)

    def written(self, sounds: Sequence[Sound]) -> list[str]:
        """Text that the processor writes in place of each sound's placeholder."""
        silence = [np.broadcast_to(np.float32(0), (sound.num_samples,)) for sound in sounds]
        replacements: list[str] = self._writer._process_audio(silence, **self._options)[1]
        return replacements

    def features(self, sounds: Sequence[Sound]) -> torch.Tensor:
        """(A, M, F): features of each sound, filled up to the model's clip.

        Raises:
            DataError: a sound is damaged.
        """
        out = self.extractor(
            [sound.decode() for sound in sounds],
            sampling_rate=self.rate,
            padding="max_length",
            return_attention_mask=True,
            return_tensors="pt",
        )
        lengths = [self.frames(sound) for sound in sounds]
        if out["attention_mask"].sum(1).tolist() != lengths:
            raise DataError(
                f"The feature extractor made {out['attention_mask'].sum(1).tolist()} frames of sounds that have "
                f"{lengths} by its settings; this version of transformers counts them otherwise."
            )
        features: torch.Tensor = out["input_features"]
        return features


class _LengthsOnly:
    """In place of a feature extractor: says how many frames each sound has, and makes none."""

    def __init__(self, extractor: WhisperFeatureExtractor) -> None:
        self._extractor = extractor

    def fetch_audio(self, audio: Any, **_: Any) -> Any:
        return audio

    def __call__(self, audio: Sequence[NDArray[np.float32]], **_: Any) -> BatchFeature:
        hop = int(self._extractor.hop_length)
        lengths = np.array([-(-len(sound) // hop) for sound in audio])
        mask_AF = np.arange(int(self._extractor.nb_max_frames)) < lengths[:, None]
        return BatchFeature({"attention_mask": mask_AF.astype(np.int64)})
