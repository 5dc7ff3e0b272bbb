"""Fixtures of runs on digits, for all tests here."""

from helpers.runs import config, config_file, digits, ledgers, mixture, one_thread, raw  # noqa: F401
