"""A run's losses are the same to the bit without a cache of samples, with an empty, a full or a half-written one."""

import json
from pathlib import Path

import pytest
import yaml

from headway.config import parse_config
from headway.data.sample_cache import samples_root
from headway.train.run import train
from helpers.processes import TRAIN, run_processes
from helpers.rollouts import write_pictured_pairs
from helpers.runs import read_metrics

ALL_READ = "encoded samples: 160 of 160 read from the cache"
pytestmark = pytest.mark.usefixtures("own_cache")


def losses(folder):
    kept = ("step", "loss", "grad_norm", "tokens", "samples_digest", "flops")
    return [{name: record.get(name) for name in kept} for record in read_metrics(Path(folder) / "metrics.jsonl")]


def line_of(capfd):
    """The end of a run's line on the cache, without its size and place."""
    return next(line for line in capfd.readouterr().err.splitlines() if "encoded samples" in line).partition(",")[0]


def run(raw, folder, cache):
    changed = raw | {"run": raw["run"] | {"folder": str(folder)}, "data": raw["data"] | {"cache_encoded": cache}}
    return parse_config(json.loads(json.dumps(changed)))


def test_a_run_trains_on_the_same_without_and_with_a_cold_a_warm_and_a_half_written_cache(
    raw, tmp_path, killed_before, capfd
):
    raw["optim"] = {"epochs": 2, "lr": 2e-3}
    raw["checkpoint"] = {"every": 2, "export": "never"}
    raw["data"]["tokens_per_pack"] = 640
    train(run(raw, tmp_path / "off", "off"))
    assert not samples_root().exists()
    assert "encoded samples" not in capfd.readouterr().err
    wanted = losses(tmp_path / "off")
    # A run that is killed leaves a part of the cache, from which it goes on when it is resumed.
    killed_before(run(raw, tmp_path / "killed", "auto"), 4)
    train(run(raw, tmp_path / "killed", "auto"), resume=True)
    assert losses(tmp_path / "killed") == wanted
    capfd.readouterr()
    train(run(raw, tmp_path / "warm", "auto"))
    assert losses(tmp_path / "warm") == wanted
    assert line_of(capfd) == ALL_READ
    # Other processes read what this one wrote.
    raw["data"] |= {"workers": 2, "prefetch_bytes": 2_000_000}
    train(run(raw, tmp_path / "workers", "1GiB"))
    assert losses(tmp_path / "workers") == wanted
    assert line_of(capfd) == ALL_READ


@pytest.mark.parametrize("loss", ["simpo", "kto"])
def test_pairs_are_learnt_the_same_from_the_cache(raw, digits, tmp_path, loss, capfd):
    pairs = write_pictured_pairs(digits, digits / "data/pairs.jsonl", 24)
    raw["data"] |= {"train": str(pairs), "tokens_per_pack": 300}
    raw["optim"] = {"epochs": 2, "lr": 2e-3}
    raw["preference"] = {"loss": loss}
    found = []
    for name, cache in (("off", "off"), ("cold", "auto"), ("warm", "auto")):
        train(run(raw, tmp_path / name, cache))
        found.append(losses(tmp_path / name))
    assert found[0] == found[1] == found[2]
    is_read = "48 of 48 read from the cache" in capfd.readouterr().err
    assert is_read == (loss != "kto")  # rows of KTO are read for their grades


def test_a_plain_run_does_not_take_the_rows_of_pairs_for_chats(raw, digits, tmp_path):
    """An entry of one objective is none of another, which may refuse such rows."""
    pairs = write_pictured_pairs(digits, digits / "data/pairs.jsonl", 24)
    raw["data"] |= {"train": str(pairs), "tokens_per_pack": 300}
    raw["preference"] = {"loss": "simpo"}
    train(run(raw, tmp_path / "pairs", "auto"))
    del raw["preference"]
    with pytest.raises(Exception, match="some are better than others"):
        train(run(raw, tmp_path / "chats", "auto"))


def test_a_folder_that_cannot_be_written_is_one_warning(raw, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/samples").write_text("no folder")
    with pytest.warns(RuntimeWarning, match="cannot be written to .*samples") as warned:
        train(run(raw, tmp_path / "run", "auto"))
    assert len([w for w in warned if "Encoded samples" in str(w.message)]) == 1
    train(run(raw, tmp_path / "off", "off"))
    assert losses(tmp_path / "run") == losses(tmp_path / "off")


@pytest.mark.dist
@pytest.mark.slow
def test_three_ranks_share_a_cache(raw, tmp_path):
    raw["optim"] = {"epochs": 2, "lr": 2e-3}
    raw["data"] |= {"workers": 1, "prefetch_bytes": 2_000_000}
    found = []
    for name, cache in (("off", "off"), ("cold", "auto"), ("warm", "auto")):
        path = tmp_path / f"{name}.yaml"
        config = raw | {"run": raw["run"] | {"folder": str(tmp_path / name)}}
        path.write_text(yaml.safe_dump(config | {"data": raw["data"] | {"cache_encoded": cache}}))
        run_processes([*TRAIN, path], 3, cwd=tmp_path)
        found.append(losses(tmp_path / name))
    assert found[0] == found[1] == found[2]
