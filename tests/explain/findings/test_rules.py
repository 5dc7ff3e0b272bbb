import re
from pathlib import Path

import pytest

from headway.explain.explanation import MOST, StepWaterfall, WaterfallLine
from headway.explain.findings import rules
from headway.explain.findings.rules import RULES, find
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from headway.train.config import TrainConfig
from headway.train.config.tree import walk
from helpers.written_traces import two_kernels_a_step


def step_of(mfu=0.3, **us):
    """A step of 1 ms of a run's records: lines and no events."""
    lines = [WaterfallLine(key, key, ns * 1000, ns / 1000) for key, ns in us.items()]
    return StepWaterfall(1, 0, 1_000_000, mfu, tuple(lines), is_edge=False, device_name="A device")


def test_findings_of_records_come_from_their_lines_alone():
    waiting = step_of(**{"idle.data": 400, "aside": 100})
    (found,) = find([waiting])
    assert (found.id, found.ns, found.share) == ("data-bound", 400_000, pytest.approx(0.4))
    assert (found.mfu_from, found.mfu_to) == pytest.approx((0.3, 0.5))
    assert find([waiting], {0: {"steps": {"1": {"making_s": {"decode": 1.0}}}}})[0].id == "data-decoding"


def test_at_most_five_are_told_the_dearest_first():
    costs = {"idle.data": 100, "idle.launch": 150, "copies": 60, "communication": 200, "idle.sync": 110}
    lines = [WaterfallLine(key, key, ns * 1000, ns / 1000) for key, ns in costs.items()]
    parts = {"checkpoint": 180_000, "logging": 70_000}
    lines.append(WaterfallLine("aside", "aside", 250_000, 0.25, parts=parts))
    step = StepWaterfall(1, 0, 1_000_000, None, tuple(lines), is_edge=False, device_name="A device")
    found = find([step])
    assert [one.id for one in found] == ["exposed-communication", "checkpoint", "host-bound", "data-bound", "logging"]
    assert len(found) == MOST
    assert found[0].mfu_to is None


def test_without_evidence_nothing_is_found(tmp_path):
    assert explain([read_trace(two_kernels_a_step().write(tmp_path / "t.json"))]).findings == ()
    assert find([]) == ()


def test_ids_are_unique_and_thresholds_are_shares():
    assert len({rule.id for rule in RULES}) == len(RULES)
    assert all(0 < rule.least < 1 for rule in RULES)


def test_settings_that_are_named_exist():
    there = {setting.name for setting in walk(TrainConfig)}
    sections = "|".join(sorted({name.partition(".")[0] for name in there}))
    files = [path for path in Path(rules.__file__).parent.glob("*.py") if path.name != "rules.py"]  # it names functions
    named = set()
    for path in files:
        named |= set(re.findall(rf"\b(?:{sections})\.(?:[a-zN]\w*\.)*[a-z]\w*", path.read_text(encoding="utf-8")))
    named.discard("model.resize_token_embeddings")  # a method of transformers
    assert len(named) > 15
    assert named - there == set()
