"""A mixture of four sources, each of another format and written by its own library, teaches a model to read digits."""

import json
import math
from io import BytesIO

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
from PIL import Image

from headway.checkpoint import latest_checkpoint
from headway.config import parse_config
from headway.synthetic.digits import write_digits, write_reader
from headway.train.run import train
from helpers.runs import IS_LONG, read_metrics

NAMES = ("lines", "table", "shards", "saved")
ROWS = 600 if IS_LONG else 100  # of each source


def with_media_apart(line, folder):
    """A chat whose image parts name nothing, and the files that they named."""
    question, answer = json.loads(line)["messages"]
    files = [(folder / part["image"]).read_bytes() for part in question["content"] if part["type"] == "image"]
    parts = [{"type": "image"} if part["type"] == "image" else part for part in question["content"]]
    return [{**question, "content": parts}, answer], files


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Paths of the four, by name; each holds single digits of its own."""
    folder = tmp_path_factory.mktemp("formats")
    data = write_digits(folder, num_one_digit=4 * ROWS, num_train=1, num_eval=1, renderings=2)
    lines = data.one_digit.read_text().splitlines()
    chats = [with_media_apart(line, folder) for line in lines]

    openai = []
    for line in lines[:ROWS]:
        question, answer = json.loads(line)["messages"]
        parts = [
            {"type": "image_url", "image_url": {"url": part["image"]}} if part["type"] == "image" else part
            for part in question["content"]
        ]
        openai.append(json.dumps({"messages": [{**question, "content": parts}, answer]}))
    (folder / "lines.jsonl").write_text("\n".join(openai))

    rows = [{"messages": json.dumps(turns), "images": files} for turns, files in chats[ROWS : 2 * ROWS]]
    pq.write_table(pa.Table.from_pylist(rows), folder / "table.parquet", row_group_size=40)

    with webdataset.ShardWriter(str(folder / "shard-%03d.tar"), maxcount=40, verbose=0) as writer:
        for number, (turns, (png,)) in enumerate(chats[2 * ROWS : 3 * ROWS]):
            writer.write({"__key__": f"{number:05d}", "json": {"messages": turns}, "png": png})

    kinds = datasets.Features({"messages": datasets.Value("string"), "images": [datasets.Image()]})
    saved = chats[3 * ROWS :]
    columns = {
        "messages": [json.dumps(turns) for turns, _ in saved],
        "images": [[Image.open(BytesIO(png)) for png in files] for _, files in saved],
    }
    datasets.Dataset.from_dict(columns, features=kinds).save_to_disk(folder / "saved", num_shards=2)
    paths = (folder / "lines.jsonl", folder / "table.parquet", folder / "shard-*.tar", folder / "saved")
    return dict(zip(NAMES, map(str, paths), strict=True))


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    return write_reader(tmp_path_factory.mktemp("reader"))


def run(tmp_path, reader, train_stages, steps, **data):
    raw = {
        "model": {"path": str(reader), "random_init": True},
        "data": {"train": train_stages, "tokens_per_pack": 512, "workers": 0, **data},
        "optim": {"steps": steps, "lr": 2e-3, "betas": [0.9, 0.99], "weight_decay": 1.0, "warmup_steps": 10},
        "run": {"folder": str(tmp_path / "run"), "device": "cpu", "threads": 1},
    }
    config = parse_config(raw)
    summary = train(config)
    records = read_metrics(config.run.folder / "metrics.jsonl")
    return summary, [record for record in records if record["kind"] == "step"]


def mix(sources, **shares):
    return {"mix": [{"path": sources[name], "name": name, **share} for name, share in shares.items()]}


def check_sources_add_up(summary, steps):
    """Tokens and losses of the sources make those of each step, and those of all steps what the summary says."""
    tokens = dict.fromkeys(NAMES, 0)
    for step in steps:
        assert set(step["sources"]) <= {*NAMES}
        parts = [part for part in step["sources"].values() if part["supervised"]]
        supervised = sum(part["supervised"] for part in parts)
        assert step["loss"] == pytest.approx(sum(part["loss"] * part["supervised"] for part in parts) / supervised)
        assert step["tokens"] == sum(part["tokens"] for part in step["sources"].values())
        for name, part in step["sources"].items():
            tokens[name] += part["tokens"]
    counted = summary.to_dict()["data"]["samples"]
    for name in NAMES:
        assert counted[name]["read"] == counted[name]["used"]
        assert counted[name]["used"]["tokens"] == tokens[name]
        assert {counted[name][outcome]["samples"] for outcome in ("skipped", "dropped", "truncated", "split")} == {0}
    return {name: counted[name]["used"]["samples"] for name in NAMES}


@pytest.mark.slow
@pytest.mark.long
def test_four_formats_mixed_by_weight_teach_a_model_to_read(tmp_path, reader, sources):
    """Every answer is a digit and the end of the turn. Who knows that, and cannot read, has a loss of ln(10) / 2."""
    stage = mix(sources, **{name: {"weight": weight} for name, weight in zip(NAMES, (4, 3, 2, 1), strict=True)})
    summary, steps = run(tmp_path, reader, [stage], 200, window=500)
    used = check_sources_add_up(summary, steps)
    for name, weight in zip(NAMES, (4, 3, 2, 1), strict=True):
        assert used[name] / sum(used.values()) == pytest.approx(weight / 10, abs=0.02)
    assert steps[0]["loss"] > 5
    assert summary.last_loss < 0.9 * math.log(10) / 2


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(None, id="indexed"),
        pytest.param({"lanes": 4, "shuffle": 16}, id="stream", marks=pytest.mark.slow),
    ],
)
def test_four_formats_mixed_by_epochs_are_read_to_the_end(tmp_path, reader, sources, stream):
    """100, 200, 50 and 300 samples, all of them once they have ended."""
    epochs = {
        "lines": {"epochs": 1, "limit": 100},
        "table": {"epochs": 2, "limit": 100},
        "shards": {"epochs": 1, "limit": 50},
        "saved": {"epochs": 3, "limit": 100},
    }
    summary, steps = run(tmp_path, reader, [mix(sources, **epochs)], 1000, stream=stream, workers=1)
    assert summary.is_complete
    assert summary.model.exists()
    saved = latest_checkpoint(tmp_path / "run/checkpoints")
    counted = saved.position()["report"]["samples"]
    assert {name: counted[name]["used"]["samples"] for name in NAMES} == dict(
        zip(NAMES, (100, 200, 50, 300), strict=True)
    )
    for name in NAMES:
        parts = [step["sources"][name] for step in steps if name in step["sources"]]  # steps that have tokens of it
        assert sum(part["tokens"] for part in parts) == counted[name]["used"]["tokens"]
