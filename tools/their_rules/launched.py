"""Megatron and MaxText: counted from the settings of a launch."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tools.their_rules.checkouts import load
from tools.their_rules.sizes import NotTheirsError, Sizes, nothing

if TYPE_CHECKING:
    from tools.their_rules.cases import Case
    from tools.their_rules.checkouts import Checkouts, Source
    from tools.their_rules.sizes import Count, Make

_VOCAB_MULTIPLE = 128  # Megatron's default


class _Names:
    """An enumeration of which only the names matter."""

    def __getattr__(self, name: str) -> str:
        return name


def _megatron_arguments(case: Case) -> SimpleNamespace:
    """Megatron's arguments for a model, of its launch scripts and of its bridge alike."""
    sizes, text = Sizes(case), Sizes(case).text
    if sizes.has_delta_rule or sizes.kind == "llama4_text":  # whose expert layers have flags of their own
        raise NotTheirsError
    latent = {}
    if sizes.is_latent:
        latent = {
            "q_lora_rank": text.q_lora_rank, "kv_lora_rank": text.kv_lora_rank, "qk_head_dim": text.qk_nope_head_dim,
            "qk_pos_emb_head_dim": text.qk_rope_head_dim, "v_head_dim": text.v_head_dim,
        }  # fmt: skip
    layers = text.num_hidden_layers
    return SimpleNamespace(
        seq_length=case.step.seq_len, hidden_size=text.hidden_size, num_layers=layers,
        num_attention_heads=text.num_attention_heads, kv_channels=sizes.head_dim,
        num_query_groups=sizes.groups, group_query_attention=not sizes.is_latent, ffn_hidden_size=sizes.ffn,
        swiglu=sizes.gated, gated_linear_unit=sizes.gated, multi_latent_attention=sizes.is_latent,
        num_experts=sizes.experts or None, num_moe_experts=sizes.experts or None,
        moe_layer_freq=[int(layer >= sizes.dense_first) for layer in range(layers)],
        moe_router_topk=getattr(text, "num_experts_per_tok", 1), moe_ffn_hidden_size=sizes.expert_ffn,
        moe_shared_expert_intermediate_size=sizes.shared_ffn or None, moe_latent_size=None,
        mtp_num_layers=sizes.prediction_layers or None, attention_output_gate=False,
        experimental_attention_variant=None, vocab_size=text.vocab_size, make_vocab_size_divisible_by=_VOCAB_MULTIPLE,
        tensor_model_parallel_size=1, padded_vocab_size=-(-text.vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE,
        is_hybrid_model=False, hybrid_layer_pattern=None, **latent,
    )  # fmt: skip


def megatron_lm(*, packs: bool) -> Make:
    """Call Megatron-LM's function with a launch's arguments; of packs, with their real tokens too."""

    def make(checkouts: Checkouts, source: Source) -> Count:
        no = dict.fromkeys(("is_hybrid_model", "is_linear_attention_variant", "is_gated_delta_net_variant"), nothing)
        space = load(checkouts.text(source), dict(no), ["num_floating_point_operations"])

        def count(case: Case) -> float | None:
            step = case.step
            if Sizes(case).is_latent and "8873b55" in source.commit:
                return None  # it had no such model
            real = {}
            if packs:
                real = {
                    "seqlen_squared_sum_in_batch": step.square_sum,
                    "total_real_tokens_in_batch": step.workload.tokens,
                }
            return float(space["num_floating_point_operations"](_megatron_arguments(case), step.num_rows, **real))

        return count

    return make


def slime(checkouts: Checkouts, source: Source) -> Count:
    """Call slime's function, or that of miles, with a launch's arguments, times 3 as both do for the update."""
    space = load(checkouts.text(source), {"SimpleNamespace": SimpleNamespace})

    def count(case: Case) -> float:
        arguments = _megatron_arguments(case)
        if not arguments.multi_latent_attention:  # Megatron-LM's defaults, which every launch has
            vars(arguments).update(kv_lora_rank=32, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128)
            arguments.q_lora_rank = None
        else:
            arguments.kv_channels = arguments.hidden_size // arguments.num_attention_heads
        return float(3 * space["calculate_fwd_flops"](case.step.workload.segments.tolist(), arguments))

    return count


# `window_size` and `window_attn_skip_freq` as the bridge of each model type sets them: src/megatron/bridge/models
_BRIDGE_WINDOWS = {"gemma2": None, "gemma3_text": None, "gpt_oss": 2, "mistral": None}


def megatron_bridge(*, frames: bool = False, lengths: bool = True) -> Make:
    """Call Megatron-Bridge's function with a provider's settings, with the lengths and pictures that it was given."""

    def make(checkouts: Checkouts, source: Source) -> Count:
        import torch

        space: dict[str, Any] = {
            "torch": torch, "F": torch.nn.functional, "dataclass": dataclass,
            "is_gated_delta_net_variant": nothing, "LoRA": type("LoRA", (), {}),
            "calculate_padded_vocab_size": lambda size, by, tp, **_: -(-size // (by * tp)) * by * tp,
        }  # fmt: skip
        load(checkouts.text(source), space)

        def count(case: Case) -> float:
            step, sizes = case.step, Sizes(case)
            if sizes.kind == "qwen2_vl":
                raise NotTheirsError
            model = _megatron_arguments(case)
            if sizes.kind in _BRIDGE_WINDOWS and getattr(sizes.text, "sliding_window", None):
                model.window_size = (sizes.text.sliding_window - 1, 0)
                model.window_attn_skip_freq = _BRIDGE_WINDOWS[sizes.kind]
            act = getattr(sizes.text, "hidden_act", None) or getattr(sizes.text, "hidden_activation", "silu")
            is_silu = act == "silu" and sizes.kind != "gpt_oss"  # whose bridge sets quick_gelu
            model.activation_func = torch.nn.functional.silu if is_silu else torch.nn.functional.gelu
            vision, grids = getattr(sizes.top, "vision_config", None), step.workload.grids
            model.vision_config = vision
            config = SimpleNamespace(model=model, peft=None)
            patches = {} if frames else {"num_vision_patches": step.workload.patches}
            sums = {"seqlen_sum": step.workload.slots, "seqlen_squared_sum": step.square_sum, **patches}
            flops = space["num_floating_point_operations"](config, step.num_rows, **(sums if lengths else {}))
            if frames and len(grids):
                flops += space["vit_flops_from_grid_thw"](config, torch.tensor(grids.tolist()))
            return float(flops)

        return count

    return make


_BLOCKS = {
    "deepseek_v2": "DEEPSEEK", "deepseek_v3": "DEEPSEEK", "gemma2": "GEMMA2", "gemma3_text": "GEMMA3", "gpt2": "GPT3",
    "gpt_oss": "GPT_OSS", "llama": "LLAMA2", "llama4_text": "LLAMA4", "mistral": "MISTRAL", "mixtral": "MIXTRAL",
    "olmo3": "OLMO3",
    "qwen2": "QWEN2", "qwen3": "QWEN3", "qwen3_moe": "QWEN3_MOE", "qwen3_vl": "QWEN3", "qwen3_vl_moe": "QWEN3_MOE",
}  # fmt: skip
_NEWER_BLOCKS = ("GPT_OSS", "OLMO3", "QWEN3_MOE")  # which MaxText did not have in July 2025


def maxtext(checkouts: Checkouts, source: Source) -> Count:
    """Call MaxText's function with the settings of its configuration of the model."""
    space = load(
        checkouts.text(source), {"DecoderBlockType": _Names()}, ["*calculate_*", "get_*_mlp_dim", "get_dense_moe*"]
    )

    def count(case: Case) -> float | None:
        sizes, text = Sizes(case), Sizes(case).text
        block = _BLOCKS.get(sizes.kind)
        if block is None or ("a4c01726e" in source.commit and block in _NEWER_BLOCKS):
            raise NotTheirsError
        latent = {"attention_type": "attention"}
        if sizes.is_latent:
            latent = {
                "attention_type": "mla", "q_lora_rank": text.q_lora_rank or 0, "kv_lora_rank": text.kv_lora_rank,
                "qk_nope_head_dim": text.qk_nope_head_dim, "qk_rope_head_dim": text.qk_rope_head_dim,
                "v_head_dim": text.v_head_dim,
            }  # fmt: skip
        config = SimpleNamespace(
            per_device_batch_size=case.step.num_rows, max_target_length=case.step.seq_len, emb_dim=text.hidden_size,
            # Gemma 2's decoder layers are pairs, of a local and a global one
            num_decoder_layers=text.num_hidden_layers // (2 if block == "GEMMA2" else 1),
            num_query_heads=text.num_attention_heads, num_kv_heads=sizes.groups, head_dim=sizes.head_dim,
            # its configuration of Qwen3's mixtures gives the width of an expert for both
            mlp_dim=sizes.expert_ffn if block == "QWEN3_MOE" else sizes.ffn,
            moe_mlp_dim=sizes.expert_ffn, mlp_activations=["silu", "linear"][: 1 + sizes.gated],
            vocab_size=text.vocab_size, num_experts=sizes.experts or 1, decoder_block=block,
            num_experts_per_tok=getattr(text, "num_experts_per_tok", 1), first_num_dense_layers=sizes.dense_first,
            shared_experts=1 if block == "LLAMA4" else getattr(text, "n_shared_experts", None) or 0,
            share_kv_projections=False,
            sliding_window_size=getattr(text, "sliding_window", None) or 0, use_multimodal=False, use_dpo=False,
            gradient_accumulation_steps=1, engram_layers=[], mtp_num_layers=0, use_indexer=False,
            nope_layer_interval=4, chunk_attn_window_size=getattr(text, "attention_chunk_size", None),
            interleave_moe_layer_step=getattr(text, "interleave_moe_layer_step", None), **latent,
        )  # fmt: skip
        return float(space["calculate_tflops_training_per_device"](config, log=False)[0]) * 1e12

    return count
