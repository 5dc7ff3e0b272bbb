"""One reader of architectures for all conventions: from a configuration, settled and checked by the traced ledger.

Needs neither torch nor transformers: a configuration is the dictionary of a `config.json`. What only a model's class
knows (whether an MLP has a gate, which layers a window is for) is read off the ledger where there is one, and nowhere
else is it guessed. Sizes that do not multiply to the ledger's rows are refused with the reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headway.conventions.architecture import Architecture, DeltaRule, Mla, Vision
from headway.count import drivers
from headway.count.adapters import is_adapter
from headway.count.cost_model import CostModel
from headway.count.models import presets
from headway.count.rows import Row
from headway.errors import UnknownModelError

# drivers of the weights that a text token meets; where blocks exist twice, of the copy for text
_OF_TEXT = ("tokens", "understood", "supervised")
_FEED_FORWARD = frozenset({"language.mlp", "language.experts", "language.router"})
_SAME = 1e-3  # sizes make the model if they multiply to the ledger's weights within this share
_MASKS = ("pairs:causal", "pairs:full", "pairs:splits", "pairs:sliding:", "pairs:chunked:")
_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_FFN = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_topk", "moe_k")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")


class _UnreadError(Exception):
    """A field that is missing, or that is no number; the text says which, as a clause."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """A language model's layers, as traced."""

    masks: tuple[str, ...]  # the driver of each attention, in the order of the layers, such as "pairs:sliding:4096"
    projections: int  # matrix elements of all attention projections that one token meets
    feed_forward: int  # matrix elements of MLPs, active experts, shared experts and routers
    head: int  # matrix elements of the head
    pair_features: int  # features that one query-key pair multiplies, query-key and value heads, over all layers
    expert_layers: int = 0  # modules of routed experts
    experts: int = 0  # elements of all routed experts
    active_experts: int = 0  # elements of the experts that one token is routed to

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer [tokens], None where there is none."""
        return tuple(_length(mask, "pairs:sliding:") for mask in self.masks)

    @property
    def chunks(self) -> tuple[int | None, ...]:
        """Chunk that each layer's attention stays in [tokens], None where there is none."""
        return tuple(_length(mask, "pairs:chunked:") for mask in self.masks)


def decoder(cost_model: CostModel) -> Decoder:
    """Sum up the rows of a cost model's language model; adapters are left out."""
    rows = [row for row in cost_model.rows if row.component.startswith("language.")]
    attention = [row for row in rows if row.op == "attention" and drivers.tower(row.driver) == "language"]
    masks = {row.module: row.driver for row in attention}
    routed = {row.module for row in rows if row.op == "experts" and row.driver == "tokens"}
    experts = [p for p in cost_model.parameters if _is_inside(p.name, routed)]
    return Decoder(
        tuple(masks.values()),
        sum(_weights(row) for row in rows if row.component == "language.projections"),
        sum(_weights(row) for row in rows if row.component in _FEED_FORWARD),
        sum(_weights(row) for row in rows if row.component == "language.head"),
        sum(row.forward for row in attention) // 2,
        len(routed),
        sum(p.numel for p in experts),
        sum(p.active for p in experts),
    )


def linear_weights(cost_model: CostModel) -> int:
    """Matrix elements of the language model's linear modules, head included and adapters left out."""
    rows = (row for row in cost_model.rows if row.op == "linear" and row.component.startswith("language."))
    return sum(_weights(row) for row in rows)


def _weights(row: Row) -> int:
    """Matrix elements that one token of text meets; 0 for rows that are not counted by tokens."""
    return 0 if row.driver not in _OF_TEXT or is_adapter(row.module) else row.forward // 2


def _is_inside(name: str, modules: set[str]) -> bool:
    while name and modules:
        name = name.rpartition(".")[0]
        if name in modules:
            return True
    return False


def _length(mask: str, prefix: str) -> int | None:
    return int(mask.removeprefix(prefix)) if mask.startswith(prefix) else None


def architecture(config: Mapping[str, Any], name: str, cost_model: CostModel | None = None) -> Architecture:
    """Read a model's numbers off its configuration.

    Args:
        config: the content of a `config.json`.
        name: of the model, for messages.
        cost_model: the model's cost model, for parameter groups, exact counts, and what only its class knows.

    Raises:
        UnknownModelError: the configuration does not describe a transformer with attention heads, and no cost model
            says what it costs.

    >>> from headway.count.models import presets
    >>> architecture(presets()["qwen3-8b"], "qwen3-8b").qk_dim
    128
    """
    text: Mapping[str, Any] = config.get("text_config") or config
    model_type = str(config.get("model_type", text.get("model_type", config.get("_class_name", ""))))
    # Without readable sizes a model is known by its cost model alone; formulas of sizes then give the reason.
    try:
        model = _sizes(text, name, model_type, config)
    except _UnreadError as error:
        reason = f"the configuration of {name} {error}"
        if cost_model is None:
            raise UnknownModelError(
                f"The configuration of {name} {error}, so conventions that are formulas of a transformer's sizes "
                "cannot be evaluated on it."
            ) from error
        return Architecture(
            name,
            model_type,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            False,
            0,
            False,
            cost_model=cost_model,
            unread=reason,
            config=config,
        )
    # A tower is read apart, since its sizes may be missing where the decoder's are there.
    model = _with_tower(model, config, cost_model)
    # The ledger knows recurrent layers by the operators that ran, whatever the configuration calls them.
    if cost_model is not None:
        spoken = [row.op for row in cost_model.rows if row.component.startswith("language.")]
        model = replace(model, recurrent="recurrence" in spoken)
    if model.recurrent:  # refused by formulas of sizes, for that reason
        return replace(model, cost_model=cost_model)
    # Gate and masks are the ledger's where there is one: the code that ran decides, not the configuration.
    if cost_model is None:
        return _from_configuration(model, text)
    return _from_ledger(replace(model, cost_model=cost_model), decoder(cost_model))


def _sizes(text: Mapping[str, Any], name: str, model_type: str, config: Mapping[str, Any]) -> Architecture:
    """Read what every configuration says in numbers; the gate and the layers' masks are not among it."""
    hidden, layers, heads = _number(text, *_HIDDEN), _number(text, *_LAYERS), _number(text, *_HEADS)
    # A key that is left out means what the class then takes: heads that divide the width, an MLP four times as wide.
    mla = _mla(text)
    head_dim = _number(text, "head_dim", default=hidden // heads)
    experts = _number(text, *_EXPERTS, default=0)
    ffn = _number(text, *_FFN, default=int(text.get("expansion_ratio") or 4) * hidden)
    expert_ffn = _number(text, "moe_intermediate_size", default=ffn)
    # Shared experts are given by their common width, or by their number.
    shared = _number(text, "shared_expert_intermediate_size", default=0)
    if not shared:
        # Llama 4 has one shared expert of the experts' width in each expert layer, and no key that says so
        default = int("intermediate_size_mlp" in text)
        shared = _number(text, *_SHARED, default=default) * expert_ffn
    # multi_query means one key head; Falcon's new_decoder_architecture takes num_kv_heads instead.
    one_key = text.get("multi_query") and not text.get("new_decoder_architecture")
    return Architecture(
        name=name,
        model_type=model_type,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=1 if one_key else _number(text, "num_key_value_heads", "num_kv_heads", default=heads),
        qk_dim=mla.nope_dim + mla.rope_dim if mla else head_dim,
        v_dim=_number(text, "v_head_dim", default=head_dim),
        ffn=_number(text, "intermediate_size_mlp", default=ffn),
        gated=True,
        vocab=_number(text, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", True))),
        num_experts=experts,
        top_k=_number(text, *_TOP_K, default=0) if experts else 0,
        expert_ffn=expert_ffn if experts else 0,
        shared_ffn=shared if experts else 0,
        moe_layers=_num_moe_layers(text, layers) if experts else 0,
        windows=(None,) * layers,
        chunks=(None,) * layers,
        sparse_step=_number(text, "decoder_sparse_step", default=0),
        recurrent=_recurrent(text),
        mtp_layers=_number(text, "num_nextn_predict_layers", default=0),
        mla=mla,
        delta=_delta(text, layers),
        config=config,
    )


def _number(config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
            raise _UnreadError(f"gives {key} as {value!r}, which is no one number for all layers")
        return int(value) or (default or 0)
    if default is None:
        raise _UnreadError(f"does not give {keys[0]}")
    return default


def _mla(text: Mapping[str, Any]) -> Mla | None:
    rank = _number(text, "kv_lora_rank", default=0)
    if not rank:
        return None
    nope, rope = _number(text, "qk_nope_head_dim"), _number(text, "qk_rope_head_dim")
    return Mla(_number(text, "q_lora_rank", default=0) or None, rank, nope, rope)


def _delta(text: Mapping[str, Any], layers: int) -> DeltaRule | None:
    if not _number(text, "linear_num_value_heads", default=0):
        return None
    every = _number(text, "full_attention_interval", default=4)
    kinds = text.get("layer_types")
    linear = layers - layers // every if kinds is None else sum(kind == "linear_attention" for kind in kinds)
    return DeltaRule(
        layers=linear,
        key_heads=_number(text, "linear_num_key_heads"),
        value_heads=_number(text, "linear_num_value_heads"),
        key_dim=_number(text, "linear_key_head_dim"),
        value_dim=_number(text, "linear_value_head_dim"),
        kernel=_number(text, "linear_conv_kernel_dim", default=4),
    )


def _num_moe_layers(text: Mapping[str, Any], layers: int) -> int:
    if isinstance(listed := text.get("moe_layers"), list):
        return len(listed)
    if isinstance(kinds := text.get("mlp_layer_types"), list):
        return sum(kind == "sparse" for kind in kinds)
    first = _number(text, "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", default=0)
    last = _number(text, "moe_layer_end_index", default=-1)
    step = _number(text, "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", default=1)
    dense_only = set(text.get("mlp_only_layers") or ())
    possible = range(first, layers if last < 0 else min(last + 1, layers))
    return sum((i + 1) % step == 0 and i not in dense_only for i in possible)


def _recurrent(text: Mapping[str, Any]) -> bool:
    kinds = [str(kind) for kind in text.get("layer_types") or ()]
    mixing = [kind for kind in kinds if kind == "linear_attention" or not kind.endswith("_attention")]
    keys = ("linear_num_value_heads", "linear_attn_config", "mamba_d_state", "ssm_state_size", "state_size", "ssm_cfg")
    return bool(mixing) or any(text.get(key) for key in keys)


def _from_configuration(model: Architecture, text: Mapping[str, Any]) -> Architecture:
    """Settle gate and masks by the configuration alone, where it says them; formulas have no number elsewhere.

    A gate of SiLU is SwiGLU in every published decoder; other activations come with and without one. What else a class
    adds, such as a gate on attention, no key says: a type is trusted where a shipped ledger shows that its sizes make
    the model.
    """
    try:
        kinds = _layer_kinds(text, model.layers)
        activation = next((text[key] for key in ("hidden_act", "hidden_activation") if text.get(key)), None)
        if activation not in {"silu", "swish"}:
            raise _UnreadError(f"does not say whether its MLP has a gate (hidden_act is {activation!r})")
        window = _number(text, "sliding_window") if "sliding_attention" in kinds else None
        chunk = _number(text, "attention_chunk_size") if "chunked_attention" in kinds else None
    except _UnreadError as error:
        return replace(model, unread=f"the configuration of {model.name} {error}; its cost model would tell")
    shipped_types = {config.get("model_type") for config in presets().values()}
    return replace(
        model,
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        chunks=tuple(chunk if kind == "chunked_attention" else None for kind in kinds),
        unread=""
        if model.model_type in shipped_types
        else f"no ledger of the type {model.model_type!r} ships, so that only the "
        f"cost model of {model.name} would tell whether its sizes make the model",
    )


def _layer_kinds(text: Mapping[str, Any], layers: int) -> list[str]:
    """Say of each layer which mask it has, as `layer_types` does."""
    kinds, window = text.get("layer_types"), text.get("sliding_window")
    if kinds is not None:
        if odd := sorted(set(kinds) - _KINDS):
            raise _UnreadError(f"gives layers of the kind {', '.join(odd)}, which no formula here has")
        return list(kinds)
    if text.get("attention_chunk_size"):
        every = _number(text, "no_rope_layer_interval", default=4)
        local = text.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(layers)]
        return ["chunked_attention" if rope else "full_attention" for rope in local]
    if "max_window_layers" in text or "use_sliding_window" in text:  # Qwen's: off unless it is said to be on
        first = _number(text, "max_window_layers", default=layers) if text.get("use_sliding_window") else layers
        return ["full_attention"] * min(first, layers) + ["sliding_attention"] * max(layers - first, 0)
    if window and isinstance(pattern := text.get("sliding_window_pattern"), int):
        return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
    if window:
        raise _UnreadError("gives sliding_window without layer_types, so that only its class says which layers have it")
    return ["full_attention"] * layers


def _from_ledger(model: Architecture, ledger: Decoder) -> Architecture:
    """Take the masks of the ledger and the gate that its weights show; refuse sizes that do not make it."""
    odd = sorted({mask for mask in ledger.masks if not mask.startswith(_MASKS)})
    if odd:
        return replace(model, unread=f"layers of {model.name} attend over {', '.join(odd)}, which no formula here has")
    gates = [gated for gated in (True, False) if _fits(replace(model, gated=gated), ledger)]
    if not gates:
        return replace(model, unread=_mismatch(model, ledger))
    return replace(model, gated=gates[0], windows=ledger.windows, chunks=ledger.chunks)


def _fits(model: Architecture, ledger: Decoder) -> bool:
    return len(ledger.masks) == model.layers and all(_close(*pair) for pair in _pairs(model, ledger).values())


def _pairs(model: Architecture, ledger: Decoder) -> dict[str, tuple[int, int]]:
    """Pair the products that the sizes imply with the ledger's; a shared expert's gate of one feature is in no size."""
    feed_forward, gates = ledger.feed_forward, model.moe_layers * model.hidden if model.shared_ffn else 0
    if feed_forward - gates == model.feed_forward_weights:
        feed_forward -= gates
    return {
        "weights of attention projections": (model.layers * model.attention_weights, ledger.projections),
        "weights that one token meets in MLPs, experts and routers": (model.feed_forward_weights, feed_forward),
        "weights of the head": (model.hidden * model.vocab, ledger.head),
        "features of a query-key pair": (
            model.layers * model.heads * (model.qk_dim + model.v_dim),
            ledger.pair_features,
        ),
        "layers with experts": (model.moe_layers, ledger.expert_layers),
        "elements of the experts that one token is routed to": (
            ledger.experts * model.top_k // max(model.num_experts, 1),
            ledger.active_experts,
        ),
    }


def _close(first: int, second: int) -> bool:
    return abs(first - second) <= _SAME * max(first, second)


def _mismatch(model: Architecture, ledger: Decoder) -> str:
    if len(ledger.masks) != model.layers:
        what = f"{model.layers} layers where the model's code runs attention in {len(ledger.masks)}"
    else:
        mismatches = {name: pair for name, pair in _pairs(model, ledger).items() if not _close(*pair)}
        name, (ours, theirs) = next(iter(mismatches.items()))
        what = f"{ours:,} {name} where the model's code has {theirs:,}"
    return f"the sizes that are read off the configuration of {model.name} make {what}"


def _with_tower(model: Architecture, config: Mapping[str, Any], cost_model: CostModel | None) -> Architecture:
    tower = config.get("vision_config")
    if not isinstance(tower, dict) or not tower:
        has_vision = cost_model is not None and cost_model.has_vision
        return replace(model, unread_tower="the configuration has no vision_config" if has_vision else "")
    try:
        return replace(model, vision=_vision(tower))
    except _UnreadError as error:
        return replace(model, unread_tower=f"vision_config {error}")


def _vision(config: Mapping[str, Any]) -> Vision:
    """Read a vision tower of the Qwen-VL kind, the one that the tools have formulas for.

    Qwen2-VL's names differ: `embed_dim` is the tower's width and `hidden_size` that of the merged tokens.
    """
    depth, merge, patch = (_number(config, key) for key in ("depth", "spatial_merge_size", "patch_size"))
    first = "embed_dim" in config
    hidden = _number(config, "embed_dim" if first else "hidden_size")
    full = config.get("fullatt_block_indexes")
    channels = _number(config, "in_channels", "in_chans", default=3)
    return Vision(
        hidden=hidden,
        depth=depth,
        heads=_number(config, "num_heads"),
        ffn=int(hidden * config.get("mlp_ratio", 4)) if first else _number(config, "intermediate_size"),
        gated=config.get("hidden_act") == "silu",
        out=_number(config, "hidden_size" if first else "out_hidden_size"),
        merge=merge,
        patch_inputs=channels * _number(config, "temporal_patch_size") * patch * patch,
        num_mergers=1 + len(config.get("deepstack_visual_indexes") or ()),
        num_full=depth if full is None else len(full),
        window_pixels=_number(config, "window_size") if full is not None else 0,
        patch_size=patch,
    )
