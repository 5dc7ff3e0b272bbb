"""Several processes share a pack: what each computes is in sequence_process.py, what is refused is here."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from headway.errors import ConfigError, TrainingError
from headway.models import load_model, use_attention
from headway.models.attention import attend
from headway.models.parallel.exchange import split_over
from headway.models.parallel.sequence import local_slots, share_packs
from helpers.models import RECURRENT_FAMILIES, tiny_config
from helpers.processes import run_processes


@pytest.mark.dist
@pytest.mark.parametrize(
    "degree", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
def test_losses_and_gradients_are_those_of_one_process(degree):
    run_processes([sys.executable, Path(__file__).with_name("sequence_process.py")], degree)


@pytest.fixture
def group_of():
    """Torch's stand-in for a group of several processes, of which this is the second; nothing is exchanged."""

    def make(degree):
        dist.init_process_group("fake", rank=1, world_size=degree, store=FakeStore())
        return dist.group.WORLD

    yield make
    dist.destroy_process_group()


def model_of(family):
    return load_model(tiny_config(family), random_init=True, device="meta")


def test_a_group_of_one_changes_nothing(group_of):
    dist_group = group_of(2)
    model = model_of("qwen3")
    alone = dist.new_group([1])
    share_packs(model, alone)
    assert not model.model._forward_pre_hooks
    assert local_slots(7, alone) == local_slots(7, None) == slice(0, 7)
    assert local_slots(7, dist_group) == slice(4, 7)


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_a_layer_that_mixes_tokens_outside_attention_is_refused(group_of, family):
    with pytest.raises(ConfigError, match=r"parallel\.sequence is 2, but .* Set parallel\.sequence to 1"):
        share_packs(model_of(family), group_of(2))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_next", r"the layer layers\.0\.linear_attn \(Qwen3NextGatedDeltaNet\) mixes tokens outside attention"),
        ("falcon_h1", r"the layer layers\.0\.mamba \(FalconH1Mixer\) mixes"),
        ("minimax", r"layer 0, of kind 'linear_attention', mixes"),
        ("rwkv", "RwkvModel does not attend through the backend 'headway_flash'"),
    ],
)
def test_the_refusal_names_the_layer(group_of, family, name):
    with pytest.raises(ConfigError, match=name):
        share_packs(model_of(family), group_of(2))


def test_more_processes_than_query_heads_are_refused(group_of):
    with pytest.raises(ConfigError, match=r"parallel\.sequence is 5, but the model has 4 query heads.* at most 4"):
        share_packs(model_of("qwen3"), group_of(5))


def test_another_attention_backend_is_refused(group_of):
    model = model_of("qwen3")
    use_attention(model, "sdpa")
    with pytest.raises(ConfigError, match="Qwen3Model does not attend through the backend 'headway_flash'"):
        share_packs(model, group_of(2))


def test_a_pack_of_fewer_slots_than_processes_is_refused(group_of):
    with pytest.raises(TrainingError, match="A pack of 3 slots cannot be shared by 4 processes"):
        local_slots(3, group_of(4))


def pack(**more):
    cu_seqlens = torch.tensor([0, 8], dtype=torch.int32)
    return {"input_ids": torch.ones(1, 8, dtype=torch.long), "pack_cu_seqlens": cu_seqlens, "use_cache": False} | more


def test_what_cannot_be_cut_is_refused_by_name(group_of):
    model = load_model(tiny_config("qwen3"), random_init=True)
    share_packs(model, group_of(2))
    with pytest.raises(TrainingError, match="pass position_ids"):
        model(**pack())
    with pytest.raises(ConfigError, match="'attention_mask', which has a value for each token"):
        model(**pack(position_ids=torch.arange(8)[None], attention_mask=torch.ones(1, 8)))


def test_a_mask_of_a_models_own_is_refused(group_of):
    split = split_over(group_of(2), 8)
    tensors = [torch.randn(1, 2, 4, 4) for _ in range(3)]
    with pytest.raises(ConfigError, match="its own mask"):
        attend(torch.nn.Module(), *tensors, torch.ones(1, 1, 4, 4, dtype=torch.bool), pack_split=split)
