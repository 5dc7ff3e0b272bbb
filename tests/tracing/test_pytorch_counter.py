"""Ledgers against PyTorch's own counter on the real eager models, module by module, forward and backward."""

from dataclasses import replace

import pytest

from headway.tracing import trace
from helpers import counter
from helpers.cases import some
from helpers.counter import build, check
from helpers.models import FAMILIES, VISION_FAMILIES

# One of each kind of attention, MLP and tower; the rest differ in how these are put together.
OFTEN = {"gpt2", "qwen3", "gemma3_sliding", "gpt_oss_sinks", "deepseek_v3", "qwen2_5_vl", "qwen3_vl_moe"}


@pytest.mark.parametrize("family", some(FAMILIES, OFTEN.__contains__))
def test_every_module_counts_what_pytorch_dispatches(family):
    check(build(family), family)


@pytest.mark.parametrize("family", some(VISION_FAMILIES, "qwen2_5_vl".__eq__))
def test_a_frozen_vision_tower_counts_what_pytorch_dispatches(family):
    model = build(family)
    model.model.visual.requires_grad_(False)
    check(model, family)


@pytest.mark.parametrize("family", some(VISION_FAMILIES, "qwen3_vl".__eq__))
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
    monkeypatch.setattr(counter, "trace", tampered)
    with pytest.raises(AssertionError):
        check(model, "qwen3")
