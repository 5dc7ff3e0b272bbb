"""Running failed tests again: what passes then is flaky, what fails twice fails, what never ran is no pass."""

import os
import re
import shutil
import subprocess
import sys

import psutil
import pytest

from helpers.processes import ROOT
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


BROKEN = {"bad": BAD, "setup": BROKEN_SETUP, "crash": CRASH}


@pytest.mark.parametrize(
    ("files", "status", "flaky", "twice"),
    [
        ({"good": GOOD, "flaky": FLAKY}, 0, ["flaky.py::test_passes_the_second_time"], []),
        (
            {"flaky": FLAKY, "good": GOOD, **BROKEN},
            1,
            ["flaky.py::test_passes_the_second_time"],
            ["bad.py::test_is_wrong", "crash.py::test_ends_its_process", "setup.py::test_needs_it"],
        ),
        ({"good": GOOD}, 0, [], []),
        ({"many": MANY.format(MOST_FLAKY + 1)}, 1, [], []),
        ({"unreadable": "import nothing_of_this_name\n", "flaky": FLAKY}, 1, [], []),
        ({}, 5, [], []),
    ],
    ids=["flaky", "fails", "passes", "many", "collection", "empty"],
)
def test_what_failed_is_run_once_more(files, status, flaky, twice, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # which take most of a process's time
    # Workers are needed where a test ends its process, and read files as .ci/run does.
    needs_workers = {"crash", "unreadable"} & files.keys()
    workers = ["-p", "xdist.plugin", "--numprocesses=2"] if needs_workers else []
    (tmp_path / "pytest.ini").write_text("[pytest]\npython_files = test_*.py\n")
    for name, text in files.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    assert main(["-q", *workers]) == status
    lines = capfd.readouterr().out.splitlines()
    assert any(re.fullmatch(r"(\d+ \w+, )*(\d+ \w+|no tests ran) in .*", line) for line in lines), "no closing line"
    assert [line for line in lines if line.startswith("flaky: ")] == [f"flaky: test_{name}" for name in flaky]
    found = sorted(line for line in lines if line.startswith("failed twice: "))
    assert found == [f"failed twice: test_{name}" for name in twice]


HANGS = """
import pytest, signal, subprocess, sys, time

def test_is_well():
    pass

def test_waits():
    subprocess.run([sys.executable, "-c", CHILD])

def test_hears_no_signal():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    test_waits()

def test_is_well_again():
    pass

CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', GRANDCHILD])"
CHILD = CHILD.replace("GRANDCHILD", repr("import time; open('BEGUN', 'a').write('begun '); time.sleep(600)"))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "timeout_s", "status", "closing", "begun"),
    [
        ([], 5, 1, "2 failed, 2 passed in", 4),
        (["--minutes=0.3"], 600, 2, "1 passed in", 1),
    ],
)
def test_no_test_that_hangs_costs_the_run(options, timeout_s, status, closing, begun, tmp_path):
    """It fails at its own limit, and what it started ends too; a run ends at its limit and names what it was at."""
    settings = f"timeout = {timeout_s}\naddopts = -p xdist.plugin -p pytest_timeout\npythonpath = {ROOT / 'tests'}"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\n{settings}\n")
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(HANGS.replace("BEGUN", str(tmp_path / "begun")))
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    command = [sys.executable, "-m", "tools.again", "-q", "--numprocesses=1", *options]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert f"\n{closing} " in done.stdout
    if status == 1:
        twice = [line for line in done.stdout.splitlines() if line.startswith("failed twice: ")]
        assert sorted(twice) == [f"failed twice: test_it.py::test_{name}" for name in ("hears_no_signal", "waits")]
        assert "in test_hears_no_signal" in done.stderr  # the stack of the process that had to be ended
    else:
        assert "interrupted: test_it.py::test_waits" in done.stdout
    assert (tmp_path / "begun").read_text().split() == ["begun"] * begun
    commands = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(tmp_path) in command]
