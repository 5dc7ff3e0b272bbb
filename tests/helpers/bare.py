"""Processes that find some packages and no others: what a smaller machine or installation has."""

import os
import re
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src"
# Before anything else is imported, in a process and in those that it starts.
_ONLY_THESE = """
import importlib.metadata
import sys
from importlib.machinery import PathFinder

class Bare:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        makers = {maker.lower().replace("_", "-") for maker in DISTRIBUTIONS.get(name.partition(".")[0], ())}
        return self.finder.find_spec(name, path, target) if not makers or makers & ALLOWED else None

DISTRIBUTIONS, ALLOWED = importlib.metadata.packages_distributions(), set(%r)
sys.meta_path[:] = [Bare(finder) if finder is PathFinder else finder for finder in sys.meta_path]
"""


def bare_environment(folder, packages):
    """An environment whose processes find Headway, packages by name, what those require, and no others."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(_ONLY_THESE % sorted(_with_requirements(packages)))
    return os.environ | {"PYTHONPATH": os.pathsep.join((str(folder), str(SOURCES)))}


def _with_requirements(names):
    """Close a set of packages under what they require, extras left out."""
    reached = set()
    while names := {_plain(name) for name in names} - reached:
        reached |= names
        names = {requirement for name in names for requirement in _requirements(name)}
    return reached


def _requirements(name):
    try:
        lines = requires(name) or []
    except PackageNotFoundError:  # such as triton, on a machine without a GPU
        return []
    return [re.match(r"[\w.-]+", line).group() for line in lines if "extra ==" not in line]


def _plain(name):
    return name.lower().replace("_", "-")
