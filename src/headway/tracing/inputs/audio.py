"""Audio clips whose features take the places of tokens in the text."""

import inspect
from typing import Any, Self

import torch

from headway.count.workload import Workload
from headway.errors import TraceError
from headway.tracing.build import subconfigs
from headway.tracing.inputs import speech_layout
from headway.tracing.inputs.form import Floats, InputForm, plain_token
from headway.tracing.inputs.probe import Probe
from headway.tracing.inputs.speech_layout import SpeechLayout
from headway.tracing.phantom import phantom_floats

_FEATURES = "get_audio_features"
_TOKENS = ("audio_token_id", "audio_token_index")
_MASKS = ("input_features_mask", "feature_attention_mask")  # true for each frame that is not padding
_SAMPLES = "chunk_sample_lengths"  # argument: samples of the waveform behind each clip's frames
_NUMBERS = (1, 2, 3, 1)  # clips in each run
_PAIRS = ("audio_pairs:full", "audio_pairs:relative", "audio_offsets")


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
            windows = speech_layout.windows(self._config)
            causal = [f"audio_pairs:sliding:{window}" for window in windows]
            self.strided = ["audio", *_PAIRS, *speech_layout.windowed("audio_pairs", windows), *causal]
            self.drivers = [*self.strided, "clips"]

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """Read the form off a model's signature."""
        accepted = inspect.signature(model.forward).parameters
        is_taken = cls.takes in accepted and "input_ids" in accepted and "decoder_input_ids" not in accepted
        # some families leave the tower out where its configuration is None
        return cls(model) if is_taken and getattr(model.config, "audio_config", True) is not None else None

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
                "pass: give clips of one length."
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
                f"the configuration {type(self._config).__name__} does not say which token stands for audio: "
                f"set its {_TOKENS[0]}."
            )
        return int(token)

    def _find(self) -> SpeechLayout:
        return speech_layout.find_layout(self._config, self.takes, self._ask, masked=bool(self._masks()))

    def _masks(self) -> list[str]:
        """List the masks of frames; one that the forward takes and the tower does not is of text positions."""
        heard = self._probe.takes(_FEATURES) if self._has_method else self._accepted
        return [name for name in _MASKS if name in self._accepted and name in heard]

    def _heard(self, speech: SpeechLayout, clips: int, frames: int, floats: Floats) -> dict[str, Any]:
        real = (torch.arange(speech.padded(frames)) < frames).expand(clips, -1)
        masks = dict.fromkeys(self._masks(), real)
        if _SAMPLES in self._accepted:
            (hop, *_) = speech_layout.whole_numbers(self._config, "hop_length")
            masks[_SAMPLES] = torch.full((clips,), frames * hop)
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
    def of(cls, model: Any) -> Self | None:
        """Read the form off a model that hears and whose configuration has no token for what it hears."""
        hears = any(hasattr(type(module), _FEATURES) for module in model.modules())
        has_token = hears and any(hasattr(c, name) for c in subconfigs(model.config) for name in _TOKENS)
        return super().of(model) if hears and not has_token else None

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
