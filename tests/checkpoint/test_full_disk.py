"""A folder that finds no room is told in the system's words, leaves nothing behind, and is made once there is room."""

import shutil
import subprocess
from contextlib import contextmanager

import pytest
import yaml

from headway.checkpoint.export import export, find_checkpoint_in
from headway.cli.app import app
from headway.config import parse_config
from headway.data.sources import open_source
from headway.errors import CheckpointError, RunCompleteError
from headway.synthetic.new_model import write_new_model
from headway.train.prepare import exports_of
from headway.train.run import train

_NO_ROOM = r"cannot write the model folder .*: No space left on device\. Make room or give another folder\."


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 4 MiB of its own; skipped where none may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=False).returncode
    if mounted != 0:
        pytest.skip("no file system may be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def room_for(num_bytes, disk):
    """Leave so much room on a disk [bytes]."""
    filler = disk / "filler"
    filler.write_bytes(bytes(max(0, shutil.disk_usage(disk).free - num_bytes)))
    try:
        yield
    finally:
        filler.unlink()


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "filler")


def test_every_door_that_writes_a_model_tells_of_a_full_disk_and_tidies(raw, small_disk, capsys, tmp_path):
    """And a finished run makes the export that found no room, once it is resumed; after that nothing is left to do."""
    run = small_disk / "run"
    raw |= {"run": raw["run"] | {"folder": str(run)}, "optim": {"steps": 1, "lr": 1e-3}, "checkpoint": {"keep": 1}}
    config = parse_config(raw)
    train(parse_config(raw | {"checkpoint": {"keep": 1, "export": "never"}}))
    checkpoint = find_checkpoint_in(run)
    export(checkpoint, tmp_path / "model")
    weights = (tmp_path / "model/model.safetensors").stat().st_size
    for room in (0, weights // 2, weights):  # nowhere, within the weights, within what stands beside them
        with room_for(room, small_disk), pytest.raises(CheckpointError, match=_NO_ROOM):
            export(checkpoint, small_disk / "model")
        with room_for(room, small_disk), pytest.raises(CheckpointError, match=_NO_ROOM):
            exports_of(config).make(checkpoint)
        assert names_in(small_disk) == ["run"]
        assert names_in(run / "export") == []
    (tmp_path / "chats.jsonl").write_text('{"text": "hello there"}\n')
    with room_for(100_000, small_disk), pytest.raises(CheckpointError, match=_NO_ROOM):
        write_new_model(
            small_disk / "new", [open_source(tmp_path / "chats.jsonl")], like=None, size=10**6, vocab_size=300, seed=0
        )
    assert names_in(small_disk) == ["run"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw))
    app(["train", str(tmp_path / "run.yaml"), "--resume"], standalone_mode=False)
    assert "Its export was missing, so Headway writes it now" in " ".join(capsys.readouterr().err.split())
    assert names_in(run / "export") == ["step-000001"]
    with pytest.raises(RunCompleteError):
        app(["train", str(tmp_path / "run.yaml"), "--resume"], standalone_mode=False)
