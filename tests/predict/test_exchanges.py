"""What the plan says that processes exchange, against what the engine's code dispatches among made-up processes."""

from itertools import combinations

import pytest

from fake_cuda.exchanged import run_exchanged
from fake_cuda.moments import settings
from headway.count import Workload
from headway.packing.mesh import MeshShape
from headway.predict.exchanges import distinct_ranks, exchanges_of
from headway.predict.recipe import Sharing, State
from headway.tracing.activations import saved_of_config
from helpers.models import tiny_config, tiny_ledger

BASE = ("speed.loss_chunk=256", "parallel.reduce_dtype=float32", "run.dtype=bfloat16-autocast")
CASES = {
    "sharded": ("little text", 2),
    "replicated": ("little text", 4, "parallel.replicate=4", "parallel.reduce_dtype=bfloat16"),
    "adapters": ("little text", 2, "model.lora={rank: 8}"),
    "experts": ("experts", 4, "parallel.expert=2", "speed.recompute=full"),
}
SLOW = {
    "shared images": ("little image", 4, "parallel.sequence=2", "speed.recompute=full"),
    "more processes than key heads": ("little text", 4, "parallel.sequence=4"),
    "frozen tower": ("little image", 8, "model.freeze=[vision]"),
    "hybrid": ("little text", 4, "parallel.replicate=2", "speed.recompute=full"),
    "sharded, gathered once": ("little text", 2, "parallel.reshard=false"),
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
        # choices of experts in turn are as frequent but for the last turn
        expected = pytest.approx(seen.num_bytes[one], rel=0.005) if kind == "experts" else seen.num_bytes[one]
        assert planned.num_bytes(one) == expected, one
        assert sum(each.kind == one for each in planned.all) == seen.calls[one], one


@pytest.mark.parametrize("lora", ["null", "{rank: 16}"])
def test_weights_in_float8_are_gathered_in_the_bytes_that_are_planned(lora):
    pytest.importorskip("torchao")  # which the oldest versions are tested without
    overrides = ("speed.loss_chunk=256", "parallel.reduce_dtype=float32", f"model.lora={lora}")
    (seen, planned), (plain, _) = (
        run_exchanged("little text", settings(*overrides, dtype), 2) for dtype in ("run.dtype=float8", BASE[2])
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


@pytest.mark.parametrize(("experts", "chosen", "ranks"), [(8, 2, 2), (8, 3, 4), (6, 4, 3), (6, 2, 6), (4, 4, 2)])
def test_ranks_of_a_token_are_those_of_all_choices_of_experts_on_average(experts, chosen, ranks):
    local = experts // ranks
    numbers = [len({expert // local for expert in choice}) for choice in combinations(range(experts), chosen)]
    assert distinct_ranks(experts, chosen, ranks) == pytest.approx(sum(numbers) / len(numbers))


# 2 of 4 experts; hidden 32, inside 16: three products of a shared expert are 2 x 3 x 32 x 16 FLOPs
@pytest.mark.parametrize(("family", "shared"), [("deepseek_v3", 3072), ("qwen3_next", 0), ("qwen3_moe", 0)])
def test_slots_go_once_to_each_process_beside_shared_experts_that_are_called_behind(family, shared):
    ledger, pack = tiny_ledger(family), Workload([60])
    saved = saved_of_config(tiny_config(family), "bfloat16")
    shape = MeshShape.of(2, expert=2)
    sharing = Sharing(2, gathers=True, expert=2)
    exchanges = exchanges_of(ledger, saved, pack, State(weight_bytes=2), sharing, shape)
    forward = [each for each in exchanges.all if each.kind == "all-to-all" and each.phase == "forward"]
    layers = len(forward) // 4
    rows, items = round(60 * (1 + 4 / 6)), 60 * 2  # of six pairs of experts, four are on both processes
    assert [(each.num_bytes, each.concurrent_flops) for each in forward] == layers * [
        (rows * 32 * 2, 60 * shared), (items * 4, 60 * shared), (items * 4, 60 * shared), (rows * 32 * 2, 0)
    ]  # fmt: skip
