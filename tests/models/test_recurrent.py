"""A recurrent layer's state stays within a pack's segments."""

import pytest
import torch

from headway.errors import ConfigError
from headway.models import load_model
from helpers.models import tiny_config

LENGTHS = (9, 70, 1, 5)  # the rule of Qwen3.5 works in chunks of 64


def packed(model):
    ids = torch.arange(sum(LENGTHS))[None] % 150 + 7
    places = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    boundaries = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    pack = {"pack_cu_seqlens": boundaries, "pack_max_seqlen": max(LENGTHS)}
    return ids, model(input_ids=ids, position_ids=places, use_cache=False, **pack).logits


@pytest.mark.parametrize("family", ["qwen3_5", "minimax", "lfm2"])  # of a state, the model's cache, a short convolution
def test_each_segment_of_a_pack_runs_as_if_it_were_alone(family):
    torch.manual_seed(0)
    model = load_model(tiny_config(family), random_init=True)
    ids, logits = packed(model)
    parts = [model(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, dim=1)]
    assert torch.allclose(logits, torch.cat(parts, dim=1), atol=1e-5)


@pytest.mark.parametrize("family", ["mamba2", "rwkv"])
def test_a_layer_that_boundaries_do_not_reach_refuses_a_pack(family):
    model = load_model(tiny_config(family), random_init=True)
    with pytest.raises(ConfigError, match=r"cannot be trained on packs\. docs/models\.md"):
        packed(model)
