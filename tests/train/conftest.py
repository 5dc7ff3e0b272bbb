"""Fixtures of runs on digits and on pairs of answers, for all tests here."""

import pytest
import torch

from headway.models.load import load_model
from helpers.rollouts import write_pairs
from helpers.runs import config, config_file, digits, ledgers, mixture, one_thread, raw, write_model  # noqa: F401


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A model of text with weights."""
    folder = write_model(tmp_path_factory.mktemp("base") / "model", "qwen3")
    torch.manual_seed(5)
    load_model(str(folder), random_init=True).save_pretrained(folder)
    return folder


@pytest.fixture
def pair_words(raw, base, tmp_path):  # noqa: F811
    """A configuration of text, as plain types, with pairs to learn from and held-out ones."""
    raw["model"] = {"path": str(base)}
    raw["data"] |= {
        "train": str(write_pairs(tmp_path / "pairs.jsonl", 24)),
        "eval": str(write_pairs(tmp_path / "held_out.jsonl", 7)),
        "tokens_per_pack": 300,
    }
    raw["optim"] = {"steps": 3, "lr": 5e-3, "schedule": "constant", "accumulation": 2}
    return raw
