"""Runs on preferences before they start: the forward of their reference, and settings of `headway init`."""

from dataclasses import replace
from typing import Any

from headway.config import TrainConfig
from headway.count import CostModel
from headway.count.adapters import is_adapter
from headway.objectives.preferences.settings import PreferenceConfig
from headway.predict.recipe import FrozenForward
from headway.predict.suggest import SuggestedObjective


def forward_of(config: TrainConfig, cost_model: CostModel) -> FrozenForward | None:
    """The forward of a run's reference; None of a run that compares with nothing.

    It has no backward, so nothing is computed again in it. Where adapters are off, blocks are not compiled.
    """
    settings = config.objective_section
    assert isinstance(settings, PreferenceConfig)
    if settings.compares_with == "none":
        return None
    rows, each_step = cost_model.rows, settings.compares_with == "adapters-off"
    speed: dict[str, Any] = {"recompute": "none"}
    if each_step:
        rows = tuple(row for row in rows if not is_adapter(row.module))
        speed |= {"compile": False}
    frozen = tuple(replace(parameter, trainable=False) for parameter in cost_model.parameters)
    settings_alone = config.model_copy(update={"preference": None, "speed": config.speed.model_copy(update=speed)})
    name = "reference, forward without adapters" if each_step else "reference"
    return FrozenForward(name, replace(cost_model, rows=rows, parameters=frozen), settings_alone, each_step)


def for_pairs(*, are_pairs: bool) -> SuggestedObjective | None:
    """DPO for pairs; None of other samples.

    Source: the rate is a tenth of the usual one, as in TRL 1.16, whose DPOConfig has 1e-6.
    """
    comments = {
        "preference": "The data are answers of which some are better: DPO. docs/preferences.md has the other losses.",
        "preference.loss": "sigmoid is DPO; orpo and simpo need no reference",
    }
    why_rate = "a tenth of the usual rate, as pairs are learnt (TRL)"
    return SuggestedObjective({"preference": {"loss": "sigmoid"}}, comments, 0.1, why_rate) if are_pairs else None
