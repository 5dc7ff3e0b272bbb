"""The learning rate as a pure function of the step."""

import math
from collections.abc import Callable

from headway.config import OptimConfig
from headway.config.optim import WSD

# Remaining fraction of the way from peak to floor: 1 at progress 0, 0 at progress 1.
_FALLS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "wsd": lambda progress: 1.0 - math.sqrt(progress),
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def learning_rate(step: int, optim: OptimConfig, steps: int | None = None) -> float:
    """Learning rate of one optimizer step: a linear rise to the peak, then the schedule's course.

    Args:
        step: the step about to be taken, counted from 1. A course that falls to `min_lr_ratio * lr` has it at the last
            step.
        optim: peak, warm-up and course.
        steps: of the whole run, as many as `optim.epochs` are; None for `optim.steps` [steps].

    Source: cosine annealing without restarts, Loshchilov and Hutter 2017 (arXiv:1608.03983), equation 5; inverse square
    root, Vaswani et al. 2017 (arXiv:1706.03762), equation 3; warm-up, stable, decay, Hu et al. 2024 (arXiv:2404.06395),
    and its 1 - sqrt decay, Hägele et al. 2024 (arXiv:2405.18392).

    >>> optim = OptimConfig(steps=10, lr=1.0, warmup_steps=2, min_lr_ratio=0.0)
    >>> [round(learning_rate(step, optim), 3) for step in (1, 2, 6, 10)]
    [0.5, 1.0, 0.5, 0.0]
    """
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    if optim.schedule == "inverse_sqrt":
        return optim.lr * math.sqrt(optim.warmup_steps / step)
    steps = optim.steps if steps is None else steps
    assert steps is not None  # whoever asks for epochs has counted them
    start = optim.warmup_steps
    if optim.schedule in WSD:  # the decay has at least a step, and no more than the warm-up leaves
        start = max(start, steps - max(1, round(optim.decay_share * steps)))
    progress = max(0, step - start) / (steps - start)
    floor = optim.min_lr_ratio
    return optim.lr * (floor + (1.0 - floor) * _FALLS[optim.schedule.removeprefix("wsd-")](progress))
