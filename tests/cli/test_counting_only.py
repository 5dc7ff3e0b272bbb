"""What the install without extras does: it counts, plans and tunes, and says in a sentence what the rest needs."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

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
# lines of the commands whose help has no example
OTHERS = {
    "models": "models --json",
    "verify": "verify gpt2",
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
    assert re.fullmatch(r"step 2: MFU \d+%, padding 26%\nstep 4: MFU \d+%, padding 26%\nFalse\n", done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("line", WORKING)
def test_what_needs_no_extra_works_without(run, line):
    done = run("-m", "headway", *line.split())
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("command", [command.name for command in app.registered_commands])
def test_no_command_ends_in_a_traceback(run, tmp_path, command):
    callback = next(known.callback for known in app.registered_commands if known.name == command)
    examples = re.findall(r"Example: headway (.*?)(?:\n\n|\Z|\n    \w+:\n)", callback.__doc__, re.DOTALL)
    example = OTHERS[command] if command in OTHERS else examples[0]
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    done = run("-m", "headway", *example.split(), cwd=tmp_path)
    assert done.returncode in (0, 1, 2), done.stderr
    assert "Traceback" not in done.stderr
    if "not installed" in done.stderr:
        assert re.search(
            r"needs \w+, which is not installed\. Install the extra: pip install '\S+\[\w+\]'", done.stderr
        )
