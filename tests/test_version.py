"""How more of the package is installed: from where the package itself came."""

from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway.version import install_command


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ('{"url": "FOLDER", "dir_info": {}}', "pip install '.[train]'"),
        ('{"url": "FOLDER", "dir_info": {"editable": true}}', "pip install '.[train]'"),
        ('{"url": "file:///somewhere/my%20clone", "dir_info": {}}', "pip install '/somewhere/my clone[train]'"),
        ('{"url": "https://host/headway.whl", "archive_info": {}}', "pip install 'headway[train]'"),
        (None, "pip install 'headway[train]'"),
        ("{", "pip install 'headway[train]'"),
    ],
    ids=["clone", "editable", "elsewhere", "wheel", "index", "damaged"],
)
def test_the_command_names_the_place_that_the_package_came_from(origin, command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = origin and origin.replace("FOLDER", Path.cwd().as_uri())
    monkeypatch.setattr(metadata, "distribution", lambda _: SimpleNamespace(read_text=lambda _: text))
    assert install_command("train") == command


def test_a_package_that_was_never_installed_has_a_command(monkeypatch):
    def nothing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", nothing)
    assert install_command("demo") == "pip install 'headway[demo]'"
