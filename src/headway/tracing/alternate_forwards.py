"""Alternate forward passes, which reach modules that the plain forward pass leaves idle.

An argument may hand a decoder another model's states, let some tokens see all others, choose a route for images, or
send videos where images go. A module that only such a pass runs costs the plain pass nothing, and is named with its
argument; a module that no pass reaches is unused.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from headway.count.workload import Workload
from headway.tracing.inputs.drawings import Drawings
from headway.tracing.inputs.model_inputs import ExampleInputs, GivenInputs, Inputs
from headway.tracing.phantom import phantom_floats

_READ = 197  # positions of another model's states
# arguments that hand a decoder the states of another model; left out, its cross attention rests
_STATES = ("encoder_hidden_states", "cross_attention_states", "encoder_outputs")
# arguments that any text model takes, and that reach no other module than its tokens do
_EVERYWHERE = (
    "attention_mask", "decoder_attention_mask", "inputs_embeds", "decoder_inputs_embeds", "labels", "past_key_values",
    "logits_to_keep",
)  # fmt: skip
_TENSOR = re.compile("Tensor|Any|empty")  # an argument that is not annotated may be one


def alternate_forwards(
    model: nn.Module, inputs: Inputs | Drawings | GivenInputs | ExampleInputs, workload: Workload
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
    inputs: Inputs | Drawings | GivenInputs | ExampleInputs, workload: Workload, tried: Sequence[str]
) -> list[str]:
    """Name the tensor arguments of a forward that neither the plain pass nor an alternate one was given."""
    if isinstance(inputs, Drawings):  # which gives all
        return []
    if not isinstance(inputs, Inputs):
        return ["whatever is not given"]
    given = {*inputs.arguments(workload), *_EVERYWHERE, *tried}
    if "decoder_input_ids" in given:  # what an encoder would give, which itself runs
        given.add("encoder_outputs")
    return [name for name, p in inputs.accepted.items() if name not in given and _TENSOR.search(str(p.annotation))]


def _states_for(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """Make the states of another model that a forward takes and nothing gives yet; empty where it takes none."""
    if "decoder_input_ids" in inputs.accepted:
        return {}
    config = getattr(model, "config", None)
    width = getattr(config, "cross_attention_hidden_size", None) or getattr(config, "hidden_size", None)
    names = [name for name in _STATES if name in inputs.accepted and name not in (part.takes for part in inputs.parts)]
    return {name: phantom_floats((1, _READ, width or 1)) for name in names}


def _as_videos(model: Any, inputs: Inputs, plain: dict[str, Any]) -> dict[str, Any]:
    """Hand pictures over as videos, where a forward takes both with their sizes in one form; else empty."""
    named = {name: f"{name}_videos" for name in plain if f"{name}_videos" in inputs.accepted}
    if len(named) < 2 or {name for name in inputs.accepted if name.endswith("_videos")} != {*named.values()}:
        return {}
    picture, video = model.config.image_token_id, model.config.video_token_id
    ids = plain["input_ids"]
    handed = {named.get(name, name): value for name, value in plain.items()}
    return handed | {"input_ids": ids.masked_fill(ids == picture, video)}
