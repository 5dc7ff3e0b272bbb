"""Fixtures of runs on digits and on pairs of answers, for all tests here."""

import pytest

from headway.train import loop
from headway.train.run import train
from helpers.rollouts import base, own_cache, pair_words  # noqa: F401
from helpers.runs import config, config_file, digits, ledgers, mixture, one_thread, raw  # noqa: F401


@pytest.fixture
def killed_before(monkeypatch):
    """End a run as if its process had been killed before a step."""

    def run(settings, step):
        rate = loop.learning_rate

        def killed(at, *rest):
            if at == step:
                raise KeyboardInterrupt
            return rate(at, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(loop, "learning_rate", killed)
            with pytest.raises(KeyboardInterrupt):
                train(settings)

    return run
