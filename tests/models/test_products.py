"""Products in other forms and widths: the same results and gradients, by the same parameters."""

import copy

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from headway.models.kernels import align_widths, gated_mlps, project_patches, use_kernels
from headway.models.load import load_model
from helpers.models import tiny_config


class Seen(TorchDispatchMode):
    """Notes the names of the operations that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_a_tower_embeds_its_patches_without_a_convolution(family):
    model = load_model(tiny_config(family), random_init=True).double()
    other = copy.deepcopy(model)
    use_kernels(other, "torch", torch.device("cpu"))
    name = "model.visual.patch_embed.proj"
    grids_M3 = torch.tensor([[1, 4, 6], [1, 2, 2]])
    conv = model.get_submodule(name)
    pixels_PD = torch.randn(28, conv.weight[0].numel(), dtype=torch.float64)
    found = {}
    for one in (model, other):
        with Seen() as seen:
            features = one.model.visual(pixels_PD, grid_thw=grids_M3).pooler_output
            features.square().sum().backward()
        found[one] = features.detach(), {key: p.grad for key, p in one.named_parameters()}, seen.names
    torch.testing.assert_close(found[other][:2], found[model][:2])
    assert "convolution" in found[model][2]
    assert not any("convolution" in operation for operation in found[other][2])
    assert other.state_dict().keys() == model.state_dict().keys()
    assert other.get_submodule(name).weight.shape == conv.weight.shape


def test_images_that_are_not_cut_are_convolved_as_before():
    tower = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 2, groups=2))
    images = torch.randn(2, 3, 16, 8)
    expected = tower(images)
    assert project_patches(tower) == ["0"]
    assert torch.equal(tower(images), expected)
    patch = images[:, :, :4, :4]
    torch.testing.assert_close(tower[0](patch), F.conv2d(patch, tower[0].weight, tower[0].bias))


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
    (said,) = align_widths(gated_mlps(wider), torch.bfloat16)
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
    assert align_widths(gated_mlps(model), torch.bfloat16) == ()
    assert "forward" not in vars(mlp(model, "qwen3").gate_proj)


def test_in_float32_four_channels_are_sixteen_bytes():
    assert align_widths(gated_mlps(model_of("qwen3", 60)), torch.float32) == ()
    assert len(align_widths(gated_mlps(model_of("qwen3", 60)), torch.bfloat16)) == 1


def test_mlps_with_adapters_are_left_alone():
    model = model_of("qwen3", 60)
    model.add_adapter(LoraConfig(r=2, target_modules=["up_proj"]))
    assert align_widths(gated_mlps(model), torch.bfloat16) == ()
