"""A model's numbers, as other tools read them: sizes, windows, experts, towers and parameter groups.

`headway.conventions.reading` makes them of a configuration and a cost model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from headway.count.cost_model import CostModel
from headway.errors import UnknownModelError

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_POSITIONS = ("wpe.weight", "embed_positions.weight")


@dataclass(frozen=True, slots=True)
class Mla:
    """Multi-head latent attention: the ranks of its low-rank projections and the parts of a head."""

    q_rank: int | None  # rank of the query projection; None where it is not factored
    kv_rank: int  # rank of the key-value projection
    nope_dim: int  # part of a query-key head without rotary positions
    rope_dim: int  # part with rotary positions


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """Layers of the gated delta rule, as Qwen3-Next and Qwen3.5 have them beside layers of gated softmax attention."""

    layers: int  # layers of the delta rule; all others attend
    key_heads: int
    value_heads: int
    key_dim: int  # size of a key head
    value_dim: int  # size of a value head
    kernel: int  # width of the short convolution [tokens]

    @property
    def weights(self) -> tuple[int, int]:
        """Matrix elements of one layer: by feature of the model's width, and of the convolution."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return 2 * keys + 3 * values + 2 * self.value_heads, self.kernel * (2 * keys + values)


@dataclass(frozen=True, slots=True)
class Vision:
    """A vision tower's numbers; sizes in features, depth in layers."""

    hidden: int  # width of the tower
    depth: int  # number of blocks
    heads: int  # attention heads
    ffn: int  # inner width of a block's MLP
    gated: bool  # whether that MLP has three matrices instead of two
    out: int  # width of the merged tokens that the language model gets
    merge: int  # patches per side that one token is merged from
    patch_inputs: int  # values in one patch (channels x frames x height x width)
    num_mergers: int  # mergers, the DeepStack ones included
    num_full: int  # blocks that attend over the whole frame; the others attend in windows
    window_pixels: int  # side of those windows [pixels]; 0 where all blocks attend in full
    patch_size: int  # side of one patch [pixels]


@dataclass(frozen=True, slots=True)
class ParameterGroups:
    """Numbers of parameters by what tools do with them; disjoint, the embedding is the head where they are tied."""

    embedding: int  # the token embedding
    positions: int  # learned position embeddings of the language model
    head: int  # the language-model head; 0 where it is the embedding
    experts: int  # experts, all of them, shared ones included
    active_experts: int  # experts that one token uses
    router: int  # routers
    vision: int  # the vision tower, mergers and position embeddings included
    vision_positions: int  # learned position embeddings of the vision tower (part of `vision`)
    other: int  # everything else in the language model: projections, dense MLPs, norms, biases

    @property
    def total(self) -> int:
        """All parameters; tied weights once."""
        others = self.experts + self.router + self.vision + self.other
        return self.embedding + self.positions + self.head + others


@dataclass(frozen=True)
class Architecture:
    """A model's numbers; sizes in features."""

    name: str
    model_type: str  # type in the configuration, e.g. "qwen3_moe"; tools choose their formula by it
    hidden: int  # width of the residual stream
    layers: int  # decoder layers
    heads: int  # query heads
    kv_heads: int  # key-value heads
    qk_dim: int  # size of a query-key head
    v_dim: int  # size of a value head
    ffn: int  # inner width of a dense MLP
    gated: bool  # whether an MLP has three matrices instead of two
    vocab: int  # rows of the embedding
    tied: bool  # whether the head is the embedding
    num_experts: int = 0  # routed experts per expert layer; 0 for a dense model
    top_k: int = 0  # routed experts per token
    expert_ffn: int = 0  # inner width of one routed expert
    shared_ffn: int = 0  # inner width of all shared experts together
    moe_layers: int = 0  # layers with experts
    windows: tuple[int | None, ...] = ()  # sliding window of each layer [tokens], None where there is none
    # chunk that each layer's attention stays in [tokens], None where there is none; as many as layers
    chunks: tuple[int | None, ...] = ()
    # every how many layers has experts, where the configuration says `decoder_sparse_step`; else 0
    sparse_step: int = 0
    recurrent: bool = False  # whether some layers are linear attention or state space instead of softmax attention
    mtp_layers: int = 0  # multi-token-prediction layers that the configuration announces
    mla: Mla | None = None  # multi-head latent attention, if any
    delta: DeltaRule | None = None  # layers of the gated delta rule, if any
    vision: Vision | None = None  # the vision tower, if any that the tools' formulas can express
    cost_model: CostModel | None = None  # source of parameter groups and exact costs, if any
    unread: str = ""  # reason why formulas of sizes have no number for the model; "" if they have one
    unread_tower: str = ""  # reason why the vision tower is in no formula; "" if it is in one, or there is none
    # the configuration itself, for what one tool alone looks at in it
    config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

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

    @property
    def feed_forward_weights(self) -> int:
        """Matrix elements that one token meets in all layers' MLPs, active and shared experts and routers."""
        experts = self.mlp_matrices * (self.top_k * self.expert_ffn + self.shared_ffn) + self.num_experts
        dense = self.dense_layers * self.mlp_matrices * self.ffn
        return self.hidden * (dense + self.moe_layers * experts)

    @cached_property
    def groups(self) -> ParameterGroups:
        """Parameter groups, from the cost model's parameters.

        Raises:
            UnknownModelError: the record was built without a cost model.
        """
        if self.cost_model is None:
            raise UnknownModelError(
                f"{self.name} was read from a configuration alone, so its number of parameters is not known. Give "
                "its cost model too: architecture(config, name, cost_model)."
            )
        sums = dict.fromkeys(ParameterGroups.__dataclass_fields__, 0)
        for parameter in self.cost_model.parameters:
            sums[_group(parameter.name, parameter.component)] += parameter.numel
            if parameter.component == "language.experts":
                sums["active_experts"] += parameter.active
        sums["vision"] += sums["vision_positions"]
        return ParameterGroups(**sums)


def _group(name: str, component: str) -> str:
    if component.startswith("vision"):
        return "vision_positions" if name.endswith("pos_embed.weight") else "vision"
    groups = {"language.head": "head", "language.experts": "experts", "language.router": "router"}
    if component in groups:
        return groups[component]
    if name.endswith(_EMBEDDINGS):
        return "embedding"
    return "positions" if name.endswith(_POSITIONS) else "other"
