"""Conventions that multiply parameters by tokens: 6ND and its relatives."""

import re
from collections.abc import Mapping

from headway.conventions.architecture import Architecture
from headway.conventions.convention import Parts, Step
from headway.conventions.reading import linear_weights
from headway.errors import NotExpressibleError

_BLOCK_NORM = re.compile(r"\.\d+\.[^.]*(?:norm|ln)[^.]*\.(?:weight|bias)$")  # a norm of a block, in none of its modules


def six_nd(model: Architecture, step: Step) -> Parts:
    """Bill 6 FLOPs per parameter that is in no embedding, for every input slot.

    All experts are billed, frozen weights and norms too, and the vision tower once per text token. Not billed:
    attention. A head that is tied to the embedding goes with it.

    Source: huggingface/transformers, src/transformers/modeling_utils.py, floating_point_ops and
    num_parameters(exclude_embeddings=True), 2026-08; Kaplan et al. 2020.
    """
    groups, slots = model.groups, step.workload.slots
    return {
        "linear": 6 * slots * groups.other,
        "experts": 6 * slots * (groups.experts + groups.router),
        "head": 6 * slots * groups.head,
        "vision": 6 * slots * (groups.vision - groups.vision_positions),
    }


def palm(model: Architecture, step: Step) -> Parts:
    """Bill 6 N + 12 layers x heads x head size x row length for every position of every row.

    N is all parameters but learned position embeddings: all experts, the token embedding, the vision tower once per
    text token. Attention is the full square of the row.

    Source: PaLM, Chowdhery et al. 2022, appendix B; karpathy/nanoGPT, model.py, estimate_mfu and get_num_params.
    """
    groups, positions = model.groups, step.row_slots
    head, embedding = (groups.head, groups.embedding) if groups.head else (groups.embedding, 0)
    return {
        "linear": 6 * positions * groups.other,
        "experts": 6 * positions * (groups.experts + groups.router),
        "head": 6 * positions * head,
        "embedding": 6 * positions * embedding,
        "vision": 6 * positions * groups.vision,
        "attention": 12 * positions * model.layers * model.heads * model.qk_dim * step.seq_len,
    }


def llm_foundry(model: Architecture, step: Step) -> Parts:
    """Bill 6 N + 12 layers x width x row length for every position of every row.

    N is the parameters that a token uses, learned positions, norms and biases included, without an embedding that is
    not the head too. Attention is the full square of the row.

    Source: mosaicml/llm-foundry, llmfoundry/models/mpt/modeling_mpt.py, flops_per_batch, and utils/mpt_param_count.py
    (commit 8c8dd48f7, 21 July 2025); printed by mosaicml/composer, composer/callbacks/speed_monitor.py, which has no
    number for models of transformers.
    """
    if model.vision is not None or model.groups.vision:
        raise NotExpressibleError("llm-foundry counts its own MPT models, which have no vision tower")
    positions = step.row_slots
    parts = _active_weights(model, positions)
    return {
        **parts,
        "linear": parts["linear"] + 6 * positions * model.groups.positions,
        "attention": 12 * positions * model.layers * model.hidden * step.seq_len,
    }


def nanochat(model: Architecture, step: Step) -> Parts:
    """Bill 6 N + 12 heads x head size x min(window, row length) per layer, for every position of every row.

    N is the weights of linear modules: the head, tied or not, and neither embeddings nor norms nor biases. Attention is
    the full square, cut at a layer's window.

    Source: karpathy/nanochat, nanochat/gpt.py, estimate_flops and num_matmul_params (commit 92d63d4, 3 July 2026).
    """
    if model.vision is not None or model.groups.vision or model.num_experts:
        raise NotExpressibleError("nanochat trains dense text models and has no number for experts or vision towers")
    assert model.cost_model is not None, "its groups were read"
    positions, head = step.row_slots, model.hidden * model.vocab
    return {
        "linear": 6 * positions * (linear_weights(model.cost_model) - head),
        "head": 6 * positions * head,
        "attention": positions * _windowed(model, step.seq_len, 12 * model.qk_dim),
    }


def torchtitan(model: Architecture, step: Step) -> Parts:
    """Bill 6 N' + 6 heads x (query-key + value size) x min(window, row length) per layer, for every label slot.

    N' leaves the input embedding out unless it is the head, and weighs routed experts by top-k / experts; norms are in.
    Attention is the full square over the configured length, packing ignored. Not billed: the vision tower.

    Source: pytorch/torchtitan, torchtitan/models/utils.py, get_nparams_and_active_nparams and
    quadratic_attention_flops_per_token (commit 01c01c8, 2026; up to b5bcd76c6 of 21 Aug 2026 it is
    `torchtitan-2026-06`).
    """
    attention = step.workload.slots * _windowed(model, step.seq_len, 6 * (model.qk_dim + model.v_dim))
    return {**_active_weights(model, step.workload.slots), "attention": attention}


def torchtitan_2026_06(model: Architecture, step: Step) -> Parts:
    """Bill as `torchtitan`, but windowed layers in full.

    Source: pytorch/torchtitan, torchtitan/models/utils.py, get_dense_model_nparams_and_flops and
    get_moe_model_nparams_and_flops (fd712e814, 10 June 2026, to b5bcd76c6, 21 Aug 2026).
    """
    attention = 6 * model.layers * model.heads * (model.qk_dim + model.v_dim) * step.seq_len
    return {**_active_weights(model, step.workload.slots), "attention": step.workload.slots * attention}


def torchtitan_2025_12_vlm(model: Architecture, step: Step) -> Parts:
    """Bill what the Qwen3-VL branch of December 2025 did: the vision tower's parameters once per text token.

    Otherwise as `torchtitan`, with full attention in windowed layers too. Vision attention is not billed.

    Source: pytorch/torchtitan, experiments/qwen3_vl, whose arguments inherit torchtitan/models/qwen3's
    get_nparams_and_flops and the MoE helper of torchtitan/models/utils.py (commit 4ab8285, 2025-12).
    """
    slots = step.workload.slots
    attention = slots * 6 * model.layers * model.heads * (model.qk_dim + model.v_dim) * step.seq_len
    vision = 6 * slots * model.groups.vision
    return {**_active_weights(model, slots), "attention": attention, "vision": vision}


# types whose configuration, as an object of transformers 5.23, has a `head_dim` though its config.json may not say it
_WITH_HEAD_DIM = frozenset({
    "afmoe", "arcee", "cohere2", "cohere2_moe", "cwm", "deepseek_v2", "deepseek_v3", "deepseek_v32", "diffllama",
    "ernie4_5", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "glm", "glm4", "glm4_moe_lite", "glm_moe_dsa",
    "gpt_oss", "helium", "hy_v3", "jais2", "llama", "llama4_text", "longcat_flash", "minicpm3", "minimax_m2",
    "ministral3", "mistral", "qwen3", "seed_oss", "solar_open", "vaultgemma",
})  # fmt: skip


def torchtitan_flux(model: Architecture, step: Step) -> Parts:
    """Bill 6 N' + 6 hidden x row per layer, for every token of text and picture.

    N' leaves out one of the two streams of a double block, since a token passes one, and bills modulation once a
    sample (a row of the configured length); embedders, biases and norms are billed for every token. A layer's attention
    is half of its pairs, though all see each other. Not billed: the autoencoder and the text encoders, which its steps
    run.

    Source: pytorch/torchtitan, torchtitan/models/flux/model/model.py, FluxModel.Config.get_nparams_and_flops, and
    flux/trainer.py, batch_generator (63a80b2be, 30 March 2026, to b5bcd76c6, 21 Aug 2026); 1 FLOP a token before.
    """
    config = model.config
    if model.model_type != "FluxTransformer2DModel" or model.cost_model is None:
        raise NotExpressibleError("torchtitan's rule for FLUX is of FLUX alone")
    hidden = config["num_attention_heads"] * config["attention_head_dim"]
    double, single, row = config["num_layers"], config["num_single_layers"], step.seq_len
    # parameters of torchtitan's model, which has no embedder of a guidance scale
    guidance = sum(p.numel for p in model.cost_model.parameters if ".guidance_embedder." in f".{p.name}")
    one_side = 12 * hidden**2 * double  # queries, keys, values and output, and an MLP four times as wide
    modulation = (12 * double + 3 * single + 2) * hidden**2
    per_token = 6 * (model.cost_model.params.total - guidance) - 6 * one_side
    per_token -= 6 * modulation * (row - 1) // row
    tokens = step.workload.tokens + int(step.workload.sources.sum())
    return {"linear": tokens * per_token, "attention": tokens * 6 * hidden * row * (double + single)}


def trl(model: Architecture, step: Step) -> Parts:
    """Bill linear layers, active experts with their router, the head and the full square of the row.

    Every MLP has three matrices. Not billed: embedding, shared experts, vision. Its `adjusted_mfu` halves attention.
    Layers of linear attention are billed as attending ones. Its function fails without `num_key_value_heads`, and for a
    mixture without `num_local_experts`, `moe_intermediate_size` or `decoder_sparse_step`: of what says the last one,
    transformers gives Qwen3's mixtures alone the first.

    Source: huggingface/trl, trl/trainer/utils.py, compute_flops_per_token (release 1.16.0, 15 Oct 2026; pull requests
    6709 and 6731 of August 2026), on `config.get_text_config()`, as its trainers call it.
    """
    text = model.config.get("text_config", model.config)
    wanted = {"num_key_value_heads": text.get("num_key_value_heads") is not None}
    if model.num_experts:
        wanted |= {
            "moe_intermediate_size": "moe_intermediate_size" in text,
            "decoder_sparse_step": bool(model.sparse_step),
            "num_local_experts": "shared_expert_intermediate_size" not in text,
        }
    _refuse_missing_keys(model, wanted)
    return _trl(model, step)


def trl_2026_07(model: Architecture, step: Step) -> Parts:
    """Bill as `trl`, an untied embedding as if it were a second head; sizes are read at the top of the configuration.

    It fails where there is no `head_dim` (Qwen2's, GPT-2's) or no `decoder_sparse_step` of a mixture.

    Source: huggingface/trl, trl/trainer/utils.py, compute_flops_per_token (commit 47b377888, pull request 5698, 7 May
    2026, and unchanged in f2cd57710, 24 July 2026).
    """
    config = model.config
    wanted = {
        "hidden_size at the top": "text_config" not in config,
        "head_dim": config.get("head_dim") is not None or model.model_type in _WITH_HEAD_DIM,
        "decoder_sparse_step": bool(model.sparse_step) or not model.num_experts,
    }
    _refuse_missing_keys(model, wanted)
    parts = _trl(model, step)
    return {**parts, "embedding": 0 if model.tied else parts["head"]}


def _refuse_missing_keys(model: Architecture, wanted: Mapping[str, bool]) -> None:
    """Refuse a model whose configuration lacks a key that TRL's function reads."""
    for key, is_there in wanted.items():
        if not is_there:
            raise NotExpressibleError(
                f"TRL reads {key} of the configuration, which {model.name}'s does not have: it fails"
            )


def _trl(model: Architecture, step: Step) -> dict[str, int | float]:
    positions, hidden = step.row_slots, model.hidden
    sparse = -(-model.layers // model.sparse_step) if model.num_experts else 0
    expert = 3 * model.top_k * model.expert_ffn + model.num_experts
    mlps = (model.layers - sparse) * 3 * hidden * model.ffn
    projections = 2 * hidden * model.qk_dim * (model.heads + model.kv_heads)
    return {
        "linear": 6 * positions * (model.layers * projections + mlps),
        "experts": 6 * positions * sparse * hidden * expert,
        "head": 6 * positions * model.vocab * hidden,
        "attention": 12 * positions * model.layers * model.heads * model.qk_dim * step.seq_len,
    }


def olmo_core(model: Architecture, step: Step) -> Parts:
    """Bill 6 FLOPs per parameter of attention, MLP and head modules, and the full square of the row, cut at windows.

    Norms are in where those modules hold them: of queries and keys, and the last one. Biases are in.

    Source: allenai/OLMo-core, src/olmo_core/nn, num_flops_per_token of Attention, FeedForward and LMHead (commit
    fa6c5014c, 22 June 2026).
    """
    if model.vision is not None or model.groups.vision or model.num_experts:
        raise NotExpressibleError(
            "OLMo-core's numbers for experts are not kept here, and it has none for vision towers"
        )
    groups, positions = model.groups, step.row_slots
    assert model.cost_model is not None, "its groups were read"
    blocks = sum(p.numel for p in model.cost_model.parameters if _BLOCK_NORM.search(p.name))
    return {
        "linear": 6 * positions * (groups.other - blocks),
        "head": 6 * positions * (groups.head or groups.embedding),
        "attention": positions * _windowed(model, step.seq_len, 12 * model.qk_dim),
    }


def _active_weights(model: Architecture, slots: int) -> dict[str, int | float]:
    groups = model.groups
    return {
        "linear": 6 * slots * groups.other,
        "experts": 6 * slots * (groups.active_experts + groups.router),
        "head": 6 * slots * (groups.head or groups.embedding),
    }


def _windowed(model: Architecture, seq_len: int, per_head: int) -> int:
    keys = sum(seq_len if window is None else min(seq_len, window) for window in model.windows)
    return per_head * model.heads * keys
