"""Sources of several shards, and a cache of their own."""

import pytest

from headway.data.sources import open_source
from helpers.data import write_shards


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def two_sources(tmp_path):
    """37 chats in 5 files, and 11 in one."""
    return (
        open_source(write_shards(tmp_path / "many", 37, 5), name="many"),
        open_source(write_shards(tmp_path / "few", 11, 1), name="few"),
    )
