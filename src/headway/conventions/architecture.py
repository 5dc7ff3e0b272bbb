"""A model's numbers, as other tools read them: sizes, windows, experts, towers and parameter groups.

`headway.conventions.reading` makes them of a configuration and a cost model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from headway.errors import UnknownModelError

if TYPE_CHECKING:
    from headway.count.cost_model import CostModel

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
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
        patch_size: side of one patch [pixels].
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
    patch_size: int


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
        windows: sliding window of each layer [tokens], None where there is none.
        chunks: chunk that each layer's attention stays in [tokens], None where there is none; as many as layers.
        sparse_step: every how many layers has experts, where the configuration says `decoder_sparse_step`; else 0.
        recurrent: whether some layers are linear attention or state space instead of softmax attention.
        mtp_layers: multi-token-prediction layers that the configuration announces.
        mla: multi-head latent attention, if any.
        vision: the vision tower, if any that the tools' formulas can express.
        cost_model: where parameter groups and exact costs come from, if any.
        unread: why formulas of sizes have no number for the model, "" where they have.
        unread_tower: why its vision tower is in no formula, "" where it is, or there is none.
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
    chunks: tuple[int | None, ...] = ()
    sparse_step: int = 0
    recurrent: bool = False
    mtp_layers: int = 0
    mla: Mla | None = None
    vision: Vision | None = None
    cost_model: CostModel | None = None
    unread: str = ""
    unread_tower: str = ""

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


def _group(name: str, component: str) -> str:
    if component.startswith("vision"):
        return "vision_positions" if name.endswith("pos_embed.weight") else "vision"
    groups = {"language.head": "head", "language.experts": "experts", "language.router": "router"}
    if component in groups:
        return groups[component]
    if name.endswith(_EMBEDDINGS):
        return "embedding"
    return "positions" if name.endswith(_POSITIONS) else "other"
