"""A window of steps under the profiler, and records in trackers, of real runs."""

import gzip
import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from headway.errors import ConfigError
from headway.train.config import parse_config
from headway.train.loop import train
from helpers.run_records import read_metrics


def test_a_profile_holds_the_steps_that_were_asked_for(raw):
    raw["run"]["profile"] = {"start": 3, "steps": 2}
    config = parse_config(raw)
    train(config)
    (trace,) = (config.run.folder / "profile").iterdir()
    assert trace.name == "steps-000003-000004-rank-0.json.gz"
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    # one update of each group (with decay and without) in each of two steps
    assert sum(event.get("name") == "aten::_fused_adamw_" for event in events) == 4


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ({"start": 1, "ranks": [1]}, "run.profile.ranks names rank 1, and the run has 1 processes"),
        ({"start": 1, "memory": True}, "run.profile.memory takes effect on CUDA only"),
    ],
)
def test_a_profile_that_cannot_be_is_an_error(raw, profile, words):
    raw["run"]["profile"] = profile
    with pytest.raises(ConfigError, match=words):
        train(parse_config(raw))


def test_trackers_get_the_records_of_the_run(raw, digits, tmp_path):
    raw["data"]["eval"] = str(digits / "data/eval.jsonl")
    raw["eval"] = {"every": 3}
    raw["run"]["trackers"] = [f"tensorboard:{tmp_path}/tb", f"jsonl:{tmp_path}/copy.jsonl"]
    config = parse_config(raw)
    train(config)
    records = read_metrics(config.run.folder / "metrics.jsonl")
    events = EventAccumulator(str(tmp_path / "tb/run")).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(r["step"], pytest.approx(r["loss"], rel=1e-6)) for r in records if r["kind"] == "step"]
    evaluated = [event.step for event in events.Scalars("eval/exact_match")]
    assert evaluated == [r["step"] for r in records if r["kind"] == "evaluation"] == [3, 6]
    assert read_metrics(tmp_path / "copy.jsonl") == records


def test_a_tracker_that_is_none_is_an_error_before_anything_runs(raw):
    raw["run"]["trackers"] = ["tensorbord:tb"]
    with pytest.raises(ConfigError, match=r"run.trackers.*'tensorbord:tb' is not a place for records"):
        parse_config(raw)
