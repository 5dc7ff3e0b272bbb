from pathlib import Path

import pytest

from headway.cache import cache_root


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, "/home/ada/.cache/headway"),
        ({"XDG_CACHE_HOME": "/scratch"}, "/scratch/headway"),
        ({"XDG_CACHE_HOME": "/scratch", "HEADWAY_CACHE": "/shared/tokens"}, "/shared/tokens"),
        ({"HEADWAY_CACHE": "~/indices"}, "/home/ada/indices"),
    ],
)
def test_the_cache_lies_where_the_environment_says(variables, folder, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    for name in ("XDG_CACHE_HOME", "HEADWAY_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert cache_root() == Path(folder)
