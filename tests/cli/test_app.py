import re
import subprocess
import sys

import pytest
import torch
import typer

import headway as package
from headway.cli import app as cli
from headway.errors import DataError, HeadwayError, WorkloadError
from headway.files import read_text


def test_version(headway):
    assert headway("--version") == (0, f"headway {package.__version__}\n", "")


def test_help_lists_every_command_once_in_its_group(headway):
    result = headway("--help")
    assert (result.code, result.err) == (0, "")
    group = typer.main.get_command(cli.app)
    listed = re.findall(r"^  ([a-z-]+)  ", result.out.partition("Measure:")[2], re.MULTILINE)
    assert sorted(listed) == sorted(group.list_commands(None))
    titles = ["Measure", "Explain", "Plan", "Data", "Train", "Use", "Plug-ins"]
    assert re.findall(r"^([A-Z][a-z-]+):$", result.out, re.MULTILINE) == ["Options", *titles]


def test_every_command_has_an_example(headway):
    group = typer.main.get_command(cli.app)
    for name in group.list_commands(None):
        assert f"Example: headway {name} " in " ".join(headway(name, "--help").out.split()), name


def test_python_m_headway_is_headway():
    done = subprocess.run([sys.executable, "-m", "headway", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"headway {package.__version__}\n"


def test_libraries_that_complain_as_they_are_imported_are_quiet_before_that():
    asked = "import headway.cli.app, logging; print(logging.getLogger('torchao').level == logging.ERROR)"
    assert subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout == "True\n"


_STILL_WRITING = """
import sys, threading, torch
from pathlib import Path
from headway.checkpoint import CheckpointSaver, Contents
from headway.cli.app import main
from headway.models.parallel.ranks import Ranks

begun = threading.Event()

def free(folder):
    begun.set()
    while True:
        tensors = [torch.empty(100) for _ in range(100)]

saver = CheckpointSaver(Path(sys.argv.pop()), Ranks(0, 1), keep=1)
saver.save(1, Contents({"weight": torch.zeros(1)}, {}, {}, {}, free))
begun.wait()
main()
"""


@pytest.mark.parametrize(("argument", "code"), [("--version", 0), ("no-such-command", 2)])
def test_a_checkpoint_that_is_still_written_does_not_make_an_exit_an_abort(tmp_path, argument, code):
    command = [sys.executable, "-c", _STILL_WRITING, argument, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert done.stdout == ("" if code else f"headway {package.__version__}\n")


@pytest.mark.parametrize(
    "arguments",
    [["no-such-command"], ["flops"], ["flops", "gpt2", "--no-such-option"], ["flops", "gpt2", "--slots", "many"]],
)
def test_wrong_use_exits_2_and_keeps_stdout_clean(headway, arguments):
    result = headway(*arguments)
    assert result.code == 2
    assert result.out == ""
    assert "Error" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(("error", "code"), [(WorkloadError("a " * 300), 2), (DataError("broken\nline"), 1)])
def test_an_error_is_one_paragraph_on_stderr(headway, monkeypatch, error, code):
    def fail(_):
        raise error

    monkeypatch.setattr("headway.cli.workload.resolve_cost_model", fail)
    result = headway("flops", "gpt2", "--segments", "8")
    assert (result.code, result.out) == (code, "")
    assert result.err.startswith("Error: ")
    assert result.err.endswith("\n")
    assert "\n\n" not in result.err
    assert max(map(len, result.err.splitlines())) <= 120
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("error", "is_told"),
    [
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("a mistake of ours"), False),
    ],
)
def test_memory_that_ran_out_is_one_paragraph_and_other_mistakes_are_not(headway, monkeypatch, error, is_told):
    def fail(_):
        raise error

    monkeypatch.setattr("headway.cli.workload.resolve_cost_model", fail)
    if not is_told:
        with pytest.raises(RuntimeError, match="of ours"):
            headway("flops", "gpt2", "--segments", "8")
        return
    result = headway("flops", "gpt2", "--segments", "8")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("Error: there was not enough memory.")


def test_an_interrupt_exits_130(headway, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("headway.cli.workload.resolve_cost_model", interrupt)
    assert headway("flops", "gpt2", "--segments", "8").code == 130


def test_long_words_such_as_paths_are_not_broken():
    path = "/data/" + "x" * 150 + "/shard-0001.jsonl:17"
    assert path in cli.error_paragraph(HeadwayError(f"the line {path} is not JSON"))


@pytest.mark.parametrize("name", sorted(set(package.__all__) - {"__version__"}))
def test_public_names_are_found(name):
    assert getattr(package, name) is not None
    assert name in dir(package)


def test_a_name_that_is_not_public_is_refused():
    with pytest.raises(AttributeError, match="it offers CostModel, FlopCount"):
        package.no_such_name  # noqa: B018  # the attribute access is what is tested


@pytest.mark.parametrize(
    "command",
    [
        "audit FILE --model qwen3-8b",
        "train FILE --dry-run",
        "flops FILE --segments 8",
        "explain FILE",
    ],
)
def test_no_command_reads_a_file_without_an_end(command, headway, monkeypatch):
    monkeypatch.setitem(read_text.__kwdefaults__, "most", 2**20)
    result = headway(*command.replace("FILE", "/dev/zero").split())
    assert result.code in (1, 2)
    assert "/dev/zero" in result.err
