"""Settings that `headway init` writes for rows of pairs."""

from headway.predict.suggest import SuggestedObjective


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
