"""AdamW with decay groups, and the learning rate as a pure function of the step."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from headway.count import CostModel
from headway.errors import ConfigError, UsageError
from headway.train.config import OptimConfig


def learning_rate(step: int, optim: OptimConfig) -> float:
    """Learning rate of one optimizer step: a linear rise, then a half cosine down to `min_lr_ratio * lr`.

    Args:
        step: the step about to be taken, counted from 1 to `optim.steps`.
        optim: peak, warm-up, course and last ratio.

    Source: cosine annealing without restarts, Loshchilov and Hutter 2017 (arXiv:1608.03983), equation 5.

    >>> optim = OptimConfig(steps=10, lr=1.0, warmup_steps=2, min_lr_ratio=0.0)
    >>> [round(learning_rate(step, optim), 3) for step in (1, 2, 6, 10)]
    [0.5, 1.0, 0.5, 0.0]
    """
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    progress = (step - optim.warmup_steps) / (optim.steps - optim.warmup_steps)
    floor = optim.min_lr_ratio
    return optim.lr * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))


def freeze(model: nn.Module, cost_model: CostModel, patterns: Sequence[str]) -> CostModel:
    """Take parameters out of training, in the model and in its ledger by the same rule.

    Args:
        model: changed in place; what is frozen already stays so.
        cost_model: traced from this model.
        patterns: components of the ledger (`vision`, `language.mlp`) or globs over parameter names.

    Returns:
        The cost model of the model as it trains now.

    Raises:
        ConfigError: a pattern matches nothing, or nothing is left to train.
    """
    try:
        frozen = cost_model.freeze(patterns)
    except UsageError as error:
        raise ConfigError(f"model.freeze: {str(error).removeprefix('--freeze ')}") from error
    parameters = dict(model.named_parameters())
    for entry in frozen.parameters:
        parameters[entry.name].requires_grad_(entry.trainable)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError("model.freeze leaves no parameter to train; take a pattern out.")
    return frozen


def make_optimizer(model: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the parameters that learn; matrices decay, vectors (norms, biases, scalars) do not.

    Args:
        model: its parameters with `requires_grad`.
        optim: peak learning rate, betas, epsilon and weight decay.

    Source: Loshchilov and Hutter 2019 (arXiv:1711.05101).
    """
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in learning if parameter.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [parameter for parameter in learning if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group of an optimizer the same learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr
