"""A real step under PyTorch's formulas explains every ledger, and a wrong ledger does not pass."""

from dataclasses import replace

import pytest
import torch
from transformers import BloomConfig, GPTNeoConfig

from headway.count import Workload, trace
from headway.count.tracing import verify as module
from headway.count.tracing.build import model_class, with_layers
from headway.count.tracing.verify import verify
from tiny_models import FAMILIES, VISION_FAMILIES, tiny_config


def model_and_step(family):
    torch.manual_seed(0)
    config = tiny_config(family)
    images = [(1, 4, 6), (2, 8, 4)] if family in VISION_FAMILIES else []
    return model_class(config)._from_config(config, dtype=torch.float32), Workload([67], images=images)


@pytest.mark.parametrize("family", FAMILIES)
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
