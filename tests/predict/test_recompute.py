"""What is recomputed to fit a budget, against all choices tried out."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import Workload, load_cost_model
from headway.count.activations import SavedActivations, SavedBlock, shipped_activations
from headway.count.recompute import recomputed_blocks
from headway.errors import PlanError
from headway.predict.activations import BlockBytes, block_bytes
from headway.predict.recompute import BlockFlops, block_flops, least_recomputed, least_within, most_kept

KINDS = ("attention", "projections", "mlp")
LEVELS = [frozenset(KINDS[:count]) for count in range(4)]
NUMBERS = st.tuples(*[st.integers(0, 20)] * 9)  # entry and rest in bytes, three kinds in bytes, four parts in FLOPs


@given(
    towers=st.tuples(NUMBERS, NUMBERS),
    counts=st.tuples(st.integers(0, 2), st.integers(1, 2)),
    budget=st.integers(0, 400),
)
def test_no_choice_that_leaves_a_block_free_recomputes_less_by_more_than_a_block(towers, counts, budget):
    blocks, flops = {}, {}
    for tower, (entry, rest, *others), count in zip(("a", "b"), towers, counts, strict=True):
        kinds, again = others[:3], others[3:]
        blocks |= {f"{tower}.{i}": BlockBytes(entry + rest + sum(kinds), entry, *kinds) for i in range(count)}
        flops |= {f"{tower}.{i}": BlockFlops(*again) for i in range(count)}
    recomputed = {name: frozenset() for name, block in blocks.items() if block.saved > block.entry}
    if most_kept(blocks, recomputed) > budget:
        with pytest.raises(PlanError, match="with all blocks recomputed"):
            least_recomputed(blocks, flops, LEVELS, budget)
        return
    chosen = least_recomputed(blocks, flops, LEVELS, budget)
    assert most_kept(blocks, chosen) <= budget
    # each block alone, or recomputed beside what one of the levels keeps
    fewest = min(
        flops_again(flops, choice)
        for ways in product([None, *LEVELS], repeat=len(blocks))
        if most_kept(blocks, choice := {n: kinds for n, kinds in zip(blocks, ways, strict=True) if kinds is not None})
        <= budget - max(block.saved - block.entry for block in blocks.values())
        or choice == recomputed
    )
    assert flops_again(flops, chosen) <= fewest + max(block.again() for block in flops.values())


def flops_again(flops, choice):
    return sum(flops[name].again(kinds) for name, kinds in choice.items())


def test_what_saves_the_most_flops_for_a_byte_is_kept_first():
    """Of four blocks with 90 bytes beside their entry: attention's 10 save 100 FLOPs, the MLP's 40 save 120."""
    blocks = {f"layers.{i}": BlockBytes(100, 10, attention=10, projections=20, mlp=40) for i in range(4)}
    flops = dict.fromkeys(blocks, BlockFlops(attention=100, projections=80, mlp=120))
    everything = most_kept(blocks, dict.fromkeys(blocks, LEVELS[3]))
    # all of them keep all that products gave, and are elementwise work to recompute
    assert everything == 4 * 80 + 20
    assert least_recomputed(blocks, flops, LEVELS, everything) == dict.fromkeys(blocks, LEVELS[3])
    # a byte less: two do without the MLP, as one of them makes its 40 bytes again; what is left is enough for one whole
    assert least_recomputed(blocks, flops, LEVELS, everything - 1) == {
        **dict.fromkeys(["layers.0", "layers.2"], LEVELS[2]),
        "layers.1": LEVELS[3],
    }
    # attention alone, in all of them: 4 x 20 and 80 of one that is made again
    assert least_recomputed(blocks, flops, LEVELS, 160) == dict.fromkeys(blocks, LEVELS[1])
    assert least_recomputed(blocks, flops, LEVELS, 400) == {}


def test_a_kind_that_saves_little_for_its_bytes_is_no_step_of_its_own():
    blocks = {f"layers.{i}": BlockBytes(100, 10, attention=40, mlp=20) for i in range(2)}
    flops = dict.fromkeys(blocks, BlockFlops(attention=1, mlp=200))
    levels = [frozenset(), frozenset({"attention"}), frozenset({"attention", "mlp"})]
    # attention's 40 bytes would fit a block, and save a two-hundredth of what both do
    assert least_recomputed(blocks, flops, levels, 10 + 10 + 90 + 40) == dict.fromkeys(blocks, frozenset())


def test_blocks_are_spread_evenly():
    blocks = {f"layers.{i}": BlockBytes(100, 10) for i in range(12)}
    flops = dict.fromkeys(blocks, BlockFlops(never_kept=7))
    # 12 x 100 whole; each of 4 frees 90, and one of them makes its 90 again while it runs
    assert least_recomputed(blocks, flops, LEVELS[:1], 12 * 100 - 3 * 90) == dict.fromkeys(
        ("layers.1", "layers.4", "layers.7", "layers.10"), frozenset()
    )


@pytest.mark.parametrize(("length", "first"), [(512, "projections"), (16384, "attention")])
def test_long_segments_keep_attention_first_and_short_ones_their_projections(length, first):
    """4 FLOPs a pair and feature for attention's 2 bytes a feature: (length + 1) / 2 x 2, against 2 x 4,096 / 2."""
    model, saved = load_cost_model("qwen3-8b"), shipped_activations("qwen3-8b", "bfloat16")
    pack, sizes = Workload([length] * (16384 // length)), {"fused": True, "compute_bytes": 2}
    blocks = block_bytes(model, saved, pack, **sizes)
    least = most_kept(blocks, dict.fromkeys(blocks, frozenset()))
    choice = least_within(model, saved, pack, least + 5 * 2**30, **sizes)
    assert f",-{first}," in f"{choice},"
    # what was chosen is read as it was meant, and fits; a block more would not
    chosen = recomputed_blocks(choice, list(blocks))
    assert most_kept(blocks, chosen) <= least + 5 * 2**30
    assert {first} in chosen.values() or all(first in kinds for kinds in chosen.values())
    assert model.count(pack, recompute=choice).recompute == sum(
        block_flops(model, pack)[name].again(kinds) for name, kinds in chosen.items()
    )


def test_inputs_on_the_host_leave_room_for_results_and_one_of_them():
    model, saved = load_cost_model("qwen3-8b"), shipped_activations("qwen3-8b", "bfloat16")
    pack, sizes = Workload([16384]), {"fused": True, "compute_bytes": 2}
    blocks = block_bytes(model, saved, pack, **sizes)
    budget = most_kept(blocks, dict.fromkeys(blocks, frozenset())) + 2**30
    again = {}
    for offloads in (False, True):
        choice = least_within(model, saved, pack, budget, **sizes, inputs_on_host=offloads)
        again[offloads] = model.count(pack, recompute=choice).recompute
        held = {name: replace(block, entry=0) if offloads else block for name, block in blocks.items()}
        fetched = offloads * max(block.entry for block in blocks.values())
        assert budget - 2**30 < most_kept(held, recomputed_blocks(choice, list(blocks))) + fetched <= budget
    assert again[True] < 0.8 * again[False]
    least = most_kept(
        {name: replace(block, entry=0) for name, block in blocks.items()}, recomputed_blocks("full", list(blocks))
    )
    with pytest.raises(PlanError, match="with all blocks recomputed"):
        least_within(model, saved, pack, least, **sizes, inputs_on_host=True)


def test_what_is_frozen_keeps_nothing_and_packs_are_shared():
    cost_model = load_cost_model("qwen3-0.6b")
    names = sorted({row.block for row in cost_model.rows if row.block})
    saved = SavedActivations(
        {name: SavedBlock({"tokens": 70}, {"tokens": 50}, {"tokens": 20}, {"tokens": 6}) for name in names}
    )
    pack = Workload([1000])
    # queries, keys, values and attention's output projection; gate and up, as nothing reads down's result
    products = (1000 * (2048 + 2 * 1024 + 1024), 1000 * 2 * 3072)
    assert set(block_bytes(cost_model, saved, pack, fused=False, compute_bytes=2).values()) == {
        BlockBytes(70_000, 20_000, 6_000, 2 * products[0], 2 * products[1])
    }
    assert set(block_bytes(cost_model, saved, pack, fused=True, compute_bytes=4, sequence=2).values()) == {
        BlockBytes(25_000, 10_000, 3_000, 2 * products[0], 2 * products[1])
    }
    frozen = cost_model.freeze(["*layers.0.*", "*embed*"])
    assert len(block_bytes(frozen, saved, pack, fused=False, compute_bytes=2)) == len(names) - 1
