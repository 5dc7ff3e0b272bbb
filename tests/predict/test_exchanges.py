"""What the plan says that processes exchange, against what the engine's code dispatches among made-up processes."""

import pytest

from fake_cuda.exchanged import run_exchanged
from fake_cuda.moments import settings

BASE = ("speed.loss_chunk=256", "parallel.reduce_dtype=float32", "run.dtype=bfloat16-autocast")
CASES = {
    "sharded": ("little text", 2),
    "replicated": ("little text", 4, "parallel.replicate=4", "parallel.reduce_dtype=bfloat16"),
    "adapters": ("little text", 2, "model.lora={rank: 8}"),
    "experts": ("experts", 4, "parallel.expert=2", "speed.recompute=full"),
}
SLOW = {
    "shared drawings": ("drawing", 4, "parallel.sequence=2", "speed.recompute=full"),
    "shared images": ("little image", 4, "parallel.sequence=2", "speed.recompute=full"),
    "more processes than key heads": ("little text", 4, "parallel.sequence=4"),
    "frozen tower": ("little image", 8, "model.freeze=[vision]"),
    "hybrid": ("little text", 4, "parallel.replicate=2", "speed.recompute=full"),
    "sharded, gathered once": ("little text", 2, "parallel.reshard=false"),
    "drawings": ("drawing", 2),
    "tied, uneven slices": ("tied", 48),
    "fewer rows than processes": ("image", 2048),
    "frozen language": ("little image", 2, "model.freeze=[language]"),
    "frozen part": ("little text", 2, "model.freeze=[language.mlp]"),
    "shared videos": ("video", 4, "parallel.sequence=2"),
    "shared packs and experts": ("experts", 8, "parallel.expert=2", "parallel.sequence=2", "speed.recompute=full"),
    "few experts on many processes": ("experts", 64, "parallel.expert=4"),
}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_every_byte_that_is_exchanged_is_planned(case):
    kind, processes, *overrides = (CASES | SLOW)[case]
    seen, planned = run_exchanged(kind, settings(*BASE, *overrides), processes)
    assert sum(seen.num_bytes.values())
    for one in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all"):
        assert planned.num_bytes(one) == seen.num_bytes[one], one
        assert sum(each.kind == one for each in planned.all) == seen.calls[one], one


def test_weights_in_float8_are_gathered_in_the_bytes_that_are_planned():
    overrides = ("speed.loss_chunk=256", "parallel.reduce_dtype=float32", "run.dtype=float8")
    (seen, planned), (plain, _) = (
        run_exchanged("little text", settings(*overrides[:2], dtype), 2) for dtype in (overrides[2], BASE[2])
    )
    assert planned.num_bytes("all-gather") == seen.num_bytes["all-gather"] < 0.8 * plain.num_bytes["all-gather"]


def test_gradients_that_are_summed_once_a_step_wait_for_its_last_pack():
    overrides = ("parallel.reduce=step", "optim.accumulation=2")
    seen, planned = run_exchanged("little text", settings(*BASE, *overrides), 2, packs=2)
    assert seen.num_bytes["all-gather"] == 2 * planned.num_bytes("all-gather")
    assert seen.num_bytes["reduce-scatter"] == planned.num_bytes("reduce-scatter")
    assert {one.kind for one in planned.all if one.once} == {"reduce-scatter"}


def test_packs_without_pictures_leave_the_tower_alone():
    seen, planned = run_exchanged("little video", settings(*BASE), 2)  # of which the pack is all text
    assert planned.num_bytes("all-gather") == seen.num_bytes["all-gather"]
    assert not any("visual" in one.unit or one.unit == "(vision)" for one in planned.all)
