"""A real step under PyTorch's formulas explains every ledger, and a wrong ledger does not pass."""

from dataclasses import replace

import pytest
import torch
from transformers import BloomConfig, DeepseekV4Config, GPTNeoConfig, OPTConfig

from headway.count import Workload
from headway.tracing import trace
from headway.tracing import verify as module
from headway.tracing.build import model_class, with_layers
from headway.tracing.verify import verify
from helpers.effort import some
from helpers.tiny_models import FAMILIES, VISION_FAMILIES, tiny_config


def model_and_step(family):
    torch.manual_seed(0)
    config = tiny_config(family)
    images = [(1, 4, 6), (2, 8, 4)] if family in VISION_FAMILIES else []
    return model_class(config)._from_config(config, dtype=torch.float32), Workload([67], images=images)


@pytest.mark.parametrize("family", some(FAMILIES, {"gpt2", "qwen3_moe", "qwen3_vl", "deepseek_v3"}.__contains__))
def test_every_module_is_equal_or_explained(family):
    lines, unseen = verify(*model_and_step(family))
    assert unseen == set()
    assert [line for line in lines if line.explanation is None] == []
    assert {line.op for line in lines if line.explanation} <= {"attention", "-"}
    assert sum(line.ledger[0] for line in lines) > 0


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(vocab_size=50, hidden_size=12, n_layer=2, n_head=3),
        GPTNeoConfig(
            vocab_size=50, hidden_size=12, num_layers=2, num_heads=3, window_size=9,
            attention_types=[[["global", "local"], 1]],
        ),
    ],
    ids=["bloom", "gpt_neo"],
)  # fmt: skip
def test_attention_by_hand_is_equal_or_explained(config):
    lines, _ = verify(model_class(config)._from_config(config, dtype=torch.float32), Workload([67]))
    assert [line for line in lines if line.explanation is None] == []
    assert sum("the mask allows" in line.explanation for line in lines) == 2


def test_a_product_that_dropout_follows_at_once_keeps_its_backward():
    config = OPTConfig(vocab_size=50, hidden_size=12, ffn_dim=20, num_hidden_layers=1, num_attention_heads=2,
                       word_embed_proj_dim=12, max_position_embeddings=512)  # fmt: skip
    lines, _ = verify(model_class(config)._from_config(config, dtype=torch.float32), Workload([67]))
    assert [line for line in lines if line.explanation is None] == []
    (fc2,) = [line for line in lines if line.module.endswith("fc2")]
    assert fc2.counted == (2 * 67 * 12 * 20, 2 * 2 * 67 * 12 * 20)


def test_scores_over_compressed_keys_are_explained():
    config = DeepseekV4Config(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8, q_lora_rank=16,
        moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, o_groups=2, o_lora_rank=8,
        index_topk=5, index_n_heads=2, index_head_dim=8, sliding_window=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
        compress_rates={"heavily_compressed_attention": 8, "compressed_sparse_attention": 4},
    )  # fmt: skip
    lines, _ = verify(model_class(config)._from_config(config, dtype=torch.float32), Workload([67]))
    assert [line for line in lines if line.explanation is None] == []
    # 67 queries on 67 keys and 8 or 16 compressed ones; the indexer scores the 16
    run = [line.explanation.split(" scores")[0] for line in lines if "the mask allows" in line.explanation]
    assert run == ["eager attention runs all 5,025", "eager attention runs all 1,072", "eager attention runs all 5,561"]


def test_a_model_is_left_as_it_was():
    model, step = model_and_step("qwen3_moe")
    held = torch.ones_like(model.lm_head.weight)
    model.lm_head.weight.grad = held
    implementations = (model.config._attn_implementation, model.config._experts_implementation)
    verify(model, step)
    assert (model.config._attn_implementation, model.config._experts_implementation) == implementations
    assert model.lm_head.weight.grad is held
    assert model.model.embed_tokens.weight.grad is None


@pytest.mark.parametrize("op", ["linear", "attention", "experts"])
def test_a_wrong_ledger_is_not_explained_away(op, monkeypatch):
    model, step = model_and_step("qwen3_moe")

    def tampered(traced, **given):
        cost = trace(traced, **given)
        rows = tuple(replace(row, forward=row.forward * 2) if row.op == op else row for row in cost.rows)
        return replace(cost, rows=rows)

    monkeypatch.setattr(module, "trace", tampered)
    wrong = {line.op for line in verify(model, step)[0] if line.explanation is None}
    assert wrong == {op}


def test_cutting_layers_keeps_each_towers_lists_in_step():
    text = with_layers(tiny_config("gemma3_sliding"), 1)
    assert (text.num_hidden_layers, text.layer_types) == (1, ["sliding_attention"])
    vision = with_layers(tiny_config("qwen3_vl"), 1)
    assert (vision.vision_config.depth, vision.vision_config.deepstack_visual_indexes) == (1, [0])
    assert vision.text_config.num_hidden_layers == 1
    assert with_layers(tiny_config("qwen3"), 9).num_hidden_layers == 2
