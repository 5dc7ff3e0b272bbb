"""Real torchtitan Trainers on the CPU (see titan_process.py): FLOPs to the integer, and where the numbers arrive.

The model is torchtitan's Llama with 3 layers of width 32, a feed-forward of 256 (2/3 of 4 x 32, rounded up to a
multiple of 256) and 64 tokens, on steps of 4 rows of 16 slots. Its FLOPs, forward and twice that backward:
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headway.explain.budget import NeededWork
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from helpers.processes import free_port, running

BLOCK = 2 * (4 * 32 * 32 + 3 * 32 * 256)  # per token: q, k, v, o; gate, up, down
HEAD = 2 * 32 * 64  # per token
PAIR = 2 * 2 * 32  # per layer and (query, key) pair: scores and values
ROWS_OF_16 = 4 * 16 * 17 // 2  # causal pairs
PER_STEP = 3 * (64 * (3 * BLOCK + HEAD) + ROWS_OF_16 * 3 * PAIR)
# one of three blocks again, to its end (torchtitan's default), or without the closing projection
ONE_BLOCK = 64 * BLOCK + ROWS_OF_16 * PAIR
ONE_BLOCK_EARLY = ONE_BLOCK - 64 * 2 * 256 * 32


@pytest.fixture(scope="module")
def titan():
    """The process that has imported torchtitan, and forks for each run."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(Path(__file__).with_name("titan_process.py"))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with running(command, env={**os.environ, "PYTHONPATH": path}, text=True, **pipes) as process:
        yield process


@pytest.fixture
def train(titan, tmp_path):
    """Train on so many ranks; returns each rank's result, what it printed and its exit status."""

    def train(world=1, **settings):
        port = free_port()
        settings = {"folder": str(tmp_path), "steps": 4, "batch_size": 2} | settings
        run = {"settings": settings, "world": world, "port": port, "folder": str(tmp_path)}
        titan.stdin.write(json.dumps(run) + "\n")
        titan.stdin.flush()
        codes = json.loads(titan.stdout.readline())
        texts = [(tmp_path / f"rank{rank}.txt").read_text() for rank in range(world)]
        results = [None if code else json.loads(text.splitlines()[-1]) for code, text in zip(codes, texts, strict=True)]
        return [*zip(results, texts, codes, strict=True)]

    return train


def checkpointing(mode, option="2", *, early_stop=False):
    return {"activation_checkpoint": {"mode": mode, "selective_ac_option": option, "early_stop": early_stop}}


@pytest.mark.parametrize(
    ("accumulation", "config", "recompute"),
    [
        pytest.param(1, checkpointing("selective"), ONE_BLOCK, marks=pytest.mark.slow),
        (2, checkpointing("full", early_stop=True), 3 * ONE_BLOCK_EARLY),
        pytest.param(4, checkpointing("none"), 0, marks=pytest.mark.slow),
    ],
)
def test_accumulation_does_not_change_a_steps_flops(train, accumulation, config, recompute):
    ((result, text, _),) = train(batch_size=4 // accumulation, config=config)
    assert result["accumulation"] == accumulation
    *logged, run = result["windows"]
    assert [w["num_steps"] for w in logged] == [1, 1, 2]  # torchtitan logs steps 1, 2 and 4
    assert [w["total"] for w in logged] == [PER_STEP, PER_STEP, 2 * PER_STEP]
    assert [w["recompute"] for w in logged] == [recompute, recompute, 2 * recompute]
    assert (run["total"], run["tokens"], run["segments"]) == (4 * PER_STEP, 4 * 64, 4 * 4)
    assert len(re.findall(r"headway at step \d: mfu\(%\): .* hfu\(%\): ", text)) == 3


@pytest.mark.slow
def test_a_profile_of_its_steps_explains_itself(train, tmp_path):
    train(batch_size=2, profile=[2, 4], config=checkpointing("full", early_stop=True))
    (path,) = tmp_path.glob("steps-000002-000003-rank-0.json.gz")
    recorded = read_trace(path)
    needed = NeededWork(recorded.headway, str(path))
    assert [needed.useful_flops(step) for step in (1, 2, 3)] == [None, PER_STEP, PER_STEP]
    for step in explain([recorded]).steps:
        assert sum(line.ns for line in step.lines) == step.duration_ns
        (memory,) = (line for line in step.lines if line.key == "memory")
        assert memory.parts.keys() >= {"forward", "backward", "recomputed"}


@pytest.mark.slow
def test_documents_are_segments_where_attention_stays_within_them(train):
    packed = {"attn_type": "flex", "attn_mask_type": "block_causal"}
    ((result, _, _),) = train(steps=2, model=packed, config=checkpointing("selective", early_stop=True))
    # titan_process.DOCUMENTS, cut where a row of 16 ends
    lengths = [5, 11, 3, 7, 6, 7, 2, 7, 2, 14]
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    first = result["windows"][0]
    assert first["segments"] == len(lengths)
    assert first["total"] == PER_STEP - 3 * (ROWS_OF_16 - pairs) * 3 * PAIR
    assert first["recompute"] == ONE_BLOCK_EARLY - (ROWS_OF_16 - pairs) * PAIR


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    "parallelism",
    [
        {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1},
        {"tensor_parallel_degree": 2},  # both ranks run the same rows, each half of every product
    ],
    ids=["data", "tensor"],
)
def test_two_ranks_bill_in_total_what_one_does(train, parallelism):
    results = train(2, steps=2, batch_size=1, config={"parallelism": parallelism})
    for result, _, _ in results:
        for window in result["windows"]:
            steps = window["num_steps"]
            assert (window["total"], window["tokens"]) == (steps * PER_STEP, steps * 64)
            assert window["mfu"] == pytest.approx(window["total"] / window["wall_s"] / (2 * 1e12))


@pytest.mark.slow
def test_the_numbers_reach_tensorboard_and_validation_is_left_out(train, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ((result, text, _),) = train(validates=True)
    *logged, run = result["windows"]
    assert text.count("validate step:") == 3
    assert run["tokens"] == 4 * 64  # validation has run 2 x 16 tokens after steps 1, 2 and 4
    assert run["wall_s"] <= result["until_last_validation_s"] - 0.6  # the two before it have slept for 0.3 s each
    (events,) = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    written = EventAccumulator(str(events)).Reload()
    for name, key, scale in (("headway/mfu(%)", "mfu", 100), ("headway/tokens_per_s", None, 1)):
        expected = [scale * w[key] if key else w["tokens"] / w["wall_s"] for w in logged]
        scalars = written.Scalars(name)
        assert [scalar.step for scalar in scalars] == [1, 2, 4]
        assert [scalar.value for scalar in scalars] == pytest.approx(expected)
    assert written.Scalars("mfu(%)")  # beside torchtitan's own


@pytest.mark.slow
def test_what_is_recomputed_by_an_unknown_policy_is_no_hfu(train):
    ((result, text, _),) = train(steps=2, config=checkpointing("selective", "op"))
    assert "no HFU is logged, for what this activation checkpointing recomputes is not known" in text
    assert "hfu(%)" not in text
    assert result["windows"][0]["total"] == PER_STEP


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "says"),  # the last two are trained by no CPU, whatever measures them
    [
        ({"misread": True}, r"bills 31 slots, but its labels are \(2, 16\): 32 slots. Give with_headway a workload_of"),
        ({"has_pixels": True}, "the dataloader makes input, pixels, of which only `input` is read"),
        ({"family": "gpt_oss"}, "of torchtitan is not traced: .* Give with_headway its cost_model"),
    ],
)
def test_what_cannot_be_counted_is_told_once_and_trained(train, settings, says):
    ((_, text, code),) = train(**settings)
    if "misread" in settings:
        assert code == 0, text[-3000:]
    assert len(re.findall("measures this training no further: ", text)) == 1
    assert re.search(says, " ".join(text.split())), text[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 5, 1_000])
def test_step_times_goodput_and_the_wall_clock_agree_however_far_the_device_lags(train, depth):
    """The laws are held in the process, on a pretended device; see `pretended.Measured.hold`."""
    saving = {"checkpoint": {"enable": True, "interval": 3}}
    ((result, text, _),) = train(depth=depth, load_s=0.1, validates=True, batch_size=4, config=saving)
    assert result is not None, text[-3000:]
    seconds = result["seconds"]
    assert result["num_steps"] == 4
    assert seconds["checkpoint"] == pytest.approx(2 * 0.2)  # of the third and the last step
    assert seconds["evaluation"] == pytest.approx(3 * (0.01 + 0.04))
    assert seconds["data wait"] == pytest.approx(0.1)
    assert result["num_waits"] <= 2 + 2 * 6


@pytest.mark.slow
def test_the_laws_catch_a_clock_that_stops_when_the_launch_returns(train):
    ((result, text, _),) = train(depth=1_000, load_s=0.0, batch_size=4, defect=True)
    assert result is not None, text[-3000:]
    assert result["seconds"]["caught"]
