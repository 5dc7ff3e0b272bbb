"""Inputs that come in lengths: the source that an encoder reads for each segment, and audio clips within the text.

A source is text, speech as features or as a waveform, or a protein. The features of a clip take the places of tokens,
or are added to them.

The layout of speech is found by running the model on each known layout, on shapes alone. Configurations have a dozen
names for the width of a frame of features, and none for whether frames come before features. A wrong guess does not fit
the first convolution or linear layer, so the model itself tells.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headway.count.workload import Workload
from headway.errors import TraceError
from headway.tracing.build import LONGEST_WINDOW, subconfigs
from headway.tracing.inputs.form import MISFITS, Floats, InputForm, Probe, plain_token
from headway.tracing.phantom import phantom_floats

# one length a run; no two alike in what strides of 4 or 8 leave over, nor all in the same half of 16
_FREE = (1201, 2011, 1606, 2408)
_EVEN = (1200, 2016, 1632, 2400)  # lengths for a model that takes multiples only
# windows in a clip, and the longest, where a last one that is partly filled could not be followed
_BLOCKS, _LONGEST_BLOCK = (5, 11, 7, 13), 1000
_SAMPLES_PER_FRAME = 160  # samples of a waveform for each frame of features: speech at 16 kHz, a frame each 10 ms
_WIDTHS = (80, 128)  # mel bands where a configuration does not say
# primes that any table of positions holds; windows of the encoder are added from the second run on
_SOURCES = (149, 311, 409, 229)
_SOURCE_PAIRS = ("source_pairs:full", "pairs:cross", "source_pairs:relative", "source_offsets")
_FEATURES = "get_audio_features"
_TOKENS = ("audio_token_id", "audio_token_index")
_MASKS = ("input_features_mask", "feature_attention_mask")  # true for each frame that is not padding
_SAMPLE_LENGTHS = "chunk_sample_lengths"  # argument: samples of the waveform behind each clip's frames
_NUMBERS = (1, 2, 3, 1)  # clips in each run
_AUDIO_PAIRS = ("audio_pairs:full", "audio_pairs:relative", "audio_offsets")


@dataclass(frozen=True)
class SpeechLayout:
    """The layout of a model's speech argument."""

    # axes after the clips: "frames" for that axis, numbers for the others, as (80, "frames")
    shape: tuple[int | str, ...]
    lengths: tuple[int, ...]  # frames of a clip in each of four runs; all alike where a model takes one length only
    fixed: int = 0  # the one length that a model takes, else 0
    multiple: int = 1  # clips are padded to a multiple of it, under a mask [frames]

    def padded(self, frames: int) -> int:
        """Give the length that clips of so many frames are handed over in."""
        return -(-frames // self.multiple) * self.multiple

    def of(self, clips: int, frames: int) -> tuple[int, ...]:
        """Give the shape of so many clips of so many frames."""
        return (clips, *(self.padded(frames) if size == "frames" else int(size) for size in self.shape))


def _whole_numbers(config: Any, pattern: str) -> list[int]:
    """List the whole numbers of a configuration whose names hold a pattern, those inside it included; each once."""
    values = (
        value
        for part in subconfigs(config)
        for name, value in vars(part).items()
        if type(value) is int and value > 0 and re.search(pattern, name)
    )
    return list(dict.fromkeys(values))


def _windows(config: Any) -> list[int]:
    """List possible windows of an encoder's attention [positions], as the configuration says or twice that."""
    sizes = _whole_numbers(config, "window|block|radius|chunk|context_size|local")
    return [w for n in sizes for w in (n, 2 * n) if 1 < w <= LONGEST_WINDOW]


def _windowed(pairs: str, sizes: Sequence[int]) -> list[str]:
    """Name the drivers of windowed attention of these sizes: in blocks, or each position among its neighbours."""
    blocks = [f"{pairs}:block:{size}" for size in sizes]
    sides = [(side, side) for size in sizes for side in (size, size - 1, size // 2)]
    sides += [((size - 1) // 2, size // 2) for size in sizes]  # windows of `size` positions, the query's own included
    return [*blocks, *(f"{pairs}:local:{before}:{after}" for before, after in dict.fromkeys(sides) if before)]


def _find_layout(
    config: Any, argument: str, hear: Callable[[SpeechLayout, int], object], *, masked: bool = True
) -> SpeechLayout:
    """Find the first layout of speech that a model runs on.

    Args:
        config: of the model.
        argument: that carries the speech.
        hear: runs the model on a layout, of so many frames; raises where the shapes do not fit.
        masked: whether clips may be padded: a mask can say how much of them is real.

    Raises:
        TraceError: the model runs on none that is known.
    """
    refused: Exception | None = None
    for speech in _layouts(config, waves=argument == "input_values", masked=masked):
        try:
            for frames in dict.fromkeys(speech.lengths):
                hear(speech, frames)
        except TraceError as error:
            refused = error
        except MISFITS as error:
            refused = refused or error
        else:
            return speech
    raise TraceError(
        f"a model of {type(config).__name__} takes {argument} in a form that Headway does not know. Give its "
        f"arguments with trace(model, inputs=...). Tried last: {' '.join(str(refused).split())}"
    ) from refused


def _layouts(config: Any, waves: bool, masked: bool) -> Iterator[SpeechLayout]:
    shapes: list[tuple[int | str, ...]]
    if waves:
        shapes = [("frames",), (1, "frames")]
    else:
        single = [*_whole_numbers(config, "mel|feat|input_dim|input_size|audio_embed_dim"), *_WIDTHS]
        stacks = _whole_numbers(config, "stack")  # frames side by side in one
        widths = dict.fromkeys([*single, *(width * frames for width in single for frames in stacks)])
        shapes = [shape for width in widths for shape in ((width, "frames"), ("frames", width))]
    unit = _SAMPLES_PER_FRAME if waves else 1
    for lengths, multiples in ((_FREE, [1, *(_windows(config) if masked else ())]), (_EVEN, [1])):
        for multiple in multiples:
            yield from (SpeechLayout(shape, tuple(n * unit for n in lengths), multiple=multiple) for shape in shapes)
    blocks = [size for size in _windows(config) if size <= _LONGEST_BLOCK]
    for block in sorted(blocks, reverse=True):  # clips that end within one window would not show it
        yield from (SpeechLayout(shape, tuple(n * block * unit for n in _BLOCKS)) for shape in shapes)
    # a decoder's positions may be 100,000, whose pairs take gigabytes
    names = ("max_source_positions", "max_position_embeddings")
    for positions in dict.fromkeys(size for name in names for size in _whole_numbers(config, name)):
        yield from (SpeechLayout(shape, (2 * positions,) * 4, 2 * positions) for shape in shapes)


def _source_of(workload: Workload) -> int:
    if not workload.sources.sum():
        raise TraceError(
            "the model reads a source for each segment, but the workload holds none. Give Workload(sources=[...])."
        )
    return int(workload.sources[0])


class SourceIds(InputForm):
    """A text that the encoder reads: `input_ids` beside `decoder_input_ids`."""

    takes = "input_ids"

    def __init__(self, model: Any) -> None:
        config = model.config
        sizes = _windows(config)
        self.strided = ["sources", *_SOURCE_PAIRS, *_windowed("source_pairs", sizes)]
        self.drivers = [*self.strided]
        self._reach = max(sizes, default=0)
        self._token = plain_token(config)

    @classmethod
    def _fits(cls, _model: Any, accepted: Mapping[str, Any]) -> bool:
        return {"input_ids", "decoder_input_ids", "encoder_outputs"} <= accepted.keys()

    def sizes(self, run: int) -> dict[str, Any]:
        """Give one source, longer than any window of the encoder from the second run on."""
        return {"sources": [_SOURCES[run] + (self._reach if run else 0)]}

    def fill(self, batch: dict[str, Any], _start: int, workload: Workload, _floats: Floats) -> None:
        """Add the source's tokens."""
        batch["input_ids"] = torch.full((1, _source_of(workload)), self._token)


class SourceFeatures(InputForm):
    """Speech that the encoder reads as features: `input_features` beside `decoder_input_ids`."""

    takes = "input_features"

    def __init__(self, model: Any) -> None:
        probe = Probe(model)

        def hear(speech: SpeechLayout, frames: int) -> None:
            ids = torch.full((1, 2), plain_token(model.config))
            sound = phantom_floats(speech.of(1, frames))
            probe.run({self.takes: sound, "decoder_input_ids": ids, "use_cache": False})

        self.speech = _find_layout(model.config, self.takes, hear)  # layout of the argument
        sizes = _windows(model.config)
        if self.speech.fixed:
            self.drivers = [f"sources:{self.speech.fixed}", "pairs:cross"]
        else:
            self.drivers = self.strided = ["sources", *_SOURCE_PAIRS, *_windowed("source_pairs", sizes)]

    @classmethod
    def _fits(cls, _model: Any, accepted: Mapping[str, Any]) -> bool:
        return {cls.takes, "decoder_input_ids"} <= accepted.keys()

    def sizes(self, run: int) -> dict[str, Any]:
        """Give one source of another length in each run, where the encoder takes it."""
        return {"sources": [self.speech.lengths[run]]}

    def fill(self, batch: dict[str, Any], _start: int, workload: Workload, floats: Floats) -> None:
        """Add the features."""
        batch[self.takes] = floats(self.speech.of(1, _source_of(workload)))


class SourceWaves(SourceFeatures):
    """Speech that the encoder reads as samples of a waveform: `input_values` beside `decoder_input_ids`."""

    takes = "input_values"


class Proteins(InputForm):
    """One sequence of amino acids with each text: the segment's source, so many residues long."""

    takes = "protein_input_ids"
    drivers = ("sources", "source_pairs:full")

    def sizes(self, run: int) -> dict[str, Any]:
        """Give one sequence of another length in each run."""
        return {"sources": [(149, 283, 571, 409)[run]]}

    def fill(self, batch: dict[str, Any], _start: int, workload: Workload, _floats: Floats) -> None:
        """Add the sequence, without padding."""
        residues = int(workload.sources.sum())
        batch[self.takes] = torch.full((1, residues), 5)  # any residue; small numbers are special
        batch["protein_attention_mask"] = torch.ones((1, residues), dtype=torch.long)


class AudioFeatures(InputForm):
    """Clips as features [clips, features, frames] or [clips, frames, features]: `input_features` beside `input_ids`.

    The model is run to find the layout of clips and the number of text positions that one takes.
    """

    takes = "input_features"

    def __init__(self, model: Any) -> None:
        self._config: Any = model.config
        self._accepted = inspect.signature(model.forward).parameters
        self._probe = Probe(model)
        self._positions: dict[int, int] = {}
        self.token = self._find_token()  # number of the token that a clip's positions hold
        self._has_method = self._probe.has(_FEATURES)
        try:
            self.speech = self._find()  # layout of the argument
        except TraceError:
            if not self._has_method:
                raise
            self._has_method = False  # the method wants the text too, or what a forward does without
            self.speech = self._find()
        if self.speech.fixed:
            self.drivers = [f"clips:{self.speech.fixed}"]
        else:
            windows = _windows(self._config)
            causal = [f"audio_pairs:sliding:{window}" for window in windows]
            self.strided = ["audio", *_AUDIO_PAIRS, *_windowed("audio_pairs", windows), *causal]
            self.drivers = [*self.strided, "clips"]

    @classmethod
    def _fits(cls, model: Any, accepted: Mapping[str, Any]) -> bool:
        is_taken = cls.takes in accepted and "input_ids" in accepted and "decoder_input_ids" not in accepted
        # some families leave the tower out where its configuration is None
        return is_taken and getattr(model.config, "audio_config", True) is not None

    def sizes(self, run: int) -> dict[str, Any]:
        """Give one to three clips; clips of one run have one length."""
        return {"audio": [self.speech.lengths[run]] * _NUMBERS[run]}

    def positions(self, workload: Workload) -> int:
        """Count the clips' text positions, and one after each that keeps it apart from the next."""
        return sum(self._positions_of(frames) + 1 for frames in workload.audio.tolist())

    def fill(self, batch: dict[str, Any], start: int, workload: Workload, floats: Floats) -> None:
        """Add features, masks, and the clips' tokens."""
        lengths = set(workload.audio.tolist())
        if not lengths:
            return
        if len(lengths) > 1:
            raise TraceError(
                f"clips of {', '.join(map(str, sorted(lengths)))} frames would be padded to one length in a forward "
                "pass. Give clips of one length."
            )
        frames = lengths.pop()
        batch |= self._heard(self.speech, len(workload.audio), frames, floats)
        for _ in workload.audio:
            batch["input_ids"][:, start : start + self._positions_of(frames)] = self.token
            start += self._positions_of(frames) + 1

    def _find_token(self) -> int:
        tokens = [getattr(c, name, None) for c in subconfigs(self._config) for name in _TOKENS]
        token = next((token for token in tokens if token is not None), None)
        if token is None:
            raise TraceError(
                f"the configuration {type(self._config).__name__} does not say which token stands for audio. Set its "
                f"{_TOKENS[0]}."
            )
        return int(token)

    def _find(self) -> SpeechLayout:
        return _find_layout(self._config, self.takes, self._ask, masked=bool(self._masks()))

    def _masks(self) -> list[str]:
        """List the masks of frames; one that the forward takes and the tower does not is of text positions."""
        heard = self._probe.takes(_FEATURES) if self._has_method else self._accepted
        return [name for name in _MASKS if name in self._accepted and name in heard]

    def _heard(self, speech: SpeechLayout, clips: int, frames: int, floats: Floats) -> dict[str, Any]:
        real = (torch.arange(speech.padded(frames)) < frames).expand(clips, -1)
        masks = dict.fromkeys(self._masks(), real)
        if _SAMPLE_LENGTHS in self._accepted:
            (hop, *_) = _whole_numbers(self._config, "hop_length")
            masks[_SAMPLE_LENGTHS] = torch.full((clips,), frames * hop)
        return {self.takes: floats(speech.of(clips, frames)), **masks}

    def _ask(self, speech: SpeechLayout, frames: int) -> int:
        """Ask the model how many text positions one clip takes."""
        heard = self._heard(speech, 1, frames, phantom_floats)
        if self._has_method:
            return self._probe.rows(_FEATURES, heard)
        text = {"input_ids": torch.full((1, 8), plain_token(self._config))}
        return self._probe.rows_before_text({**text, **heard})

    def _positions_of(self, frames: int) -> int:
        if frames not in self._positions:
            self._positions[frames] = self._ask(self.speech, frames)
        return self._positions[frames]


class AudioWaves(AudioFeatures):
    """Clips as samples of a waveform [clips, samples]: `input_values` beside `input_ids`."""

    takes = "input_values"


class AddedAudio(AudioFeatures):
    """One clip with each text, as long as it: features are added to the embeddings one by one (Voxtral Realtime)."""

    fills = True

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.drivers = [driver for driver in self.drivers if driver != "clips"]  # there are as many as segments

    @classmethod
    def _fits(cls, model: Any, accepted: Mapping[str, Any]) -> bool:
        hears = any(hasattr(type(module), _FEATURES) for module in model.modules())
        has_token = hears and any(hasattr(c, name) for c in subconfigs(model.config) for name in _TOKENS)
        return super()._fits(model, accepted) and hears and not has_token

    def sizes(self, run: int) -> dict[str, Any]:
        """Give one clip."""
        return {"audio": [self.speech.lengths[run]]}

    def positions(self, workload: Workload) -> int:
        """Count the positions that the clip is added to."""
        return sum(map(self._positions_of, workload.audio.tolist()))

    def fill(self, batch: dict[str, Any], _start: int, workload: Workload, floats: Floats) -> None:
        """Add features; every position of the text takes one."""
        (frames,) = workload.audio.tolist()
        batch |= self._heard(self.speech, 1, frames, floats)

    def _find_token(self) -> int:
        return plain_token(self._config)
