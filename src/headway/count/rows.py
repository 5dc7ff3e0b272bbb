"""What a cost model is made of: its parameters, and one row for each operation of each module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

ALWAYS = -1
"""`Gradient.needs` of a gradient that flows on to an input of the model: it is computed whatever is trained."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter tensor of a model.

    Attributes:
        name: dotted name, as `named_parameters()` gives it.
        numel: number of elements.
        active: elements that one token's forward uses (top-k of the experts); `numel` where all are.
        component: the component it belongs to, such as `vision.mlp`.
        trainable: whether it gets a gradient.
    """

    name: str
    numel: int
    active: int
    component: str
    trainable: bool = True


@dataclass(frozen=True, slots=True)
class Gradient:
    """One matrix product of the backward pass.

    Attributes:
        phase: `dgrad` for the gradient of an activation, `wgrad` for that of a weight.
        flops: FLOPs per unit of the row's driver.
        needs: bit i set when training parameter i makes autograd compute it; or `ALWAYS`.
    """

    phase: Literal["dgrad", "wgrad"]
    flops: int
    needs: int

    def runs(self, trained: int) -> bool:
        """Whether autograd computes it.

        Args:
            trained: bit i set when parameter i is trained.
        """
        return self.needs == ALWAYS or bool(self.needs & trained)


@dataclass(frozen=True, slots=True)
class Row:
    """One operation of one module.

    Attributes:
        module: dotted path of the module that ran it.
        op: `linear`, `matmul`, `convolution`, `experts`, `attention` or `recurrence`.
        component: such as `language.mlp`.
        driver: what its cost is proportional to (see `headway.count.drivers`).
        forward: FLOPs per unit of the driver.
        gradients: the backward's products.
        block: the checkpointable block that holds it, "" for none.
        recomputed: whether checkpointing that block runs this forward again. Recomputation stops at the last tensor
            that backward needs, so a block's closing projection usually is not.
        features: (in, out) of a linear module, for LoRA; None for other operations.
    """

    module: str
    op: str
    component: str
    driver: str
    forward: int
    gradients: tuple[Gradient, ...] = ()
    block: str = ""
    recomputed: bool = False
    features: tuple[int, int] | None = None


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
    """Names of the parameters by which hidden layers multiply, stacks of the matrices of experts among them.

    A parameter is one if it belongs to a hidden layer and its gradient is a matrix product, which those of norms and
    biases are not.

    Args:
        rows: of a cost model.
        parameters: of the same, with what is frozen frozen; a frozen matrix may be left out.
    """
    read = 0
    for row in rows:
        if row.op != "convolution":
            for gradient in row.gradients:
                read |= gradient.needs if gradient.phase == "wgrad" else 0
    return frozenset(
        parameter.name
        for number, parameter in enumerate(parameters)
        if read >> number & 1 and parameter.component.rpartition(".")[2] in _PARTS
    )
