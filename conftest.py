"""What every test starts from: one thread per process, no network, no settings of the user's shell."""

import faulthandler
import gc
import logging
import os
import signal
import sys
from collections import Counter
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
from tools.again import kill_orphans

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
def _own_processes():
    """Kill the ranks that a test has left running."""
    yield
    if processes := sys.modules.get("helpers.processes"):
        processes.kill_forked()


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


STDERR = pytest.StashKey[int]()
MOST_OF_LIMIT = 1.2
"""Times its `timeout` that a test may take where not even that ends it, as in a call of C that never returns."""


def pytest_configure(config):
    config.stash[STDERR] = os.dup(2)  # as it is before a test's output is kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Print every thread's stack and end the process if a test outlives its limit; its worker is replaced."""
    limit_s = MOST_OF_LIMIT * float(item.config.getoption("timeout", None) or item.config.getini("timeout") or 0)
    if limit_s:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_exception_interact(node):
    """Kill what processes of a failed test have left behind, such as ranks of a killed torchrun."""
    kill_orphans(f"PYTEST_CURRENT_TEST={node.nodeid} (")


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem):
    """Kill what a test has left behind that ended its worker."""
    kill_orphans(f"PYTEST_CURRENT_TEST={crashitem} (")


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


@pytest.hookimpl(trylast=True)  # once tests that are left out are gone
def pytest_collection_modifyitems(config, items):
    """Skip what needs a CUDA device or a browser where there is none; workers begin with the longest modules."""
    if hasattr(config, "workerinput"):
        slow = Counter(item.path for item in items if {"slow", "dist"} & {mark.name for mark in item.iter_markers()})
        sizes = Counter(item.path for item in items)
        items.sort(key=lambda item: (-slow[item.path], -sizes[item.path], item.path))
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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give each module to one worker: its tests share what took long to run or read."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # the order is that of `pytest_collection_modifyitems`

    class Scheduling(LoadFileScheduling):
        # xdist's own waits without end for a worker that took the place of a dead one: it hands it tests that are done.
        def remove_node(self, node):
            units = [
                [name for name, is_done in unit.items() if not is_done] for unit in self.assigned_work[node].values()
            ]
            left = [name for unit in units for name in unit]
            self.assigned_work[node] = {}
            super().remove_node(node)
            for name in left[1:]:
                self.workqueue.setdefault(self._split_scope(name), {})[name] = False
            for other in self.nodes if left else ():
                self._reschedule(other)
            return left[0] if left else None  # the test that ended the worker, and is not to end the next one

        def schedule(self):
            super().schedule()
            for node in self.nodes:
                self._reschedule(node)  # a worker begins a test once it has the one after it

    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    """Name the tests that workers were at when the run was interrupted, one of which may hang."""
    workers = config.pluginmanager.getplugin("dsession")
    if exitstatus == pytest.ExitCode.INTERRUPTED and workers is not None:
        for units in workers.sched.assigned_work.values():
            for name in [name for unit in units.values() for name, is_done in unit.items() if not is_done][:1]:
                terminalreporter.write_line(f"interrupted: {name}")
