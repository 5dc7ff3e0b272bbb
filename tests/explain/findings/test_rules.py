import re
from pathlib import Path

import pytest

from headway.config import TrainConfig
from headway.config.tree import walk
from headway.explain.explanation import MOST, StepWaterfall, WaterfallLine
from headway.explain.findings import rules
from headway.explain.findings.evidence import RunEvidence, RunStep, StepEvidence
from headway.explain.findings.rule import Observation, Rule, RuleObserver, TimeOf
from headway.explain.findings.rules import RULES, find
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from headway.meter import pauses as meter_pauses
from helpers.traces import sidecar, two_kernels_a_step


def step_of(mfu=0.3, **us):
    """A step of 1 ms of a run's records: lines and no events."""
    lines = [WaterfallLine(key, key, ns * 1000, ns / 1000) for key, ns in us.items()]
    return StepWaterfall(1, 0, 1_000_000, mfu, tuple(lines), is_edge=False, device_name="A device")


def test_findings_of_records_come_from_their_lines_alone():
    waiting = step_of(**{"idle.data": 400, "aside": 100})
    (found,) = find(StepEvidence([waiting]))
    assert (found.id, found.ns, found.share) == ("data-bound", 400_000, pytest.approx(0.4))
    assert (found.mfu_from, found.mfu_to) == pytest.approx((0.3, 0.5))
    assert find(StepEvidence([waiting], {0: {"steps": {"1": {"making_s": {"decode": 1.0}}}}}))[0].id == "data-decoding"


def test_at_most_five_are_told_the_dearest_first():
    costs = {"idle.data": 100, "copies": 60, "communication": 200, "idle.sync": 110}
    waits = {"idle.sync": {"aten::item (cudaStreamSynchronize)": 110_000}}
    lines = [WaterfallLine(key, key, ns * 1000, ns / 1000, parts=waits.get(key, {})) for key, ns in costs.items()]
    parts = {"checkpoint": 180_000, "logging": 105_000}
    lines.append(WaterfallLine("aside", "aside", 285_000, 0.285, parts=parts))
    step = StepWaterfall(1, 0, 1_000_000, None, tuple(lines), is_edge=False, device_name="A device")
    found = find(StepEvidence([step]))
    assert [one.id for one in found] == [
        "exposed-communication",
        "checkpoint",
        "synchronisation",
        "logging",
        "data-bound",
    ]
    assert len(found) == MOST
    assert found[0].mfu_to is None


def test_without_evidence_nothing_is_found(tmp_path):
    found = explain([read_trace(two_kernels_a_step().write(tmp_path / "t.json"))]).findings
    assert [finding.id for finding in found] == ["largest-loss"]  # which names no cause
    assert find(StepEvidence([])) == find() == ()


def test_a_name_has_one_rule_with_an_observer_and_thresholds_are_shares():
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.observers for rule in RULES)
    assert sum(len(rule.observers) == 2 for rule in RULES) == 15  # seen in traces and in records
    assert all(0 < rule.in_trace.least < 1 for rule in RULES if rule.in_trace is not None)
    assert all(0 <= observer.least < 1 for rule in RULES for observer in rule.observers)


SECOND = 10**9
RUN = RunEvidence([RunStep(n, (9 if n == 1 else 1) * SECOND, mfu=0.1) for n in range(1, 12)])


@pytest.mark.parametrize(
    ("side", "time", "num_steps", "loss_ns", "share"),
    [
        ("in_trace", TimeOf.STEPS, 1, 250_000, 0.25),
        ("in_records", TimeOf.RUN, 11, SECOND, 1 / 19),
        ("in_records", TimeOf.STEPS, 10, SECOND, 1 / 10),
    ],
)
def test_a_rule_of_any_evidence_is_one_entry_of_the_table(monkeypatch, side, time, num_steps, loss_ns, share):
    def look(evidence):
        assert type(evidence) is (StepEvidence if side == "in_trace" else RunEvidence)
        assert evidence.num_steps == num_steps
        return Observation(loss_ns, "Seen.", "a cause.", "a change.")

    def rule(least):
        return Rule("made-up", **{side: RuleObserver(look, least, time)})

    monkeypatch.setattr(rules, "RULES", (rule(share - 0.01),))
    (found,) = find(StepEvidence([step_of()]), RUN)
    assert (found.id, found.seen, found.share) == ("made-up", "Seen.", pytest.approx(share))
    assert len(find(StepEvidence([step_of()]))) == (side == "in_trace")
    monkeypatch.setattr(rules, "RULES", (rule(share + 0.01),))
    assert find(StepEvidence([step_of()]), RUN) == ()


def test_of_two_observers_of_a_rule_that_of_records_goes_first(monkeypatch):
    def observer(message):
        observation = None if message is None else Observation(1000, message, "a cause.", "a change.")
        return RuleObserver(lambda _: observation, 0.0)

    for in_a_row, told in (("Run.", "Run."), (None, "Steps.")):
        monkeypatch.setattr(rules, "RULES", (Rule("made-up", observer("Steps."), observer(in_a_row)),))
        assert [found.seen for found in find(StepEvidence([step_of()]), RUN)] == [told]


def test_what_names_no_cause_is_charged_with_what_no_other_finding_names():
    (alone,) = find(run=RunEvidence([RunStep(n, SECOND, mfu=0.01) for n in range(15)]))
    assert (alone.id, alone.share, alone.mfu_to) == ("not-compute-bound", pytest.approx(0.95), None)
    uneven, vague = find(run=RunEvidence([RunStep(n, SECOND, mfu=0.01, imbalance=0.2) for n in range(15)]))
    assert (uneven.id, uneven.share, uneven.mfu_to) == ("heavy-pack", pytest.approx(0.2), pytest.approx(0.01 / 0.8))
    assert (vague.id, vague.share) == ("not-compute-bound", pytest.approx(0.75))


def test_a_loss_is_no_more_than_the_time_of_which_it_is_lost():
    (found,) = find(run=RunEvidence([RunStep(n, SECOND, imbalance=7.0) for n in range(3)]))
    assert (found.id, found.ns, found.share) == ("heavy-pack", SECOND, 1.0)


def test_settings_of_headway_train_are_advised_to_those_who_use_it(tmp_path):
    """A foreign trace, and one of a loop under a meter, name none; every rule has general advice."""
    steps = {str(number): {**sidecar()["steps"]["1"], "tokens": 40, "slots": 100} for number in range(10)}
    for loop, is_advised in (("headway train", True), ("a loop of one's own", False), (None, False)):
        trace = two_kernels_a_step().write(tmp_path / "t.json", headway=sidecar(steps=steps, loop=loop))
        padding = next(finding for finding in explain([read_trace(trace)]).findings if finding.id == "padding")
        assert ("data.tokens_per_pack" in padding.next) == is_advised
        assert "pack samples end to end" in padding.next


def test_settings_that_are_named_exist():
    there = {setting.name for setting in walk(TrainConfig)}
    sections = "|".join(sorted({name.partition(".")[0] for name in there}))
    files = [path for path in Path(rules.__file__).parent.glob("*.py") if path.name != "rules.py"]  # it names functions
    words = Path(meter_pauses.__file__).with_name("purposes.toml")
    texts = [path.read_text(encoding="utf-8") for path in (*files, words)]
    named = {name for text in texts for name in re.findall(rf"\b(?:{sections})\.(?:[a-zN]\w*\.)*[a-z]\w*", text)}
    named.discard("model.resize_token_embeddings")  # a method of transformers
    assert len(named) > 15
    assert named - there == set()
    assert not [text for text in texts if "config.json" in text]  # no run reads a key of it that advice could name
