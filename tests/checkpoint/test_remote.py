"""A run that lives behind a URL: its checkpoints, records and exports are in the store, and it goes on from there."""

import random
import shutil
import signal
import time
from pathlib import Path

import fsspec
import pytest
import yaml

from headway import stores
from headway.answer.model_folder import find_model
from headway.checkpoint.export import find_checkpoint_in
from headway.config import parse_config
from headway.errors import CheckpointError, ConfigError
from headway.log.run_files import run_copy
from headway.models.load import load_model
from headway.train.check import check_run
from headway.train.run import train
from helpers.processes import TRAIN, run_processes, start_processes
from helpers.runs import IS_LONG, read_metrics

KILLS = 10 if IS_LONG else 2


@pytest.fixture
def remote(raw, tmp_path, monkeypatch):
    """A configuration whose run folder is a URL, and the folder in which that store keeps its objects."""
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    raw["run"]["folder"] = f"file://{tmp_path / 'store/run'}"
    raw["checkpoint"] = {"every": 2}
    return raw, tmp_path / "store/run"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def forget(tmp_path):
    """Lose the machine's disk: what is in the store is all that is left."""
    shutil.rmtree(tmp_path / "cache")


def test_a_run_goes_on_from_the_store_to_the_bit_and_is_read_from_there(remote, tmp_path):
    raw, store = remote
    raw["optim"]["schedule"] = "constant"
    url = Path(raw["run"]["folder"])
    alone = train(parse_config(raw | {"run": raw["run"] | {"folder": str(tmp_path / "alone")}}))
    begun = train(
        parse_config(raw | {"optim": raw["optim"] | {"steps": 3}, "checkpoint": {"every": 2, "export": "never"}})
    )
    assert begun.to_dict()["checkpoint"] == stores.url_of(url / "checkpoints/step-000003")
    assert names(store / "checkpoints") == ["step-000002", "step-000003"]
    forget(tmp_path)
    with pytest.raises(ConfigError, match=r"the run folder file://.*/store/run already holds a run"):
        train(parse_config(raw))
    forget(tmp_path)
    ended = train(parse_config(raw), resume=True)
    assert ended.steps == 6
    assert names(store / "checkpoints") == ["step-000004", "step-000006"]
    assert names(store / "export") == ["step-000006"]
    records = [record for record in read_metrics(store / "metrics.jsonl") if record["kind"] == "step"]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    losses = [record["loss"] for record in read_metrics(alone.folder / "metrics.jsonl") if record["kind"] == "step"]
    assert [record["loss"] for record in records] == losses
    forget(tmp_path)
    checked = check_run(run_copy(url), alone.folder)
    assert checked.faults == ()
    assert checked.verdict == "nothing was lost or repeated in steps 1 to 6"
    assert yaml.safe_load((store / "config.yaml").read_text())["run"]["folder"] == stores.url_of(url)
    # its newest model, and the checkpoint that it was made of, whose tensors are read where they are
    location = find_model(str(url))
    assert location.kind == "model"
    exported = load_model(location.path).state_dict()
    checkpoint = find_checkpoint_in(url)
    assert checkpoint.step == 6
    assert not list((tmp_path / "cache").rglob("*.distcp"))
    assert exported.keys() == load_model(alone.model).state_dict().keys()
    assert find_model(str(stores.place(checkpoint.folder))).kind == "checkpoint"
    piece = next((store / "checkpoints/step-000006").glob("*.distcp"))
    piece.write_bytes(piece.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp has \d+ of \d+ bytes"):
        find_checkpoint_in(url)


@pytest.mark.slow
def test_a_checkpoint_that_the_store_refuses_is_told_and_the_one_before_is_gone_on_from(remote, tmp_path, monkeypatch):
    """A store has no renaming: what has no manifest is no checkpoint, and is deleted by the run that goes on."""
    raw, store = remote
    system = type(fsspec.filesystem("file"))
    put = system.put_file

    def refuse_manifest(self, source, target, **options):
        if target.endswith("step-000004/manifest.json"):
            raise PermissionError(13, "Access Denied")
        return put(self, source, target, **options)

    with monkeypatch.context() as patched:
        patched.setattr(system, "put_file", refuse_manifest)
        with pytest.raises(
            CheckpointError, match=r"the checkpoint of step 4 to file://.*/checkpoints: .*Access Denied"
        ):
            train(parse_config(raw))
    assert not (store / "checkpoints/step-000004/manifest.json").exists()
    assert (store / "checkpoints/step-000004/__0_0.distcp").is_file()
    forget(tmp_path)
    assert train(parse_config(raw), resume=True).is_complete
    assert names(store / "checkpoints") == ["step-000004", "step-000006"]
    assert check_run(run_copy(Path(raw["run"]["folder"]))).faults == ()


@pytest.fixture
def bucket(monkeypatch):
    """A bucket of an S3-compatible server on this machine."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {"ENDPOINT_URL": f"http://{host}:{port}", "DEFAULT_REGION": "us-east-1"}
    for name, value in (settings | {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test"}).items():
        monkeypatch.setenv(f"AWS_{name}", value)
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bucket")
    yield "s3://bucket"
    server.stop()


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_on_an_object_store_survives_kills_and_lost_disks(raw, bucket, tmp_path, monkeypatch):
    """Each kill takes the machine's disk with it; `check` proves from the store that no sample was lost or repeated."""
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    url = f"{bucket}/run"
    raw["run"]["folder"], raw["checkpoint"] = url, {"every": 3}
    raw["optim"]["steps"] = 24
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw))
    command = [*TRAIN, str(tmp_path / "run.yaml"), "--resume-if-any"]
    chance = random.Random(0)
    for _ in range(KILLS):
        metrics, enough = stores.spool(Path(url)) / "metrics.jsonl", chance.randint(4, 8)
        (process,) = start_processes(command, 1, tmp_path)
        since, deadline_s = None, time.monotonic() + 120
        while since is None or metrics.read_text().count('"kind": "step"') < since + enough:
            assert process.poll() is None, process.err.read_text()
            assert time.monotonic() < deadline_s
            if since is None and metrics.is_file():
                since = metrics.read_text().count('"kind": "step"')
            time.sleep(0.01)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        forget(tmp_path)
    run_processes(command, 1)
    forget(tmp_path)
    checked = check_run(run_copy(Path(url)))
    assert checked.faults == ()
    assert checked.verdict == "nothing was lost or repeated in steps 1 to 24"
    assert not Path("s3:").exists()
    assert load_model(find_model(url).path).num_parameters() > 0
