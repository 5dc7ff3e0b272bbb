"""Forward of a model that does not learn, beside a run's steps: of each step, or of the data once before the first."""

from typing import NamedTuple

from headway.config import TrainConfig
from headway.count import CostModel
from headway.plugins import objective_of


class FrozenForward(NamedTuple):
    """A forward that a run computes beside those of the model that learns.

    Attributes:
        name: of it, in words.
        cost_model: of the model that runs, none of which is trained.
        config: settings of a run that would compute it alone.
        each_step: whether each step computes it of its packs; otherwise the data have it once, before the first step.
    """

    name: str
    cost_model: CostModel
    config: TrainConfig
    each_step: bool


def frozen_forward(config: TrainConfig, cost_model: CostModel) -> FrozenForward | None:
    """Find the forward that a run's objective computes beside the model; None of one that computes none.

    Args:
        config: the recipe.
        cost_model: of its model, with what is frozen frozen and adapters in place.
    """
    objective = objective_of(config.objective_name)
    forward_of = None if objective is None else objective.hook("forwards")
    forward: FrozenForward | None = None if forward_of is None else forward_of(config, cost_model)
    return forward
