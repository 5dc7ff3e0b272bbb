import re
import tomllib
from pathlib import Path

import pytest

from headway.config import TrainConfig
from headway.config.tree import walk
from headway.explain.explanation import MOST, StepWaterfall, WaterfallLine
from headway.explain.findings import rules
from headway.explain.findings.evidence import RunEvidence, RunStep, StepEvidence
from headway.explain.findings.rule import Observation, Rule, RuleObserver, TimeOf, observe, sentences
from headway.explain.findings.rules import RULES, find
from headway.explain.records import explain_records
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from headway.meter import pauses as meter_pauses
from helpers.traces import PUBLISHED, US, WrittenTrace, beside_the_repository, shapes, sidecar, two_kernels_a_step


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
    assert sum(len(rule.observers) == 2 for rule in RULES) == 21  # seen in traces and in records
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


def run_with(**by_step):
    """A run of 15 steps of 1 s, with more in some of them: names of fields of a step, each with seconds by step."""
    steps = []
    for n in range(1, 16):
        collected_ns, after_ns = (int(by_step.get(kind, {}).get(n, 0.001) * SECOND) for kind in ("collection", "after"))
        phases_ns = {"forward": SECOND // 2, "optimizer": 1, "after": after_ns}
        places = (("after", "train.py:7 in main", "", after_ns),)
        steps.append(RunStep(n, SECOND, mfu=0.1, collection_ns=collected_ns, phases_ns=phases_ns, places=places))
    beside = {
        name: {n: int(s * SECOND) for n, s in by_step.get(name, {}).items()} for name in ("checkpoint", "evaluation")
    }
    return RunEvidence(steps, {name: sum(ns.values()) for name, ns in beside.items()}, (), beside)


def traced_with(tmp_path, kind, seconds):
    """Steps of 100 ms on a CPU, with a chore, a collection or a pause in some: seconds by step."""
    trace, at = WrittenTrace(), 1000 * US
    bounds = [at]
    for number in range(1, 16):
        trace.operator("aten::mm", at, 100_000 * US, **shapes([[64, 64], [64, 64]]))
        at += 100_000 * US
        ns = round(seconds.get(number, 0) * SECOND)
        if kind == "garbage-collection" and ns:
            trace.annotation("gc:collection of generation 2", at, ns)
        elif kind == "recompilation" and ns:
            trace.operator("compile (dynamo_timed)", at, ns)
        elif kind != "host-pause" and ns:
            trace.annotation(f"phase:{kind}", at, ns)
        at += ns
        bounds.append(at)
    trace.steps(*bounds)
    return {finding.id: finding for finding in explain([read_trace(trace.write(tmp_path / "t.json"))]).findings}


TABLE = tomllib.loads(Path(rules.__file__).with_name("sentences.toml").read_text("utf-8"))
ONCE, TWICE, OFTEN, ALWAYS = {14: 0.9}, {3: 0.9, 9: 0.8}, {3: 0.9, 7: 0.9, 11: 0.9}, dict.fromkeys(range(1, 16), 0.3)
SAYS_A_RULE = re.compile(r"\boften|again and again|(each|every) (step|epoch)|from step to step")
SECONDS = pytest.mark.parametrize("seconds", [ONCE, TWICE, OFTEN, ALWAYS], ids=["once", "twice", "often", "always"])


def assert_told_as_it_came(found, seconds):
    if seconds in (ONCE, TWICE):
        assert all(f"at step {step}" in found.seen for step in seconds)
        assert found.when.startswith("once, " if seconds == ONCE else "twice, ")
        assert not SAYS_A_RULE.search(found.cause)
        assert found.mfu_to is None
        assert found.extent == found.when
    else:
        assert found.when == ""
        assert found.extent.startswith("up to ")
        assert ("in 3 of 15 steps: 3, 7, 11" in found.seen) == (seconds == OFTEN)


@SECONDS
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("collection", "garbage-collection"),
        ("after", "host-pause"),
        ("checkpoint", "checkpoint"),
        ("evaluation", "evaluation"),
    ],
)
def test_what_came_once_in_a_run_is_told_with_its_step(kind, name, seconds):
    run = run_with(**{kind: {step: 5 * s if name == kind else 1.9 * s for step, s in seconds.items()}})
    assert_told_as_it_came({finding.id: finding for finding in find(run=run)}[name], seconds)


@SECONDS
@pytest.mark.parametrize(
    "kind", ["host-pause", "garbage-collection", "checkpoint", "evaluation", "logging", "recompilation"]
)
def test_what_came_once_in_a_profile_is_told_with_its_step(tmp_path, kind, seconds):
    assert_told_as_it_came(traced_with(tmp_path, kind, seconds)[kind], seconds)


def test_causes_of_what_need_not_come_again_speak_of_no_rule():
    """How often it came stands in what was seen; a cause holds of one time as well."""
    purposes = tomllib.loads(Path(meter_pauses.__file__).with_name("purposes.toml").read_text("utf-8"))["purpose"]
    causes = [words["cause"] for row in purposes for name in ("in_trace", "in_records") if (words := row.get(name))]
    causes += [sentences(name)["why"] for name in TABLE if "once" in sentences(name)]
    assert len(causes) > 25
    assert not list(filter(SAYS_A_RULE.search, causes))


@pytest.mark.parametrize("path", PUBLISHED)
def test_of_a_single_step_nothing_is_told_as_a_rule(path):
    explanation = explain([read_trace(path)])
    if len(explanation.steps) == 1:
        assert not [one.cause for one in explanation.findings if SAYS_A_RULE.search(one.cause)]
        assert "recompilation" not in {one.id for one in explanation.findings}


@pytest.mark.parametrize("path", beside_the_repository("reviews/explain/cases/inputs/gc_once.jsonl"))
def test_one_full_collection_of_a_foreign_run_is_no_rule(path):
    (found,) = explain_records(path).findings
    assert (found.id, found.when) == ("garbage-collection", "once, 541 ms at step 14")


def test_a_rule_that_adds_up_too_much_is_seen_in_its_share(monkeypatch):
    """A share that was cut to 100 % would hide a rule's mistake from the laws on shares."""

    def look(evidence):
        return observe(evidence, "chore/checkpoint", 3 * evidence.duration_ns, steps=evidence.duration_ns)

    monkeypatch.setattr(rules, "RULES", (Rule("made-up", in_records=RuleObserver(look, 0.1)),))
    (found,) = find(run=RUN)
    assert (found.share, RUN.share(3 * RUN.duration_ns)) == (pytest.approx(3), "300.0 %")


OBSERVED = [
    (path.name, name)
    for path in sorted(Path(rules.__file__).parent.glob("*.py"))
    for name in re.findall(r'observe\(\s*\w+,\s*f?"([a-z/ -]+)', path.read_text("utf-8"))
]


def test_every_sentence_has_a_verb_stop_and_a_rule_that_says_it():
    """Sentences are data: names that rules observe, each with what was seen, why and what to do, one sentence each."""
    assert len(OBSERVED) > 70
    observed = {name.partition("/")[0] for _, name in OBSERVED} | {rule.name for rule in RULES}
    assert {name.partition("/")[0] for name in TABLE} <= observed
    for name in TABLE:
        words = sentences(name)
        assert words.keys() >= {"seen", "why", "next"}, name
        assert set(words) <= {"seen", "seen_in_records", "why", "next", "setting", "once"}, name
        for key in ("seen", "seen_in_records", "why", "next"):
            text = words.get(key, ".")
            assert text.endswith((".", "}")), (name, key)
            assert not text[:1].isupper() or re.match(r"Python |MFU ", text), (name, key)


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
    files.append(Path(rules.__file__).with_name("sentences.toml"))
    words = Path(meter_pauses.__file__).with_name("purposes.toml")
    texts = [path.read_text(encoding="utf-8") for path in (*files, words)]
    named = {name for text in texts for name in re.findall(rf"\b(?:{sections})\.(?:[a-zN]\w*\.)*[a-z]\w*", text)}
    named.discard("model.resize_token_embeddings")  # a method of transformers
    assert len(named) > 15
    assert named - there == set()
    assert not [text for text in texts if "config.json" in text]  # no run reads a key of it that advice could name
