"""Fixtures of the core's tests that runs here need too."""

from helpers.runs import ledgers, one_thread  # noqa: F401
