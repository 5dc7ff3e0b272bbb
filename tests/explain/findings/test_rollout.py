"""Faults of reinforcement learning's loops: named first, with what the mended loop saves by the law of its times."""

import pytest

from headway.explain.findings.evidence import RunEvidence, RunStep
from headway.explain.findings.rules import find
from headway.explain.phases import PhaseLine
from headway.explain.records import explain_records
from helpers.loops import metered_rl_loop

LONG = [11] * 15 + [251]  # tokens of answers; 26 on average: as many tokens in 250 decode steps as in 25
FAULTS = [
    ("longest-answer", {"answers": LONG}, {"answers": [26] * 16}),
    ("small-decode-batches", {"batch": 4}, {"batch": 16}),
    ("repeated-prefill", {"prefix": "own", "prompts": [512] * 4}, {"prompts": [512] * 4}),
    ("repeated-scoring", {"updates": 4, "references": 4}, {"updates": 4, "references": 1}),
    ("host-phase", {"reward_s": 3.0}, {"reward_s": 0.0}),
    ("no-overlap", {"server": 4}, {"server": 4, "ahead": True}),
    ("no-overlap", {"server": 4, "answers": [200] * 16}, {"server": 4, "answers": [200] * 16, "ahead": True}),
]


@pytest.mark.parametrize(("name", "fault", "mended"), FAULTS)
@pytest.mark.parametrize("log_every", [1, 3])
def test_a_fault_is_named_first_with_what_the_mended_loop_saves(tmp_path, name, fault, mended, log_every):
    faulty_s = metered_rl_loop(tmp_path / "faulty.jsonl", log_every=log_every, **fault)
    mended_s = metered_rl_loop(tmp_path / "mended.jsonl", log_every=log_every, **mended)
    first = explain_records(tmp_path / "faulty.jsonl").findings[0]
    assert first.id == name
    if name == "host-phase":  # what no phase claims is the host's as well
        mended_s -= 0.01
    assert first.ns == pytest.approx((faulty_s - mended_s) * 1e9, rel=1e-6)
    assert name not in [finding.id for finding in explain_records(tmp_path / "mended.jsonl").findings]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"server": 4, "ahead": True},
        {"updates": 4},
        {"answers": [20, 22, 24, 26] * 4},
        {"batch": None},
        {"prefix": "own", "prompts": [8] * 4},
    ],
)
def test_a_healthy_loop_has_no_finding(tmp_path, options):
    metered_rl_loop(tmp_path / "m.jsonl", **options)
    assert [f.id for f in explain_records(tmp_path / "m.jsonl").findings if f.id != "not-compute-bound"] == []


def test_sentences_say_what_was_seen_and_name_the_phase(tmp_path):
    metered_rl_loop(tmp_path / "m.jsonl", answers=LONG)
    (finding, *_) = explain_records(tmp_path / "m.jsonl").findings
    assert finding.seen == (
        "90.0 % of the places of decode steps in the phase 'rollout' were idle: the longest answer of a batch had 251 "
        "tokens, the mean answer 26."
    )
    assert "headway train" not in finding.next


def test_a_server_that_works_all_the_time_is_told_from_one_that_waits(tmp_path):
    metered_rl_loop(tmp_path / "m.jsonl", server=4, answers=[300] * 16, ahead=True, updates=0)
    finding = next(f for f in explain_records(tmp_path / "m.jsonl").findings if f.id == "no-overlap")
    assert "worked 100.0 % of it" in finding.seen
    assert "more of the devices for it" in finding.next


def test_a_full_memory_has_no_room_for_a_larger_batch(tmp_path):
    metered_rl_loop(tmp_path / "m.jsonl", batch=4)
    phases = explain_records(tmp_path / "m.jsonl").steps[0].phases
    for memory_share, names in ((0.5, ["small-decode-batches"]), (0.9, [])):
        steps = [RunStep(n, 10**9, rate=1.0, memory_share=memory_share, loop_phases=phases) for n in range(1, 9)]
        assert [f.id for f in find(run=RunEvidence(steps)) if f.id == "small-decode-batches"] == names


def test_a_phase_whose_flops_nobody_knows_is_not_called_the_hosts():
    line = PhaseLine("rollout", 10**9, 1.0, 10**9)
    steps = [RunStep(n, 10**9, rate=1.0, loop_phases=(line,)) for n in range(1, 9)]
    assert find(run=RunEvidence(steps)) == ()


def test_rest_is_the_hosts_where_nothing_is_counted_in_it(tmp_path):
    metered_rl_loop(tmp_path / "m.jsonl", rest_s=3.0)
    finding = explain_records(tmp_path / "m.jsonl").findings[0]
    assert (finding.id, finding.ns) == ("host-phase", pytest.approx(3.01e9, rel=1e-6))
    assert finding.seen.startswith("what no phase claims took")


@pytest.mark.parametrize(("trained", "is_told"), [(2000, True), (40, False)])
def test_samples_that_nothing_is_learnt_from_are_told(trained, is_told):
    rollout = PhaseLine("rollout", 400, 0.4, 400, quantities={"prefills": 1, "prefill_tokens": 4, "decode_tokens": 12})
    update = PhaseLine("update", 600, 0.6, 600, quantities={"tokens": trained})
    steps = [RunStep(number, 1000, loop_phases=(rollout, update)) for number in range(1, 9)]
    finding = next((f for f in find(run=RunEvidence(steps)) if f.id == "samples-in-step"), None)
    assert (finding is not None and finding.ns == 400) == is_told
