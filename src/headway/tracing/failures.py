"""An error of foreign code that runs on tensors without data, with its place and what to do."""

from typing import Any

import torch
from torch import nn

from headway.errors import TraceError
from headway.tracing.record import Recorder

_LONGEST = 300  # characters of an error's own text


def failed_on_shapes(error: Exception, model: Any, recorder: Recorder | None = None) -> TraceError:
    """Describe an error that was raised while a model was traced.

    Args:
        error: what was raised.
        model: which was traced, or its configuration.
        recorder: of the run that failed; None where no module ran yet.
    """
    place, operation = type(model).__name__, ""
    if recorder is not None and recorder.failure is not None and recorder.failure[0] is error:
        _, path, operation = recorder.failure
        place = f"module {path or '(the model)'} ({type(model.get_submodule(path)).__name__})"
    text = " ".join(str(error).split())
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
    return TraceError(
        f"{place} {f'fails in {operation}' if operation else 'raises an error'} when it runs on shapes alone: "
        f"{type(error).__name__}: {text.rstrip('.') or 'no reason'}. {_way_out(model)}"
    )


def _way_out(model: Any) -> str:
    if isinstance(model, nn.Module) and (stored := _quantised(model)):
        return (
            f"Its weights are stored quantised ({stored}): trace the model without quantisation, which has the same "
            "FLOPs, and pass its cost model on (cost_model=)."
        )
    return (
        "If the model runs by itself on such inputs, trace it with another operation in this place, or give the inputs "
        "that it needs with trace(model, inputs=...); what is metered then takes that cost model (cost_model=)."
    )


def _quantised(model: nn.Module) -> str:
    """Name a parameter that is stored in integers or by a tensor class of its own; "" where there is none."""
    for name, parameter in model.named_parameters():
        stored = type(parameter if type(parameter) is not nn.Parameter else parameter.data)
        is_plain = stored in (torch.Tensor, nn.Parameter) or not stored.__module__.startswith(
            ("torchao", "bitsandbytes")
        )
        if not is_plain or not (parameter.is_floating_point() or parameter.is_complex()):
            return f"{name} as {stored.__name__} of {parameter.dtype}"
    return ""
