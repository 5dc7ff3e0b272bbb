"""Runs whose records tell where the time of their steps went, each with one fault."""

import json

import pytest

from headway.explain.findings.evidence import RunEvidence, RunStep
from headway.explain.findings.rules import find
from helpers.pages import write_run

SECOND = 10**9
HEALTHY = {
    "data": 5_000_000, "input": 5_000_000, "forward": 300_000_000, "loss": 5_000_000, "backward": 600_000_000,
    "gradients": 15_000_000, "optimizer": 60_000_000, "after": 10_000_000,
}  # fmt: skip


def recorded(phases=None, **more):
    """Twenty steps of one second."""
    shares = {**HEALTHY, **(phases or {})}
    scale = SECOND / sum(shares.values())
    phases_ns = {name: round(ns * scale) for name, ns in shares.items()}
    return [RunStep(n, SECOND, rate=1.0, phases_ns=phases_ns, **more) for n in range(1, 21)]


def looked(gap, purpose, share=0.5):
    return {"places": ((gap, "train.py:30 in step", purpose, round(share * SECOND)),)}


UNKNOWN_LOOP = {"optimizer": {"name": "Mine", "num_tensors": 100}}
LOOP = {"optimizer": {"name": "AdamW", "num_tensors": 100, "mode": "loop"}}


@pytest.mark.parametrize(
    ("steps", "wanted", "share"),
    [
        (recorded(), None, 0),
        (recorded(lead_ns=SECOND), None, 0),
        (recorded(facts=LOOP), None, 0),  # 6 % for the update are what one takes
        (recorded(collection_ns=SECOND // 2), "garbage-collection", 0.5),
        (recorded({"after": SECOND}), "host-pause", 0.5),
        (recorded({"after": SECOND}, collection_ns=SECOND // 2), "garbage-collection", 0.5),  # and no pause beside it
        (recorded({"input": SECOND}), "host-pause", 0.5),
        (recorded({"after": SECOND}, **looked("after", "logging")), "logging", 0.5),
        (recorded({"after": SECOND}, **looked("after", "checkpoint")), "checkpoint", 0.5),
        (recorded({"after": SECOND}, **looked("after", "another program")), "host-pause", 0.5),
        (recorded({"gradients": SECOND}, **looked("gradients", "read-back")), "read-back", 0.5),
        (recorded({"gradients": SECOND}, **looked("gradients", "parameter-loop")), "parameter-loop", 0.5),
        (recorded({"gradients": SECOND, "optimizer": 0}), None, 0),  # the update itself is in the gap
        (recorded({"optimizer": SECOND}, facts=LOOP), "optimizer-loop", 0.5 * (1 - 7 / 20)),
        (recorded({"optimizer": SECOND}, facts={"optimizer": {"mode": "fused"}}), None, 0),
        (recorded(facts={"weights_dtype": "float64"}), "double-precision", 0.45),
        (recorded(facts={"anomaly_mode": True}), "anomaly-mode", 0),
        (recorded(late_rank=2, late_ns=SECOND // 4, late_phase="input"), "slow-rank", 0.25),
        (recorded(lead_ns=SECOND // 100), "host-bound", 0.96),
        (recorded({"optimizer": SECOND}, facts=UNKNOWN_LOOP), "optimizer-loop", 0.5 * (1 - 7 / 20)),
        (recorded({"exchange": SECOND}), "exposed-communication", 0.5),
        (recorded({"exchange": SECOND}, late_rank=1, late_ns=SECOND // 2, late_phase="data"), "slow-rank", 0.5),
        (recorded({"after": SECOND}, **looked("after", "exchange")), "exposed-communication", 0.5),
        (recorded({"after": SECOND}, extra={"forward": (2, SECOND // 2)}), "uncounted-products", 0.5),
        (recorded(extra={"backward": (1, SECOND // 4)}), "uncounted-products", 0.25),
        (recorded(extra={"update": (7, SECOND // 4)}), "update-each-pass", 0.25),
        (recorded(core_wait_ns=SECOND // 2), "shared-cores", 0.5),
        (recorded(clock=0.7, limits=("heat",)), "throttled-clocks", 0.3),
        (recorded(clock=0.95, limits=("power",)), None, 0),  # as boards at their power limit run
    ],
)
def test_each_rule_speaks_of_its_fault_and_of_nothing_else(steps, wanted, share):
    findings = find(run=RunEvidence(steps))
    assert [finding.id for finding in findings] == ([] if wanted is None else [wanted])
    if findings:
        assert findings[0].share == pytest.approx(share, abs=0.02)


def test_a_pause_names_its_code_and_where_it_is():
    (finding,) = find(run=RunEvidence(recorded({"after": SECOND}, **looked("after", ""))))
    assert finding.seen == ("the loop spent 50.3 % of the time behind the update, mostly in train.py:30 in step.")


def test_a_rank_that_is_late_now_and_then_is_no_slow_rank():
    steps = [
        RunStep(n, SECOND, rate=1.0, late_rank=n % 3, late_ns=SECOND // 4, late_phase="data") for n in range(1, 21)
    ]
    assert find(run=RunEvidence(steps)) == ()


def test_the_largest_loss_comes_first():
    steps = recorded(
        {"after": 3 * SECOND, "gradients": 0.3 * SECOND},
        places=(
            ("after", "train.py:30 in step", "checkpoint", SECOND // 2),
            ("gradients", "train.py:20 in step", "parameter-loop", SECOND // 20),
        ),
        collection_ns=SECOND // 10,
    )
    findings = find(run=RunEvidence(steps))
    assert [finding.id for finding in findings] == ["checkpoint", "garbage-collection"]
    assert findings[0].share > findings[1].share


def test_a_clock_that_fell_is_told_with_its_reasons_and_an_idle_one_is_not(headway, tmp_path):
    def finding_of(**state):
        folder = write_run(tmp_path / "run", 40, machine_state={"most_sm_mhz": 1980, **state})
        found = json.loads(headway("explain", folder, "--json").out)["findings"]
        return next((finding for finding in found if finding["id"] == "throttled-clocks"), None)

    hot = finding_of(sm_mhz=1188, limits=["heat", "power"])
    assert "40.0 % below its highest in 40 samples beside the steps, held by heat and power" in hot["seen"]
    assert finding_of(sm_mhz=300, limits=["idle"]) is None
    assert finding_of(sm_mhz="1188", limits=7) is None  # what a stranger wrote
