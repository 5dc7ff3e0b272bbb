"""How often `headway init` lets data play, and what makes a model fit."""

from dataclasses import replace

import numpy as np
import pytest

from headway.count import CostModel, load_cost_model
from headway.count.rows import Parameter
from headway.devices import named_device
from headway.predict.suggest import MeasuredLengths, _epochs, _fitted, _learning_rate
from helpers.device import length_table

CHATS = MeasuredLengths(np.array([100, 200]), bad=0, images=0, are_documents=False)
CORPUS = replace(CHATS, are_documents=True)
LARGE, SMALL = (CostModel("m", (), (Parameter("w", n, n, "language.mlp"),)) for n in (1_500_000_000, 3_000_000))


@pytest.mark.parametrize(
    ("lengths", "model", "from_scratch", "steps", "epochs"),
    [
        (CHATS, LARGE, False, 40, 3),
        (CORPUS, LARGE, False, 40, 1),  # a corpus is read once
        (CHATS, SMALL, False, 31, 10),  # nobody fine-tunes 3 M parameters: 310 steps
        (CHATS, LARGE, True, 100, 3),  # without weights, 300 steps
        (CORPUS, SMALL, False, 40_000, 1),
        (CORPUS, SMALL, True, 150, 2),
        (CHATS, SMALL, False, 1, 50),  # more than so often teaches a handful of samples by heart
    ],
)
def test_data_play_as_often_as_a_model_needs(lengths, model, from_scratch, steps, epochs):
    assert _epochs(steps, model, lengths, from_scratch=from_scratch) == epochs


@pytest.mark.parametrize(("adapters", "rate"), [(False, 1e-5), (True, 2e-4)])
def test_pairs_learn_at_a_tenth_of_the_rate(adapters, rate):
    assert _learning_rate(LARGE, CHATS, adapters=adapters) == rate
    pairs = replace(CHATS, are_pairs=True)
    assert _learning_rate(LARGE, pairs, adapters=adapters) == pytest.approx(rate / 10)


@pytest.mark.parametrize(("device", "base"), [("H100", None), ("4090", None), ("4080", "nf4")])
def test_a_base_in_4_bits_is_suggested_where_adapters_do_not_fit_without(device, base):
    name = "qwen3-8b"
    raw = {
        "model": {"path": name},
        "data": {"train": [{"path": "chats.jsonl"}], "tokens_per_pack": 8192},
        "optim": {"steps": 1, "lr": 1e-5},
        "run": {"folder": "run"},
    }
    lengths = ("uniform", length_table())
    fitted, planned = _fitted(raw, load_cost_model(name), named_device(device), 2e-4, lengths)
    assert planned.fits
    assert fitted["model"].get("base") == base
    assert "lora" in fitted["model"]
    # of what changes no result, inputs on the host are enough for 24 GB, and not for 16
    assert ("offload" in fitted.get("speed", {})) == (device == "4090")


def test_packs_of_a_device_are_the_fastest_that_leave_out_no_sample():
    """With as many tokens a step, no longer than memory allows, and never shorter than the longest sample."""
    raw = {
        "model": {"path": "qwen3-0.6b"},
        "data": {"train": [{"path": "chats.jsonl"}], "tokens_per_pack": 32_768},
        "optim": {"steps": 1, "lr": 1e-5, "accumulation": 2},
        "run": {"folder": "run"},
    }
    lengths, model = ("uniform", length_table()), load_cost_model("qwen3-0.6b")
    of_device = {name: _fitted(raw, model, named_device(name), 2e-4, lengths)[0] for name in ("H100", "4090")}
    for name, fitted in of_device.items():
        tokens, packs = fitted["data"]["tokens_per_pack"], fitted["optim"]["accumulation"]
        assert tokens * packs == pytest.approx(2 * 32_768, rel=0.01), name
        assert tokens >= lengths[1].tokens.max()
    assert "lora" not in {**of_device["H100"]["model"], **of_device["4090"]["model"]}
    assert of_device["H100"]["data"]["tokens_per_pack"] == 32_768  # all of it fits, and nothing is computed again
    assert of_device["4090"]["data"]["tokens_per_pack"] < 16_384
