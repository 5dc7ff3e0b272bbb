"""Processes that tests start: several that train together over gloo, some held at a moment, some with few packages."""

import atexit
import multiprocessing
import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import psutil


def free_port() -> int:
    """A port that nobody has, below those that the system gives to whoever asks for any."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("", port))  # at every address, as torch listens
            return port


ROOT = Path(__file__).parents[2]
# of processes that tests start
PYTHONPATH = os.pathsep.join(str(ROOT / folder) for folder in ("src", "plugins/headway-bagel/src", "tests"))
TRAIN = (sys.executable, "-m", "headway", "train")


@contextmanager
def running(command: Sequence[object], **settings: Any) -> Iterator[subprocess.Popen[Any]]:
    """A program that a test watches or talks to; it and what it started are killed where the block ends."""
    words = [str(part) for part in command]
    with subprocess.Popen(words, start_new_session=True, **settings) as process:
        try:
            yield process
        finally:
            # ranks of torchrun have sessions of their own
            children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ()
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


class Forked:
    """A process made by multiprocessing's fork server, which has imported the engine already, with Popen's methods.

    It is a process as any other but for the seconds that imports take.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], out: Path, err: Path, cwd: Path) -> None:
        self.args, self.out, self.err = command, out, err
        self._process = _SERVER.Process(target=_become, args=(command, dict(environment), out, err, cwd))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def kill_forked() -> None:
    """Kill the processes of `start_processes` that still run, as a failed test leaves them."""
    while _STARTED:
        process = _STARTED.pop()
        if process.poll() is None:
            process.kill()
            process.wait()


_STARTED: list[Forked] = []
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["headway.quiet", "headway.train.run", "headway.cli.app"])


def _become(command: Sequence[str], environment: Mapping[str, str], out: Path, err: Path, cwd: Path) -> None:
    """Run a command of Python's in a process that the fork server made."""
    for path, number in ((out, 1), (err, 2)):
        with Path(path).open("w") as file:
            os.dup2(file.fileno(), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    _, how, *arguments = command
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    if "HEADWAY_TEST_LEDGERS" in environment:  # as tests/train has it
        from helpers.runs import install_ledgers

        install_ledgers()
    try:
        if how == "-m":
            sys.argv = arguments
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        elif how == "-c":
            sys.argv = ["-c", *arguments[1:]]
            exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = [how, *arguments]
            runpy.run_path(how, run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out


def start_processes(
    command: Sequence[object],
    count: int,
    said: Path,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> list[Forked]:
    """Start `count` processes of one group; each finds its place in RANK, LOCAL_RANK and WORLD_SIZE.

    Args:
        command: Python and its arguments: -m and a module, -c and a program, or a script; the same for all.
        count: processes of the group; a group of one is a process that torchrun did not start.
        said: folder of what they say: RANK.out and RANK.err.
        env: environment variables on top of this process's.
        cwd: their working directory, if not this process's.
    """
    port = free_port()
    shared = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    shared |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if count > 1:
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    started = []
    for rank in range(count):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {}
        environment = shared | place | dict(env or {})
        files = said / f"{rank}.out", said / f"{rank}.err"
        for file in files:
            file.touch()
        started.append(Forked([str(part) for part in command], environment, *files, cwd or Path.cwd()))
        _STARTED.append(started[-1])
    return started


def run_processes(
    command: Sequence[object],
    count: int,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float = 240.0,
    check: bool = True,
) -> list[subprocess.CompletedProcess[str]]:
    """Run `count` processes of one group to their end; what each said and how it ended, by rank.

    Args:
        command: the program and its arguments, the same for all.
        count: processes of the group.
        env: environment variables on top of this process's.
        cwd: their working directory, if not this process's.
        timeout_s: after so long those that still run are killed and the test fails [s].
        check: fail, with what the failing process said, as soon as one ends with another status than 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        running = start_processes(command, count, Path(folder), env=env, cwd=cwd)
        deadline_s = time.monotonic() + timeout_s
        try:
            while any(process.poll() is None for process in running) and time.monotonic() < deadline_s:
                if check and any(process.returncode for process in running):
                    break  # the others would wait for it
                time.sleep(0.02)
        finally:
            hung = [rank for rank, process in enumerate(running) if process.poll() is None]
            for process in running:
                process.kill()
                process.wait()
        ended = [
            subprocess.CompletedProcess(
                process.args,
                process.returncode,
                Path(folder, f"{rank}.out").read_text(),
                Path(folder, f"{rank}.err").read_text(),
            )
            for rank, process in enumerate(running)
        ]
    failed = [rank for rank, one in enumerate(ended) if one.returncode and rank not in hung]
    said = "\n".join(f"rank {rank} of {count}: {ended[rank].stdout}{ended[rank].stderr}" for rank in failed or hung)
    if check:
        assert not failed, said
    assert not hung or (check and failed), f"ranks {hung} did not end within {timeout_s} s\n{said}"
    return ended


_LIMIT_S = 120.0  # until a run comes to a moment [s]


def _stop(pid):
    """Hold a process, and wait until it stands."""
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TZX":
        time.sleep(0.0005)


def interrupt(processes, is_moment, number, targets=None):
    """Send a signal at a moment of a run: all processes are held, looked at, and let go again until it is there.

    Args:
        processes: of the run, by rank; with `pid` and `poll`.
        is_moment: whether the run's files show the moment.
        number: the signal.
        targets: process ids that get it; those of all processes, if not given.
    """
    pids = [process.pid for process in processes]
    deadline_s = time.monotonic() + _LIMIT_S
    while True:
        assert time.monotonic() < deadline_s, "the run never came to this moment"
        assert all(process.poll() is None for process in processes), "the run ended before this moment"
        if is_moment():
            try:
                for pid in pids:
                    _stop(pid)
                if is_moment():
                    for target in pids if targets is None else targets:
                        os.kill(target, number)
                    return
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
        time.sleep(0.001)


SOURCES = Path(__file__).parents[2] / "src"
# Before anything else is imported, in a process and in those that it starts.
_ONLY_THESE = """
import importlib.metadata
import sys
from importlib.machinery import PathFinder

class Bare:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        makers = {maker.lower().replace("_", "-") for maker in DISTRIBUTIONS.get(name.partition(".")[0], ())}
        return self.finder.find_spec(name, path, target) if not makers or makers & ALLOWED else None

DISTRIBUTIONS, ALLOWED = importlib.metadata.packages_distributions(), set(%r)
sys.meta_path[:] = [Bare(finder) if finder is PathFinder else finder for finder in sys.meta_path]
"""


def bare_environment(folder, packages):
    """An environment whose processes find Headway, packages by name, what those require, and no others."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(_ONLY_THESE % sorted(_with_requirements(packages)))
    return os.environ | {"PYTHONPATH": os.pathsep.join((str(folder), str(SOURCES)))}


def _with_requirements(names):
    """Close a set of packages under what they require, extras left out."""
    reached = set()
    while names := {_plain(name) for name in names} - reached:
        reached |= names
        names = {requirement for name in names for requirement in _requirements(name)}
    return reached


def _requirements(name):
    try:
        lines = requires(name) or []
    except PackageNotFoundError:  # such as triton, on a machine without a GPU
        return []
    return [re.match(r"[\w.-]+", line).group() for line in lines if "extra ==" not in line]


def _plain(name):
    return name.lower().replace("_", "-")
