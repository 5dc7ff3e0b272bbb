"""The repeated layers of language models and vision towers are found by what they are, not by their names."""

import pytest

from headway.errors import ConfigError
from headway.models.blocks import blocks
from headway.models.load import load_model
from helpers.models import tiny_config


@pytest.mark.parametrize(
    ("family", "towers"),
    [
        ("gpt2", {"transformer.h": 2}),
        ("qwen3", {"model.layers": 2}),
        ("qwen3_vl", {"model.language_model.layers": 2, "model.visual.blocks": 3}),
        ("qwen2_5_vl", {"model.language_model.layers": 2, "model.visual.blocks": 3}),
    ],
)
def test_every_layer_of_every_tower_is_a_block(family, towers):
    found = blocks(load_model(tiny_config(family), random_init=True))
    assert {block.tower: sum(other.tower == block.tower for other in found) for block in found} == towers
    assert all(block.name.startswith(block.tower + ".") for block in found)


def test_a_model_without_repeated_layers_is_refused():
    model = load_model(tiny_config("qwen3"), random_init=True)
    model.model.layers = model.model.layers[:0]
    with pytest.raises(ConfigError, match="no repeated layers"):
        blocks(model)
