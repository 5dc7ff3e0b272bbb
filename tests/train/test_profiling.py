"""A window of steps under the profiler, and records in trackers, of real runs."""

import gzip
import json
import shutil
import warnings
from collections import Counter
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from headway.config import parse_config
from headway.errors import ConfigError
from headway.explain.breakdown import break_down
from headway.explain.records import explain_records
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from headway.train.run import train
from helpers.processes import TRAIN, run_processes
from helpers.runs import read_metrics
from helpers.traces import share_of_operators_with_an_owner


def read(path):
    with gzip.open(path) as file:
        return json.load(file)


def is_in(event, outer):
    return outer["ts"] <= event["ts"] and event["ts"] + event["dur"] <= outer["ts"] + outer["dur"]


def losses(config):
    return [r["loss"] for r in read_metrics(config.run.folder / "metrics.jsonl") if r["kind"] == "step"]


def test_a_profile_holds_the_steps_that_were_asked_for(raw, digits, tmp_path, capsys):
    raw["speed"] = {"recompute": "full"}
    raw["data"]["eval"], raw["eval"] = str(digits / "data/eval.jsonl"), {"every": 3}
    raw["data"]["cache_encoded"] = "off"  # the second run would read what the first has encoded
    plain = parse_config({**raw, "run": {**raw["run"], "folder": str(tmp_path / "plain")}})
    train(plain)
    raw["run"]["profile"] = {"start": 3, "steps": 2}
    config = parse_config(raw)
    train(config)
    assert losses(config) == losses(plain)  # to the bit

    (path,) = (config.run.folder / "profile").iterdir()
    assert path.name == "steps-000003-000004-rank-0.json.gz"
    assert f"profile of steps 3 to 4: {path}; a step took" in capsys.readouterr().err.replace("\n", "")
    trace = read(path)
    # one update of each group (with decay and without) in each of two steps
    assert sum(event.get("name") == "aten::_fused_adamw_" for event in trace["traceEvents"]) == 4
    names = Counter(event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation")
    assert (names["ProfilerStep#3"], names["ProfilerStep#4"]) == (1, 1)
    phases = {name.removeprefix("phase:"): count for name, count in names.items() if name.startswith("phase:")}
    of_each = dict.fromkeys(("data_wait", "logging", "forward", "backward", "optimizer"), 2)
    assert phases == {**of_each, "evaluation": 1}
    events = [
        event
        for event in trace["traceEvents"]
        if event.get("name") == "module:model.language_model.layers.0.mlp.up_proj"
    ]
    for phase in ("forward", "backward"):  # which recomputes
        outside = [event for event in trace["traceEvents"] if event.get("name") == f"phase:{phase}"]
        assert sum(is_in(event, one) for one in outside for event in events) == 2

    facts = trace["headway"]
    assert (facts["recompute"], facts["world_size"], facts["peak_flops_per_s"]) == ("full", 1, 100e9)
    assert facts["components"]["model.visual.blocks.0.attn.qkv"] == "vision.projections"
    records = {str(r["step"]): r for r in read_metrics(config.run.folder / "metrics.jsonl") if r["kind"] == "step"}
    for number, step in facts["steps"].items():
        useful = {name: sum(both.values()) for name, both in step["useful_flops"].items()}
        assert useful == records[number]["flops_by_component"]
        assert sum(step["recomputed_flops"].values()) == records[number]["flops"]["recompute"] > 0
        assert step["router"] is None  # without experts
        assert step["making_s"].keys() == {"read", "decode", "tokenise"}
        assert (step["tokens"], step["slots"]) == (records[number]["tokens"], records[number]["slots"])
    assert list(facts["steps"]) == ["3", "4"]

    recorded = explain_records(config.run.folder / "metrics.jsonl").steps
    for waterfall in explain([read_trace(path)]).steps:
        # a run needs what its trace says that it needs
        lines = [{line.key: line.ns for line in one.lines} for one in (waterfall, recorded[waterfall.step - 1])]
        for key in ("useful", "ceiling"):  # records charge recomputation and padding their time
            assert lines[0][key] == pytest.approx(lines[1][key], abs=20)  # [ns]: whole ones of each component
        assert lines[0]["useful"] > 0 < lines[0]["recomputation"] < lines[1]["recomputation"]
        components = {row.name: row for row in break_down(waterfall, "component")}
        assert share_of_operators_with_an_owner(waterfall) > 0.95
        of_step = facts["steps"][str(waterfall.step)]
        for name, both in of_step["useful_flops"].items():
            assert components[name].flops == sum(both.values()) + of_step["recomputed_flops"].get(name, 0)
            assert components[name].matmul_ns > 0
        layers = [row for row in break_down(waterfall, "attention") if row.flops]
        assert [row.by_phase.keys() for row in layers] == [row.flops_by_phase.keys() for row in layers]
        flops = sum(components[f"{tower}.attention"].flops for tower in ("vision", "language"))
        assert sum(row.flops for row in layers) == flops


@pytest.mark.slow
def test_a_resumed_run_records_the_rest_of_the_window(raw):
    raw["run"]["profile"] = {"start": 3, "steps": 4}
    raw["optim"]["steps"] = 6
    raw["checkpoint"] = {"every": 4}
    config = parse_config(raw)
    train(config)
    folder = config.run.folder
    shutil.rmtree(folder / "checkpoints" / "step-000006")
    train(config, resume=True)
    found = {path.name: list(read(path)["headway"]["steps"]) for path in (folder / "profile").iterdir()}
    assert found == {
        "steps-000003-000006-rank-0.json.gz": ["3", "4", "5", "6"],
        "steps-000005-000006-rank-0.json.gz": ["5", "6"],
    }


@pytest.mark.slow
def test_a_profile_says_how_evenly_experts_were_used(raw, mixture):
    raw["model"]["path"] = str(mixture)
    raw["run"]["profile"] = {"start": 1, "steps": 2}
    raw["optim"]["steps"] = 2
    config = parse_config(raw)
    train(config)
    records = {str(r["step"]): r for r in read_metrics(config.run.folder / "metrics.jsonl") if r["kind"] == "step"}
    (path,) = (config.run.folder / "profile").iterdir()
    steps = read(path)["headway"]["steps"]
    assert {number: step["router"] for number, step in steps.items()} == {n: records[n]["router"] for n in steps}


def test_a_profile_that_cannot_be_written_stops_no_training(raw, monkeypatch):
    raw["run"]["profile"] = {"start": 2, "steps": 1}
    config = parse_config(raw)
    replace = Path.replace

    def full_disk(path, target):
        if Path(target).name.startswith("steps-"):
            raise OSError(28, "No space left on device")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", full_disk)
    with warnings.catch_warnings(record=True) as caught:  # others' too, which are nobody's business here
        warnings.simplefilter("always")
        summary = train(config)
    (message,) = [text for warning in caught if (text := str(warning.message)).startswith("The profile: ")]
    assert message.endswith("No space left on device. Training goes on without.")
    assert summary.steps == 6
    assert ("not recorded", "The profile: OSError: [Errno 28] No space left on device") in summary.not_recorded()
    assert not list((config.run.folder / "profile").iterdir())


@pytest.mark.dist
@pytest.mark.slow
def test_a_chosen_rank_of_a_sharded_model_writes_its_own_file(raw, tmp_path):
    raw["run"]["profile"] = {"start": 2, "steps": 1, "ranks": [1]}
    raw["optim"]["steps"] = 3
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(raw))
    run_processes([*TRAIN, path], 2)
    folder = Path(raw["run"]["folder"])
    (written,) = (folder / "profile").iterdir()
    assert written.name == "steps-000002-000002-rank-1.json.gz"
    trace = read(written)
    facts = trace["headway"]
    assert (facts["rank"], facts["world_size"]) == (1, 2)
    (record,) = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "step" and r["step"] == 2]
    useful = sum(sum(both.values()) for both in facts["steps"]["2"]["useful_flops"].values())
    assert useful == record["rank_flops"][1]
    names = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"}
    assert {"module:model.language_model.layers.0.mlp.up_proj", "module:lm_head", "phase:backward"} <= names
    (waterfall,) = explain([read_trace(written)]).steps
    rows = break_down(waterfall, "component")
    assert share_of_operators_with_an_owner(waterfall) > 0.95
    assert {"(data parallelism)", "(communication)", "language.mlp", "vision.mlp"} <= {row.name for row in rows}


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ({"start": 1, "ranks": [1]}, "run.profile.ranks names rank 1, but the run has 1 processes"),
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
