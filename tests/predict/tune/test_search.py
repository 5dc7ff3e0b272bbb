"""The search: what fits, in which order, and what the planner is asked."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest

from headway.devices import named_device
from headway.errors import DataError, PlanError
from headway.packing.lengths import LengthTable
from headway.predict.packs import plan_packs
from headway.predict.predictor import Predictor
from headway.predict.speeds import Speeds
from headway.predict.tune import distinct, front
from headway.predict.tune.search import PricedLengths
from headway.predict.tune.space import admitted
from helpers.device import length_table, pretended_step


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
