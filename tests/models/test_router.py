"""How evenly slots are spread over experts, against counts made by hand."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from headway.models.experts import RouterLoad, use_experts
from helpers.models import tiny_config


@pytest.fixture
def model():
    """Two layers of four experts, and routers that send slots where they are told."""
    model = AutoModelForCausalLM.from_config(tiny_config("gpt_oss_sinks"), attn_implementation="eager").train()
    use_experts(model)
    return model


def told(model, *choices):
    """Make the router of each layer choose two experts for every slot."""
    for layer, chosen in zip(model.model.layers, choices, strict=True):
        nn.init.zeros_(layer.mlp.router.weight)
        layer.mlp.router.bias.data = torch.tensor([10.0 if expert in chosen else 0.0 for expert in range(4)])


def unchanged(_load):
    """The sum over a single process."""


def forward(model, slots=6):
    return model(input_ids=torch.arange(10, 10 + slots)[None], use_cache=False).logits


def test_a_router_that_uses_two_of_four_experts_is_twice_the_mean(model):
    told(model, {0, 1}, {2, 3})
    load = RouterLoad(model, torch.device("cpu"))
    forward(model)
    assert load.take(unchanged).tolist() == [2.0, 2.0, 4.0]  # two experts of each layer went without


def test_the_worst_layer_stands_beside_the_mean(model):
    told(model, {0, 1}, {2, 3})
    load = RouterLoad(model, torch.device("cpu"))
    forward(model)  # six slots for two experts of each layer
    told(model, {0, 1}, {0, 1})
    forward(model, slots=3)
    # first layer: 9, 9, 0, 0 of a mean of 4.5; second: 3, 3, 6, 6 of the same mean
    assert load.take(unchanged).tolist() == pytest.approx([(2 + 4 / 3) / 2, 2.0, 2.0])


def test_a_step_begins_at_zero_and_sums_over_processes(model):
    told(model, {0, 1}, {0, 1})
    load = RouterLoad(model, torch.device("cpu"))
    forward(model)
    load.take(unchanged)
    told(model, {2, 3}, {2, 3})
    forward(model)

    def with_another(load_E):
        load_E += torch.tensor([6, 6, 0, 0] * 2)  # what another process routed

    assert load.take(with_another).tolist() == [1.0, 1.0, 0.0]


def test_evaluation_is_not_counted(model):
    told(model, {0, 1}, {0, 1})
    load = RouterLoad(model, torch.device("cpu"))
    forward(model)
    told(model, {2, 3}, {2, 3})
    forward(model.eval())
    assert load.take(unchanged).tolist() == [2.0, 2.0, 4.0]


def test_recomputing_a_layer_changes_no_number(model):
    told(model, {0, 1}, {1, 2})
    load = RouterLoad(model, torch.device("cpu"))
    layer = model.model.layers[0]
    layer.gradient_checkpointing, layer._gradient_checkpointing_func = (
        True,
        lambda *a: checkpoint(*a, use_reentrant=False),
    )
    forward(model).sum().backward()
    assert load.take(unchanged).tolist() == [2.0, 2.0, 4.0]


def test_a_model_without_experts_has_no_numbers():
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3"))
    assert RouterLoad(model, torch.device("cpu")).take(unchanged).shape == (0,)
