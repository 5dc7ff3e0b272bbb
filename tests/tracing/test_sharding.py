"""Sharding changes no logical FLOPs, and the shares of the ranks add up."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.count import Workload, load_cost_model, models
from headway.errors import UsageError
from headway.tracing import trace
from helpers.counter import build
from helpers.processes import run_processes

SCRIPT = Path(__file__).with_name("sharded_models.py")
VISION = load_cost_model("qwen2.5-vl-7b")
LAYERS = [f"model.language_model.layers.{i}" for i in range(28)]

grids = st.lists(st.tuples(st.integers(1, 3), st.sampled_from([2, 8]), st.sampled_from([4, 16])), max_size=3)
steps = st.builds(Workload, st.lists(st.integers(1, 3000), min_size=1, max_size=4), images=grids)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.long
def test_every_rank_of_every_layout_traces_the_plain_models_ledger(tmp_path):
    run_processes([sys.executable, SCRIPT, tmp_path], 2)
    traced = {path.stem: models.load(path) for path in tmp_path.glob("*.json")}
    assert len(traced) >= 2 * 10
    for name, cost in traced.items():
        assert cost == trace(build(name.partition("-")[0])), name


@given(steps, st.integers(1, 9))
def test_even_shares_add_up_to_the_step(step, ranks):
    count = VISION.count(step, recompute="full")
    shares = count.split(ranks)
    assert sum(shares) == count
    assert len(shares) == ranks
    assert max(share.total for share in shares) - min(share.total for share in shares) <= 3 * len(count.rows)


@given(steps, st.sets(st.integers(0, 27), max_size=4), st.sampled_from(["none", "full", "attention"]))
def test_stages_add_up_to_the_step(step, cuts, recompute):
    starts = [LAYERS[i] for i in sorted(cuts)]
    stages = VISION.count_stages(step, starts, recompute=recompute)
    assert len(stages) == len(starts) + 1
    assert sum(stages) == VISION.count(step, recompute=recompute)


def test_a_stage_holds_its_blocks_and_the_last_one_the_head():
    step = Workload([100], images=[(1, 8, 16)])
    first, middle, last = VISION.count_stages(step, [LAYERS[7], LAYERS[21]])
    assert "vision.attention" in first.by_component()
    assert {row.name for row in middle.rows} == {f"language.{part}" for part in ("attention", "projections", "mlp")}
    # the last stage has 7 blocks where the middle one has 14, and the head: 3584 to 152064, three times over
    assert last.total == middle.total // 2 + 3 * 2 * 100 * 3584 * 152064
    assert VISION.count_stages(step, []) == [VISION.count(step)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: VISION.count_stages(Workload([9]), ["model.layers.7"]), "'model.layers.7', which runs nothing"),
        (lambda: VISION.count_stages(Workload([9]), LAYERS[3:1:-1]), "layers.2', which leaves the stage before it"),
        (lambda: VISION.count(Workload([9])).split(0), "0 ranks cannot share"),
    ],
)
def test_shares_that_cannot_be_are_refused(call, message):
    with pytest.raises(UsageError, match=message):
        call()
