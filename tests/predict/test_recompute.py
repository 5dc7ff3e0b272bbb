"""The fewest blocks that fit a budget, against all choices tried out."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import Workload, load_cost_model
from headway.count.activations import SavedActivations, SavedBlock
from headway.errors import PlanError
from headway.predict.recompute import BlockBytes, block_bytes, least_recomputed, most_kept

SIZES = st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 20))


@given(first=SIZES, second=SIZES, counts=st.tuples(st.integers(0, 3), st.integers(1, 3)), budget=st.integers(0, 300))
def test_no_smaller_choice_fits(first, second, counts, budget):
    blocks = {}
    for tower, (entry, rest, attention), count in zip(("a", "b"), (first, second), counts, strict=True):
        blocks |= {f"{tower}.{i}": BlockBytes(entry + attention + rest, entry, attention) for i in range(count)}
    # of each block: whole, recomputed with its attention kept, or recomputed with it
    choices = [
        {name: keeps for name, keeps in zip(blocks, ways, strict=True) if keeps is not None}
        for ways in product((None, True, False), repeat=len(blocks))
    ]
    fitting = [chosen for chosen in choices if most_kept(blocks, chosen) <= budget]
    if not fitting:
        with pytest.raises(PlanError, match="with all blocks recomputed"):
            least_recomputed(blocks, budget)
        return
    found = least_recomputed(blocks, budget)
    assert most_kept(blocks, found) <= budget
    attention_again = [list(chosen.values()).count(False) for chosen in fitting]
    assert list(found.values()).count(False) == min(attention_again)
    if not min(attention_again):
        assert len(found) == min(len(chosen) for chosen in fitting if all(chosen.values()))


def test_attention_is_recomputed_only_where_nothing_else_is_enough():
    blocks = {f"layers.{i}": BlockBytes(100, 10, 20) for i in range(4)}
    # all recomputed with their attention kept: 4 x 30, and 70 of one block that is made again
    assert least_recomputed(blocks, 190) == dict.fromkeys(blocks, True)
    # two without: 40 less is kept, and 90 are made again
    assert least_recomputed(blocks, 170) == {"layers.0": True, "layers.1": False, "layers.2": True, "layers.3": False}


def test_blocks_are_spread_evenly():
    blocks = {f"layers.{i}": BlockBytes(100, 10) for i in range(12)}
    # 12 x 100 whole; each of 4 frees 90, and one of them makes its 90 again while it runs
    assert least_recomputed(blocks, 12 * 100 - 3 * 90) == dict.fromkeys(
        ("layers.2", "layers.5", "layers.8", "layers.11"), True
    )


def test_what_is_frozen_keeps_nothing_and_packs_are_shared():
    cost_model = load_cost_model("qwen3-0.6b")
    names = sorted({row.block for row in cost_model.rows if row.block})
    saved = SavedActivations(
        {name: SavedBlock({"tokens": 70}, {"tokens": 50}, {"tokens": 20}, {"tokens": 6}) for name in names}
    )
    pack = Workload([1000])
    assert set(block_bytes(cost_model, saved, pack, fused=False).values()) == {BlockBytes(70_000, 20_000, 6_000)}
    assert set(block_bytes(cost_model, saved, pack, fused=True, sequence=2).values()) == {
        BlockBytes(25_000, 10_000, 3_000)
    }
    frozen = cost_model.freeze(["*layers.0.*", "*embed*"])
    assert len(block_bytes(frozen, saved, pack, fused=False)) == len(names) - 1
