"""What every test starts from: one thread per process, no network, no settings of the user's shell."""

import gc
import logging
import os
import signal
import sys
from pathlib import PurePath
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tests run side by side on few cores
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
for name in ("HEADWAY_CACHE", "HEADWAY_DEBUG", "HEADWAY_PEAKS", "COLUMNS"):  # readline sets COLUMNS, for pipes too
    os.environ.pop(name, None)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of hundreds of processes compiles the package anew
sys.dont_write_bytecode = False
os.environ["HEADWAY_PEAK_FLOPS"] = "100e9"  # to measure it takes two seconds, and tests start hundreds of processes

# A shell has its background jobs ignore Ctrl-C, and nohup the end of the terminal: programs that tests start would too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import pytest
from hypothesis import given, settings
from hypothesis.strategies import none

from helpers.pages import CHROMIUM

# A slow machine is no failure, and the same examples everywhere make a failure reproducible.
settings.register_profile("headway", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("quick", parent=settings.get_profile("headway"))
settings.register_profile("long", parent=settings.get_profile("headway"), max_examples=300)
settings.load_profile(os.environ.get("HEADWAY_TEST_PROFILE", "headway"))


@pytest.fixture(autouse=True)
def _own_peak(request, monkeypatch):
    """Leave the peak to the device where a test is about it."""
    if request.node.get_closest_marker("own_peak") or request.node.get_closest_marker("gpu"):
        monkeypatch.delenv("HEADWAY_PEAK_FLOPS")


@pytest.fixture(autouse=True)
def _own_folder():
    """Forget that a command ran in this process: it keeps the current folder out of all processes started after it."""
    os.environ.pop("PYTHONSAFEPATH", None)
    yield
    os.environ.pop("PYTHONSAFEPATH", None)


@pytest.fixture(autouse=True)
def _own_accelerator():
    """Forget the state that all Accelerators of a process share: a Trainer in bfloat16 would decide for later tests."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@pytest.fixture(autouse=True)
def _own_log_level():
    """Forget that a command had transformers say less: it holds for the rest of its process."""
    library = logging.getLogger("transformers")
    if "transformers" in sys.modules and library.level != logging.WARNING:
        library.setLevel(logging.WARNING)


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def headway(monkeypatch, capsys):
    """Run the command line in this process: headway("flops", "gpt2", ...) -> Result."""
    from headway.cli.app import main

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["headway", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        code = exit_.value.code
        return Result(0 if code is None else code, captured.out, captured.err)

    return run


@pytest.hookimpl(tryfirst=True)  # before fixtures of a module, which draw models too
def pytest_runtest_setup():
    """Seed torch, so that weights and inputs that a test draws without a seed of its own are the same in every run."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


def pytest_collection_finish():
    """Take what is imported by now for what stays: looking through it for garbage was a tenth of the suite's time."""
    given(none())(lambda _: None)()  # older versions of hypothesis look once for who refers to their random numbers
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_collection_modifyitems(items):
    """Skip what needs a CUDA device or a browser where there is none."""
    for item in items:
        if item.get_closest_marker("browser") and not CHROMIUM:
            item.add_marker(pytest.mark.skip(reason="needs Chromium: apt-get install chromium"))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


# Modules whose tests share what took long to run or read: xdist gives each to one worker, the largest first.
SHARED_RUNS = {
    "test_card.py",
    "test_draw_demo.py",
    "test_drawing.py",
    "test_evaluate.py",
    "test_house.py",
    "test_laws_engine.py",
    "test_laws_keep.py",
    "test_ranks.py",
    "test_resume.py",
    "test_shard.py",
    "test_site.py",
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Spread tests over the workers one by one, but not those that share runs."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            module = nodeid.partition("::")[0]
            return module if PurePath(module).name in SHARED_RUNS else nodeid

    return Scheduling(config, log)
