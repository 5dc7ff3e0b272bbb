"""The search: what fits, in which order, and what the planner is asked."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest

from headway.config import load_config
from headway.count import load_cost_model
from headway.devices import named_device
from headway.errors import DataError, PlanError
from headway.packing.lengths import MIXES, LengthTable
from headway.predict.communication import Links
from headway.predict.lengths import lengths_of
from headway.predict.packs import plan_packs
from headway.predict.predictor import Predictor
from headway.predict.speeds import Speeds
from headway.predict.tune import Search, Space, distinct, front, same_step
from headway.predict.tune.search import PricedLengths
from headway.predict.tune.space import admitted
from helpers.device import length_table, pretended_step
from helpers.processes import ROOT


def test_choices_are_ranked_by_useful_flops_over_predicted_time_and_fit(make_search):
    found = make_search().run()
    rates = [one.flops_per_s for one in found.ranked]
    assert len(rates) == found.fitting > 4
    # those within a thousandth of each other are ranked by what they change and hold
    assert max(later / earlier for earlier, later in pairwise(rates)) < 1.002
    assert all(one.memory.peak <= 60 * 2**30 for one in found.ranked)
    assert any(one.memory.peak > 60 * 2**30 for one in found.candidates)
    assert found.tried >= len(found.candidates)
    best = found.ranked[0]
    assert best.flops_per_s == pytest.approx(best.packs.flops.total / best.step_s)


def test_each_packing_is_planned_once_by_the_real_planner(make_search, monkeypatch):
    calls = []

    def counted(config, *args, **more):
        calls.append((config.data.tokens_per_pack, config.optim.accumulation))
        return plan_packs(config, *args, **more)

    monkeypatch.setattr("headway.predict.tune.search.plan_packs", counted)
    found = make_search().run()
    assert sorted(calls) == [(16_384, 2), (32_768, 1)]
    assert found.packings == 2


def test_packs_and_memory_are_those_of_a_dry_run(make_search):
    search = make_search()
    best = search.run().ranked[0]
    name, lengths = search.lengths
    packs = plan_packs(best.config, search.predictor.cost_model, best.shape, "none", lengths=(name, lengths))
    assert packs.to_dict() == best.packs.to_dict()
    memory = search.predictor.memory(best.config, 8, (packs.most_tokens, packs.most_patches))
    assert memory == best.memory


@pytest.mark.parametrize("recompute", ["none", "full", "every:3", "full,-attention"])
def test_packs_planned_without_recomputation_take_what_those_planned_with_it_take(make_search, recompute):
    search = make_search()
    config = admitted(search.config, {"speed.recompute": recompute})
    speeds, shape = Speeds.of_device(named_device("H100"), "bf16"), config.parallel.mesh_shape(8)
    predictor = Predictor(search.predictor.cost_model, search.predictor.saved, speeds=speeds)
    plain, again = (
        plan_packs(config, predictor.cost_model, shape, choice, search.lengths) for choice in ("none", recompute)
    )
    expected, found = predictor.time(config, again, 8), predictor.time(config, plain, 8)
    assert found.flops == expected.flops == plain.flops.total
    assert found.step_s == pytest.approx(expected.step_s, rel=1e-9)


def test_steps_have_the_size_asked_for(make_search):
    for one in make_search(accumulations=(1, 2, 3, 5)).run().candidates:
        assert one.step_tokens == pytest.approx(8 * 32_768, rel=0.05)


def test_a_size_that_no_packs_give_is_told(make_search):
    search = make_search(tolerance=1e-6)
    with pytest.raises(PlanError, match=r"give steps of 262,144 tokens \+-0.0001 % on 8 devices"):
        search.run()


def test_a_limit_that_nothing_fits_names_the_least(make_search):
    with pytest.raises(PlanError, match=r"none of \d+ choices fits 2.0 GiB on each of 8 devices. The least .* takes"):
        make_search(room_gib=2.0).run()


def test_without_a_limit_everything_fits(make_search):
    found = make_search(room_gib=None).run()
    assert len(found.ranked) == len(found.candidates) == found.fitting
    assert all("memory:" not in one.config.speed.recompute for one in found.ranked)


def test_what_the_limit_leaves_is_used_for_activations(make_search):
    found = make_search(accumulations=(1,), chunks=(2048,), replicates=(1,)).run()
    by_choice = {one.config.speed.recompute.partition(":")[0]: one for one in reversed(found.ranked)}
    assert {*by_choice} == {"full", "memory"}  # none does not fit
    assert by_choice["full"].memory.activations < by_choice["memory"].memory.activations
    assert by_choice["memory"].memory.peak <= found.room_bytes


def test_samples_are_not_given_up_for_speed(make_search, recipe):
    """Packs shorter than the longest sample would drop it; the recipe's own drop none."""
    search = make_search(accumulations=(1, 2, 16), timer=lambda config, packs: pretended_step(config, packs, {}))
    assert {one.config.optim.accumulation for one in search.run().candidates} == {1, 2}


def test_packs_that_leave_out_samples_are_no_choices_and_stand_beside_them(make_search, recipe):
    """One of 4,000 samples is longer than packs of half the length."""
    tokens = np.where(np.arange(8000) % 4000 == 7, 20_000, 300)
    none = np.zeros((0, 3), dtype=np.int64)
    search = make_search(timer=lambda config, packs: pretended_step(config, packs, {}))
    search.space = dataclasses.replace(search.space, accumulations=(1, 2))
    search = dataclasses.replace(search, lengths=("long ones", LengthTable(tokens, 0 * tokens, none, none[:, 0])))
    found = search.run()
    assert {one.config.optim.accumulation for one in found.candidates} == {1}
    assert {one.config.optim.accumulation for one in found.shorter} == {2}
    samples, of_tokens = search.longer(found.shorter[0].config)
    assert (samples, of_tokens) == (1 / 4000, pytest.approx(20_000 / (20_000 + 3999 * 300)))
    assert found.fitting == len(found.ranked)


def test_rare_long_samples_of_a_mix_are_counted_over_more_samples_than_a_few_steps_hold(recipe):
    config = admitted(recipe, {"plan.mix": "chats", "data.tokens_per_pack": 81_920, "plan.devices": 1})
    found = same_step(config, on_device(config, "H200"), 1, lengths_of(config, load_cost_model("qwen2.5-7b"), SHAPE))
    drawn = MIXES["chats"].lengths(200_000).tokens
    for other in found:
        is_longer = drawn > other.choice.config.data.tokens_per_pack
        assert other.samples == pytest.approx(is_longer.mean(), abs=2e-4)
        assert other.leaves_out == bool(other.tokens > 0.001)


def test_more_packs_pay_for_their_gathers(recipe):
    """Weights are gathered for each pack, so that slow links make packs long."""
    config = admitted(recipe, {"plan.mix": "chats", "data.tokens_per_pack": 81_920})
    shape = config.parallel.mesh_shape(16)
    lengths = lengths_of(config, load_cost_model("qwen2.5-7b"), shape)
    packs = {}
    for network in (50e9, 0.5e9):
        links = Links.of_device(named_device("H200"), network_bytes_per_s=network, per_node=8)
        search = Search(config, on_device(config, "H200", links), 16, 50 * 2**30, lengths, Space.of_packs(config, 16))
        packs[network] = search.run().ranked[0].config.optim.accumulation
    assert packs[0.5e9] == 1 < packs[50e9]


SHAPE = load_config(ROOT / "recipes/qwen2.5-7b-text-81920.yaml").parallel.mesh_shape(1)


def on_device(config, name, links=None):
    device = named_device(name)
    speeds = Speeds.of_device(device, "bf16")
    return Predictor.of(config, load_cost_model("qwen2.5-7b"), device=device, speeds=speeds, links=links)


def test_a_recipe_whose_samples_do_not_fit_it_is_told_so(make_search, recipe):
    config = admitted(recipe, {"data.overlong": "error", "data.tokens_per_pack": 1024})
    with pytest.raises(DataError, match="more than a pack's budget of 1024 tokens"):
        make_search(config=config).run()


def test_a_choice_that_the_model_does_not_admit_is_left_out(make_search):
    found = make_search(accumulations=(1,), recomputes=("full", "every:1000")).run()
    assert {one.config.speed.recompute for one in found.candidates} == {"full"}


def test_the_recipe_itself_is_timed_too(make_search, recipe):
    own = make_search().run().own
    assert (own.config, own.settings) == (recipe, ())


def test_lengths_cost_what_they_cost_and_are_counted_once(make_search, monkeypatch):
    model = make_search().predictor.cost_model
    lengths = length_table(50, 90)
    priced = PricedLengths(lengths.tokens, lengths.patches, lengths.grids, lengths.grid_rows)
    expected = lengths.costs(model)
    assert (priced.costs(model) == expected).all()
    sources = (("a", "drop"), ("b", "split"))
    two = PricedLengths(lengths.tokens, lengths.patches, source=np.arange(50) % 2, sources=sources)
    of_source = {name: part.table.costs(model).tolist() for name, part in two.parts.items()}
    assert of_source == {name: LengthTable.costs(part.table, model).tolist() for name, part in two.parts.items()}
    monkeypatch.setattr("headway.packing.lengths.segment_costs", None)
    assert {name: part.table.costs(model).tolist() for name, part in two.parts.items()} == of_source
    first = priced.costs(model)
    first[:] = 0  # a caller's own copy
    assert (priced.costs(model) == expected).all()


class One:
    """A choice of which only memory and speed are looked at."""

    def __init__(self, peak, rate, kind):
        self.memory, self.flops_per_s, self.kind = type("Memory", (), {"peak": peak}), rate, kind


def test_the_front_holds_what_nothing_beats_in_both():
    a, b, c, d, e = One(10, 1.0, "a"), One(20, 3.0, "b"), One(15, 0.5, "c"), One(30, 3.0, "d"), One(20, 2.0, "e")
    assert front([d, c, e, b, a]) == [a, b]
    assert front([]) == []


def test_of_each_kind_the_first_is_shown():
    a, b, c = One(1, 3.0, "x"), One(1, 2.0, "x"), One(1, 1.0, "y")
    assert distinct([a, b, c], 5) == [a, c]
    assert distinct([a, b, c], 1) == [a]


def test_a_choices_kind_leaves_out_details(make_search):
    best = make_search().run().ranked[0]
    chunked = dataclasses.replace(best, config=admitted(best.config, {"speed.loss_chunk": 77}))
    other = dataclasses.replace(best, config=admitted(best.config, {"optim.accumulation": 7}))
    assert best.kind == chunked.kind != other.kind
