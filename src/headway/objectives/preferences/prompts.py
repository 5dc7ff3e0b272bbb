"""Answers of a preference that share their prompt in a pack, if the run asks for it and its model can."""

from typing import Any

from transformers import PreTrainedModel

from headway.count import CostModel
from headway.data import Encoder
from headway.errors import ConfigError
from headway.models.attention.backend import NAME
from headway.models.parallel.sequence import mixes_tokens
from headway.models.rotary import reads_rows
from headway.objectives.preferences.settings import PreferenceConfig
from headway.plugins import lays_out_packs


def share_prompts(
    settings: PreferenceConfig, model: PreTrainedModel, cost_model: CostModel, encoder: Encoder
) -> tuple[str, ...]:
    """Have an encoder put each prompt into packs once, if the run asks for it and its model can.

    Args:
        settings: the section on preferences.
        model: with or without weights.
        cost_model: of the model.
        encoder: of its samples; changed in place.

    Returns:
        A line that says why not, where that was left to the model.

    Raises:
        ConfigError: prompts are to be shared, and the model cannot.
    """
    if settings.shared_prompts is False:
        return ()
    # Unpaired answers stand behind other prompts too, in packs of as many tokens.
    by_itself = f"{settings.loss} takes each answer by itself" if settings.row.unpaired else ""
    reason = by_itself or why_apart(model, cost_model, encoder)
    if reason and settings.shared_prompts is True:
        raise ConfigError(
            f"preference.shared_prompts is true, but {reason}, so each answer needs a copy of its prompt. Set "
            "shared_prompts to auto or false."
        )
    encoder.shares_prompts = not reason
    return (f"each answer has its own copy of the prompt, because {reason}",) if reason else ()


def why_apart(model: PreTrainedModel, cost_model: CostModel, encoder: Encoder) -> str:
    """Say why answers cannot share a prompt on this model; empty where they can.

    Branches are runs in a causal mask, so all that mixes tokens of the text must be attention with that mask alone.
    """
    if lays_out_packs(model.config):
        return "the model lays out its own packs"
    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]  # transformers leaves it so
    config, types = decoder.config.get_text_config(), getattr(encoder.media.processed, "types_name", None)
    mixing, otherwise = mixes_tokens(decoder), cost_model.mixed_otherwise
    attends = config._attn_implementation == NAME and decoder._supports_attention_backend
    # Caps on scores and sinks beside the keys are what kernels under such a mask do not have.
    reasons = {
        f"{mixing} mixes tokens outside attention": mixing is not None,
        f"the model's text does not mix by causal attention alone ({otherwise})": bool(otherwise),
        f"{type(decoder).__name__} does not attend through the backend {NAME!r}": not attends,
        f"the model's mask follows {types}": types is not None,
        "the model caps the scores of its attention": getattr(config, "attn_logit_softcapping", None) is not None,
        "the model's rotary embedding goes by the length of each answer": reads_rows(decoder),
        "the model's attention has sinks": any(name.endswith(".sinks") for name, _ in decoder.named_parameters()),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
