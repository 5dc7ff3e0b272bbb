"""Ports of this machine for processes that meet."""

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """A port that nobody has, below those that the system gives to whoever asks for any."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
