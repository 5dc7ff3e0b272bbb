"""Which settings are tried, and how they are read and written."""

import numpy as np
import pytest
import yaml

from headway.config import load_config
from headway.errors import ConfigError, PlanError
from headway.packing.lengths import LengthTable
from headway.predict.recipe import assignment
from headway.predict.tune.space import LEFT, Space, admitted, changes, differences, parse_step_tokens, recipe_text
from helpers.processes import ROOT


def lengths(tokens, patches=None):
    tokens = np.array(tokens)
    return LengthTable(tokens, np.zeros_like(tokens) if patches is None else np.array(patches))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2M", (2_000_000, 0.05)),
        ("2M +-5%", (2_000_000, 0.05)),
        ("1.5M +- 2.5 %", (1_500_000, 0.025)),
        ("131072", (131_072, 0.05)),
        ("64k±1%", (64_000, 0.01)),
        ("1G +/-10%", (10**9, 0.1)),
    ],
)
def test_the_tokens_of_a_step_are_read_with_their_tolerance(text, expected):
    assert parse_step_tokens(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "2 MiB", "2M +-0%", "2M +-100%", "2M 5%", "-2M", "0", "two", "9999999G"])
def test_other_sizes_of_a_step_are_refused(text):
    with pytest.raises(PlanError, match="is not a number of tokens with a tolerance above 0 and below 100 %"):
        parse_step_tokens(text)


def test_ranks_accumulation_and_packing_length_make_the_steps_size(recipe):
    space = Space(8 * 32_768, accumulations=(1, 2, 3, 4), sequences=(1, 2))
    found = list(space.packings(recipe, 8, lengths([100, 9000])))
    assert len(found) == 8
    for one in found:
        packs = 8 // one["parallel.sequence"] * one["optim.accumulation"]
        assert packs * one["data.tokens_per_pack"] == pytest.approx(8 * 32_768, rel=0.01)
        assert one["data.patches_per_pack"] is None
    assert {one["data.tokens_per_pack"] for one in found} >= {65_536, 32_768, 16_384, 8192}


def test_packs_shorter_than_the_longest_sample_are_left_out_where_that_is_an_error(recipe):
    strict = admitted(recipe, {"data.overlong": "error"})
    space = Space(8 * 32_768, accumulations=(1, 2, 4))
    tokens = [one["data.tokens_per_pack"] for one in space.packings(strict, 8, lengths([100, 9000]))]
    assert tokens == [32_768, 16_384]


def test_the_longest_sample_counts_only_where_its_own_source_refuses_longer_ones(recipe):
    rows = LengthTable(
        np.array([100, 9000, 20_000]),
        np.zeros(3, dtype=int),
        source=np.array([0, 1, 2]),
        sources=(("a", "error"), ("b", None), ("c", "drop")),
    )
    space = Space(8 * 32_768, accumulations=(1, 2, 4, 64))
    for policy, expected in (("error", [32_768, 16_384]), ("drop", [32_768, 16_384, 8192, 512])):
        config = admitted(recipe, {"data.overlong": policy})
        assert [one["data.tokens_per_pack"] for one in space.packings(config, 8, rows)] == expected


def test_a_limit_on_patches_stands_just_above_their_mean_and_holds_the_largest_sample(recipe):
    space = Space(8 * 32_768, accumulations=(1, 64))
    found = list(space.packings(recipe, 8, lengths([1000, 1000], [1000, 3000])))
    patches = [one["data.patches_per_pack"] for one in found]
    assert patches[0] is None
    assert 2 * 32_768 < patches[1] < 1.1 * 2 * 32_768  # two patches a token on average
    assert patches[3] == 3000
    fixed = Space(8 * 32_768, accumulations=(2,), limits_patches=False)
    limited = admitted(recipe, {"data.patches_per_pack": 60_000})
    assert [one["data.patches_per_pack"] for one in fixed.packings(limited, 8, lengths([9], [9]))] == [30_000]


def test_meshes_are_those_that_the_devices_fit():
    space = Space(1, replicates=(1, 2, 4, 8), experts=(1, 8))
    found = [(one["parallel.replicate"], one["parallel.expert"]) for one in space.meshes(8, sequence=2)]
    assert found == [(1, 1), (1, 8), (2, 1), (4, 1)]


def test_gradients_are_summed_once_a_step_only_where_there_are_several_packs():
    space = Space(1, reshards=(True, False), reduces=("pack", "step"))
    assert len(list(space.sharings(1))) == 2
    assert len(list(space.sharings(2))) == 4


def test_the_whole_space_follows_from_recipe_devices_and_model(recipe):
    one = Space.of(recipe, 1, num_heads=28, num_experts=0)
    assert (one.sequences, one.replicates, one.experts, one.reshards, one.reduces) == (
        (1,), (1,), (1,), (True,), ("pack",),
    )  # fmt: skip
    assert one.step_tokens == 32_768
    assert LEFT in one.recomputes
    many = Space.of(recipe, 32, num_heads=4, num_experts=128, step_tokens=10**6, tolerance=0.1)
    assert (many.step_tokens, many.tolerance) == (10**6, 0.1)
    assert many.sequences == (1, 2, 4)  # not more processes than heads
    assert many.replicates == (1, 2, 4, 8, 16, 32)
    assert many.experts == (1, 2, 4, 8)
    own = Space.of(recipe, 32, num_heads=4, num_experts=128, meshes=False)
    assert (own.sequences, own.replicates, own.experts, own.reshards) == ((1,), (1,), (1,), (True,))
    liger = admitted(recipe, {"speed.kernels": "liger"})
    assert Space.of(liger, 1, num_heads=4, num_experts=0).chunks == (2048,)
    with pytest.raises(ConfigError, match="does not divide the 7 processes"):
        Space.of(admitted(recipe, {"parallel.sequence": 2}), 7, num_heads=4, num_experts=0)


def test_towers_are_recomputed_apart_where_backward_passes_several(recipe):
    one = Space.of(recipe, 1, num_heads=28, num_experts=0, towers={"language"})
    assert one.recomputes == Space.of(recipe, 1, num_heads=28, num_experts=0).recomputes
    two = Space.of(recipe, 1, num_heads=28, num_experts=0, towers={"language", "vision"})
    more = {choice for choice in two.recomputes if choice not in one.recomputes}
    assert {"vision:full", "language:full", "vision:full,-attention", "full,-attention,vision:full"} <= more
    assert all(admitted(recipe, {"speed.recompute": choice}) for choice in more)


def test_the_configurations_own_checks_decide(recipe):
    assert admitted(recipe, {"parallel.reduce": "step"}) is None  # has no effect with one pack a step
    assert admitted(recipe, {"parallel.reduce": "step", "optim.accumulation": 2}) is not None
    assert admitted(recipe, {"speed.recompute": "half"}) is None


def test_what_changes_is_told_as_set_takes_it(recipe):
    values = {"optim.accumulation": 4, "speed.loss_chunk": None, "parallel.shard": "auto", "parallel.reshard": False}
    assert changes(recipe, values) == {k: values[k] for k in values if k != "parallel.shard"}
    assert differences(recipe, admitted(recipe, values)) == changes(recipe, values)
    assert [assignment(*item) for item in changes(recipe, values).items()] == [
        "optim.accumulation=4",
        "speed.loss_chunk=null",
        "parallel.reshard=false",
    ]
    assert assignment("speed.recompute", "full,-attention") == "speed.recompute=full,-attention"


@pytest.mark.parametrize("name", ["qwen2.5-vl-7b-video-51200", "qwen3-vl-8b-video-51200-sp2"])
def test_a_recipe_reads_back_as_what_was_found(name, tmp_path):
    base = ROOT / "recipes" / f"{name}.yaml"
    values = {"data.tokens_per_pack": 40_960, "optim.accumulation": 3, "speed.loss_chunk": None, "parallel.sequence": 4}
    config = admitted(load_config(base), {**values, "plan.device": "H100", "speed.recompute": "memory:12.5GiB"})
    target = tmp_path / "best.yaml"
    target.write_text(recipe_text(base, config, target, "A remark."), encoding="utf-8")
    assert load_config(target) == config
    assert target.read_text().startswith("# A remark.\nextends: ")


def test_a_recipe_holds_no_more_than_what_changes(tmp_path):
    base = ROOT / "recipes/qwen2.5-7b-text-81920.yaml"
    config = admitted(load_config(base), {"optim.accumulation": 2})
    written = yaml.safe_load(recipe_text(base, config, ROOT / "best.yaml", "A remark."))
    assert written == {"extends": "recipes/qwen2.5-7b-text-81920.yaml", "optim": {"accumulation": 2}}
