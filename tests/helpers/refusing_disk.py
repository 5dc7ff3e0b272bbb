"""A disk that takes no more."""

import resource
import signal
from contextlib import contextmanager


@contextmanager
def a_full_disk(room):
    """Let no file grow beyond `room` bytes: the write fails as on a full disk, even for root."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
