"""The examples in docstrings are run."""

import doctest
import importlib
import pkgutil

import pytest

import headway

# torchtitan cannot be imported without Triton, for which its integration's own tests have a stand-in
LEFT_OUT = {"headway.__main__", "headway.integrations.torchtitan"}
MODULES = ["headway", *(module.name for module in pkgutil.walk_packages(headway.__path__, "headway."))]


@pytest.mark.parametrize("name", [name for name in MODULES if name not in LEFT_OUT])
def test_docstring_examples_give_what_they_show(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples_to_run():
    finder = doctest.DocTestFinder(exclude_empty=True)
    modules = [importlib.import_module(name) for name in ("headway", "headway.count.masks", "headway.cli.parse")]
    assert all(any(test.examples for test in finder.find(module)) for module in modules)
