"""A step by the phases that its loop names: they add up to it, and say what bounds each."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.explain.phases import PhaseLine, mean_phases, phase_lines, phase_sentences
from headway.explain.records import explain_records
from headway.explain.text import as_text
from helpers.loops import metered_rl_loop

seconds = st.floats(0, 100)
names = st.sampled_from(["rollout", "reference", "update", "rest"])
records = st.builds(
    lambda wall_s, num_steps, phases: {"wall_s": wall_s, "num_steps": num_steps, "phases": phases},
    st.floats(0.001, 1000), st.integers(1, 7), st.dictionaries(names, st.builds(lambda s: {"wall_s": s}, seconds)),
)  # fmt: skip


@given(st.lists(st.tuples(records, st.integers(0, 10**9)), min_size=1, max_size=6))
def test_phases_add_up_to_the_step_and_to_the_mean_step(steps):
    told = []
    for record, aside_ns in steps:
        duration_ns = round(record["wall_s"] * 1e9) // record["num_steps"] + aside_ns
        lines = phase_lines(record, duration_ns, aside_ns)
        assert not lines or sum(line.ns for line in lines) == duration_ns
        assert bool(lines) == bool(record["phases"])
        told.append((duration_ns, lines))
    mean = mean_phases(told)
    assert not mean or sum(line.ns for line in mean) == sum(ns for ns, _ in told) // len(told)


def test_a_step_is_shown_by_phase_with_what_bounds_each(tmp_path):
    metered_rl_loop(tmp_path / "m.jsonl", answers=[11] * 15 + [251])
    text = as_text(explain_records(tmp_path / "m.jsonl"))
    table = text[text.index("by phase") :].splitlines()
    rows = [re.split(r"  +", row.strip()) for row in table[2:7]]
    assert [[row[0], row[1], row[-1]] for row in rows] == [
        ["rollout", "9,256.00", "idle rows"],  # 256 tokens of prompts, 250 steps of 16 rows
        ["reward", "10.00", "host"],
        ["reference", "1,440.00", "30.0 %"],
        ["update", "4,320.00", "30.0 %"],
        ["rest", "10.00", "host"],
    ]
    assert table[8].split()[:4] == ["the", "step", "15,036.00", "100.0"]
    assert "250 decode steps of 16.0 rows, 90.0 % of them idle" in " ".join(text.split())


def test_the_numbers_for_programs_have_each_phase_of_each_step_and_of_the_mean(tmp_path):
    metered_rl_loop(tmp_path / "m.jsonl", server=4)
    told = json.loads(json.dumps(explain_records(tmp_path / "m.jsonl").to_dict()))
    for part in (told["mean"], *told["steps"]):
        assert sum(phase["ns"] for phase in part["phases"]) == part["duration_ns"]
        rollout = part["phases"][0]
        assert (rollout["name"], rollout["num_devices"], rollout["bound"]) == ("rollout", 4, "other devices")
        assert rollout["generated_tokens"] == 400
    assert [phase["name"] for phase in told["mean"]["phases"]] == ["rollout", "reward", "reference", "update", "rest"]


def test_a_loop_without_phases_is_shown_without_them(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1, "wall_s": 1.0, "phases": {}}\n{"step": 2, "step_s": 1.0}\n')
    explanation = explain_records(tmp_path / "m.jsonl")
    assert [step.phases for step in explanation.steps] == [(), ()]
    assert "by phase" not in as_text(explanation)


@pytest.mark.parametrize("odd", [None, 7, "rollout", ["rollout"], {"rollout": 3}, {"rollout": None}])
def test_phases_that_headway_does_not_write_are_none(odd):
    assert phase_lines({"phases": odd, "num_steps": 1}, 10**9, 0) == ()


@pytest.mark.parametrize("odd", [None, "x", float("nan"), -1e300, [1], True])
@pytest.mark.parametrize("key", ["wall_s", "flops", "mfu", "mbu", "num_devices", "devices_s", "decode_slots"])
def test_odd_values_of_a_phase_are_not_known_and_the_sum_stays(key, odd):
    entry = {"wall_s": 0.5, "num_devices": 2, "devices_s": 0.25, "flops": {"total": 100}, key: odd}
    lines = phase_lines({"phases": {"rollout": entry}}, 10**9, 0)
    assert sum(line.ns for line in lines) == 10**9
    assert all(line.to_dict() for line in lines)


@pytest.mark.parametrize(
    ("line", "bound"),
    [
        (PhaseLine("update", 10, 1.0, 10, flops=1.0, mfu=0.4, mbu=0.2), "compute"),
        (PhaseLine("rollout", 10, 1.0, 10, flops=1.0, mfu=0.04, mbu=0.5), "memory"),
        (PhaseLine("rollout", 10, 1.0, 10, flops=1.0, mfu=0.04, mbu=0.05), "neither"),
        (PhaseLine("rollout", 10, 1.0, 10, flops=1.0, mfu=0.04), ""),
        (PhaseLine("rollout", 10, 1.0, 10), ""),
        (PhaseLine("reward", 10, 1.0, 10, flops=0.0), "host"),
        (PhaseLine("aside", 10, 1.0, 10), ""),
        (PhaseLine("rollout", 10, 1.0, 20, num_devices=8, flops=1.0, mfu=0.4, mbu=0.2), "other devices"),
    ],
)
def test_what_bounds_a_phase(line, bound):
    assert line.bound == bound


def test_devices_of_a_phase_are_told_with_the_wait_for_them():
    line = PhaseLine("rollout", 2_000_000, 0.2, 9_000_000, num_devices=8, flops=1.0)
    (text,) = phase_sentences([line])
    assert "8 devices of its own worked for 9.00 ms, and the loop waited 2.00 ms for them" in text


def test_means_of_rates_are_totals_over_totals():
    steps = [(10, [PhaseLine("update", 10, 1.0, 10, mfu=0.4)]), (30, [PhaseLine("update", 30, 1.0, 30, mfu=0.2)])]
    (mean,) = mean_phases(steps)
    assert mean.mfu == pytest.approx((10 * 0.4 + 30 * 0.2) / 40)
