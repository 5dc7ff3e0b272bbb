"""Ledgers against PyTorch's own counter on the real eager models, module by module, forward and backward."""

from dataclasses import replace

import pytest

import witness
from headway.count import drivers, trace
from tiny_models import FAMILIES, VISION_FAMILIES
from witness import build, check, count_backward, count_forward, eager_attention, inputs, workload


@pytest.mark.parametrize("family", FAMILIES)
def test_every_module_counts_what_pytorch_dispatches(family):
    check(build(family), family)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_frozen_vision_tower_counts_what_pytorch_dispatches(family):
    model = build(family)
    model.model.visual.requires_grad_(False)
    check(model, family)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_trained_merger_before_a_frozen_language_model_counts_what_pytorch_dispatches(family):
    model = build(family).requires_grad_(False)
    model.model.visual.merger.requires_grad_(True)
    check(model, family)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_tied", "qwen3_moe"])
def test_training_only_the_last_layer_counts_what_pytorch_dispatches(family):
    model = build(family).requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)
    check(model, family)


def test_a_wrong_coefficient_would_be_seen(monkeypatch):
    honest = trace

    def tampered(model):
        cost = honest(model)
        return replace(cost, rows=(*cost.rows[:-1], replace(cost.rows[-1], forward=cost.rows[-1].forward + 2)))

    model = build("qwen3")
    monkeypatch.setattr(witness, "trace", tampered)
    with pytest.raises(AssertionError):
        check(model, "qwen3")


# the method has two names: the old one is all that transformers 5.17 has, the new one the only one without a warning
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3_sliding", "qwen2", "qwen3_vl", "qwen2_5_vl"])
def test_checkpointing_recomputes_what_pytorch_dispatches(family):
    model = build(family)
    plain = count_backward(count_forward(model, inputs(model, family))[0].sum())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again = count_backward(count_forward(model, inputs(model, family))[0].sum())
    cost = trace(build(family))
    recompute, eager_extra = cost.count(workload(family), recompute="full").recompute, 0
    for row in cost.rows:
        if row.op == "attention" and row.recomputed:
            per_score, squares = eager_attention(model, row.module)
            eager_extra += per_score * sum(squares) - drivers.parse(row.driver)(workload(family)) * row.forward
    assert sum((again - plain).elements()) == recompute + eager_extra
    assert not plain - again
