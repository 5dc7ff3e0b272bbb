"""`headway report A B --fail-if` fails where a run got slower, and says why; not where its steps vary by as much."""

import json
import random

import pytest

from helpers.pages import write_run

MEMORY = 10**9


@pytest.fixture
def runs(tmp_path):
    """Write runs whose steps take 0.5 s and vary by a share, with their waits for data, memory and FLOPs."""

    def write(name, *, varies, waits_s=0.0, slower=1.0, memory=MEMORY, flops=9000):
        folder = write_run(tmp_path / name, 60)
        rows, draw = (
            [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()],
            random.Random(name),
        )
        for row in rows:
            wall_s = 0.5 * slower * (1 + varies * draw.uniform(-1, 1)) + waits_s
            row |= {"wall_s": wall_s, "step_s": wall_s, "data_wait_s": waits_s, "mfu": flops / wall_s / 1e5}
            row["flops"] |= {"total": flops}
            row["flops_by_component"] = {"language.mlp": flops}
            row["peak_memory_bytes"] = memory
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return write


def gate(headway, stored, new, *conditions):
    options = [word for condition in conditions for word in ("--fail-if", condition)]
    return headway("report", stored, new, "-o", stored / "page.html", *options)


@pytest.mark.parametrize("condition", ["mfu<-5%", "tokens/s < -5.0%", "step>+5%"])
def test_a_run_that_got_slower_fails_with_the_cause(headway, runs, condition):
    stored = runs("stored", varies=0.02)
    waiting = gate(headway, stored, runs("waiting", varies=0.02, waits_s=0.06), condition)
    assert waiting.code == 1
    told = " ".join(waiting.err.split())
    assert "waiting (B) is worse than stored (A): " in told
    assert "Worse: " in told, told
    assert "data" in told.partition("Worse: ")[2]
    assert (stored / "page.html").exists()
    assert gate(headway, stored, runs("alike", varies=0.02, slower=1.01), condition).code == 0
    assert gate(headway, stored, runs("faster", varies=0.02, slower=0.9), condition).code == 0


def test_what_lies_within_how_steps_vary_does_not_fail(headway, runs):
    result = gate(headway, runs("stored", varies=0.9), runs("new", varies=0.9, slower=1.08), "step>1%", "mfu<-1%")
    assert (result.code, "within how the steps vary" in result.err) == (0, True), result.err


def test_the_work_of_a_step_does_not_vary_by_itself(headway, runs):
    """MFU of steps that are as long and compute a tenth less has fallen by a tenth, however sure their time is."""
    stored, new = runs("stored", varies=0.01), runs("new", varies=0.01, flops=8100)
    result = gate(headway, stored, new, "mfu<-5%", "step>5%")
    assert (result.code, "mfu 18.0 % -> 16.2 %" in " ".join(result.err.split())) == (1, True), result.err


def test_memory_is_held_to_what_it_was(headway, runs):
    stored = runs("stored", varies=0.01)
    result = gate(headway, stored, runs("new", varies=0.01, memory=6 * MEMORY // 5), "memory>10%")
    assert (result.code, "(+20.0 %)" in result.err) == (1, True), result.err


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("mfu<5%", "would hold for two equal runs"),
        ("step>-5%", "would hold for two equal runs"),
        ("mfu<-0%", "would hold for two equal runs"),
        ("goodness<-5%", "Write a metric (mfu, tokens/s, step, memory)"),
        ("mfu<-5", "is not a condition"),
        ("__import__('os')", "is not a condition"),
    ],
)
def test_a_condition_that_is_none_is_refused(headway, runs, condition, words):
    stored = runs("stored", varies=0.01)
    result = gate(headway, stored, stored, condition)
    assert (result.code, words in " ".join(result.err.split())) == (2, True), result.err
    assert not (stored / "page.html").exists()


def test_a_gate_needs_two_runs(headway, runs):
    result = headway("report", runs("stored", varies=0.01), "--fail-if", "mfu<-5%")
    assert (result.code, "Give two runs" in result.err) == (2, True)
