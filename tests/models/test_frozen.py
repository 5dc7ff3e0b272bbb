"""Weights that do not learn, held in the dtype that products compute in."""

import copy

import pytest
import torch

from headway.models.init_weights import init_weights
from headway.models.load import load_model
from headway.models.precision import Precision
from headway.models.quantised import hold_frozen
from headway.optim.groups import freeze
from headway.tracing import trace
from helpers.models import tiny_config

IDS = torch.arange(10, 40)[None]
AUTOCAST = Precision("bfloat16-autocast", torch.float32, torch.bfloat16, "cpu")


def pair(family, patterns, *, gathers=False):
    """A model whose frozen weights are held in bfloat16, and the same with all in float32."""
    models = []
    for holds in (True, False):
        model = load_model(tiny_config(family), random_init=True, device="meta")
        ledger = freeze(model, trace(model), patterns)
        if holds:
            hold_frozen(model, ledger, AUTOCAST.params, AUTOCAST.compute, gathers=gathers)
        torch.manual_seed(0)
        init_weights(model, "cpu", dtype=torch.float32)
        models.append(model)
    return models


@pytest.mark.parametrize(
    ("family", "patterns"),
    [
        ("qwen3", ["language.projections", "language.mlp"]),
        ("qwen3", ["language.head", "language.mlp"]),
        ("qwen3_tied", ["language"]),
        ("qwen3_moe", ["language.experts", "language.router"]),
        ("qwen3_vl", ["vision"]),
        ("gpt_oss_sinks", ["language.experts"]),
    ],
)
def test_losses_and_gradients_are_those_of_float32_to_the_bit(family, patterns):
    patterns = [pattern for pattern in patterns if pattern != "language"] or ["model.layers.0.*"]
    results = []
    for model in pair(family, patterns):
        model.train()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        results.append((loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (loss, held), (other, plain) = results
    assert torch.equal(loss, other)
    assert held.keys() == plain.keys()
    assert all(torch.equal(gradient, plain[name]) for name, gradient in held.items())


def test_what_learns_and_what_more_than_products_reads_stays_in_float32():
    held, _ = pair("qwen3", ["model.*"])
    dtypes = {name: parameter.dtype for name, parameter in held.named_parameters()}
    assert dtypes.pop("lm_head.weight") == torch.float32  # it learns
    narrow = {name for name, dtype in dtypes.items() if dtype == torch.bfloat16}
    assert {name.split(".")[-2] for name in narrow} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    tied, _ = pair("qwen3_tied", ["model.embed_tokens.*"])
    assert tied.lm_head.weight.dtype == torch.float32  # rows are looked up in it too
    gathered, _ = pair("qwen3", ["model.*"], gathers=True)
    assert {p.dtype for p in gathered.model.parameters()} == {torch.bfloat16}


def test_values_are_the_same_whatever_they_are_held_in():
    held, plain = pair("qwen3", ["model.layers.*"], gathers=True)
    for (name, parameter), other in zip(held.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, copy.deepcopy(other).to(parameter.dtype)), name
