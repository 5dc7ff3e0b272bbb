"""A resumed run reads the data that it began with, or says which file was changed."""

import os
import shutil

import pytest

from headway.config import parse_config, with_overrides
from headway.errors import CheckpointError
from headway.train import agreement
from headway.train.run import train


@pytest.fixture
def stopped(raw, digits, tmp_path):
    """Train two steps on a copy of the data; the file, and configurations of a run that goes on, with changes."""
    path = tmp_path / "chats.jsonl"

    def run():
        shutil.copy(digits / "data/train.jsonl", path)
        raw["data"]["train"] = [{"path": str(path), "root": str(digits / "data")}]
        train(parse_config(with_overrides(raw, ["optim.steps=2"])))
        return path, lambda *changes: parse_config(with_overrides(raw, ["optim.steps=3", *changes]))

    return run


def test_data_rewritten_at_equal_lengths_are_refused_by_name_and_copies_go_on(stopped):
    path, longer = stopped()
    content, status = path.read_bytes(), path.stat()
    path.write_bytes(content.translate(bytes.maketrans(b"0123456789", b"1234567890")))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(CheckpointError, match=r"chats\.jsonl of the source chats has other content"):
        train(longer(), resume=True)
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    assert train(longer(), resume=True).steps == 3


@pytest.mark.slow
def test_large_data_are_known_by_their_times_and_a_setting_takes_copies(stopped, monkeypatch):
    monkeypatch.setattr(agreement, "is_small", lambda _: False)
    path, longer = stopped()
    os.utime(path, ns=(10**18, 10**18))
    with pytest.raises(CheckpointError, match=r"chats was changed: 2001-.* the state with data\.verify: size, which"):
        train(longer(), resume=True)
    assert train(longer("data.verify=size"), resume=True).steps == 3


@pytest.mark.slow
def test_hashes_that_were_asked_for_take_copies_and_find_rewrites(stopped, raw, monkeypatch):
    monkeypatch.setattr(agreement, "is_small", lambda _: False)
    raw["data"]["verify"] = "hash"
    path, longer = stopped()
    os.utime(path, ns=(10**18, 10**18))
    assert train(longer(), resume=True).steps == 3
    path.write_bytes(path.read_bytes().replace(b"1", b"2"))
    with pytest.raises(CheckpointError, match="has other content"):
        train(longer("optim.steps=4"), resume=True)
