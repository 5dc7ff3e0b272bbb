"""Gated MLPs in a wider width: the same results and gradients, by the same parameters."""

import copy

import pytest
import torch
from peft import LoraConfig

from headway.models import load_model
from headway.models.widths import align_widths
from helpers.tiny_models import tiny_config


def model_of(family, width):
    torch.manual_seed(0)
    config = tiny_config(family)
    (config.vision_config if family == "qwen2_5_vl" else config).intermediate_size = width
    return load_model(config, random_init=True)


def mlp(model, family):
    return model.model.visual.blocks[0].mlp if family == "qwen2_5_vl" else model.model.layers[0].mlp


def widths_used(module, x):
    widths = []
    hook = module.down_proj.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[-1]))
    result = module(x)
    hook.remove()
    return result, widths


@pytest.mark.parametrize("family", ["qwen3", "qwen2_5_vl"])  # without biases, and with
@pytest.mark.parametrize("autocast", [False, True])
def test_results_and_gradients_are_those_of_the_given_width(family, autocast):
    plain = model_of(family, 60)
    wider = copy.deepcopy(plain)
    (said,) = align_widths(wider, torch.bfloat16)
    assert "64 channels for 60" in said
    assert wider.state_dict().keys() == plain.state_dict().keys()
    one, other = mlp(plain, family), mlp(wider, family)
    x = torch.randn(7, one.gate_proj.in_features)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        (expected, _), (found, widths) = widths_used(one, inputs[0]), widths_used(other, inputs[1])
    assert widths == [64]
    expected.float().square().sum().backward()
    found.float().square().sum().backward()
    tolerance = {"rtol": 2e-2, "atol": 1e-3} if autocast else {"rtol": 1e-5, "atol": 1e-7}
    torch.testing.assert_close(found, expected, **tolerance)
    for mine, theirs in zip([inputs[1], *other.parameters()], [inputs[0], *one.parameters()], strict=True):
        assert theirs.grad.abs().sum() > 0
        torch.testing.assert_close(mine.grad, theirs.grad, **tolerance)


def test_widths_that_fit_stay():
    model = model_of("qwen3", 64)
    assert align_widths(model, torch.bfloat16) == ()
    assert "forward" not in vars(mlp(model, "qwen3").gate_proj)


def test_in_float32_four_channels_are_sixteen_bytes():
    assert align_widths(model_of("qwen3", 60), torch.float32) == ()
    assert len(align_widths(model_of("qwen3", 60), torch.bfloat16)) == 1


def test_mlps_with_adapters_are_left_alone():
    model = model_of("qwen3", 60)
    model.add_adapter(LoraConfig(r=2, target_modules=["up_proj"]))
    assert align_widths(model, torch.bfloat16) == ()
