"""Profiles that a long run takes by itself: when, at what cost, and that they change nothing."""

import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import yaml

from headway.config import parse_config
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from headway.log.boundary import ErrorBoundary
from headway.meter.step_clock import StepTime
from headway.meter.step_phases import PhaseTimes
from headway.train import profiling
from headway.train.profiling import AutoProfile
from headway.train.run import train
from helpers.device import Clock
from helpers.processes import run_processes
from helpers.runs import read_metrics


class Window:
    """A window that records nothing, and takes half a second for it."""

    path = None

    def __init__(self, steps, clock, opened):
        self.steps, self.clock, self.is_over = steps, clock, False
        opened.append(steps)

    def compare_with(self, times):
        assert len(list(times)) == 10

    def start(self, _meter):
        self.clock.now_s += 0.25

    def took(self, step):
        if step.number == self.steps[-1]:
            self.clock.now_s += 0.25
            self.is_over = True

    def give_up(self):
        self.is_over = True


def opened_by(durations_s, folder, *, compiled=(), num_steps=None):
    """Take steps of some durations and return the windows that were opened."""
    clock, opened = Clock(), []
    meter = SimpleNamespace(steps_before=0, watchers=[], boundary=ErrorBoundary())
    with patch("headway.meter.clock.now_s", clock):
        automatic = AutoProfile(
            folder,
            meter,
            num_steps=num_steps or len(durations_s),
            window=lambda steps: Window(steps, clock, opened),
        )
        with automatic:
            for number, duration_s in enumerate(durations_s, start=1):
                clock.now_s += duration_s
                end, nothing = SimpleNamespace(host_s=clock.now_s), PhaseTimes([], {})
                time = StepTime(end, 0.0, {}, [], nothing, None, 0.0, number in compiled)
                automatic.took(SimpleNamespace(number=number, time=time))
        assert meter.watchers == []
    return [(steps.start, len(steps)) for steps in opened]


@pytest.mark.parametrize(
    ("durations_s", "windows"),
    [
        ([1.0] * 1000, [(41, 2)]),  # the first 20 hold the first step, whose time is not known
        ([0.7] * 1000, []),  # 700 s are not 200 times as long as a profile
        ([0.5] * 2000, [(41, 2)]),
        ([2.0] * 500 + [6.0] * 500, [(41, 2), (561, 2)]),  # after three looks that see other steps
        ([3.0] * 500 + [1.0] * 500, [(41, 2), (561, 2)]),
        ([1.0] * 500 + [3.0] * 30 + [1.0] * 500, [(41, 2)]),  # for a short while
        ([1.0] * 500 + [1.3] * 500, [(41, 2)]),
        ([1.0] * 10, []),
    ],
)
def test_a_long_run_is_profiled_once_it_is_warm_and_when_its_speed_changes(durations_s, windows, tmp_path):
    assert opened_by(durations_s, tmp_path) == windows


def test_a_run_that_compiles_is_not_warm(tmp_path):
    assert opened_by([1.0] * 1000, tmp_path, compiled={3, 37}) == [(61, 2)]
    assert opened_by([1.0] * 1000, tmp_path, compiled=set(range(0, 1000, 7))) == []


def test_what_all_profiles_cost_stays_within_their_share(tmp_path):
    durations_s = ([1.0] * 200 + [5.0] * 200) * 5
    windows = opened_by(durations_s, tmp_path)
    assert len(windows) > 3
    assert 0.5 * len(windows) <= profiling.LARGEST_SHARE * sum(durations_s)


def test_a_folder_has_only_a_few(tmp_path):
    (tmp_path / "profile").mkdir()
    for number in range(4):
        (tmp_path / f"profile/steps-{number}.json.gz").touch()
    assert opened_by([1.0] * 1000, tmp_path) == []


EAGER = {"FIRST_S": 0.0, "LARGEST_SHARE": 1e9, "_COMPARED": 4}  # of short runs too


def losses(config):
    return [record["loss"] for record in read_metrics(config.run.folder / "metrics.jsonl") if record["kind"] == "step"]


def config_of(raw, folder, **run):
    return parse_config({**raw, "run": {**raw["run"], "folder": str(folder), **run}})


@pytest.mark.slow
def test_a_run_has_the_same_losses_and_a_whole_step(raw, tmp_path):
    raw["optim"]["steps"] = 14
    raw["checkpoint"] = {"every": 12}
    plain = config_of(raw, tmp_path / "plain", auto_profile=False)
    with patch.multiple(profiling, **EAGER):
        train(plain)
        assert not (plain.run.folder / "profile").exists()
        config = config_of(raw, tmp_path / "profiled")
        train(config)
        assert losses(config) == losses(plain)  # to the bit
        names = sorted(path.name for path in (config.run.folder / "profile").iterdir())
        assert names[0] == "steps-000009-000010-rank-0.json.gz"
        for waterfall in explain([read_trace(config.run.folder / "profile" / names[0])]).steps:
            assert sum(line.ns for line in waterfall.lines) == waterfall.duration_ns
        # a run that goes on has its own
        longer = config_of({**raw, "optim": {**raw["optim"], "steps": 26}}, tmp_path / "profiled")
        train(longer, resume=True)
        assert len(list((config.run.folder / "profile").iterdir())) > len(names)
    records = [r for r in read_metrics(config.run.folder / "metrics.jsonl") if r["kind"] == "step"]
    phases = [record["phases_s"] for record in records if record["phases_s"]]
    assert phases
    assert all(times[name] > 0 for times in phases for name in ("data", "forward", "backward", "optimizer"))
    assert records[-1]["optimizer"]["name"] == "Optimizer"
    assert records[-1]["making_s"].keys() == {"read", "decode", "tokenise"}


def test_a_short_run_has_none(raw):
    config = parse_config(raw)
    train(config)
    assert not (config.run.folder / "profile").exists()


def test_one_that_fails_is_a_warning(raw):
    raw["optim"]["steps"] = 12
    config = parse_config(raw)

    def fails(*_):
        raise OSError("no profiler")

    with (
        patch.multiple(profiling, **EAGER),
        patch.object(profiling.ProfileWindow, "start", fails),
        pytest.warns(RuntimeWarning, match="The automatic profile: OSError: no profiler. Training goes on without"),
    ):
        assert train(config).steps == 12


@pytest.mark.dist
@pytest.mark.slow
def test_three_ranks_train_on_while_the_first_is_profiled(raw, tmp_path):
    raw["optim"]["steps"] = 14
    recipe = tmp_path / "recipe.yaml"
    for name in ("plain", "profiled"):
        raw["run"] = {**raw["run"], "folder": str(tmp_path / name), "auto_profile": name == "profiled"}
        recipe.write_text(yaml.safe_dump(raw))
        program = tmp_path / "train_eagerly.py"
        program.write_text(
            textwrap.dedent(f"""
                import sys
                from headway.cli.app import main
                from headway.train import profiling

                vars(profiling).update({EAGER})
                sys.argv.insert(1, "train")
                main()
            """)
        )
        run_processes([sys.executable, program, recipe], 3)
    records = [
        [record["loss"] for record in read_metrics(tmp_path / name / "metrics.jsonl") if record["kind"] == "step"]
        for name in ("plain", "profiled")
    ]
    assert records[0] == records[1]
    assert {path.name[-14:] for path in Path(tmp_path / "profiled/profile").iterdir()} == {"rank-0.json.gz"}
    assert not (tmp_path / "plain/profile").exists()
