"""A run on a mixture of four sources of different formats, from an index and from a stream."""

import gzip
import json

import pytest

from headway.config import parse_config
from headway.train.run import train
from helpers.runs import read_metrics

NAMES = ("lines", "packed", "array", "words")


@pytest.fixture
def mixed(raw, digits):
    """Digits as JSONL, gzipped JSONL and a JSON array, and documents."""
    folder = digits / "data"
    lines = (folder / "train.jsonl").read_text().splitlines()
    (folder / "lines.jsonl").write_text("\n".join(lines[:30]))
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[30:55]).encode()))
    (folder / "array.json").write_text(json.dumps([json.loads(line) for line in lines[55:]]))
    (folder / "words.jsonl").write_text("\n".join(json.dumps({"text": f"Read the digits. {n}" * 3}) for n in range(20)))
    paths = ("lines.jsonl", "packed.jsonl.gz", "array.json", "words.jsonl")
    weights = (2.0, 1.0, 1.0, 0.5)
    parts = [
        {"path": str(folder / path), "name": name, "weight": weight}
        for path, name, weight in zip(paths, NAMES, weights, strict=True)
    ]
    raw["data"] |= {"train": [{"mix": parts}], "tokens_per_pack": 400}
    raw["optim"] |= {"steps": 8, "accumulation": 2}
    raw["checkpoint"] = {"every": 4}
    return raw


@pytest.mark.parametrize("stream", [None, pytest.param({"lanes": 2, "shuffle": 8}, marks=pytest.mark.slow)])
def test_each_source_of_a_mixture_has_its_loss_and_tokens(mixed, stream):
    mixed["data"]["stream"] = stream
    config = parse_config(mixed)
    summary = train(config)
    steps = [record for record in read_metrics(config.run.folder / "metrics.jsonl") if record["kind"] == "step"]
    for step in steps:
        sources = step["sources"]
        assert tuple(sources) == NAMES
        assert sum(source["tokens"] for source in sources.values()) == step["tokens"]
        supervised = sum(source["supervised"] for source in sources.values())
        summed = sum(source["loss"] * source["supervised"] for source in sources.values() if source["supervised"])
        assert summed / supervised == pytest.approx(step["loss"], rel=1e-5)
        assert all(source["waste"] == 0.0 for source in sources.values())
    counted = summary.to_dict()["data"]["samples"]
    assert counted["lines"]["used"]["samples"] > counted["words"]["used"]["samples"] > 0
    assert sum(source["used"]["tokens"] for source in counted.values()) == sum(step["tokens"] for step in steps)
    assert steps[-1]["sources"]["lines"]["loss"] < steps[0]["sources"]["lines"]["loss"]


@pytest.mark.parametrize("stream", [pytest.param(None, marks=pytest.mark.slow), {"lanes": 2, "shuffle": 8}])
def test_a_mixture_goes_on_from_a_checkpoint_as_if_never_stopped(mixed, stream, monkeypatch):
    mixed["data"]["stream"] = stream
    config = parse_config(mixed)
    train(config)
    whole = read_metrics(config.run.folder / "metrics.jsonl")

    mixed["run"]["folder"] += "-again"
    config = parse_config(mixed)
    from headway.train import loop

    rate = loop.learning_rate

    def killed_at_the_sixth_step(step, *settings):
        if step == 6:
            raise KeyboardInterrupt
        return rate(step, *settings)

    monkeypatch.setattr(loop, "learning_rate", killed_at_the_sixth_step)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    monkeypatch.undo()
    summary = train(config, resume=True)
    again = read_metrics(config.run.folder / "metrics.jsonl")
    assert [(r["step"], r["loss"], r["sources"]) for r in again] == [
        (r["step"], r["loss"], r["sources"]) for r in whole
    ]
    assert summary.report.samples.total("used").tokens == sum(record["tokens"] for record in again)
