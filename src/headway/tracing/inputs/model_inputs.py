"""Make the inputs of a traced model: workloads of unlike proportions, and the forward's arguments for each.

A model takes text (`input_ids`), and whatever its towers take in one of the forms of the table `FORMS`. For another
kind of model the user gives a function from a workload to arguments, or one example of arguments.

An alternate forward pass reaches modules that the plain one leaves idle: an argument may hand a decoder another model's
states, let some tokens see all others, choose a route for images, or send videos where images go. A module that only
such a pass runs costs the plain pass nothing, and is named with its argument; a module that no pass reaches is unused.
"""

import copy
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from headway.count.workload import Workload
from headway.errors import TraceError
from headway.plugins import family_hook
from headway.tracing import build
from headway.tracing.arguments import as_phantoms, on_device, rebuilt
from headway.tracing.inputs import frames, images, lengths
from headway.tracing.inputs.denoiser import Denoiser
from headway.tracing.inputs.form import WINDOW_SIDES, InputForm, plain_token
from headway.tracing.known_values import tensors
from headway.tracing.phantom import phantom_floats

# the forms in which models take images, sound or sources: a model takes the first that fits each argument; a further
# kind of input appends its own
FORMS: list[type[InputForm]] = [
    lengths.SourceIds,
    lengths.SourceFeatures,
    lengths.SourceWaves,
    images.Grids,
    frames.PageFrames,
    frames.EncoderFrames,
    frames.TiledFrames,
    frames.CrossAttentionFrames,
    frames.RobotFrames,
    frames.SingleImages,
    images.Patches,
    frames.NestedFrames,
    frames.Frames,
    frames.VideoFrames,
    images.FlattenedPatches,
    lengths.Proteins,
    lengths.AddedAudio,
    lengths.AudioFeatures,
    lengths.AudioWaves,
]

_LENGTHS = (131, 197, 263, 331)  # primes: no product of a model's sizes equals a multiple of two of them
_SHORT_LENGTHS = (17, 29, 41, 59)  # lengths for a text with few positions, as beside a picture in CLIP
_PRIME_GAP = 60  # the next prime is nearer than that, as far as segments reach
_NUM_STATES = 197  # positions of another model's states
# arguments that hand a decoder the states of another model; left out, its cross attention rests
_STATES = ("encoder_hidden_states", "cross_attention_states", "encoder_outputs")
# arguments that any text model takes, and that reach no other module than its tokens do
_EVERYWHERE = (
    "attention_mask", "decoder_attention_mask", "inputs_embeds", "decoder_inputs_embeds", "labels", "past_key_values",
    "logits_to_keep",
)  # fmt: skip
_TENSOR = re.compile("Tensor|Any|empty")  # an argument that is not annotated may be one


class UnknownInputsError(TraceError):
    """A model whose forward takes neither token ids nor any known form of input."""


class Inputs:
    """The inputs of a model that takes `input_ids`, with its towers' inputs.

    Of an encoder-decoder the segment is `decoder_input_ids`, and what the encoder reads is a part.

    Raises:
        TraceError: its forward takes no `input_ids`, or images in a form that no part knows; or its data decides how
            much it computes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.accepted = inspect.signature(model.forward).parameters  # arguments of the model's forward
        _refuse_entropy_patches(model)
        # an encoder-decoder's segment is the decoder's; its arguments are named after it
        self._decoder = "decoder_" if {"decoder_input_ids", "encoder_outputs"} <= self.accepted.keys() else ""
        self.parts = _parts_of(model)
        self._takes_images = any(isinstance(part, images.Images) for part in self.parts)
        self._refuse_unknown_forms(model)

        # candidates for what an operation's cost grows with: of the text, then of each tower's inputs
        self.drivers = ["tokens", "pairs:causal", "pairs:full", *(d for p in self.parts for d in p.drivers)]
        self.drivers += ["segments", "transitions"]
        self.strided = [name for part in self.parts for name in part.strided]
        self.notes = {key: note for part in self.parts for key, note in part.notes.items()}

        # lengths of the four segments [tokens], which a table of positions may limit
        self._places = build.places(model) or sys.maxsize
        self._lengths = _LENGTHS if self._places > _LENGTHS[-1] else _SHORT_LENGTHS
        self._plain_token = plain_token(getattr(model, "config", None))

    def _refuse_unknown_forms(self, model: nn.Module) -> None:
        """Refuse a forward that takes neither text nor a known form of input, or images in no known form."""
        if f"{self._decoder}input_ids" not in self.accepted and not self.parts:
            raise UnknownInputsError(
                f"{type(model).__name__}.forward takes {', '.join(self.accepted) or 'nothing'}, but the trace of a "
                "model needs input_ids. Give the arguments with trace(model, inputs=...). In a loop you need no "
                "trace, because Meter(model, watch=True) counts the forwards of any module."
            )
        if "pixel_values" in self.accepted and not self._takes_images and images.has_tower(model):
            raise TraceError(
                f"{type(model).__name__} takes images in a form that Headway does not know. Give its arguments with "
                "trace(model, inputs=...), or trace its language model alone, from the text configuration."
            )

    def workloads(self, longest_window: int = 0) -> list[Workload]:
        """Plan four single-segment workloads that no two drivers treat alike.

        Args:
            longest_window: the largest attention window seen [tokens]; segments after the first exceed it, so that
                its edge is exercised.
        """
        extra = longest_window if longest_window <= build.LONGEST_WINDOW else 0
        plans: list[dict[str, Any]] = [{}, {}, {}, {}]
        for run, part in itertools.product(range(4), self.parts):
            plans[run] |= part.sizes(run)
        inside = [self.positions(Workload([1], **plan)) for plan in plans]
        if any(part.fills for part in self.parts):
            return [Workload([length], **plan) for length, plan in zip(inside, plans, strict=True)]
        lengths = [length + self._lengths[run] for run, length in enumerate(inside)]
        extra = min(extra, max(self._places - max(lengths) - _PRIME_GAP, 0))
        return [
            Workload([_next_prime(length + (extra if run else 0))], **plans[run]) for run, length in enumerate(lengths)
        ]

    def routed(self) -> "Iterator[tuple[str, Inputs]]":
        """Name each argument that sends images another way through the model, with inputs that take it."""
        for place, part in enumerate(self.parts):
            for name in part.routes:
                other = copy.copy(self)
                other.parts = [*self.parts[:place], part.along(name), *self.parts[place + 1 :]]
                yield name, other

    def positions(self, workload: Workload) -> int:
        """Count the text positions that the towers' inputs take."""
        return sum(part.positions(workload) for part in self.parts)

    def arguments(self, workload: Workload, device: torch.device | None = None) -> dict[str, Any]:
        """Make the arguments of one forward: a single segment whose first tokens are the towers'.

        Args:
            workload: one segment, and the images and clips that lie in it.
            device: of a real model, which gets random floats; None for a phantom twin, which gets phantoms.

        Raises:
            TraceError: the model takes no images, and the workload holds some.
        """
        if len(workload.grids) and not self._takes_images:
            raise TraceError("the model takes no images, but the workload holds some.")

        def floats(shape: Sequence[int]) -> torch.Tensor:
            return phantom_floats(shape) if device is None else torch.randn(tuple(shape))

        ids = torch.full((1, workload.tokens), self._plain_token)
        batch: dict[str, Any] = {
            "input_ids": ids,
            f"{self._decoder}input_ids": ids,
            f"{self._decoder}position_ids": torch.arange(workload.tokens)[None],
            "lang_ids": torch.zeros(1, dtype=torch.long),
            "use_cache": False,
        }
        start = 0
        for part in self.parts:
            part.fill(batch, start, workload, floats)
            start += part.positions(workload)
        batch = {name: value for name, value in batch.items() if name in self.accepted}
        return on_device(batch, device) if device is not None else batch

    def doubled(self, workload: Workload) -> dict[str, Any]:
        """Make the arguments of one forward over two segments alike, as two rows of a batch."""
        batch: dict[str, Any] = _side_by_side(self.arguments(workload))
        return batch


def _parts_of(model: nn.Module) -> list[InputForm]:
    parts: list[InputForm] = []
    for form in FORMS:
        is_carried = form.takes in (part.takes for part in parts)
        if not is_carried and (part := form.of(model)) is not None:
            parts.append(part)
    return parts


def _refuse_entropy_patches(model: nn.Module) -> None:
    if getattr(getattr(model, "config", None), "patching_mode", None) == "entropy":
        raise TraceError(
            f"{type(model).__name__} cuts its text into patches by the entropy of its predictions, so the cost "
            "depends on the data. Give one example, with patch_lengths, to trace(model, inputs=...)."
        )


class FunctionInputs:
    """Inputs that the user's own function makes from a workload.

    Args:
        function: maps a workload to the forward's arguments: a dictionary by name, or a tuple by position.
    """

    def __init__(self, function: Callable[[Workload], Any]) -> None:
        self._function = function
        self.strided: list[str] = []
        self.notes: dict[str, str] = {}
        self.drivers = ["tokens", "pairs:causal", "pairs:full"]
        self.drivers += ["patches", "patch_pairs:frame", "patch_pairs:grid", "patches/4", "patches/16", "frames"]
        self.drivers += [f"patch_pairs:window:{side}" for side in WINDOW_SIDES]
        self.drivers += ["sources", "source_pairs:full", "pairs:cross", "audio", "audio_pairs:full", "clips"]
        self.drivers += ["grids", "segments", "transitions"]

    def workloads(self, longest_window: int = 0) -> list[Workload]:
        """Plan single-segment workloads with sources, images and a clip of sizes that grow in unlike proportions."""
        extra = longest_window if longest_window <= build.LONGEST_WINDOW else 0
        grids: list[list[tuple[int, int, int]]] = [
            [(1, 12, 20)],
            [(1, 28, 8), (1, 12, 20)],
            [(3, 20, 12), (1, 8, 8)],
            [(1, 8, 16), (2, 16, 12), (1, 12, 12)],
        ]
        clips = [[400], [200, 640], [1040, 80, 360], [120, 280, 560, 240]]
        return [
            Workload(
                [_next_prime(_LENGTHS[run] + (extra if run else 0))],
                images=grids[run],
                sources=[(149, 179, 283, 211)[run]],
                audio=clips[run],
            )
            for run in range(4)
        ]

    def arguments(self, workload: Workload, device: torch.device | None = None) -> Any:
        """Call the function, and put its tensors on the device, or make phantoms of its floats."""
        arguments = self._function(workload)
        return on_device(arguments, device) if device is not None else as_phantoms(arguments)

    def doubled(self, workload: Workload) -> Any:
        """Make the arguments of one forward over two segments alike.

        A function that makes a batch of one row puts a segment into a row; any other says itself what two segments are.
        """
        arguments = self.arguments(workload)
        is_one_row = all(tensor.shape[:1] == (1,) for tensor in tensors(arguments))
        return _side_by_side(arguments) if is_one_row else self.arguments(workload + workload)


class ExampleInputs:
    """One example of a forward's arguments; what it costs is billed per segment of a workload.

    Args:
        example: a dictionary by name, or a tuple by position.
    """

    drivers = ("segments",)
    strided = ()
    notes: ClassVar[dict[str, str]] = {}

    def __init__(self, example: Any) -> None:
        self._example = example
        self.is_text = isinstance(example, dict) and "input_ids" in example

    def workloads(self, _longest_window: int = 0) -> list[Workload]:
        """Plan the one workload that there is: a segment of unknown length."""
        return [Workload([1])]

    def arguments(self, _workload: Workload, device: torch.device | None = None) -> Any:
        """Put the example on a device, or make phantoms of its floats."""
        return on_device(self._example, device) if device is not None else as_phantoms(self._example)


class FamilyForm(Protocol):
    """The inputs of a family of models that makes them itself, as `headway.plugins` finds it.

    A form may also have `text_alone()`: the arguments of a pack without media, which shows what parameters a token of
    text meets where a model has several copies of its blocks.

    Attributes:
        strided: as `Inputs` has it.
        notes: facts for the cost model's source.
        drivers: names of what the costs may grow with.
    """

    strided: Sequence[str]
    notes: dict[str, str]
    drivers: tuple[str, ...]

    def workloads(self, longest_window: int = 0) -> list[Workload]:
        """Plan packs of unlike proportions."""

    def arguments(self, workload: Workload, device: torch.device | None = None) -> dict[str, Any]:
        """Make the arguments of one forward; see `Inputs.arguments`."""


def inputs_for(model: nn.Module, inputs: Any = None) -> Inputs | Denoiser | FamilyForm | FunctionInputs | ExampleInputs:
    """Choose how a model's inputs are made.

    Args:
        model: a phantom twin, or a real model.
        inputs: a function from a workload to arguments, one example of arguments, or None for what the model's own
            signature says.
    """
    if inputs is None:
        own = family_hook(getattr(model, "config", None), "inputs")
        return (Denoiser.of(model) or Inputs(model)) if own is None else own(model)
    return FunctionInputs(inputs) if callable(inputs) else ExampleInputs(inputs)


def _side_by_side(arguments: Any) -> Any:
    """Repeat every tensor among arguments along its first axis, along which samples lie."""
    if isinstance(arguments, torch.Tensor):
        return torch.cat([arguments, arguments]) if arguments.dim() else arguments
    return rebuilt(arguments, _side_by_side)


def call(model: nn.Module, arguments: Any) -> Any:
    """Run a model on arguments by name (a dictionary), by position (a tuple or list), or on a single one."""
    if isinstance(arguments, dict):
        return model(**arguments)
    return model(*arguments) if isinstance(arguments, tuple | list) else model(arguments)


def _next_prime(n: int) -> int:
    while any(n % d == 0 for d in range(2, int(n**0.5) + 1)):
        n += 1
    return n


def alternate_forwards(
    model: nn.Module, inputs: Inputs | FamilyForm | FunctionInputs | ExampleInputs, workload: Workload
) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Iterate over further forward passes: the arguments that lead another way, and all that the pass gets."""
    if not isinstance(inputs, Inputs):
        return
    plain = inputs.arguments(workload)
    if states := _states_for(model, inputs):
        yield [*states], plain | states
    if "global_attention_mask" in inputs.accepted:  # tokens that see all others have their own projections
        first = torch.zeros_like(plain["input_ids"])
        first[:, 0] = 1
        yield ["global_attention_mask"], plain | {"global_attention_mask": first}
    if videos := _as_videos(model, inputs, plain):
        yield [name for name in videos if name not in plain], videos
    for name, routed in inputs.routed():
        yield [name], routed.arguments(routed.workloads()[0])


def without_arguments(
    inputs: Inputs | FamilyForm | FunctionInputs | ExampleInputs, workload: Workload, tried: Sequence[str]
) -> list[str]:
    """Name the tensor arguments of a forward that neither the plain pass nor an alternate one was given."""
    if isinstance(inputs, FunctionInputs | ExampleInputs):
        return ["whatever is not given"]
    if not isinstance(inputs, Inputs):  # a family's own form gives all
        return []
    names = {*inputs.arguments(workload), *_EVERYWHERE, *tried}
    if "decoder_input_ids" in names:  # the encoder itself runs and gives this argument
        names.add("encoder_outputs")
    return [name for name, p in inputs.accepted.items() if name not in names and _TENSOR.search(str(p.annotation))]


def _states_for(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """Make the states of another model that a forward takes and nothing gives yet; empty where it takes none."""
    if "decoder_input_ids" in inputs.accepted:
        return {}
    config = getattr(model, "config", None)
    width = getattr(config, "cross_attention_hidden_size", None) or getattr(config, "hidden_size", None)
    names = [name for name in _STATES if name in inputs.accepted and name not in (part.takes for part in inputs.parts)]
    return {name: phantom_floats((1, _NUM_STATES, width or 1)) for name in names}


def _as_videos(model: Any, inputs: Inputs, plain: dict[str, Any]) -> dict[str, Any]:
    """Hand pictures over as videos, where a forward takes both with their sizes in one form; else empty."""
    video_names = {name: f"{name}_videos" for name in plain if f"{name}_videos" in inputs.accepted}
    if len(video_names) < 2 or {name for name in inputs.accepted if name.endswith("_videos")} != {
        *video_names.values()
    }:
        return {}
    picture, video = model.config.image_token_id, model.config.video_token_id
    ids = plain["input_ids"]
    videos = {video_names.get(name, name): value for name, value in plain.items()}
    return videos | {"input_ids": ids.masked_fill(ids == picture, video)}
