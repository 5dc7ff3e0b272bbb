"""Preferences: learning from answers of which some are better than others (DPO, KTO, reward models and their kin).

`settings.py` is the section `preference` of a configuration, `objective.py` what the training loop asks, `losses.py`
the losses, `reference.py` the log-probabilities that they compare with, `held_out.py` how held-out pairs are judged.
"""

from headway.plugins import ObjectivePlugin

OBJECTIVE = ObjectivePlugin(
    section="preference",
    title="Train on preferences: answers of which some are better; null for none",
    package=__name__,
    hooks={
        "section": "settings:PreferenceConfig",
        "objective": "objective:Preferences",
        "rows": "rows:rule_of",
        "judge": "held_out:judge_of",
        "prepare_encoder": "prompts:share_prompts",
        "forwards": "plans:forward_of",
        "small_rows": "rows:into_pairs",
        "suggested": "plans:for_pairs",
    },
)

# A process that unpickles a setting imports this package first, and the configuration has its section as a field.
import headway.config  # noqa: E402, F401 - after OBJECTIVE, which the configuration asks for
