"""Fixtures of runs on digits, for all tests here."""

from helpers.digits_run import config, config_file, digits, mixture, one_thread, raw  # noqa: F401
from helpers.traced_once import ledgers  # noqa: F401
