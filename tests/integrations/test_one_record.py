"""Every loop writes the same step record: one schema, one set of names."""

import json

import pytest
import torch

from headway.log.records import read_records
from headway.meter import Meter
from headway.meter.window import SCHEMA_VERSION
from helpers.device import Device
from helpers.loops import (
    PEAK,
    ROWS,
    hugging_face,
    in_accelerate,
    in_lightning,
    in_megatron,
    loader,
    tiny,
    tiny_cost_model,
)

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*does not have many workers:UserWarning", "ignore:.*treespec, LeafSpec.* is deprecated:FutureWarning"
    ),
]
# what `headway train` adds of its own
OF_THE_ENGINE = {"epoch", "loss", "lr", "grad_norm", "compiled", "recompiles", "packs", "making_s", "samples_digest"}


def in_a_plain_loop(_folder):
    def run(_device, **options):
        model = tiny()
        with Meter(model, cost_model=tiny_cost_model(), peak=PEAK, log_every=1, **options) as meter:
            for batch in meter.batches(loader(ROWS[:2], 1)):
                meter.count(batch)
                model(**batch).loss.backward()
                meter.step()

    return run


@pytest.fixture(scope="module")
def plain_names(tmp_path_factory):
    return names_of(in_a_plain_loop, tmp_path_factory.mktemp("plain"))


def names_of(loop, folder):
    """Run a loop that logs to a file; returns the names of its records, which are those of one schema."""
    path = folder / "metrics.jsonl"
    loop(folder)(Device(), log_to=[path])
    records = [record for record in read_records(path) if record["kind"] == "step"]
    assert records
    assert {record["schema_version"] for record in records} == {SCHEMA_VERSION}
    (names,) = {frozenset(record) for record in records}
    return names


@pytest.mark.parametrize("loop", [hugging_face, in_accelerate, in_lightning, in_megatron])
def test_every_integration_writes_the_record_of_a_plain_loop(tmp_path, loop, plain_names):
    assert names_of(loop, tmp_path) == plain_names


def test_the_engine_writes_the_same_record_and_its_own_numbers(tmp_path, plain_names):
    from headway.config import parse_config
    from headway.train.run import train
    from helpers.runs import configuration, write_model

    turns = [{"role": "user", "content": "Which picture is it?"}, {"role": "assistant", "content": "It is the one."}]
    (tmp_path / "text.jsonl").write_text("\n".join([json.dumps({"messages": turns})] * 16))
    data = [{"path": str(tmp_path / "text.jsonl"), "name": "text"}]
    changes = {"optim": {"steps": 3, "warmup_steps": 1}}
    raw = configuration(write_model(tmp_path / "model", "qwen3"), data, tmp_path / "run", overrides=changes)
    torch.set_num_threads(1)
    train(parse_config(raw))
    records = [one for one in read_records(tmp_path / "run/metrics.jsonl") if one["kind"] == "step"]
    assert len(records) == 3
    assert {record["schema_version"] for record in records} == {SCHEMA_VERSION}
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_bytes().splitlines()]
    unsampled = [json.dumps(line) for line in lines if line["kind"] == "step" and "phases_s" not in line]
    assert all(len(line) <= 1000 for line in unsampled)
    assert sum(len(json.dumps(line)) for line in lines[1:]) <= 3 * 1200
    for record in records:
        assert record.keys() - OF_THE_ENGINE == plain_names
        assert record.keys() >= OF_THE_ENGINE
