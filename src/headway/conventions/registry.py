"""The conventions by name."""

import difflib
import re
from functools import cache

from headway.conventions import maxtext, megatron, nemo, ours, rl_trainers, veomni, verl, weights
from headway.conventions.convention import Convention
from headway.errors import UnknownConventionError
from headway.plugins import hooks_of_all
from headway.words import Argument

_ALL = (
    Convention(
        "useful", "1", "", "real tokens, allowed pairs, vision by patch, backward as autograd needs it",
        ours.useful, "real", "segments", "rows",
    ),
    Convention(
        "hardware", "1", "", "useful on every slot, padding too, plus what checkpointing runs again",
        ours.hardware, "slots", "segments", "rows",
    ),
    Convention(
        "6nd", "2026-08", "", "6 x parameters outside embeddings per slot: all experts, vision too, no attention",
        weights.six_nd, "slots", "none", "rows",
    ),
    Convention(
        "palm", "2022-04", "nanogpt", "all parameters but positions, and the full square of the configured row",
        weights.palm, "rows", "rows",
    ),
    Convention(
        "torchtitan", "2026-08", "torchtitan", "full square of the configured row for every label slot; vision free",
        weights.torchtitan, "slots", "rows",
    ),
    Convention(
        "torchtitan-2026-06", "2026-06", "torchtitan",
        "full square of the configured row, windows or not, for every label slot; vision free",
        weights.torchtitan_2026_06, "slots", "rows", releases=("0.3.0",),
    ),
    Convention(
        "torchtitan-2025-12-vlm", "2025-12", "torchtitan",
        "full square of the configured row; all vision parameters once per text token",
        weights.torchtitan_2025_12_vlm, "slots", "rows",
    ),
    Convention(
        "torchtitan-flux", "2026-08", "torchtitan",
        "embedders for every token of text and picture, half of attention's pairs; no autoencoder, no text encoders",
        weights.torchtitan_flux, "joint", "segments", "rows", only="FluxTransformer2DModel",
        seq_len=True,
    ),
    Convention(
        "megatron-bridge", "2026-08", "", "every slot, half the square of each segment; padded vocabulary, no router",
        megatron.megatron_bridge, "slots", "segments", towers=True, seq_len=True,
    ),
    Convention(
        "megatron-bridge-2026-05", "2026-05", "", "megatron-bridge with all patches of a row as one picture",
        megatron.megatron_bridge_2026_05, "slots", "segments", towers=True, seq_len=True, releases=("0.6.2",),
    ),
    Convention(
        "megatron-bridge-2025", "2025-10", "", "rows x configured length and half its square, windows or not",
        megatron.megatron_bridge_2025, "rows", "rows",
    ),
    Convention(
        "megatron-lm", "2026-08", "", "real tokens of packs, half the square of each segment; padded vocabulary",
        megatron.megatron_lm, "real", "segments",
    ),
    Convention(
        "megatron-lm-2026-05", "2026-05", "", "rows x configured length and half its square; no windows",
        megatron.megatron_lm_2026_05, "rows", "rows",
    ),
    Convention(
        "maxtext", "2026-08", "", "rows x configured length, half its square; vision free but for Gemma-3 and Llama-4",
        maxtext.maxtext, "rows", "rows",
    ),
    Convention(
        "maxtext-2026-03", "2026-03", "", "maxtext with windows as half of row x window",
        maxtext.maxtext_2026_03, "rows", "rows",
    ),
    Convention(
        "maxtext-2025-06", "2025-06", "", "rows x configured length and its full square",
        maxtext.maxtext_2025, "rows", "rows",
    ),
    Convention(
        "lmms-engine", "2026-08", "lmms-engine",
        "real tokens, full square of each segment, the embedding as a second head; vision free",
        verl.lmms_engine, "real", "segments", releases=("0.1.4",),
    ),
    Convention(
        "veomni", "2026-08", "veomni",
        "real tokens, full square of each segment; vision mergers per patch; frozen towers and LoRA at less",
        veomni.veomni, "real", "segments", towers=True, delta=True, releases=("0.1.12",),
    ),
    Convention(
        "veomni-2026-07", "2026-07", "veomni", "veomni with Qwen2.5-VL's windows in pixels",
        veomni.veomni_2026_07, "real", "segments", towers=True, delta=True,
    ),
    Convention(
        "verl", "2026-07", "verl", "real tokens, half square of each segment, the embedding as a second head",
        verl.verl, "real", "segments", towers=True, delta=True, releases=("0.9.1",),
    ),
    Convention(
        "verl-2025-12", "2025-12", "verl",
        "real tokens, full square of each segment, the embedding as a second head",
        verl.verl_2025_12, "real", "segments",
    ),
    Convention(
        "nemo-automodel", "2026-08", "nemo-automodel",
        "rows x configured length and half its square; no routers, vision free",
        nemo.automodel, "rows", "rows", delta=True, releases=("0.7.0",),
    ),
    Convention(
        "nemo-rl", "2026-08", "nemo-rl", "real tokens, half the square of each sample; no routers",
        nemo.rl, "real", "segments",
    ),
    Convention(
        "slime", "2026-08", "", "real tokens, half the square of each sample; no routers, vision free",
        rl_trainers.slime, "real", "segments",
    ),
    Convention(
        "miles", "2026-08", "miles",
        "real tokens, half the square of each sample; keys and values of every model as of latent attention",
        rl_trainers.miles, "real", "segments",
    ),
    Convention(
        "prime-rl", "2026-08", "prime-rl",
        "rows x their length and its full square; no shared experts, vision free",
        rl_trainers.prime_rl, "rows", "rows", delta=True,
    ),
    Convention(
        "llm-foundry", "2025-07", "llm-foundry", "parameters that a token uses, and the full square of the row",
        weights.llm_foundry, "rows", "rows",
    ),
    Convention(
        "olmo-core", "2026-06", "olmo-core", "parameters of attention, MLPs and head, and the full square of the row",
        weights.olmo_core, "rows", "rows",
    ),
    Convention(
        "nanochat", "2026-07", "nanochat", "matmul parameters and the full square of the row, cut at windows",
        weights.nanochat, "rows", "rows",
    ),
    Convention(
        "trl", "2026-08", "trl", "linear layers, routers, head, the full square of the row; vision free",
        weights.trl, "rows", "rows", delta=True, releases=("1.16.0",),
    ),
    Convention(
        "trl-2026-07", "2026-05", "trl-2026-07", "trl with an untied embedding as a second head",
        weights.trl_2026_07, "rows", "rows",
    ),
    Convention(
        "flop-counter", "2026-08", "", "dispatched products: full squares, flash backward 2.5 x; experts unseen",
        ours.flop_counter, "slots", "segments", "rows",
    ),
)  # fmt: skip


@cache
def _by_name() -> dict[str, Convention]:
    """All conventions by name: those above, then those of installed families."""
    rules = (*_ALL, *(rule for rules in hooks_of_all("conventions") for rule in rules))
    return {rule.name: rule for rule in rules}


def conventions(model_type: str | None = None) -> tuple[Convention, ...]:
    """List the conventions, ours first.

    Args:
        model_type: leaves out those of tools that train one other type of model; None leaves out none.
    """
    return tuple(rule for rule in _by_name().values() if model_type is None or rule.only in ("", model_type))


def get_convention(name: str) -> Convention:
    """Find a convention by name, with or without its version or a release of its tool: "useful/1", "trl/1.16.0".

    Raises:
        UnknownConventionError: no convention has this name, or not in this version; the message names the nearest.

    >>> get_convention("useful/1").name
    'useful'
    >>> get_convention("torchtitan/0.3.0").name
    'torchtitan-2026-06'
    """
    base, slash, version = name.lower().partition("/")
    rules = _by_name()
    convention = rules.get(base)
    releases = {release: rule for rule in rules.values() if _tool_of(rule) == base for release in rule.releases}
    if version in releases:
        return releases[version]
    if convention is None:
        close = difflib.get_close_matches(base, rules, n=2, cutoff=0.5)
        hint = f"Did you mean {' or '.join(close)}? " if close else ""
        raise UnknownConventionError(
            Argument("convention"),
            f" {name!r} is not known. {hint}Known are {', '.join(rules)}; docs/conventions.md says what each counts.",
            value=name,
            choices=tuple(rules),
        )
    if slash and version != convention.version:
        known_releases = "".join(f" Of its tool's releases {release} is known." for release in releases)
        raise UnknownConventionError(
            Argument("convention"),
            f" {name!r}: {convention.name} is kept in version {convention.version} only.{known_releases} Give "
            f"{convention.name!r} or '{convention.name}/{[*releases, convention.version][0]}'.",
            value=name,
            choices=[convention.version, *releases],
        )
    return convention


def _tool_of(rule: Convention) -> str:
    """Name of a rule's tool, without the date of the rule.

    >>> _tool_of(get_convention("megatron-bridge-2026-05"))
    'megatron-bridge'
    """
    return re.sub(r"-20\d\d(-.*)?$", "", rule.name)
