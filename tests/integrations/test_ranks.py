"""Processes over gloo: what they compute together is, to the FLOP, what one computes alone."""

import json
import sys
from pathlib import Path

import pytest

from headway import Workload, trace
from helpers.loops import LENGTHS, tiny
from helpers.processes import run_processes

WAYS = ["ddp", "fsdp2", "fsdp1", "accelerate", "transformers_trainer", "lightning_trainer"]
WAYS_TO_SHARE = ["pairs_in_a_row", "pairs_apart", "without_names", "with_fsdp", "said"]
WAYS_TO_SHARE += ["trainer", "accelerated", "lightning_trainer"]

pytestmark = pytest.mark.dist


def run_ranks(script, number, folder):
    path = folder / "windows.json"
    command = [sys.executable, Path(__file__).with_name(script), path]
    run_processes(command, number, env={"CUDA_VISIBLE_DEVICES": ""})
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return run_ranks("metered_ranks.py", 2, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return run_ranks("shared_ranks.py", 4, tmp_path_factory.mktemp("shared"))


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_cost_what_one_costs(measured, way):
    expected = trace(tiny()).count(Workload(LENGTHS), recompute="full" if way == "fsdp1" else "none")
    run = measured[way]
    assert run["recompute"] == expected.recompute
    assert (run["world_size"], run["num_steps"], run["num_batches"]) == (2, 1, 4)
    assert run["tokens"] == sum(LENGTHS)
    assert run["total"] == expected.total == sum(run["rank_flops"])
    assert run["components"] == expected.by_component()
    assert min(run["rank_flops"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS_TO_SHARE)
def test_a_batch_that_two_of_four_ranks_share_is_counted_once(shared, way):
    run = shared[way]
    assert (run["tokens"], run["steps"]) == (sum(LENGTHS), 1)
    assert run["total"] == trace(tiny()).count(Workload(LENGTHS)).total == sum(run["rank_flops"])
    in_a_row = way != "pairs_apart"
    assert (run["rank_flops"][0] == run["rank_flops"][1]) is in_a_row  # each is billed its share of the batch


@pytest.mark.slow
def test_a_stage_of_a_pipeline_is_billed_what_it_runs_and_tokens_are_counted_once(shared):
    """The stages' FLOPs add up to the model's; the last one has the head, so that it has more."""
    run = shared["pipelined"]
    model = trace(tiny())
    step = model.count(Workload([8] * 4))
    assert (run["total"], run["tokens"], run["steps"]) == (2 * 2 * step.total, 2 * 2 * 32, 2)
    half = sum(row.total for row in model.count(Workload([8] * 4), by="layer").rows if ".layers.0." in row.name)
    first, last, *others = run["rank_flops"]
    assert others == [first, last]
    assert (first, first + last) == (2 * half, 2 * step.total)


@pytest.mark.slow
def test_ranks_of_fsdp_have_batches_of_their_own_whatever_their_mesh_is_called(shared):
    for run in shared["own_rows"]:
        assert (run["total"], run["tokens"]) == (trace(tiny()).count(Workload(LENGTHS)).total, sum(LENGTHS))
        assert len(set(run["rank_flops"])) == 4


@pytest.mark.slow
def test_groups_that_ranks_cannot_form_and_sequences_that_are_cut_are_refused(shared):
    assert shared["refused"] == "batch_ranks=3 does not divide the 4 ranks of this run into groups."
    cut = shared["cut_sequences"]
    assert "a forward sees a part of them" in cut["refusal"]
    assert cut["tokens"] == 2 * 16  # of two pairs, each with one batch of two rows
    assert cut["total"] == trace(tiny()).count(Workload([8] * 4)).total


@pytest.mark.slow
def test_ranks_that_trace_other_shapes_add_up(tmp_path):
    run = run_ranks("diffusing_ranks.py", 3, tmp_path)
    assert run["rank_flops"] == run["counted"]
    assert run["windows"] == [run["total"]] == [sum(run["counted"])]
    assert run["images"] == 3 * 2
