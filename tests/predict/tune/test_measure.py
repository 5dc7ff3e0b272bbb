"""Runs of a few steps, and the ranking that follows from them; commands that pretend to train, and a real one."""

import json
import sys
import time
from pathlib import Path

import pytest

from headway.config import load_config, parse_config
from headway.predict.tune import Trial, corrected, measure
from headway.predict.tune.measure import WARM_UP


def pretends(code):
    """A command that runs some Python with the path of the configuration as `path`."""
    return lambda path, processes: [sys.executable, "-c", f"path = {str(path)!r}; processes = {processes}\n{code}"]


WRITES = """
import json, pathlib, yaml
config = yaml.safe_load(open(path))
run = pathlib.Path(config["run"]["folder"]); run.mkdir()
with open(run / "metrics.jsonl", "w") as file:
    for step in range(config["optim"]["steps"]):
        slow = 9.0 if step < 2 else 0.5 + step % 2
        one = {"kind": "step", "wall_s": slow, "tokens": 10, "flops": {"total": 30}, "peak_memory_bytes": 1000 + step}
        file.write(json.dumps(one) + chr(10))
    file.write(json.dumps({"kind": "evaluation"}) + chr(10))
"""


def test_steps_behind_the_warm_up_are_timed(config):
    seen = measure(config, 1, steps=4, command=pretends(WRITES))
    assert seen == Trial(
        "measured", flops_per_s=120 / 4.0, step_s=1.0, tokens_per_s=10.0, peak_bytes=1000 + WARM_UP + 3
    )


@pytest.mark.parametrize(
    ("code", "outcome", "reason"),
    [
        ("raise SystemExit('Error: out of memory on cuda:0 (rank 0): it had 3 GiB')", "out of memory", "3 GiB"),
        ("import os; os.kill(os.getpid(), 9)", "out of memory", "exit code -9"),
        ("raise ValueError('a planted fault')", "failed", "ValueError: a planted fault"),
        ("import sys; sys.exit(3)", "failed", "exit code 3"),
        (WRITES.replace('range(config["optim"]["steps"])', "range(2)"), "failed", "before a step could be timed"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_a_result(config, code, outcome, reason):
    seen = measure(config, 1, command=pretends(code))
    assert (seen.outcome, seen.flops_per_s, seen.step_s) == (outcome, None, None)
    assert reason in seen.reason


@pytest.mark.slow
def test_a_run_without_an_end_is_ended(config, tmp_path):
    child = tmp_path / "pid"
    code = f"""
import os, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(child)!r}, "w").write(str(worker.pid))
time.sleep(600)
"""
    seen = measure(config, 1, limit_s=10.0, command=pretends(code))
    assert (seen.outcome, seen.reason) == ("did not end", "ended after 10 s")
    stat = Path(f"/proc/{child.read_text()}/stat")
    deadline_s = time.monotonic() + 60
    while stat.exists() and stat.read_text().split()[2] != "Z":  # ended, and waits for somebody to notice
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_measured_run_is_the_same_run_without_what_is_beside_it(raw):
    raw["optim"] |= {"steps": None, "epochs": 3, "accumulation": 2}
    raw["run"] |= {"trackers": ["tensorboard:runs/tb"], "profile": {"start": 100}}
    code = """
import json, pathlib, yaml
config = yaml.safe_load(open(path))
raise SystemExit("Error: " + json.dumps([config["optim"]["steps"], config["optim"]["accumulation"], processes,
    config["run"]["trackers"], config["run"]["profile"], config["checkpoint"]["export"]]))
"""
    seen = measure(parse_config(raw), 3, steps=4, command=pretends(code))
    assert json.loads(seen.reason.removeprefix("Error: ")) == [6, 2, 3, [], None, "never"]


@pytest.mark.slow
def test_a_real_run_is_measured_and_leaves_nothing_behind(config_file, tmp_path):
    path = config_file()
    before = {one.name for one in tmp_path.iterdir()}
    seen = measure(load_config(path), 1, steps=2)
    assert seen.outcome == "measured", seen.reason
    assert seen.flops_per_s > 0
    assert {one.name for one in tmp_path.iterdir()} == before


class One:
    """A choice of which only memory and speed are looked at."""

    def __init__(self, rate, peak=1):
        self.flops_per_s, self.memory = rate, type("Memory", (), {"peak": peak})


def test_what_was_measured_goes_by_its_measured_rate_and_the_rest_is_scaled():
    a, b, c = One(10.0), One(9.0), One(8.0)
    seen = {a: Trial("measured", flops_per_s=4.0, step_s=1.0), b: Trial("measured", flops_per_s=5.4, step_s=1.0)}
    ranked = corrected([a, b, c], seen)
    assert [one for one, _, _ in ranked] == [b, a, c]
    assert [rate for _, rate, _ in ranked] == pytest.approx([5.4, 4.0, 8.0 * (0.4 + 0.6) / 2])
    assert [each for _, _, each in ranked] == [seen[b], seen[a], None]


def test_where_memory_ran_out_choices_that_hold_as_much_are_left_out():
    a, b, c, d = One(10.0, peak=50), One(9.0, peak=40), One(8.0, peak=60), One(7.0, peak=45)
    seen = {a: Trial("out of memory"), b: Trial("measured", flops_per_s=9.0, step_s=1.0)}
    assert [one for one, _, _ in corrected([a, b, c, d], seen)] == [b, d]


def test_a_failure_alone_says_nothing_of_the_others():
    a, b = One(10.0), One(9.0)
    assert [one for one, _, _ in corrected([a, b], {a: Trial("failed")})] == [b]
