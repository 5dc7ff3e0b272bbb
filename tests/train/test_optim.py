import math

import pytest
import torch

from headway.count import trace
from headway.errors import ConfigError
from headway.models.load import load_model
from headway.train.config import OptimConfig
from headway.train.optim import freeze, learning_rate, make_optimizer


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (1, 0.25),  # a quarter of the way up
        (4, 1.0),  # the top
        (9, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 5 / 10))),  # halfway down: 0.55
        (14, 0.1),  # the floor
    ],
)
def test_the_learning_rate_rises_linearly_and_falls_as_a_half_cosine(step, expected):
    optim = OptimConfig(steps=14, lr=1.0, warmup_steps=4, min_lr_ratio=0.1)
    assert learning_rate(step, optim) == pytest.approx(expected, rel=1e-12)


def test_a_constant_schedule_stays_at_the_top():
    optim = OptimConfig(steps=10, lr=0.5, warmup_steps=2, schedule="constant")
    assert [learning_rate(step, optim) for step in (1, 2, 3, 10)] == [0.25, 0.5, 0.5, 0.5]


def test_norms_and_biases_do_not_decay():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Embedding(5, 3))
    groups = make_optimizer(model, OptimConfig(steps=1, lr=0.1, weight_decay=0.3)).param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == {
        "0.weight": 0.3,
        "0.bias": 0.0,
        "1.weight": 0.0,
        "1.bias": 0.0,
        "2.weight": 0.3,
    }


def test_a_frozen_parameter_is_not_optimised():
    model = torch.nn.Linear(3, 4)
    model.weight.requires_grad_(False)
    groups = make_optimizer(model, OptimConfig(steps=1, lr=0.1)).param_groups
    assert [p for group in groups for p in group["params"]] == [model.bias]


@pytest.fixture(scope="module")
def model(digits):
    return load_model(str(digits / "model"), random_init=True)


def test_freezing_the_vision_tower_leaves_the_rest_in_model_and_ledger_alike(model):
    cost_model = freeze(model, trace(model), ["vision"])
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if name.startswith("model.visual.")}
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert cost_model.params.trainable == trained
    model.requires_grad_(True)


def test_a_pattern_that_matches_nothing_is_an_error(model):
    with pytest.raises(ConfigError, match=r"model.freeze: visoin matches no parameter"):
        freeze(model, trace(model), ["visoin"])


def test_freezing_everything_is_an_error(model):
    with pytest.raises(ConfigError, match="no parameter to train"):
        freeze(model, trace(model), ["*"])
    model.requires_grad_(True)
