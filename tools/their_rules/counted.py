"""torchtitan, nanochat and llm-foundry: counted from a model's parameters."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tools.their_rules.cases import hf_config
from tools.their_rules.checkouts import load, method
from tools.their_rules.sizes import NotTheirsError, Sizes, nothing

if TYPE_CHECKING:
    from tools.their_rules.cases import Case
    from tools.their_rules.checkouts import Checkouts, Source
    from tools.their_rules.sizes import Count


def _meta(case: Case) -> Any:
    """The model without weights, for rules that count its parameters."""
    import torch
    import transformers

    config = copy.deepcopy(hf_config(case.model))
    auto = transformers.AutoModelForImageTextToText if "-vl-" in case.model else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config)


def torchtitan(checkouts: Checkouts, source: Source) -> Count:
    """Call torchtitan's functions for dense models and for mixtures, with parameters named as its models name them."""
    from torch import nn

    text = checkouts.text(source)
    space: dict[str, Any] = {"nn": nn, "logger": SimpleNamespace(info=nothing)}
    load(text, space, ["get_dense_model_nparams_and_flops", "get_moe_model_nparams_and_flops"])

    def count(case: Case) -> float | None:
        sizes, seq_len = Sizes(case), case.step.seq_len
        if sizes.kind in ("gpt2", "opt") or sizes.has_delta_rule:
            raise NotTheirsError
        model, text_config = _meta(case), sizes.text
        heads = text_config.num_attention_heads
        both = 2 * sizes.head_dim
        if sizes.is_latent:
            both = text_config.qk_nope_head_dim + text_config.qk_rope_head_dim + text_config.v_head_dim
        tied = bool(sizes.top.tie_word_embeddings)
        if not sizes.experts and "-vl-" not in case.model:
            shell = SimpleNamespace(parameters=model.parameters, children=lambda: [model.get_input_embeddings()])
            per_token = space["get_dense_model_nparams_and_flops"](
                shell, text_config.num_hidden_layers, heads, both, seq_len, tied
            )[1]
            return float(per_token * case.step.workload.slots)
        router = SimpleNamespace(top_k=getattr(text_config, "num_experts_per_tok", 1))
        moe = SimpleNamespace(router=router, num_experts=sizes.experts) if sizes.experts else None
        layers = [SimpleNamespace(moe=moe, attention=True)] * text_config.num_hidden_layers
        config = SimpleNamespace(layers=layers, enable_weight_tying=tied)
        names = [(_titan_name(name), p) for name, p in model.named_parameters()]
        shell = SimpleNamespace(named_parameters=lambda: names)
        per_token = space["get_moe_model_nparams_and_flops"](config, shell, heads, both, seq_len)[1]
        return float(per_token * case.step.workload.slots)

    return count


def _titan_name(name: str) -> str:
    """A parameter's name as torchtitan's model has it, as far as its rule looks at it."""
    if ".visual." in name:
        return "vision_encoder"
    if "embed_tokens" in name:
        return "tok_embeddings.embedding"
    if ".shared_expert" in name:
        return "moe.shared_experts"
    if ".experts." in name:
        return "moe.routed_experts"
    return "moe.router" if name.endswith((".gate.weight", ".router.weight", ".router.bias")) else name


def nanochat(checkouts: Checkouts, source: Source) -> Count:
    """Call nanochat's methods on a model's linear modules."""
    from torch import nn

    text = checkouts.text(source)
    matmuls = method(text, "GPT", "num_matmul_params", {"Linear": nn.Linear})
    estimate = method(text, "GPT", "estimate_flops", {})

    def count(case: Case) -> float | None:
        sizes, step = Sizes(case), case.step
        text_config = sizes.text
        heads, width = text_config.num_attention_heads, text_config.hidden_size
        if sizes.experts or "-vl-" in case.model or sizes.head_dim * heads != width or sizes.kind == "gpt2":
            raise NotTheirsError  # its own models have none, and heads that fill the width
        model = _meta(case)
        config = SimpleNamespace(n_head=heads, n_embd=width, sequence_len=step.seq_len)
        windows = [(window or -1, 0) for window in case.numbers.windows]
        shell = SimpleNamespace(config=config, window_sizes=windows, num_matmul_params=lambda: matmuls(model))
        return float(estimate(shell) * step.row_slots)

    return count


def llm_foundry(checkouts: Checkouts, source: Source) -> Count:
    """Call llm-foundry's methods on the parameters of a model."""
    space: dict[str, Any] = {}
    counted = checkouts.text(dataclasses.replace(source, path="llmfoundry/models/utils/mpt_param_count.py"))
    load(counted, space, ["mpt_get_active_params", "_dtensor_safe_check_numel"])
    space |= {"ffns_with_megablocks": (), "DTensor": type("DTensor", (), {})}
    batch = method(checkouts.text(source), "ComposerMPTCausalLM", "flops_per_batch", {"warnings": None})
    attention = method(checkouts.text(source), "ComposerMPTCausalLM", "get_attention_flops", {})

    def count(case: Case) -> float | None:
        sizes, step = Sizes(case), case.step
        text = sizes.text
        if sizes.experts or "-vl-" in case.model:
            raise NotTheirsError  # its mixtures are MegaBlocks', which no model here is
        model = _meta(case)
        inner = SimpleNamespace(tie_word_embeddings=bool(text.tie_word_embeddings))
        transformer = SimpleNamespace(config=inner, wte=model.get_input_embeddings())
        mpt = SimpleNamespace(
            config=SimpleNamespace(ffn_config={"ffn_type": "mptmlp"}),
            parameters=model.parameters, model=SimpleNamespace(transformer=transformer),
        )  # fmt: skip
        config = SimpleNamespace(block_overrides=None, n_layers=text.num_hidden_layers, d_model=text.hidden_size)
        shell = SimpleNamespace(
            model=SimpleNamespace(config=config), n_active_params=space["mpt_get_active_params"](mpt)
        )
        shell.get_attention_flops = lambda length: attention(shell, length)
        ids = SimpleNamespace(shape=(step.num_rows, step.seq_len))
        return float(batch(shell, {"input_ids": ids}))

    return count
