"""Everything that can be said of a dataset can be said in the configuration."""

import json
from pathlib import Path

import numpy as np
import pytest

from headway.config import parse_config
from headway.config.data import DataConfig
from headway.data.media.sizes import MediaSizes
from headway.errors import ConfigError
from headway.train.data import open_stages, overlong_of
from headway.train.run import train
from helpers.runs import read_metrics


@pytest.fixture
def folders(tmp_path):
    """Datasets of one name in two folders: lines of text, and bare token ids of five documents."""
    for name in ("words", "ids"):
        (tmp_path / name).mkdir()
    (tmp_path / "words/train.txt").write_text("one two\nthree\nfour five six\n")
    ids = np.tile(np.array([25, 26, 27, 23], dtype=np.uint16), 5)
    (tmp_path / "ids/train.bin").write_bytes(ids.tobytes())
    return tmp_path


def test_formats_are_read_as_yaml_says_and_two_files_may_have_one_name(raw, folders):
    raw["data"] |= {
        "train": [
            {"path": str(folders / "words/train.txt"), "sample_by": "line"},
            {"path": str(folders / "ids/train.bin"), "token_dtype": "uint16", "end_token": 23},
        ]
    }
    raw["optim"] |= {"steps": None, "epochs": 2, "warmup_steps": 0}
    counted = train(parse_config(raw)).to_dict()["data"]["samples"]
    assert {name: count["used"]["samples"] for name, count in counted.items()} == {"words/train": 6, "ids/train": 10}
    assert counted["ids/train"]["used"]["tokens"] == 2 * 5 * 4


def stages_of(train, **settings):
    return open_stages(DataConfig(train=train, tokens_per_pack=64, **settings), epochs=1)


def test_names_are_told_apart_by_folders_then_by_extensions_unless_they_are_given(folders):
    (folders / "words/train.jsonl").write_text(json.dumps({"text": "one"}))
    paths = [str(folders / name) for name in ("words/train.txt", "words/train.jsonl")]
    sources, _ = stages_of(paths)
    assert [source.name for source in sources] == paths
    sources, (stage,) = stages_of([{"path": paths[0], "name": "a"}, paths[1]])
    assert [source.name for source in sources] == ["a", "train"]
    assert [(part.name, part.weight, part.epochs) for part in stage.sources] == [
        ("a", None, None),
        ("train",) + 2 * (None,),
    ]


def test_one_file_read_in_two_ways_needs_names(folders):
    path = str(folders / "words/train.txt")
    with pytest.raises(ConfigError, match=r"two sources called 'train'.* Give each source its own 'name'"):
        stages_of([path, {"path": path, "sample_by": "line"}])
    with pytest.raises(ConfigError, match=r"token_dtype is 'uint16', but no file of .* takes it"):
        stages_of({"path": path, "token_dtype": "uint16"})


def test_bounds_and_policy_of_a_source_come_before_those_of_the_run(folders):
    path = str(folders / "words/train.txt")
    train = [
        {"path": path, "name": "a", "max_pixels": 4096, "fps": 1.0, "overlong": "drop"},
        {"path": path, "name": "b", "overlong": "split"},
        {"path": path, "name": "c"},
    ]
    sources, _ = stages_of(train, max_pixels=9000, overlong="truncate")
    assert [source.sizes for source in sources] == [MediaSizes(max_pixels=4096, fps=1.0), MediaSizes(), MediaSizes()]
    config = DataConfig(train=train, tokens_per_pack=64, overlong="truncate")
    assert overlong_of(config) == {"a": "drop", "b": "split", "c": "truncate"}
    assert overlong_of(DataConfig(train=train[2:], tokens_per_pack=64, overlong="truncate")) == "truncate"
    mixed = DataConfig(stages=[{"path": path, "epochs": 1}, {"mix": train[:2]}], tokens_per_pack=64)
    assert overlong_of(mixed) == {"train": "error", "a": "drop", "b": "split"}


@pytest.mark.parametrize("setting", [{"max_pixels": 4096}, {"overlong": "drop"}])
def test_one_file_with_two_bounds_or_policies_needs_names(folders, setting):
    path = str(folders / "words/train.txt")
    with pytest.raises(ConfigError, match=r"two sources called 'train'.* Give each source its own 'name'"):
        stages_of([path, {"path": path, **setting}])


@pytest.mark.parametrize("stream", [None, {"lanes": 2, "shuffle": 1}], ids=["indexed", "streamed"])
@pytest.mark.parametrize("place", ["run", "source"])
def test_bounds_on_pictures_hold_in_training_and_in_the_export_and_a_resume_keeps_them(raw, stream, place):
    raw["data"]["stream"] = stream
    raw["optim"] |= {"steps": 2}
    raw["checkpoint"] = {"every": 1}
    plain = patches(train(parse_config(raw)), raw)
    bounds = {"min_pixels": 64, "max_pixels": 256}
    (raw["data"] if place == "run" else raw["data"]["train"][0]).update(bounds)
    raw["run"]["folder"] += "-small"
    summary = train(parse_config(raw))
    assert patches(summary, raw) <= 0.6 * plain
    images = json.loads((summary.model / "processor_config.json").read_text())["image_processor"]
    assert (images["size"]["longest_edge"] == 256) == (place == "run")
    (raw["data"] if place == "run" else raw["data"]["train"][0])["max_pixels"] = 512
    raw["optim"]["steps"] = 3
    with pytest.raises(ConfigError, match="max_pixels"):
        train(parse_config(raw), resume=True)


def patches(summary, raw):
    """Patches of each token that was trained on."""
    records = [each for each in read_metrics(Path(raw["run"]["folder"], "metrics.jsonl")) if each["kind"] == "step"]
    assert summary.steps == len(records)
    return sum(each["patches"] for each in records) / sum(each["segments"] for each in records)


def test_packs_made_ahead_may_not_exceed_the_memory_of_the_machine(raw):
    raw["data"]["prefetch_bytes"] = 2**50
    with pytest.raises(ConfigError, match=r"data.prefetch_bytes \d+ is more than this machine's memory"):
        train(parse_config(raw))
