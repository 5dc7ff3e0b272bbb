"""Sources of encoder-decoders: text, or speech as features or as a waveform, beside the decoder's segment."""

import inspect
from typing import Any, Self

import torch

from headway.count.workload import Workload
from headway.errors import TraceError
from headway.tracing.inputs import speech_layout
from headway.tracing.inputs.form import Floats, InputForm, plain_token
from headway.tracing.inputs.probe import Probe
from headway.tracing.inputs.speech_layout import SpeechLayout
from headway.tracing.phantom import phantom_floats

# primes that any table of positions holds; windows of the encoder are added from the second run on
_SOURCES = (149, 311, 409, 229)
_PAIRS = ("source_pairs:full", "pairs:cross", "source_pairs:relative", "source_offsets")


def _source_of(workload: Workload) -> int:
    if not workload.sources.sum():
        raise TraceError(
            "the model reads a source for each segment, and the workload holds none: give Workload(sources=[...])."
        )
    return int(workload.sources[0])


class SourceIds(InputForm):
    """A text that the encoder reads: `input_ids` beside `decoder_input_ids`."""

    takes = "input_ids"

    def __init__(self, config: Any) -> None:
        sizes = speech_layout.windows(config)
        self.strided = ["sources", *_PAIRS, *speech_layout.windowed("source_pairs", sizes)]
        self.drivers = [*self.strided]
        self._reach = max(sizes, default=0)
        self._token = plain_token(config)

    @classmethod
    def of(cls, model: Any) -> "SourceIds | None":
        """Read the form off a model's signature."""
        accepted = inspect.signature(model.forward).parameters
        return cls(model.config) if {"input_ids", "decoder_input_ids", "encoder_outputs"} <= accepted.keys() else None

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

        self.speech = speech_layout.find_layout(model.config, self.takes, hear)  # layout of the argument
        sizes = speech_layout.windows(model.config)
        if self.speech.fixed:
            self.drivers = [f"sources:{self.speech.fixed}", "pairs:cross"]
        else:
            self.drivers = self.strided = ["sources", *_PAIRS, *speech_layout.windowed("source_pairs", sizes)]

    @classmethod
    def of(cls, model: Any) -> "SourceFeatures | None":
        """Read the form off a model's signature."""
        accepted = inspect.signature(model.forward).parameters
        return cls(model) if {cls.takes, "decoder_input_ids"} <= accepted.keys() else None

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

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """Read the form off a model's signature."""
        return cls() if cls.takes in inspect.signature(model.forward).parameters else None

    def sizes(self, run: int) -> dict[str, Any]:
        """Give one sequence of another length in each run."""
        return {"sources": [(149, 283, 571, 409)[run]]}

    def fill(self, batch: dict[str, Any], _start: int, workload: Workload, _floats: Floats) -> None:
        """Add the sequence, without padding."""
        residues = int(workload.sources.sum())
        batch[self.takes] = torch.full((1, residues), 5)  # any residue; small numbers are special
        batch["protein_attention_mask"] = torch.ones((1, residues), dtype=torch.long)
