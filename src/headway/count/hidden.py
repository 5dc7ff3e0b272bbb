"""The matrices of hidden layers: those that the optimizer Muon is for, the same for a run and for what is planned."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.count.cost_model import CostModel

# Embeddings, the head, the router (a head over experts) and what embeds patches are not between hidden activations.
# Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks",
# https://kellerjordan.github.io/posts/muon/; Liu et al. 2025, arXiv:2502.16982.
_PARTS = frozenset({"projections", "mlp", "experts", "merger", "mtp"})


def hidden_matrices(cost_model: CostModel) -> frozenset[str]:
    """Names of the parameters by which hidden layers multiply, stacks of the matrices of experts among them.

    A parameter is one if it belongs to a hidden layer and its gradient is a matrix product, which those of norms and
    biases are not.

    Args:
        cost_model: of the model, with what is frozen frozen; a frozen matrix may be left out.
    """
    read = 0
    for row in cost_model.rows:
        if row.op != "convolution":
            for gradient in row.gradients:
                read |= gradient.needs if gradient.phase == "wgrad" else 0
    return frozenset(
        parameter.name
        for number, parameter in enumerate(cost_model.parameters)
        if read >> number & 1 and parameter.component.rpartition(".")[2] in _PARTS
    )
