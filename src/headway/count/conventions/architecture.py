"""A model's numbers, as other tools read them: sizes from its configuration, parameter groups from its cost model.

Needs neither torch nor transformers: a configuration is the dictionary of a `config.json`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from headway.errors import UnknownModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headway.count.cost_model import CostModel

_UNGATED = frozenset({"gpt2", "gpt_neox", "gptj", "opt", "phi", "falcon", "starcoder2"})
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")
_POSITIONS = ("wpe.weight", "embed_positions.weight")


@dataclass(frozen=True, slots=True)
class Mla:
    """Multi-head latent attention: the ranks of its low-rank projections and the parts of a head.

    Attributes:
        q_rank: rank of the query projection; None where it is not factored.
        kv_rank: rank of the key-value projection.
        nope_dim: part of a query-key head without rotary positions.
        rope_dim: part with rotary positions.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int


@dataclass(frozen=True, slots=True)
class Vision:
    """A vision tower's numbers; sizes in features, depth in layers.

    Attributes:
        hidden: width of the tower.
        depth: number of blocks.
        heads: attention heads.
        ffn: inner width of a block's MLP.
        gated: whether that MLP has three matrices instead of two.
        out: width of the merged tokens that the language model gets.
        merge: patches per side that one token is merged from.
        patch_inputs: values in one patch (channels x frames x height x width).
        num_mergers: mergers, the DeepStack ones included.
        num_full: blocks that attend over the whole frame; the others attend in windows.
        window_pixels: side of those windows [pixels]; 0 where all blocks attend in full.
    """

    hidden: int
    depth: int
    heads: int
    ffn: int
    gated: bool
    out: int
    merge: int
    patch_inputs: int
    num_mergers: int
    num_full: int
    window_pixels: int


@dataclass(frozen=True, slots=True)
class ParameterGroups:
    """Numbers of parameters by what tools do with them; disjoint, the embedding is the head where they are tied.

    Attributes:
        embedding: the token embedding.
        positions: learned position embeddings of the language model.
        head: the language-model head; 0 where it is the embedding.
        experts: experts, all of them, shared ones included.
        active_experts: experts that one token uses.
        router: routers.
        vision: the vision tower, mergers and position embeddings included.
        vision_positions: learned position embeddings of the vision tower (part of `vision`).
        other: everything else in the language model: projections, dense MLPs, norms, biases.
    """

    embedding: int
    positions: int
    head: int
    experts: int
    active_experts: int
    router: int
    vision: int
    vision_positions: int
    other: int

    @property
    def total(self) -> int:
        """All parameters; tied weights once."""
        rest = self.experts + self.router + self.vision + self.other
        return self.embedding + self.positions + self.head + rest


@dataclass(frozen=True)
class Architecture:
    """A model's numbers; sizes in features.

    Attributes:
        name: of the model.
        model_type: as the configuration says, e.g. "qwen3_moe"; what tools choose their formula by.
        hidden: width of the residual stream.
        layers: decoder layers.
        heads: query heads.
        kv_heads: key-value heads.
        qk_dim: size of a query-key head.
        v_dim: size of a value head.
        ffn: inner width of a dense MLP.
        gated: whether an MLP has three matrices instead of two.
        vocab: rows of the embedding.
        tied: whether the head is the embedding.
        num_experts: routed experts per expert layer; 0 for a dense model.
        top_k: routed experts per token.
        expert_ffn: inner width of one routed expert.
        shared_ffn: inner width of all shared experts together.
        moe_layers: layers with experts.
        windows: sliding window of each layer [tokens], None for full attention.
        recurrent: whether some layers are linear attention or state space instead of softmax attention.
        mtp_layers: multi-token-prediction layers that the configuration announces.
        mla: multi-head latent attention, if any.
        vision: the vision tower, if any.
        cost_model: where parameter groups and exact costs come from, if any.
        missing: a size that the configuration does not give, "" for none; formulas of sizes then have no number.
    """

    name: str
    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    ffn: int
    gated: bool
    vocab: int
    tied: bool
    num_experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    moe_layers: int = 0
    windows: tuple[int | None, ...] = ()
    recurrent: bool = False
    mtp_layers: int = 0
    mla: Mla | None = None
    vision: Vision | None = None
    cost_model: CostModel | None = None
    missing: str = ""

    @property
    def attention_weights(self) -> int:
        """Matrix elements of one layer's attention projections."""
        if self.mla is not None:
            mla, qk = self.mla, self.heads * self.qk_dim
            query = self.hidden * qk if mla.q_rank is None else mla.q_rank * (self.hidden + qk)
            keys = self.hidden * (mla.kv_rank + mla.rope_dim) + mla.kv_rank * self.heads * (mla.nope_dim + self.v_dim)
            return query + keys + self.heads * self.v_dim * self.hidden
        queries, keys_values = self.heads * self.qk_dim, self.kv_heads * (self.qk_dim + self.v_dim)
        return self.hidden * (queries + keys_values) + self.heads * self.v_dim * self.hidden

    @property
    def mlp_matrices(self) -> int:
        """Matrices of one MLP: 3 with a gate, otherwise 2."""
        return 3 if self.gated else 2

    @property
    def dense_layers(self) -> int:
        """Layers with a dense MLP."""
        return self.layers - self.moe_layers

    @cached_property
    def groups(self) -> ParameterGroups:
        """Parameter groups, from the cost model's parameters.

        Raises:
            UnknownModelError: the record was built without a cost model.
        """
        if self.cost_model is None:
            raise UnknownModelError(
                f"{self.name} was read from a configuration alone, which does not say how many parameters it has. Give "
                "its cost model too: architecture(config, name, cost_model)."
            )
        sums = dict.fromkeys(ParameterGroups.__dataclass_fields__, 0)
        for parameter in self.cost_model.parameters:
            sums[_group(parameter.name, parameter.component)] += parameter.numel
            if parameter.component == "language.experts":
                sums["active_experts"] += parameter.active
        sums["vision"] += sums["vision_positions"]
        return ParameterGroups(**sums)


def architecture(config: Mapping[str, Any], name: str, cost_model: CostModel | None = None) -> Architecture:
    """Read a model's numbers off its configuration.

    Args:
        config: the content of a `config.json`.
        name: of the model, for messages.
        cost_model: the model's cost model, for parameter groups and exact counts.

    Raises:
        UnknownModelError: the configuration does not describe a transformer with attention heads, and no cost model
            says what it costs.

    >>> from headway.count.models import presets
    >>> architecture(presets()["qwen3-8b"], "qwen3-8b").qk_dim
    128
    """
    text: Mapping[str, Any] = config.get("text_config") or config
    model_type = str(config.get("model_type", text.get("model_type", "")))
    try:
        hidden = int(_first(text, "hidden_size", "n_embd"))
        layers = int(_first(text, "num_hidden_layers", "n_layer"))
        heads = int(_first(text, "num_attention_heads", "n_head"))
        vocab = int(_first(text, "vocab_size"))
    except KeyError as error:
        if cost_model is not None:
            return Architecture(
                name, model_type, 0, 0, 0, 0, 0, 0, 0, False, 0, False, cost_model=cost_model, missing=error.args[0]
            )
        raise UnknownModelError(
            f"The configuration of {name} does not give {error.args[0]}, so conventions that are formulas of a "
            "transformer's sizes cannot be evaluated on it."
        ) from error
    mla = _mla(text)
    head_dim = int(text.get("head_dim") or hidden // heads)
    experts = int(text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts") or 0)
    ffn = int(text.get("intermediate_size") or text.get("n_inner") or 4 * hidden)
    expert_ffn = int(text.get("moe_intermediate_size") or ffn) if experts else 0
    shared = int(text.get("shared_expert_intermediate_size") or (text.get("n_shared_experts") or 0) * expert_ffn)
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", True))
    return Architecture(
        name=name,
        model_type=model_type,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        qk_dim=mla.nope_dim + mla.rope_dim if mla else head_dim,
        v_dim=int(text["v_head_dim"]) if mla else head_dim,
        ffn=ffn,
        gated=model_type not in _UNGATED,
        vocab=vocab,
        tied=bool(tied),
        num_experts=experts,
        top_k=int(text.get("num_experts_per_tok") or 0) if experts else 0,
        expert_ffn=expert_ffn,
        shared_ffn=shared if experts else 0,
        moe_layers=_num_moe_layers(text, layers) if experts else 0,
        windows=_windows(text, layers),
        recurrent=_recurrent(text),
        mtp_layers=int(text.get("num_nextn_predict_layers") or 0),
        mla=mla,
        vision=_vision(config["vision_config"]) if config.get("vision_config") else None,
        cost_model=cost_model,
    )


def _first(config: Mapping[str, Any], *keys: str) -> Any:
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise KeyError(keys[0])


def _mla(text: Mapping[str, Any]) -> Mla | None:
    if not text.get("kv_lora_rank"):
        return None
    q_rank = text.get("q_lora_rank")
    nope, rope = int(text["qk_nope_head_dim"]), int(text["qk_rope_head_dim"])
    return Mla(int(q_rank) if q_rank else None, int(text["kv_lora_rank"]), nope, rope)


def _num_moe_layers(text: Mapping[str, Any], layers: int) -> int:
    first_dense, step = int(text.get("first_k_dense_replace") or 0), int(text.get("decoder_sparse_step") or 1)
    dense_only = set(text.get("mlp_only_layers") or ())
    return sum(i >= first_dense and (i + 1) % step == 0 and i not in dense_only for i in range(layers))


def _windows(text: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = text.get("sliding_window")
    if not window or text.get("use_sliding_window") is False:
        return (None,) * layers
    kinds = text.get("layer_types")
    if kinds is None and "sliding_window_pattern" in text:
        pattern = int(text["sliding_window_pattern"])
        kinds = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
    if kinds is None:
        return (int(window),) * layers
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _recurrent(text: Mapping[str, Any]) -> bool:
    softmax = {"full_attention", "sliding_attention", "chunked_attention"}
    keys = ("linear_num_value_heads", "linear_attn_config", "mamba_d_state", "ssm_state_size", "state_size", "ssm_cfg")
    return bool(set(text.get("layer_types") or ()) - softmax) or any(text.get(key) for key in keys)


def _vision(config: Mapping[str, Any]) -> Vision | None:
    """Read a vision tower of the Qwen-VL kind, the one that the tools have formulas for; None for another."""
    if "depth" not in config or "spatial_merge_size" not in config or "intermediate_size" not in config:
        return None
    patch = int(config["patch_size"])
    depth = int(config["depth"])
    full = config.get("fullatt_block_indexes")
    return Vision(
        hidden=int(config["hidden_size"]),
        depth=depth,
        heads=int(config["num_heads"]),
        ffn=int(config["intermediate_size"]),
        gated=config.get("hidden_act") == "silu",
        out=int(config["out_hidden_size"]),
        merge=int(config["spatial_merge_size"]),
        patch_inputs=int(config.get("in_channels", 3)) * int(config["temporal_patch_size"]) * patch * patch,
        num_mergers=1 + len(config.get("deepstack_visual_indexes") or ()),
        num_full=depth if full is None else len(full),
        window_pixels=int(config["window_size"]) if full is not None else 0,
    )


def _group(name: str, component: str) -> str:
    if component.startswith("vision"):
        return "vision_positions" if name.endswith("pos_embed.weight") else "vision"
    groups = {"language.head": "head", "language.experts": "experts", "language.router": "router"}
    if component in groups:
        return groups[component]
    if name.endswith(_EMBEDDINGS):
        return "embedding"
    return "positions" if name.endswith(_POSITIONS) else "other"
