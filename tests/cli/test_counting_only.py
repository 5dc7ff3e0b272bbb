"""What the install without extras does: it counts, plans and tunes, and says in a sentence what the rest needs."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

from headway.cli.app import app
from helpers.processes import bare_environment

ROOT = Path(__file__).parents[2]
TUNED = "recipes/qwen3-vl-8b-image-61440.yaml"
WORKING = (
    "flops qwen3-vl-8b --segments 4096 --images 1x32x48",
    "compare gpt2 --segments 8 --device H100 --step-time 1",
    "mfu gpt2 --seq-len 8 --device H100 --chips 1 --mfu 0.4",
    "plan qwen3-8b --device H100 --devices 8",
    f"train {TUNED} --dry-run",
    f"tune {TUNED} --device H100 --devices 8",
    "models",
    "devices H100",
    "config",
)
# lines of the commands whose example names what is not here
OTHERS = {
    "train": f"train {TUNED}",
    "export": "export runs/train out",
    "demo": "demo",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run Python where nothing but the dependencies of the install without extras can be imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packages = [re.match(r"[\w-]+", line).group() for line in project["dependencies"]]
    env = bare_environment(tmp_path_factory.mktemp("packages"), packages) | {"COLUMNS": "200"}

    def run(*arguments, cwd=ROOT):
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=cwd)

    return run


def test_the_first_python_of_the_readme_runs(run):
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL).group(1)
    done = run("-c", f"{block}\nimport sys; print('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"step 2: 2 steps in .*, MFU .* %, .* tokens/s, padding 25\.9 %\nFalse\n", done.stdout)


# runs each command of a list as `python -m headway` would, in one process, which spares a start for each
EACH = """
import contextlib, io, json, sys, traceback
from headway.cli.app import main

for line in json.loads(sys.argv[1]):
    err, sys.argv = io.StringIO(), ["headway", *line.split()]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            code = traceback.print_exc() or "raised"
    print(json.dumps([line, code, err.getvalue()]))
"""


@pytest.mark.slow
def test_what_needs_no_extra_works_without(run):
    done = run("-c", EACH, json.dumps(WORKING))
    assert [json.loads(row) for row in done.stdout.splitlines()] == [[line, 0, ""] for line in WORKING], done.stderr


# lines with a mistake that no library is needed to find, and the way out that they are told
MISTAKES = {
    "flops qwen3-vl8b --segments 8": "Did you mean qwen3-vl-8b",
    "flops ./nowhere/config.json --segments 8": "`headway models` lists the shipped models",
    "mfu qwen3-vl8b --seq-len 8 --mfu 0.4": "Did you mean qwen3-vl-8b",
    "compare qwen3-vl8b --segments 8 --device H100 --step-time 1": "Did you mean qwen3-vl-8b",
    "plan qwen3-vl8b --device H100": "Did you mean qwen3-vl-8b",
    "tune qwen3-vl8b --device H100": "Did you mean qwen3-vl-8b",
    "verify gtp2": "Did you mean gpt2",
    "devices H1000": "Did you mean H100",
    "plan gpt2": "no device is named (--device H100 would name one)",
    "tune gpt2": "no device is named (--device H100 would name one)",
}


def test_a_mistake_is_told_before_a_library_is_asked_for(run):
    done = run("-c", EACH, json.dumps([*MISTAKES]))
    for line, code, err in map(json.loads, done.stdout.splitlines()):
        told = " ".join(err.split())
        assert MISTAKES[line] in told, (line, told)
        needs = "needs torch" in told
        assert (code, needs) == ((1, True) if "device is named" in told else (2, False)), (line, told)


@pytest.mark.slow
def test_no_command_ends_in_a_traceback(run, tmp_path):
    lines = []
    group = typer.main.get_command(app)
    for command in (group.get_command(None, name) for name in group.list_commands(None)):
        examples = re.findall(r"Example: headway (.*?)(?:\n\n|\Z|\n    \w+:\n)", command.callback.__doc__, re.DOTALL)
        lines.append(OTHERS[command.name] if command.name in OTHERS else " ".join(examples[0].split()))
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    rows = [json.loads(row) for row in run("-c", EACH, json.dumps(lines), cwd=tmp_path).stdout.splitlines()]
    assert [line for line, _, _ in rows] == lines
    wrong = [row for row in rows if row[1] not in (0, 1, 2) or "Traceback" in row[2]]
    extra = r"needs \w+, which is not installed\. Install the extra: pip install '\S+\[\w+\]'"
    wrong += [row for row in rows if "not installed" in row[2] and not re.search(extra, row[2])]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["model.lora.rank=16", "model.freeze=[vision]"])
def test_a_plan_of_what_learns_in_part_says_what_it_estimates_without_torch(run, headway, setting):
    """The light install's numbers are near those of the full one, and a note says that they are estimated."""
    line = ("plan", "qwen2.5-vl-7b", "--device", "H100", "--devices", "8", "--json", "--set", setting)
    light, full = json.loads(run("-m", "headway", *line).stdout), json.loads(headway(*line).out)
    assert any("PyTorch is not installed" in note for note in light["notes"])
    assert not any("PyTorch is not installed" in note for note in full["notes"])
    assert light["memory"]["peak"] == pytest.approx(full["memory"]["peak"], rel=0.05)
    assert light["time"]["step_s"] == pytest.approx(full["time"]["step_s"], rel=0.03)
