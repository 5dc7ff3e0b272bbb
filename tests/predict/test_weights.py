"""Slices of weights that FSDP2 fills up: rows of tensors by their shapes, and sizes from the rule of `torch.chunk`."""

from collections import Counter

import pytest
import torch

from fake_cuda.moments import small_config, traced
from headway.count import load_cost_model
from headway.predict.weights import Holding, Unit, padding_of, rows_of, sliced, spread_over, units_of
from headway.tracing.build import model_on_shapes

WIDTH, INTER, EXPERTS = 256, 256, 8  # of the little model of experts
EACH = 3 * WIDTH * INTER  # an expert: gate, up and down


def by_name(cost_model):
    return {one.name: one for one in cost_model.parameters}


@pytest.mark.parametrize("kind", ["little text", "tied", "little experts", "little image", "little video"])
def test_rows_are_those_of_the_tensors(kind):
    cost_model, _ = traced(kind)
    rows, shapes = rows_of(cost_model), model_on_shapes(small_config(kind), torch.float32).named_parameters()
    assert {name: len(tensor) for name, tensor in shapes} == {
        one.name: rows.count(one) for one in cost_model.parameters
    }


@pytest.mark.parametrize(("shards", "filled"), [(2, 8), (3, 9), (8, 8), (32, 32), (40, 40)])
def test_eight_experts_are_filled_up_to_whole_slices(shards, filled):
    """`torch.chunk` gives the first processes the most rows, and FSDP2 pads every slice to the first."""
    cost_model, _ = traced("little experts")
    chunks = torch.arange(EXPERTS).chunk(shards)
    assert len(chunks[0]) * shards == filled
    name = "model.layers.0.mlp.experts.down_proj"
    assert by_name(sliced(cost_model, shards, 1))[name].numel == filled * WIDTH * INTER


@pytest.mark.parametrize(("shards", "expert", "filled"), [(8, 2, 8), (64, 4, 64), (64, 8, 64), (12, 4, 12)])
def test_spread_experts_are_filled_up_within_what_a_process_keeps(shards, expert, filled):
    """64 processes of which 4 share the experts: each keeps 2, in slices for 16; all 4 together hold 4 x 16 rows."""
    cost_model, _ = traced("little experts")
    name = "model.layers.0.mlp.experts.down_proj"
    assert by_name(sliced(cost_model, shards, expert))[name].numel == filled * WIDTH * INTER


def test_what_divides_is_not_filled_up():
    cost_model, _ = traced("little experts")
    assert padding_of(cost_model, 4) == 1
    assert sliced(cost_model, 4, 1).parameters == cost_model.parameters
    assert sliced(cost_model, 4, 1) is sliced(cost_model, 4, 1)  # found once


def test_the_share_that_is_filled_up_is_told():
    cost_model, _ = traced("little experts")
    size = cost_model.params.total
    assert padding_of(cost_model, 32) == pytest.approx((size + 6 * 24 * EACH) / size, rel=1e-3)  # and a few odd rows
    assert padding_of(load_cost_model("qwen3-30b-a3b"), 512) == pytest.approx(4, rel=0.1)


def test_gradients_as_they_come_are_not_filled_up():
    cost_model, saved = traced("little experts")
    found = units_of(cost_model, saved["bfloat16"], Holding(4, 2, gathers=True, shards=32))
    unit = found["model.layers.0", False]
    own = sum(one.numel for one in cost_model.parameters if one.name.startswith("model.layers.0."))
    assert unit.arriving == 2 * own
    assert unit.summing == 4 * (own + 24 * EACH + 24 * WIDTH)  # the router has a row for each expert too


def test_spread_experts_are_a_unit_of_their_own():
    cost_model, saved = traced("little experts")
    found = units_of(cost_model, saved["bfloat16"], Holding(4, 2, gathers=True, shards=64, expert=4))
    assert found["model.layers.0", True] == Unit(4 * 16 * EACH, 2 * 16 * EACH, 2 * 2 * EACH, 4 * 16 * EACH)
    assert found["model.layers.0", False].arriving == 2 * sum(
        one.numel
        for one in cost_model.parameters
        if one.name.startswith("model.layers.0.") and ".experts" not in one.name
    )
    alone = units_of(cost_model, saved["bfloat16"], Holding(4, 2, gathers=True, shards=64))
    assert not [unit for unit, is_spread in alone if is_spread]


def test_experts_that_every_token_passes_are_not_spread():
    over = Counter(
        (one.name.rpartition(".experts.")[1] or one.name.rpartition(".shared_experts.")[1], spread_over(one, 8))
        for one in load_cost_model("deepseek-v3").parameters
        if "experts" in one.name
    )
    assert over == {(".experts.", 8): 2 * 58, (".shared_experts.", 1): 3 * 58}  # 58 of 61 layers have experts


def test_a_shared_expert_in_slices_is_still_none_that_is_spread():
    cost_model = load_cost_model("deepseek-v3")
    name = "model.layers.3.mlp.shared_experts.gate_proj.weight"  # 2,048 rows
    cut = by_name(sliced(cost_model, 3000, 8))[name]
    assert cut.numel == 3000 * by_name(cost_model)[name].numel // 2048
    assert spread_over(cut, 8) == 1
