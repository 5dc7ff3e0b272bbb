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


@given(steps, st.sets(st.integers(1, 27), max_size=4), st.sampled_from(["none", "full", "attention"]))
def test_stages_add_up_to_the_step(step, cuts, recompute):
    modules = list(dict.fromkeys(row.module for row in VISION.rows))  # in the order of forward
    starts = [0, *(next(i for i, m in enumerate(modules) if m.startswith(f"{LAYERS[cut]}.")) for cut in sorted(cuts))]
    counts = [
        VISION.stage(modules[start:end]).count(step, recompute=recompute)
        for start, end in zip(starts, [*starts[1:], None], strict=True)
    ]
    assert sum(counts) == VISION.count(step, recompute=recompute)


def test_a_number_of_ranks_that_cannot_share_is_refused():
    with pytest.raises(UsageError, match="0 ranks cannot share"):
        VISION.count(Workload([9])).split(0)
