"""The examples in docstrings are run."""

import doctest
import importlib
import linecache
import re
from pathlib import Path

import pytest

import headway

# torchtitan cannot be imported without Triton, for which its integration's own tests have a stand-in
LEFT_OUT = {"headway.__main__", "headway.integrations.torchtitan"}
RUN = re.compile(r"^ *>>> (?!.*\+SKIP)", flags=re.MULTILINE)
ROOT = Path(headway.__path__[0])
NAMES = {
    ".".join(("headway", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if RUN.search(path.read_text(encoding="utf-8"))
}


@pytest.mark.parametrize("name", sorted(NAMES - LEFT_OUT))
def test_docstring_examples_give_what_they_show(name):
    linecache.clearcache()  # doctest asks of every file in it whether it has changed
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted
    assert not found.failed
