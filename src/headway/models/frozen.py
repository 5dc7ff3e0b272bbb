"""Weights that do not learn, held in the dtype of their products, or in 4 or 8 bits (`model.base`).

Autocast casts a weight for its product and keeps master weights of float32 for what learns. Of a weight that only
products read, and that does not learn, nothing needs more than the copy: it is held in that dtype, the same numbers at
half the bytes. What else reads a weight (an embedding that looks rows up, a norm) keeps its dtype on one process. FSDP2
gathers all weights in the dtype of the products, so among several processes all that do not learn are held in it.
"""

import math

import torch
from torch import nn

from headway.count import CostModel
from headway.count.quantised import Base, quantised_parameters
from headway.count.units import product_weights
from headway.errors import ConfigError
from headway.models.experts import experts_of
from headway.models.precision import Precision
from headway.models.quantised import ByteLayout, hold


def hold_frozen(model: nn.Module, cost_model: CostModel, precision: Precision, *, gathers: bool) -> None:
    """Give weights that do not learn the dtype of the products, in place.

    Args:
        model: on the meta device, with adapters in place.
        cost_model: traced from it.
        precision: of the run.
        gathers: whether FSDP2 gathers the weights.
    """
    names = product_weights(cost_model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and parameter.dtype == precision.params and (gathers or name in names):
            parameter.data = parameter.data.to(precision.compute)


def quantise_base(model: nn.Module, cost_model: CostModel, base: Base) -> tuple[str, ...]:
    """Replace the weights of frozen linear layers and experts by bytes, in place and under the same names.

    Args:
        model: on the meta device, with adapters in place.
        cost_model: traced from it; names the weights by what reads them.
        base: how they are held.

    Returns:
        A note for the start of the run.

    Raises:
        ConfigError: there is nothing to hold so.
    """
    names = quantised_parameters(cost_model)
    layouts = {name: ByteLayout(base, tuple(parameter.shape)) for name, parameter in _holdable(model) if name in names}
    if not layouts:
        raise ConfigError(
            f"model.base {base!r} holds frozen linear layers of repeated blocks, and {type(model).__name__} has none "
            "here. Take it out."
        )
    hold(model, layouts)
    values = sum(math.prod(layout.shape) for layout in layouts.values())
    num_bytes = sum(math.prod(layout.stored_shape) for layout in layouts.values())
    return (
        f"{len(layouts)} frozen weights of {values / 1e6:.2f} M parameters are held as {base}, in "
        f"{8 * num_bytes / values:.2f} bits each",
    )


def _holdable(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Weights of plain linear layers, and what experts multiply by; those that two modules share are left out."""
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    experts = experts_of(model)
    holders = {path: module for path, module in model.named_modules() if type(module) is nn.Linear or path in experts}
    return [
        (f"{path}.{name}", parameter)
        for path, module in holders.items()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim > 1 and uses[id(parameter)] == 1
    ]
