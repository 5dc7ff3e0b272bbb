"""Weights that are stored quantised, and the layers of floats that they stand for.

Adapters are trained on bases in 4 or 8 bits (bitsandbytes, torchao). A step must compute what the model without
quantisation would: each product once, of the layer's own sizes. How a kernel does it (unpacking to bfloat16 first, or
multiplying integers) changes its speed and no FLOP, so the layer is billed as a plain one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headway.errors import TraceError

_PACKAGES = ("torchao", "bitsandbytes")


def is_quantised(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is a parameter that is no plain floats; integers among buffers are just that."""
    return isinstance(tensor, nn.Parameter) and stored_as(tensor) is not None


def stored_as(parameter: torch.Tensor) -> str | None:
    """Name the form of a parameter that is stored quantised: its class or dtype; None for plain floats."""
    cls = type(parameter) if type(parameter) is not nn.Parameter else type(parameter.data)
    if cls.__module__.partition(".")[0] in _PACKAGES:
        return cls.__name__
    if parameter.is_floating_point() or parameter.is_complex():
        return None
    return str(parameter.dtype).removeprefix("torch.")


def represented_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of the floats that a module's own parameters stand for, by name, where it says so (`model.base`)."""
    return {name: tuple(layout.shape) for name, layout in vars(module).get("quantised", {}).items()}


def plain_layers(model: nn.Module, stand_in: Callable[[nn.Parameter], Any]) -> dict[int, Any]:
    """Make plain layers and parameters in place of a model's quantised ones.

    A layer says by its attributes what it stands for: `in_features` and `out_features`, or `num_embeddings` and
    `embedding_dim`. Where a tensor keeps the shape and dtype of the floats that it stands for, it says so itself.

    Args:
        model: it is not touched.
        stand_in: makes the parameter of a twin from one of floats without data.

    Returns:
        The stand-ins by the id of what they stand for: of layers, and of parameters.

    Raises:
        TraceError: a weight is packed in a layer that does not say its sizes.
    """
    stand_ins: dict[int, Any] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not is_quantised(parameter):
                continue
            if parameter.is_floating_point():
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                stand_ins[id(parameter)] = stand_in(nn.Parameter(empty, parameter.requires_grad))
            elif (layer := _layer(module)) is not None:
                # the layer as a whole: its own forward would unpack what is no data here
                for part, own in layer.named_parameters():
                    before = getattr(module, part)
                    trained = before.requires_grad and stored_as(before) is None
                    setattr(layer, part, stand_in(nn.Parameter(own.data, trained)))
                stand_ins[id(module)] = layer
            elif name in represented_shapes(module):  # a stack of experts' matrices, which its layer reads by name
                empty = torch.empty(represented_shapes(module)[name], device="meta")
                stand_ins[id(parameter)] = stand_in(nn.Parameter(empty, requires_grad=False))
            else:
                raise TraceError(
                    f"module {path or '(the model)'} ({type(module).__name__}) stores {path and path + '.'}{name} "
                    f"quantised ({stored_as(parameter)}), so Headway cannot tell which layer it stands for. Trace "
                    "the model without quantisation, which has the same FLOPs, and pass that cost model "
                    "(cost_model=)."
                )
    return stand_ins


def note_on_quantised(model: nn.Module) -> str:
    """Note for a ledger's source the quantised parts of a model; "" for none."""
    forms = {form for p in model.parameters() if (form := stored_as(p)) is not None}
    return f"{', '.join(sorted(forms))}; billed as the floats that they stand for" if forms else ""


def _layer(module: nn.Module) -> nn.Module | None:
    inputs, outputs = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if isinstance(inputs, int) and isinstance(outputs, int):
        return nn.Linear(inputs, outputs, bias=getattr(module, "bias", None) is not None, device="meta")
    rows, width = getattr(module, "num_embeddings", None), getattr(module, "embedding_dim", None)
    if isinstance(rows, int) and isinstance(width, int):
        return nn.Embedding(rows, width, padding_idx=getattr(module, "padding_idx", None), device="meta")
    return None
