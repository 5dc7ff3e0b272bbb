"""What the README shows is what happens: its console sessions and Python snippets are run."""

import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from helpers.pages import broken_links

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


# Commands of the console blocks, each with the output that the README shows below it.
SESSIONS = [
    session.partition("\n")[::2]
    for kind, body in BLOCKS
    if kind == "console"
    for session in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]
]


def pattern(shown):
    """Turn shown output into a pattern: a line `...` stands for any lines, ` ...` at a line's end for its rest."""
    lines = shown.splitlines()
    return "".join(
        "(?:.*\n)*" if line == "..." else re.escape(line.removesuffix(" ...")) + (" .*" * line.endswith(" ...")) + "\n"
        for line in lines
    )


@pytest.mark.parametrize(("command", "shown"), SESSIONS, ids=[command for command, _ in SESSIONS])
def test_a_console_session_prints_what_the_readme_shows(command, shown, monkeypatch, capsys):
    from headway.cli.app import main

    program, *arguments = shlex.split(command)
    assert program == "headway"
    monkeypatch.setattr(sys, "argv", ["headway", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    out = capsys.readouterr().out
    assert exit_.value.code == 0
    assert re.fullmatch(pattern(shown), out), out


SNIPPETS = [body for kind, body in BLOCKS if kind == "python"]


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_a_python_snippet_runs(snippet, capsys):
    exec(compile(snippet, "README.md", "exec"), {})
    assert capsys.readouterr().out.endswith("\n")


def installed_by(line):
    """Names of the distributions that a line `pip install '.[EXTRAS]'` brings, by what the installed ones ask for."""
    brought, missing = set(), [Requirement("headway" + "".join(re.findall(r"\[[\w,]+\]", line)))]
    while missing:
        requirement = missing.pop()
        for extra in requirement.extras or {""}:
            if (requirement.name, extra) in brought:
                continue
            brought.add((requirement.name, extra))
            try:
                needs = metadata.requires(requirement.name) or []
            except metadata.PackageNotFoundError:  # of another system
                continue
            needs = map(Requirement, needs)
            missing += [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
    return {re.sub(r"[-_.]+", "-", name).lower() for name, _ in brought}


# Start-up code of a process that finds no module and no distribution but those that were installed.
ALONE = """
import json, os, re, sys

_LEFT_OUT = json.loads(os.environ["LEFT_OUT"])

class Finder:
    def __init__(self, finder):
        self._finder = finder

    def __getattr__(self, name):
        return getattr(self._finder, name)

    def find_spec(self, name, *arguments):
        left_out = name.partition(".")[0] in _LEFT_OUT["modules"]
        return None if left_out else self._finder.find_spec(name, *arguments)

    def find_distributions(self, *arguments):
        for found in getattr(self._finder, "find_distributions", lambda *_: ())(*arguments):
            if re.sub("[-_.]+", "-", found.name or "").lower() not in _LEFT_OUT["distributions"]:
                yield found

sys.meta_path[:] = map(Finder, sys.meta_path)
"""


def sh_block(command):
    """Lines of the README's shell block in which a command stands, without comments."""
    (block,) = [body for kind, body in BLOCKS if kind == "sh" and command in body]
    return [line.partition("#")[0].strip() for line in block.splitlines()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Folder with the content of the wheel that is built of this checkout, as an installation has it."""
    builders = pytest.importorskip("hatchling.builders.wheel", reason="hatchling, which builds wheels, is not here")
    folder = tmp_path_factory.mktemp("wheel")
    (built,) = builders.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    zipfile.ZipFile(built).extractall(folder / "installed")
    return folder / "installed"


@pytest.fixture
def alone(tmp_path):
    """Environment of a process that has what the README's longer install line brings, and nothing else."""
    return environment(tmp_path, next(line for line in sh_block("pip install") if "[" in line))


@pytest.fixture
def light(tmp_path, wheel):
    """The same of the README's first install line, with the package as its wheel has it."""
    return environment(tmp_path, next(line for line in sh_block("pip install") if "[" not in line), str(wheel))


def environment(tmp_path, line, *packages):
    """Environment of a process that finds some packages first, and what an install line brings, and nothing else."""
    brought = installed_by(line)
    names = {module: {re.sub(r"[-_.]+", "-", name).lower() for name in of} for module, of in PROVIDERS.items()}
    left_out = {
        "modules": [module for module, of in names.items() if not of & brought],
        "distributions": sorted(set().union(*names.values()) - brought),
    }
    assert {"torchao", "datasets"} <= {*left_out["modules"]}, "the tests' own packages are not left out"
    start_up = tmp_path / "start_up"
    start_up.mkdir()
    (start_up / "sitecustomize.py").write_text(ALONE)
    paths = [str(start_up), *packages, *filter(None, [os.environ.get("PYTHONPATH")])]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"LEFT_OUT": json.dumps(left_out), "PYTHONPATH": os.pathsep.join(paths), "PATH": path}


PROVIDERS = metadata.packages_distributions()


def test_the_wheel_counts_and_plans_what_the_readme_shows_behind_its_first_install_line(light):
    assert any(command.startswith("headway plan") for command, _ in SESSIONS)
    for command, output in SESSIONS:
        arguments = shlex.split(command.removeprefix("headway "))
        done = subprocess.run(
            [sys.executable, "-m", "headway", *arguments],
            cwd=ROOT,
            env=light,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        assert re.fullmatch(pattern(output), done.stdout), done.stdout
    code = "import headway, importlib.util as u; print(headway.__file__); print(u.find_spec('torch'))"
    where = subprocess.run([sys.executable, "-c", code], env=light, capture_output=True, text=True, check=True).stdout
    assert where.splitlines() == [str(Path(light["PYTHONPATH"].split(os.pathsep)[1]) / "headway/__init__.py"), "None"]


def test_links_of_a_published_page_lead_to_the_repository():
    build = pytest.importorskip("hatch_build", reason="hatchling, whose interface it uses, is not here")
    text = build.with_absolute_links(README, "https://host/o/headway")
    assert "](docs/" not in text
    assert 'src="docs/' not in text
    assert re.search(r"!\[[^]]*\]\(https://host/o/headway/raw/main/docs/|src=\"https://host/o/headway/raw/main/", text)
    assert "](https://host/o/headway/blob/main/docs/" in text
    assert build.with_absolute_links("[a](#b) [c](http://d) `x[1](y)`", "https://h").startswith("[a](#b) [c](http://d)")


@pytest.mark.slow
def test_the_first_commands_end_in_a_model_that_reads_behind_the_install_line_alone(alone, tmp_path):
    commands = sh_block("headway train train.yaml")
    assert [command.split()[:2] for command in commands][-1] == ["headway", "train"]
    for command in commands:
        done = subprocess.run(command, shell=True, cwd=tmp_path, env=alone, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
    share = re.search(r"^exact match +([\d.]+) % \(\d+ of 200 held-out samples\)$", done.stdout, flags=re.MULTILINE)
    assert float(share[1]) >= 90


def test_what_an_install_line_leaves_out_is_missing(alone, tmp_path):
    code = "import importlib.util, sys; print([bool(importlib.util.find_spec(name)) for name in ('numpy', 'datasets')])"
    done = subprocess.run([sys.executable, "-c", code], env=alone, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[True,", "False]"]


def test_the_readme_has_what_these_tests_are_for():
    assert len(SESSIONS) >= 2
    assert len(SNIPPETS) >= 1
    assert len(README.splitlines()) <= 130


def test_links_lead_to_files_and_headings():
    assert broken_links(ROOT / "README.md") == []
