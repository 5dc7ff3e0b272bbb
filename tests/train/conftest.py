"""Fixtures of runs on digits and on pairs of answers, for all tests here."""

from helpers.rollouts import base, own_cache, pair_words  # noqa: F401
from helpers.runs import config, config_file, digits, ledgers, mixture, one_thread, raw  # noqa: F401
