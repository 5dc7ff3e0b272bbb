"""Worker processes of the data pipeline: how they are started, and what each does first."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Sequence
from multiprocessing.context import BaseContext

import torch


def worker_context(preload: Sequence[str]) -> BaseContext:
    """Name how processes start: without this one's CUDA context, threads and locks.

    Args:
        preload: modules that the fork server imports once, so that workers begin at once; the first use in a process
            decides.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["headway.quiet", *preload])
    return context


def prepare_worker() -> None:
    """Begin in a worker: one thread, Ctrl-C left to the process that started it, and an end when that one is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever: it holds the queue's writing end itself."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
