"""A mixture of four sources, each of another format and written by its own library, teaches a model to read digits."""

import json
from io import BytesIO

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
from PIL import Image

from headway.demo.digits import write_digits
from headway.demo.reader import write_reader
from headway.train.config import parse_config
from headway.train.loop import train
from headway.train.record import read_metrics

NAMES = ("lines", "table", "shards", "saved")
ROWS = 600  # of each source


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
    pq.write_table(pa.Table.from_pylist(rows), folder / "table.parquet", row_group_size=100)

    with webdataset.ShardWriter(str(folder / "shard-%03d.tar"), maxcount=150, verbose=0) as writer:
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
        "data": {"train": train_stages, "tokens_per_pack": 1024, "workers": 0, **data},
        "optim": {"steps": steps, "lr": 2e-3, "betas": [0.9, 0.99], "weight_decay": 1.0, "warmup_steps": 10},
        "run": {"folder": str(tmp_path / "run"), "device": "cpu", "threads": 1},
    }
    config = parse_config(raw)
    summary = train(config)
    records = read_metrics(config.run.folder / "metrics.jsonl")
    return summary, [record for record in records if record["kind"] == "step"]


def test_try(tmp_path, reader, sources):
    import time
    stages = [{"mix": [{"path": path, "name": name, "weight": w} for (name, path), w in zip(sources.items(), (4, 3, 2, 1))]}]
    t = time.time()
    summary, steps = run(tmp_path, reader, stages, 160)
    print([round(s["loss"], 2) for s in steps[::8]], time.time() - t)
    print(steps[-1]["sources"], summary.as_json()["data"])
