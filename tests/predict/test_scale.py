"""A recipe at many sizes: the plan of packs against the planner itself, and how shapes follow."""

import numpy as np
import pytest

from headway.config import load_config
from headway.count import load_cost_model
from headway.count.activations import SavedByPrecision, shipped_activations
from headway.devices import named_device
from headway.errors import ConfigError, PlanError
from headway.packing import Budget, Items, Order, Plan, measure
from headway.packing.lengths import MIXES, LengthTable
from headway.predict.communication import Links
from headway.predict.failures import Reliability
from headway.predict.lengths import STEPS, enough_lengths, repeated
from headway.predict.predictor import Predictor
from headway.predict.scale import at_size, sized, sizes_of
from headway.predict.speeds import Speeds
from headway.predict.weights import padding_of
from helpers.processes import ROOT

H100 = named_device("H100")


def recipe(*settings):
    return load_config(ROOT / "recipes/qwen2.5-7b-text-81920.yaml", ("data.tokens_per_pack=8192", *settings))


def predicted(config, devices, reliability=None, model="qwen2.5-7b"):
    saved = SavedByPrecision(lambda precision: shipped_activations(model, precision))
    speeds, links = Speeds.of_device(H100, "bf16"), Links.of_device(H100)
    predictor = Predictor(load_cost_model(model), saved, speeds=speeds, links=links)
    return at_size(predictor, config, devices, reliability=reliability)


@pytest.mark.parametrize(
    ("settings", "devices", "ranks"),
    [((), 64, 64), (("optim.accumulation=2",), 24, 24), (("parallel.sequence=2",), 96, 48)],
)
def test_fill_and_balance_are_those_of_the_planner_at_that_size(settings, devices, ranks):
    config = recipe(*settings)
    found = predicted(config, devices)
    accumulation = config.optim.accumulation
    samples = round(17 * ranks * accumulation * 8192 / MIXES["chats"].lengths(2000).tokens.mean() - 0.5) + 1000
    items, _ = Items.build(
        {"any": MIXES["chats"].lengths(samples)}, Budget(8192), config.data.overlong, load_cost_model("qwen2.5-7b")
    )
    order = Order.epochs(items.sizes, 1, seed=config.data.seed)
    plan = Plan(items, order, Budget(8192), ranks * accumulation, accumulation=accumulation)
    report, _ = measure(plan, ranks)
    assert (found.packs.report.balance, found.packs.report.fill) == (report.balance, report.fill)
    assert found.planned_steps == 16
    assert found.time.tokens == pytest.approx(report.fill * 8192 * ranks * accumulation)


def test_fewer_steps_of_many_ranks_say_the_same(monkeypatch):
    at_length = predicted(recipe(), 1024)
    monkeypatch.setattr("headway.predict.lengths._MANY_SAMPLES", 1)
    shortly = predicted(recipe(), 1024)
    assert (at_length.planned_steps, shortly.planned_steps) == (16, 4)  # the bound is that of docs/plan.md
    assert shortly.time.step_s == pytest.approx(at_length.time.step_s, rel=5e-3)
    assert shortly.packs.report.fill == pytest.approx(at_length.packs.report.fill, rel=5e-3)
    assert shortly.packs.report.balance == pytest.approx(at_length.packs.report.balance, rel=1e-2)
    assert shortly.memory == at_length.memory


def test_exposed_exchanges_and_failures_grow_with_devices():
    runs = [predicted(recipe(), devices, Reliability(50_000 * 3600, 30, 300)) for devices in (8, 64, 512)]
    assert [run.devices for run in runs] == [8, 64, 512]
    exposed = [run.step.line("communication.transfer").expected for run in runs]
    assert exposed == sorted(exposed)
    goodputs = [run.interruptions.goodput for run in runs]
    assert goodputs == sorted(goodputs, reverse=True)
    memory = [run.memory.peak for run in runs]
    assert memory == sorted(memory, reverse=True)  # every device keeps a smaller slice
    for run in runs:
        assert run.lasting_tokens_per_s == run.interruptions.goodput * run.time.tokens_per_s.expected
        assert run.to_dict()["time"]["step_s"][1] == run.time.step_s


def test_copies_take_what_a_number_of_shards_leaves():
    assert sized(recipe(), 64).parallel.replicate == 1
    config = recipe("parallel.shard=8")
    assert [sized(config, devices).parallel.replicate for devices in (8, 64)] == [1, 8]
    with pytest.raises(ConfigError, match=r"parallel\.shard 8"):
        predicted(config, 20)


def test_a_row_for_each_of_too_many_shards_is_told():
    assert padding_of(load_cost_model("qwen2.5-7b"), 8) == pytest.approx(1, abs=1e-3)
    experts = load_cost_model("qwen3-vl-30b-a3b")  # 128 of them in a layer, most of its weights
    assert padding_of(experts, 512) == pytest.approx(4, rel=0.1)
    assert padding_of(experts, 512, expert=8) == pytest.approx(4, rel=0.1)  # 16 of them on each process, over 64


def test_few_lengths_are_drawn_from_until_there_are_enough(tmp_path, monkeypatch):
    table = LengthTable(np.arange(1, 4), np.array([0, 8, 4]), np.array([[1, 2, 4], [1, 2, 2]]), np.array([1, 2]))
    drawn = repeated(table, 1000, seed=0)
    assert len(drawn.tokens) == 1000
    assert set(drawn.tokens) == {1, 2, 3}
    patches = np.bincount(drawn.grid_rows, drawn.grids.prod(axis=1), 1000)
    assert (patches == drawn.patches).all()
    assert (drawn.patches == np.array([0, 0, 8, 4])[drawn.tokens]).all()
    assert repeated(table, 3, seed=0) is table
    (tmp_path / "lengths.csv").write_text("tokens\n100\n2000\n")
    config = recipe("plan.mix=null", f"plan.lengths={tmp_path / 'lengths.csv'}")
    (_, found), steps = enough_lengths(config, load_cost_model("qwen2.5-7b"), config.parallel.mesh_shape(8))
    assert steps == 16
    assert found.tokens.sum() > 16 * 8 * 8192
    monkeypatch.setattr("headway.predict.lengths._MANY_SAMPLES", 1700)
    assert enough_lengths(config, load_cost_model("qwen2.5-7b"), config.parallel.mesh_shape(8))[1] == 8


def test_fewer_steps_are_planned_where_samples_run_out(monkeypatch):
    monkeypatch.setattr("headway.predict.lengths.MOST_SAMPLES", 2000)
    config = recipe()
    (_, found), steps = enough_lengths(config, load_cost_model("qwen2.5-7b"), config.parallel.mesh_shape(32))
    assert 2 <= steps < STEPS
    assert len(found.tokens) <= 2000


def test_no_lengths_are_refused():
    with pytest.raises(PlanError, match="Give lengths=FILE"):
        predicted(recipe("plan.mix=null"), 8)


def test_sizes_are_read():
    assert sizes_of("8, 64,8") == (8, 64)
    for text in ("8,", "0", "x", "8,-1", "9999999"):
        with pytest.raises(PlanError, match="is not a number of devices"):
            sizes_of(text)
