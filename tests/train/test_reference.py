"""The key of a stored reference changes with all that its log-probabilities depend on, and with nothing else."""

import copy
import sys

import pytest
import torch

from headway.models.load import load_model
from headway.objectives.preferences import reference
from headway.objectives.preferences.reference import reference_key
from helpers.models import tiny_config
from helpers.processes import run_processes

SETTINGS = {"config": {"vocab_size": 64}, "precision": "float32 on cpu", "cut": None}


@pytest.fixture(scope="module", params=["qwen3", "deepseek_v3"])
def model(request):
    """A model of transformers; that of DeepSeek adds a buffer to its router's scores."""
    torch.manual_seed(0)
    return load_model(tiny_config(request.param), random_init=True)


def test_every_weight_and_its_place_is_in_the_key(model):
    """A permutation, which leaves every sum as it is, is noticed; so is a change of one bit."""
    key = reference_key(model, SETTINGS)
    assert reference_key(copy.deepcopy(model), SETTINGS) == key
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        before = tensor.detach().clone()
        changed = [before.flip(axis) for axis in range(before.ndim)] + [before + torch.ones_like(before)]
        changed += [before.T] if before.ndim == 2 and len({*before.shape}) == 1 else []
        for other in changed:
            if not torch.equal(other, before):
                tensor.data.copy_(other)
                assert reference_key(model, SETTINGS) != key, name
        tensor.data.copy_(before)
    assert reference_key(model, SETTINGS) == key


@pytest.mark.parametrize("change", [{"config": {"vocab_size": 65}}, {"precision": "bfloat16 on cpu"}, {"cut": 128}])
def test_settings_are_in_the_key(model, change):
    assert reference_key(model, SETTINGS | change) != reference_key(model, SETTINGS)


@pytest.mark.parametrize("name", ["library_versions", "code_digest"])
def test_software_is_in_the_key(model, monkeypatch, name):
    key = reference_key(model, SETTINGS)
    monkeypatch.setattr(reference, name, lambda *_: "of tomorrow")
    assert reference_key(model, SETTINGS) != key


SHARDED = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from headway.objectives.preferences.reference import reference_key

dist.init_process_group("gloo")
torch.manual_seed(0)
meshes = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
for shape in ((7, 5), (3,), (2, 9, 4), (1, 1), (8, 8)):  # slices of unlike sizes, and empty ones
    whole = torch.nn.ParameterDict({"weight": torch.randn(shape)})
    last = len(shape) - 1
    cuts = [(0, (Shard(0),)), (0, (Shard(last),)), (1, (Shard(0), Replicate())), (1, (Shard(0), Shard(last)))]
    for mesh, placements in cuts:
        spread = torch.nn.ParameterDict({"weight": distribute_tensor(whole["weight"].data, meshes[mesh], placements)})
        assert reference_key(spread, {}) == reference_key(whole, {}), (shape, placements)
"""


@pytest.mark.dist
@pytest.mark.slow
def test_the_key_is_the_same_however_weights_are_sharded():
    run_processes([sys.executable, "-c", SHARDED], 4)
