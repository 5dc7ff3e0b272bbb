"""A cache of its own for every test, and an empty file system in memory that stands for a remote store."""

import fsspec
import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("HEADWAY_CACHE", str(folder))
    return folder


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    yield system
    for path in system.find("/"):
        system.rm_file(path)
