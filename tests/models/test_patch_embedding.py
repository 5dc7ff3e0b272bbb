"""Patch embeddings multiply matrices, and nothing else about them changes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from headway.models.kernels import use_kernels
from headway.models.load import load_model
from headway.models.patch_embedding import project_patches
from helpers.tiny_models import tiny_config


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
