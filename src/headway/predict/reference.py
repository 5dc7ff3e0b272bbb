"""Forward of the reference that preferences are compared with: of each step, or of the data once before the first."""

from dataclasses import replace

from headway.config import TrainConfig
from headway.count import CostModel
from headway.count.adapters import is_adapter


def reference_model(config: TrainConfig, cost_model: CostModel) -> CostModel | None:
    """Give the model that computes a run's reference: one that has no backward, without adapters where these are off.

    Args:
        config: the recipe.
        cost_model: of its model, with what is frozen frozen and adapters in place.

    Returns:
        None of a run that compares with nothing.
    """
    preference = config.preference
    if preference is None or preference.compares_with == "none":
        return None
    rows = cost_model.rows
    if preference.compares_with == "adapters-off":
        rows = tuple(row for row in rows if not is_adapter(row.module))
    return replace(cost_model, rows=rows, parameters=tuple(replace(p, trainable=False) for p in cost_model.parameters))


def is_each_step(config: TrainConfig) -> bool:
    """Tell whether a step computes the reference of its packs; otherwise it is computed before the first one."""
    return config.preference is not None and config.preference.compares_with == "adapters-off"


def reference_config(config: TrainConfig) -> TrainConfig:
    """Settings of that forward: nothing is computed again, and where adapters are off, blocks are not compiled."""
    speed = {"recompute": "none"} | ({"compile": False} if is_each_step(config) else {})
    return config.model_copy(update={"preference": None, "speed": config.speed.model_copy(update=speed)})
