"""Run a command while its processes are stopped for moments, as by a busy machine: what fails then depends on time.

python -m tools.disturbed python -m pytest -q --numprocesses=4 tests/meter
"""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

LENGTHS_S = ((0.98, 0.003, 0.02), (0.018, 0.1, 0.5), (0.002, 1.0, 2.0))
"""Shares of the stops, their shortest and longest [s]: as by a shared core, a slow disk, a machine that swaps."""
_LOOK_S = 1.0  # from one look for new processes to the next


def main(command: Sequence[str], *, seed: int = 0) -> int:
    """Run a command to its end; returns its exit status.

    Args:
        command: program and arguments.
        seed: of which processes are stopped, when, and for how long.
    """
    program = subprocess.Popen(command)
    draw = random.Random(seed)
    num_stops = 0
    while program.poll() is None:
        processes = _family(program.pid)
        look_again_s = time.monotonic() + _LOOK_S
        while processes and time.monotonic() < look_again_s:
            # up to three at once, so that processes that wait for each other are late by turns
            chosen = draw.sample(processes, k=min(len(processes), draw.randint(1, 3)))
            stopped = [process for process in chosen if _stop(process)]
            (_, shortest_s, longest_s), *_ = draw.choices(LENGTHS_S, [share for share, *_ in LENGTHS_S])
            try:
                time.sleep(draw.uniform(shortest_s, longest_s))
            finally:
                for process in stopped:
                    _signal(process, signal.SIGCONT)
            num_stops += len(stopped)
            time.sleep(draw.uniform(*LENGTHS_S[0][1:]))
    sys.stderr.write(f"processes were stopped {num_stops:,} times\n")
    return program.returncode


def _family(pid: int) -> list[psutil.Process]:
    """A process and all below it; nothing of one that has ended."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _stop(process: psutil.Process) -> bool:
    """Stop a running process; returns whether it did, as one that the command itself has stopped is left alone."""
    try:
        if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
            return False
    except psutil.NoSuchProcess:
        return False
    return _signal(process, signal.SIGSTOP)


def _signal(process: psutil.Process, number: signal.Signals) -> bool:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
