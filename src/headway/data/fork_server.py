"""Imported first by the fork server of data workers: Ctrl-C is left to the process that asked for them.

A terminal sends Ctrl-C to every process of a command. The fork server ignores it only once it has imported everything,
and its workers not before they have begun, so that each of them would print a traceback; workers whose trainer is
ending meanwhile find neither its message nor its semaphores. Handlers are handed on to the workers.
"""

import signal
import sys
from traceback import walk_tb
from types import TracebackType


def _print_unless_abandoned(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print why a worker did not begin, but not where the trainer has taken down what it was to begin with."""
    modules = [frame.f_globals.get("__name__") for frame, _ in walk_tb(trace)]
    no_semaphore = kind is FileNotFoundError and modules[-1] == "multiprocessing.synchronize"
    no_message = kind is EOFError and modules[-1] == "multiprocessing.spawn"
    if not (no_semaphore or no_message):
        sys.__excepthook__(kind, error, trace)


if any(
    argument.startswith("from multiprocessing.forkserver import main") for argument in sys.orig_argv
):  # nowhere else
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    sys.excepthook = _print_unless_abandoned
