"""A manifest that cannot be true of a checkpoint is refused, and so is a checkpoint with a link in it."""

import json

import pytest
import torch

from headway.checkpoint import CheckpointSaver, Contents, open_checkpoint, random_state, restore_random_state
from headway.checkpoint.export import export, find_checkpoint_in
from headway.errors import CheckpointError
from headway.models.parallel.ranks import Ranks


@pytest.fixture
def checkpoint(tmp_path):
    def describe(folder):
        (folder / "config.json").write_text("{}")

    with CheckpointSaver(tmp_path, Ranks(0, 1), keep=1) as saver:
        saver.save(5, Contents({"model.a": torch.ones(2)}, random_state(), {"at": 5}, {"data": 1}, describe))
        return saver.wait()


def _entry(name):
    return {name: {"bytes": 1, "sha256": "0" * 64}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": -5}, "gives the step -5"),
        ({"step": True}, "gives the step True"),
        ({"step": 10**9}, "gives the step 1000000000, and the folder's name another"),
        ({"world_size": 0}, "gives 0 processes"),
        ({"world_size": 10**9}, r"lists \d files of 1000000000 processes"),
        ({"world_size": 2}, "does not list rank-00001.pt"),
        ({"mesh": {"data": 0}}, "gives 1 processes as {'data': 0}"),
        ({"files": {}}, "lists 0 files"),
        ({"files": _entry(".metadata")}, "does not list position.json"),
        ({"files": _entry("../../etc/passwd")}, "lists '../../etc/passwd'"),
        ({"files": _entry("/etc/passwd")}, "lists '/etc/passwd'"),
        ({"files": {"a": {"bytes": -1, "sha256": "0" * 64}}}, "with -1 bytes"),
        ({"files": {"a": {"bytes": 1, "sha256": None}}}, "the checksum None"),
        ({"files": 7}, "cannot be read"),
    ],
)
def test_a_manifest_that_cannot_be_true_is_refused(changes, message, checkpoint):
    path = checkpoint.folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(checkpoint.folder)


@pytest.mark.parametrize("name", ["model/secret.json", "model/config.json", "rank-00000.pt", "elsewhere"])
def test_a_link_is_not_followed(name, checkpoint, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("mine")
    link = checkpoint.folder / name
    link.unlink(missing_ok=True)
    link.symlink_to(secret)
    with pytest.raises(CheckpointError, match=f"holds a link, {name}"):
        find_checkpoint_in(checkpoint.folder)
    with pytest.raises(CheckpointError, match=f"holds a link, {name}"):
        export(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_copy_may_have_another_name(checkpoint, tmp_path):
    assert open_checkpoint(checkpoint.folder.rename(tmp_path / "kept")).step == 5


def test_a_manifest_with_the_digest_that_earlier_versions_wrote_is_read(checkpoint):
    path = checkpoint.folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architecture": "0" * 64}))
    assert open_checkpoint(checkpoint.folder) == checkpoint


def test_what_is_no_state_of_random_generators_is_told(checkpoint):
    (checkpoint.folder / "rank-00000.pt").write_bytes(b"\x80\x02c")
    with pytest.raises(CheckpointError, match=r"rank-00000\.pt cannot be read"):
        checkpoint.random_state(0)
    for state in ({}, {"python": (3, (1,), None)}, random_state() | {"torch": torch.zeros(3, dtype=torch.uint8)}):
        with pytest.raises(CheckpointError, match="random generators cannot be restored"):
            restore_random_state(state)


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000])
def test_a_position_that_is_none_is_told(content, checkpoint):
    (checkpoint.folder / "position.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"position\.json cannot be read"):
        checkpoint.position()
