"""The parts of a cost model: its parameters, and one row for each operation of each module."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

ALWAYS = -1
"""`Gradient.needs` of a gradient that flows on to an input of the model: it is computed whatever is trained."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter tensor of a model."""

    name: str  # dotted name, as `named_parameters()` gives it
    numel: int  # number of elements
    active: int  # elements that one token's forward uses (top-k of the experts); `numel` where all are
    component: str  # the component it belongs to, such as `vision.mlp`
    trainable: bool = True  # whether it gets a gradient


@dataclass(frozen=True, slots=True)
class Gradient:
    """One matrix product of the backward pass."""

    phase: Literal["dgrad", "wgrad"]  # `dgrad` for the gradient of an activation, `wgrad` for that of a weight
    flops: int  # FLOPs per unit of the row's driver
    needs: int  # bit i set when training parameter i makes autograd compute it; or `ALWAYS`

    def runs(self, trained: int) -> bool:
        """Tell whether autograd computes it."""
        return self.needs == ALWAYS or bool(self.needs & trained)


@dataclass(frozen=True, slots=True)
class Row:
    """One operation of one module."""

    module: str  # dotted path of the module that ran it
    op: str  # `linear`, `matmul`, `convolution`, `experts`, `attention` or `recurrence`
    component: str  # component of the module, such as `language.mlp`
    driver: str  # the quantity that its cost is proportional to (see `headway.count.drivers`)
    forward: int  # FLOPs per unit of the driver
    gradients: tuple[Gradient, ...] = ()  # the backward's products
    block: str = ""  # the checkpointable block that holds it, "" for none
    # whether checkpointing that block runs this forward again. Recomputation stops at the last tensor that backward
    # needs, so a block's closing projection usually is not
    recomputed: bool = False
    features: tuple[int, int] | None = None  # (in, out) of a linear module, for LoRA; None for other operations
    cached: int = 0  # elements of one token's keys and values, of all heads, that attention reads for a pair; 0: others


@dataclass(frozen=True, slots=True)
class ParamCount:
    """Numbers of parameters: all, those one token uses, those trained."""

    total: int
    active: int
    trainable: int


# Muon updates matrices between hidden activations: not embeddings, the head, the router (a head over experts) or what
# embeds patches.
# Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks",
# https://kellerjordan.github.io/posts/muon/; Liu et al. 2025, arXiv:2502.16982.
_PARTS = frozenset({"projections", "mlp", "experts", "merger", "mtp"})


def hidden_matrices(rows: Sequence[Row], parameters: Sequence[Parameter]) -> frozenset[str]:
    """Name the parameters by which hidden layers multiply, stacks of the matrices of experts among them.

    A parameter is one if it belongs to a hidden layer and its gradient is a matrix product, which those of norms and
    biases are not.

    Args:
        rows: of a cost model.
        parameters: of the same, with what is frozen frozen; a frozen matrix may be left out.
    """
    multiplied = 0  # bit i set for parameter i
    for row in rows:
        if row.op != "convolution":
            for gradient in row.gradients:
                multiplied |= gradient.needs if gradient.phase == "wgrad" else 0
    return frozenset(
        parameter.name
        for number, parameter in enumerate(parameters)
        if multiplied >> number & 1 and parameter.component.rpartition(".")[2] in _PARTS
    )
