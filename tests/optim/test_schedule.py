"""The learning rate of every step, against PyTorch-style schedules of transformers."""

import pytest
import torch
from pydantic import ValidationError
from transformers import optimization

from headway.config import OptimConfig
from headway.optim import learning_rate

STEPS, WARMUP, LR = 40, 8, 0.5


def theirs(make, **settings):
    """A schedule of transformers, as factors of the peak by step."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    return make(optimizer, num_warmup_steps=WARMUP, **settings).lr_lambdas[0]


TRAINING = {"num_training_steps": STEPS}
CASES = [
    ({"schedule": "constant"}, optimization.get_constant_schedule_with_warmup, {}),
    (
        {"schedule": "cosine", "min_lr_ratio": 0.2},
        optimization.get_cosine_with_min_lr_schedule_with_warmup,
        {"min_lr_rate": 0.2, **TRAINING},
    ),
    ({"schedule": "linear", "min_lr_ratio": 0.0}, optimization.get_linear_schedule_with_warmup, TRAINING),
    ({"schedule": "inverse_sqrt"}, optimization.get_inverse_sqrt_schedule, {}),
    *(
        (
            {"schedule": schedule, "decay_share": 0.25, "min_lr_ratio": 0.0},
            optimization.get_wsd_schedule,
            {"num_decay_steps": 10, "decay_type": shape, **TRAINING},
        )
        for schedule, shape in (("wsd-linear", "linear"), ("wsd-cosine", "cosine"), ("wsd", "1-sqrt"))
    ),
]


@pytest.mark.parametrize(("settings", "make", "their_settings"), CASES)
def test_a_schedule_is_that_of_transformers(settings, make, their_settings):
    optim = OptimConfig(steps=STEPS, lr=LR, warmup_steps=WARMUP, **settings)
    witness = theirs(make, **their_settings)
    # Ours counts steps from 1, theirs from 0: our first step has their second rate, and our last step the last of all.
    for step in range(1, STEPS + 1):
        assert learning_rate(step, optim) == pytest.approx(LR * witness(step), rel=1e-12, abs=1e-15), step


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_a_falling_schedule_ends_at_its_floor(schedule):
    optim = OptimConfig(steps=STEPS, lr=LR, warmup_steps=WARMUP, schedule=schedule, min_lr_ratio=0.3)
    assert learning_rate(WARMUP, optim) == LR
    assert learning_rate(STEPS, optim) == pytest.approx(0.3 * LR, rel=1e-12)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"schedule": "constant", "min_lr_ratio": 0.5}, "min_lr_ratio has no effect with schedule 'constant'"),
        ({"schedule": "linear", "decay_share": 0.5}, "decay_share has no effect with schedule 'linear'. Remove it, or"),
        ({"schedule": "inverse_sqrt", "min_lr_ratio": 0.5, "warmup_steps": 1}, "min_lr_ratio has no effect"),
        ({"schedule": "inverse_sqrt"}, "needs warmup_steps, because"),
        ({"muon": {"momentum": 0.9}}, "optim.muon has no effect with optimizer 'adamw'"),
        ({"ema": {"decay": 1.0}}, "below 1"),
        ({"lr_of": {"vision": "0.1x"}}, "give a learning rate, such as 2.0e-6, or a factor of optim.lr"),
        ({"lr_of": {"vision": 0.0}}, "To freeze a part, name it in model.freeze"),
    ],
)
def test_a_setting_without_effect_is_an_error(settings, words):
    with pytest.raises(ValidationError, match=words):
        OptimConfig(steps=STEPS, lr=LR, **settings)
