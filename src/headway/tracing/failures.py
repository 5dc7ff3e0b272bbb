"""An error of foreign code that runs on tensors without data, with its place and what to do."""

from typing import Any

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
    happened = f"fails in {operation}" if operation else "raises an error"
    return TraceError(
        f"{place} {happened} when it runs on shapes alone: {type(error).__name__}: {text.rstrip('.') or 'no reason'}. "
        "If the model runs by itself on such inputs, trace it with another operation in this place, or give the inputs "
        "that it needs with trace(model, inputs=...); what is metered then takes that cost model (cost_model=)."
    )


def refuse_quantised(model: nn.Module) -> None:
    """Refuse a model whose weights are stored quantised, as 4-bit bases of adapters are.

    Raises:
        TraceError: one is.
    """
    for name, parameter in model.named_parameters():
        stored = type(parameter) if type(parameter) is not nn.Parameter else type(parameter.data)
        is_packed = not (parameter.is_floating_point() or parameter.is_complex())
        if is_packed or stored.__module__.startswith(("torchao.quantization", "torchao.dtypes", "bitsandbytes")):
            path = name.rpartition(".")[0]
            raise TraceError(
                f"module {path or '(the model)'} ({type(model.get_submodule(path)).__name__}) stores {name} quantised "
                f"({stored.__name__}, {parameter.dtype}), and its products cannot be read. Trace the model without "
                "quantisation, which has the same FLOPs, and pass its cost model on (cost_model=)."
            )
