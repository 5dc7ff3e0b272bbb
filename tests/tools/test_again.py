"""Running failed tests again: what passes then is flaky, what fails twice fails, what never ran is no pass."""

import re

import pytest

from tools.again import MOST_FLAKY, main

FLAKY = """
from pathlib import Path

def test_passes_the_second_time():
    seen = Path(__file__).with_name("seen")
    was_there = seen.exists()
    seen.touch()
    assert was_there
"""
BROKEN_SETUP = """
import pytest

@pytest.fixture
def broken():
    raise OSError("no port")

def test_needs_it(broken):
    pass
"""
CRASH = "import os\n\ndef test_ends_its_process():\n    os._exit(9)\n"
GOOD = "def test_is_well():\n    pass\n"
BAD = "def test_is_wrong():\n    assert not 'right'\n"
MANY = "import pytest\n\n@pytest.mark.parametrize('n', range({}))\ndef test_is_wrong(n):\n    assert not 'right'\n"


@pytest.mark.parametrize(
    ("files", "status", "flaky", "twice"),
    [
        ({"good": GOOD}, 0, [], []),
        ({"good": GOOD, "flaky": FLAKY}, 0, ["flaky.py::test_passes_the_second_time"], []),
        ({"flaky": FLAKY, "bad": BAD}, 1, ["flaky.py::test_passes_the_second_time"], ["bad.py::test_is_wrong"]),
        ({"setup": BROKEN_SETUP, "good": GOOD}, 1, [], ["setup.py::test_needs_it"]),
        ({"many": MANY.format(MOST_FLAKY + 1)}, 1, [], []),
        ({"unreadable": "import nothing_of_this_name\n", "flaky": FLAKY}, 1, [], []),
        ({}, 5, [], []),
    ],
    ids=["passes", "flaky", "fails", "set-up", "many", "collection", "empty"],
)
def test_what_failed_is_run_once_more(files, status, flaky, twice, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\npython_files = test_*.py\n")
    for name, text in files.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    assert main(["-q", "--numprocesses=2"]) == status
    lines = capfd.readouterr().out.splitlines()
    assert any(re.fullmatch(r"(\d+ \w+, )*(\d+ \w+|no tests ran) in .*", line) for line in lines), "no closing line"
    assert [line for line in lines if line.startswith("flaky: ")] == [f"flaky: test_{name}" for name in flaky]
    assert [line for line in lines if line.startswith("failed twice: ")] == [f"failed twice: test_{n}" for n in twice]


def test_a_test_that_ends_its_worker_fails_twice(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_crash.py").write_text(CRASH)
    (tmp_path / "test_good.py").write_text(GOOD)
    assert main(["-q", "--numprocesses=2"]) == 1
    assert "failed twice: test_crash.py::test_ends_its_process" in capfd.readouterr().out.splitlines()
