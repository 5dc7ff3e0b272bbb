"""One optimizer for a whole model: AdamW, and Muon where it is asked for, on parameters sharded or not.

Each process updates its own part of every parameter. The state holds plain tensors, sharded as their parameters are, so
that PyTorch's distributed checkpoints save and reshard it like any other optimizer's.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headway.config import OptimConfig
from headway.config.optim import WSD
from headway.count import CostModel
from headway.count.updating import ONE_PASS_FROM, RULES
from headway.models.parallel.ranks import Ranks
from headway.optim import adamw, muon
from headway.optim.adamw import why_not
from headway.optim.groups import parameter_groups
from headway.optim.parts import Update, is_float32, moment_type, new_moment, slice_number
from headway.tracing.unwrap import local

UPDATES = {"adamw": adamw.update, "muon": muon.update}
"""Functions that update a group's parameters, by the rule of the group; `headway.count.updating.RULES` has the rest."""


class Optimizer(torch.optim.Optimizer):
    """AdamW and Muon, by the `rule` of each group.

    Args:
        groups: as `parameter_groups` makes them.
        settings: of the rules, and how moments are held.

    Attributes:
        updates: steps taken, left-out ones among them; what noise for rounding follows from.
        found_inf: 1.0, on a device, makes steps leave everything as it is, and 0.0 does nothing; None for no look.
        factor: what steps multiply gradients by as they read them, in float32, a scalar on a device; None for 1. Only
            gradients in float32 hold the product afterwards.
        one_pass_on: type of the devices on which AdamW runs in one pass, see `choose_update`; None for nowhere.
        notes: lines on it for the start of the run.
    """

    def __init__(self, groups: list[dict[str, Any]], settings: OptimConfig) -> None:
        super().__init__(groups, {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps})
        self.updates = 0
        self.found_inf: torch.Tensor | None = None
        self.factor: torch.Tensor | None = None
        self.one_pass_on: str | None = None
        self.notes: tuple[str, ...] = ()
        self._settings = settings
        self._noise: dict[tuple[torch.device, int], torch.Generator] = {}
        self._places = {
            parameter: place
            for place, parameter in enumerate(p for group in self.param_groups for p in group["params"])
        }

    @property
    def update_mode(self) -> str:
        """Kind of update, as the records of steps name it: one kernel for AdamW, stacks of like matrices for Muon."""
        return "fused" if all(group["rule"] == "adamw" for group in self.param_groups) else "foreach"

    def choose_update(self, ranks: Ranks) -> None:
        """Let AdamW update what is not held in float32 in one pass, if the kernel for it runs on all processes.

        Args:
            ranks: the processes that update together; those that hold copies of a slice must round alike.
        """
        large = [
            p
            for group in self.param_groups
            for p in group["params"]
            if group["rule"] == "adamw" and local(p).is_cuda and local(p).numel() >= ONE_PASS_FROM
        ]
        large = [p for p in large if self._settings.state != "8bit" and not is_float32(p, self._settings)]
        kinds = {(p.dtype, getattr(torch, moment_type(p, self._settings))) for p in large}
        outcomes = ranks.gather_all((bool(kinds), why_not(kinds, local(large[0]).device) if kinds else None))
        problem = next((problem for _, problem in outcomes if problem is not None), None)
        if problem is not None:
            self.notes = (
                f"AdamW on CUDA: with float32 copies, several times slower than in one pass, because {problem}",
            )
        elif any(has_kinds for has_kinds, _ in outcomes):
            self.one_pass_on = "cuda"
            self.notes = ("AdamW on CUDA: in one pass over weights, gradients and moments (Triton)",)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure, so nothing to return
        """Update every parameter that has a gradient; no device is waited for."""
        assert closure is None
        self.updates += 1
        for group in self.param_groups:
            states = self._states(group)
            if not states:
                continue
            # Weights that were offloaded to the host wait for these there, as they have for their gradients.
            device, counts = next(iter(states)).device, [state["step"] for state in states.values()]
            found_inf, factor = (None if x is None else x.to(device) for x in (self.found_inf, self.factor))
            torch._foreach_add_(counts, 1.0)
            skip = None if found_inf is None else found_inf > 0
            UPDATES[group["rule"]](
                Update(
                    group,
                    self._settings,
                    states,
                    found_inf,
                    skip,
                    factor,
                    self.one_pass_on,
                    self._noise_of,
                    self._seed_of,
                )
            )
            if found_inf is not None:  # a step that was left out does not count
                torch._foreach_sub_(counts, [found_inf] * len(counts))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take in a state; moments stay in the type in which they are held, whatever the parameters' type is."""
        super().load_state_dict({**state_dict, "state": {key: {} for key in state_dict["state"]}})
        keys = (key for group in state_dict["param_groups"] for key in group["params"])
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        for key, parameter in zip(keys, parameters, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                self.state[parameter][name] = value.to(parameter.device)
        self.updates = max((int(state["step"]) for state in self.state.values() if state), default=0)

    def state_bytes_of(self, parameter: torch.Tensor) -> int:
        """Bytes of the state that this process keeps of a parameter, or will after the first step."""
        group = next(group for group in self.param_groups if any(parameter is p for p in group["params"]))
        twin, state = torch.empty_like(local(parameter), device="meta"), dict[str, torch.Tensor]()
        for name in RULES[group["rule"]].moments:
            new_moment(state, name, twin, moment_type(parameter, self._settings))
        return sum(moment.nbytes for moment in state.values())

    def _states(self, group: dict[str, Any]) -> dict[torch.Tensor, dict[str, Any]]:
        parameters: list[torch.Tensor] = [p for p in group["params"] if p.grad is not None]
        for parameter in parameters:
            state: dict[str, Any] = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                for name in RULES[group["rule"]].moments:
                    new_moment(state, name, parameter, moment_type(parameter, self._settings))
        return {parameter: self.state[parameter] for parameter in parameters}

    def _noise_of(self, first: torch.Tensor, *, stream: int) -> torch.Generator:
        """Noise that depends on update, slice and purpose alone, so that a resumed run rounds as it would have."""
        noise = self._noise.setdefault((first.device, stream), torch.Generator(first.device))
        return noise.manual_seed(self._seed_of(first) * 2 + stream)

    def _seed_of(self, parameter: torch.Tensor) -> int:
        # slices round independently, and the step of 2^64 over the golden ratio moves a generator's low bits too
        seed = self.updates * len(self._places) + self._places[parameter] + slice_number(parameter) * 0x9E3779B97F4A7C15
        return seed % 2**62


def make_optimizer(
    model: nn.Module, optim: OptimConfig, cost_model: CostModel, ranks: Ranks | None = None
) -> Optimizer:
    """Build the optimizer of the parameters that learn.

    Args:
        model: its parameters with `requires_grad`, as they are trained: sharded, if they will be.
        optim: rules, learning rates, decay and the precision of moments.
        cost_model: of this model, for the parts that settings name.
        ranks: the processes that train, for which AdamW's kernel is tried; None to do without it.

    Raises:
        ConfigError: as in `parameter_groups`.
    """
    optimizer = Optimizer(parameter_groups(model, optim, cost_model), optim)
    if ranks is not None:
        optimizer.choose_update(ranks)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group its share of a learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]


def take_step(
    optimizer: Optimizer,
    numbers_K: torch.Tensor,
    *,
    factor: torch.Tensor | None = None,
    skips: bool,
    learns: bool = True,
) -> None:
    """Update the weights; where numbers are not finite, leave the update out if `skips` is set.

    The optimizer looks at the numbers on the device: nothing waits for them. A step with nothing to learn from leaves
    weights and moments as they are: neither momentum nor weight decay acts without a gradient.

    Args:
        optimizer: with the gradients in place.
        numbers_K: the step's losses and gradient norm, the same on all ranks, shape (K,).
        factor: of the gradients, a scalar, from `headway.models.parallel.clipping_factor`; None for no clipping.
        skips: whether an update may be left out.
        learns: whether there was anything to learn from, on any rank.
    """
    if not learns:
        optimizer.updates += 1
        return
    optimizer.factor = factor
    if skips:
        optimizer.found_inf = 1.0 - torch.isfinite(numbers_K).all().to(torch.float32)
    optimizer.step()


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
