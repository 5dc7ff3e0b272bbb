"""The fewest blocks that fit a budget, against all choices tried out."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import Workload, load_cost_model
from headway.count.saved import SavedActivations, SavedBlock
from headway.errors import PlanError
from headway.plan.recompute import BlockBytes, block_bytes, fewest_recomputed, most_kept

SIZES = st.tuples(st.integers(0, 40), st.integers(0, 40))


@given(first=SIZES, second=SIZES, counts=st.tuples(st.integers(0, 4), st.integers(1, 4)), budget=st.integers(0, 300))
def test_no_smaller_choice_fits(first, second, counts, budget):
    blocks = {}
    for tower, (entry, rest), count in zip(("a", "b"), (first, second), counts, strict=True):
        blocks |= {f"{tower}.{i}": BlockBytes(entry + rest, entry) for i in range(count)}
    fitting = [
        chosen
        for size in range(len(blocks) + 1)
        for chosen in combinations(blocks, size)
        if most_kept(blocks, chosen) <= budget
    ]
    if not fitting:
        with pytest.raises(PlanError, match="with all blocks recomputed"):
            fewest_recomputed(blocks, budget)
        return
    found = fewest_recomputed(blocks, budget)
    assert most_kept(blocks, found) <= budget
    assert len(found) == len(fitting[0])


def test_blocks_are_spread_evenly():
    blocks = {f"layers.{i}": BlockBytes(100, 10) for i in range(12)}
    # 12 x 100 whole; each of 4 frees 90, and one of them makes its 90 again while it runs
    assert fewest_recomputed(blocks, 12 * 100 - 3 * 90) == ("layers.2", "layers.5", "layers.8", "layers.11")


def test_what_is_frozen_keeps_nothing_and_packs_are_shared():
    cost_model = load_cost_model("qwen3-0.6b")
    names = sorted({row.block for row in cost_model.rows if row.block})
    saved = SavedActivations({name: SavedBlock({"tokens": 70}, {"tokens": 50}, {"tokens": 20}) for name in names})
    pack = Workload([1000])
    assert set(block_bytes(cost_model, saved, pack, fused=False).values()) == {BlockBytes(70_000, 20_000)}
    assert set(block_bytes(cost_model, saved, pack, fused=True, sequence=2).values()) == {BlockBytes(25_000, 10_000)}
    frozen = cost_model.freeze(["*layers.0.*", "*embed*"])
    assert len(block_bytes(frozen, saved, pack, fused=False)) == len(names) - 1
