"""A search over a shipped model's costs with a pretended clock."""

import pytest

from headway.config import load_config
from headway.count import load_cost_model
from headway.count.activations import SavedByPrecision, shipped_activations
from headway.predict.predictor import Predictor
from headway.predict.tune import Search, Space
from helpers.device import length_table, pretended_step
from helpers.processes import ROOT


class Pretended(Predictor):
    """Predicts the time of a step by a pretended clock."""

    def __init__(self, cost_model, saved, timer):
        super().__init__(cost_model, saved)
        object.__setattr__(self, "timer", timer)

    def time(self, config, packs, devices):  # noqa: ARG002 - the clock reads them off the configuration
        return self.timer(config, packs)


@pytest.fixture
def recipe():
    return load_config(ROOT / "recipes/qwen2.5-7b-text-81920.yaml", ("plan.devices=8", "data.tokens_per_pack=32768"))


@pytest.fixture
def make_search(recipe):
    """A search of a small space on 8 devices: two accumulations, three choices of blocks, two chunks."""

    def make(room_gib=60.0, config=None, timer=pretended_step, **space):
        axes = {
            "accumulations": (1, 2),
            "recomputes": ("none", "full", "left"),
            "chunks": (2048, None),
            "replicates": (1, 2),
        } | space
        model = load_cost_model("qwen2.5-7b")
        saved = SavedByPrecision(lambda precision: shipped_activations("qwen2.5-7b", precision))
        room = None if room_gib is None else int(room_gib * 2**30)
        lengths = ("uniform", length_table())
        return Search(config or recipe, Pretended(model, saved, timer), 8, room, lengths, Space(8 * 32_768, **axes))

    return make
