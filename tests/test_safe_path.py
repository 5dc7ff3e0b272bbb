"""Nothing is imported from the folder that one stands in, by any process that a command starts."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway.safe_path import SAFE_PATH_VARIABLE, current_folder_kept_out

ROOT = Path(__file__).parents[1]
# What Python, its fork server and resource tracker, torch and Headway import early, and what site looks for.
HOSTILE = (
    "headway", "json", "logging", "multiprocessing", "numpy", "pickle", "runpy", "secrets", "signal", "sitecustomize",
    "torch", "typer", "usercustomize", "yaml",
)  # fmt: skip
STARTERS = {"Popen", "spawn", "ensure_running", "Process", "start_processes"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from headway.data.sources import open_source
    from headway.synthetic.new_model import write_new_model

    folder = tmp_path_factory.mktemp("clean")
    _write_rows(folder / "rows.jsonl")
    sources = [open_source(folder / "rows.jsonl")]
    write_new_model(folder / "tiny", sources, like="qwen3", size=100_000, vocab_size=300, seed=0)
    return folder / "tiny"


def _write_rows(path):
    turns = [{"role": "user", "content": "1 2"}, {"role": "assistant", "content": "2 1"}]
    path.write_text(f"{json.dumps({'messages': turns})}\n" * 20)


@pytest.fixture
def hostile_folder(tmp_path):
    """A folder as a stranger may pack it: data, a configuration, and modules under the names of common ones."""
    _write_rows(tmp_path / "rows.jsonl")
    for name in HOSTILE:
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'RAN')!r}, 'a').write(__file__)\nraise SystemExit\n"
        )
    return tmp_path


def _run(command, folder):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", SAFE_PATH_VARIABLE)}
    environment |= {
        "HEADWAY_CACHE": str(folder / "cache"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (folder / "RAN").exists(), (folder / "RAN").read_text()


def test_the_hostile_folder_of_these_tests_is_hostile(hostile_folder):
    subprocess.run([sys.executable, "-c", "import json"], cwd=hostile_folder, check=False)
    assert (hostile_folder / "RAN").exists()


@pytest.mark.slow
def test_a_command_with_workers_runs_no_code_of_the_folder_one_stands_in(hostile_folder, model):
    _run(["headway", "index", "rows.jsonl", "--model", str(model)], hostile_folder)


@pytest.mark.parametrize(
    "command",
    [
        ["headway", "look", "rows.jsonl", "--model", "MODEL", "--packing-length", "64"],
        ["headway", "train", "run.yaml"],
        ["headway", "evaluate", "MODEL", "rows.jsonl"],
        ["torchrun", "--standalone", "--nproc-per-node", "2", "--no-python", "headway", "train", "run.yaml"],
        [sys.executable, "-P", "-m", "headway", "train", "run.yaml"],
    ],
    ids=lambda command: " ".join(command[-4:-1]),
)
@pytest.mark.long
def test_no_command_runs_code_of_the_folder_one_stands_in(command, hostile_folder, model):
    (hostile_folder / "run.yaml").write_text(
        f"model: {{path: {model}, random_init: true}}\n"
        "data: {train: [{path: rows.jsonl}], tokens_per_pack: 64, workers: 1}\n"
        "optim: {steps: 2, lr: 1.0e-3}\ncheckpoint: {export: never}\nrun: {folder: run, device: cpu}\n"
    )
    _run([str(model) if word == "MODEL" else word for word in command], hostile_folder)


def test_every_process_is_started_where_the_current_folder_is_kept_out():
    """Of what starts a process of Python's: anything else that is run is no Python, as git."""
    loose = []
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        guarded = {
            id(inner)
            for block in ast.walk(tree)
            if isinstance(block, ast.With) and "current_folder_kept_out" in ast.unparse(block.items[-1])
            for inner in ast.walk(block)
        }
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call):
                continue
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            is_python = name in STARTERS or "sys.executable" in ast.unparse(call)
            if is_python and id(call) not in guarded:
                loose.append(f"{path.name}:{call.lineno} {name}")
    assert not loose


def test_a_program_that_uses_the_library_keeps_its_own_environment(monkeypatch):
    monkeypatch.delenv(SAFE_PATH_VARIABLE, raising=False)
    with current_folder_kept_out():
        assert os.environ[SAFE_PATH_VARIABLE] == "1"
    assert SAFE_PATH_VARIABLE not in os.environ


def test_pages_start_no_module_that_python_would_look_for_in_the_current_folder():
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *ROOT.glob("recipes/*.yaml"),
        *ROOT.glob("examples/*.py"),
        *(path for path in ROOT.glob("examples/*/*") if path.suffix != ".pyc"),
    ]
    history = {"CHANGELOG.md", "log.md"}
    texts = {path: path.read_text(encoding="utf-8") for path in pages if path.is_file() and path.name not in history}
    assert len(texts) > 30
    assert [path for path, text in texts.items() if "-m headway" in text.replace("-P -m headway", "")] == []
