"""One optimizer for a whole model: AdamW, and Muon where it is asked for, on parameters sharded or not.

Each process updates its own part of every parameter. The state holds plain tensors, sharded as their parameters are, so
that PyTorch's distributed checkpoints save and reshard it like any other optimizer's.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from headway.count import CostModel
from headway.train.config import OptimConfig
from headway.train.config.optim import MuonConfig
from headway.train.optim.groups import parameter_groups
from headway.train.optim.moments import Held, Plain, chunks, local, new_moment, open_moment, width
from headway.train.optim.muon import orthogonalised, step_scale


class Optimizer(torch.optim.Optimizer):
    """AdamW and Muon, by the `rule` of each group.

    Args:
        groups: as `parameter_groups` makes them.
        lr: learning rate until `set_learning_rate` gives another.
        betas: AdamW's decay rates.
        eps: AdamW's epsilon.
        muon: Muon's settings.
        held: how moments are held; None for the parameters' own type.

    Source: AdamW, Loshchilov and Hutter 2019 (arXiv:1711.05101); Muon, see `headway.train.optim.muon`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        muon: MuonConfig,
        held: Held | None,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self.found_inf: torch.Tensor | None = (
            None  # 1.0 makes PyTorch's fused kernel leave a step out, as in GradScaler
        )
        self._muon = muon
        self._held = held
        self._noise: dict[torch.device, torch.Generator] = {}
        self._places = {
            parameter: place
            for place, parameter in enumerate(p for group in self.param_groups for p in group["params"])
        }
        for group in self.param_groups:
            # PyTorch's own key, by which it puts the step of a loaded state where its fused kernel wants it
            group["fused"] = group["rule"] == "adamw" and all(self._is_fused(p) for p in group["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure, so nothing to return
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            if group["rule"] == "muon":
                self._step_muon(group)
            elif group["fused"]:
                self._step_fused(group)
            else:
                self._step_adamw(group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take in a state; moments stay in the type in which they are held, whatever the parameters' type is."""
        wanted = {key: {"step": state["step"]} if "step" in state else {} for key, state in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": wanted})
        keys = (key for group in state_dict["param_groups"] for key in group["params"])
        held = (parameter for group in self.param_groups for parameter in group["params"])
        for key, parameter in zip(keys, held, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if name != "step":
                    self.state[parameter][name] = value.to(parameter.device)

    def _is_fused(self, parameter: torch.Tensor) -> bool:
        """Whether PyTorch's fused kernel updates a parameter: it wants moments in the parameter's own type."""
        return self._held is None or (self._held == "float32" and parameter.dtype is torch.float32)

    def _step_fused(self, group: dict[str, Any]) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        adamw(
            [local(p) for p in parameters],
            [local(p.grad) for p in parameters],
            [local(self.state[p]["exp_avg"]) for p in parameters],
            [local(self.state[p]["exp_avg_sq"]) for p in parameters],
            [],
            [self.state[p]["step"] for p in parameters],
            fused=True,
            amsgrad=False,
            found_inf=self.found_inf,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _step_adamw(self, group: dict[str, Any]) -> None:
        """AdamW in float32 on moments that are held in another type than the parameters."""
        (beta1, beta2), lr = group["betas"], group["lr"]
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state, noise = self._begin(parameter, {"exp_avg": True, "exp_avg_sq": False})
            step = int(state["step"])
            first = open_moment(state, "exp_avg", parameter.shape, noise, signed=True)
            second = open_moment(state, "exp_avg_sq", parameter.shape, noise, signed=False)
            weights = Plain(local(parameter), width(parameter.shape), noise)
            gradients = Plain(local(parameter.grad), width(parameter.shape), noise)
            for rows in chunks(local(parameter).numel(), width(parameter.shape)):
                gradient = gradients.read(rows)
                mean = first.read(rows).lerp_(gradient, 1.0 - beta1)
                square = second.read(rows).lerp_(gradient.square_(), 1.0 - beta2)
                first.write(rows, mean)
                second.write(rows, square)
                spread = square.sqrt_().div_(math.sqrt(1.0 - beta2**step)).add_(group["eps"])
                weight = weights.read(rows).mul_(1.0 - lr * group["weight_decay"])
                weights.write(rows, weight.addcdiv_(mean, spread, value=-lr / (1.0 - beta1**step)))

    def _step_muon(self, group: dict[str, Any]) -> None:
        lr = group["lr"]
        for parameter, direction in orthogonalised(self._momenta(group), self._muon.iterations):
            noise = self._noise_of(parameter, int(self.state[parameter]["step"]), stream=1)
            weights = Plain(local(parameter), 1, noise)
            everything = slice(None)
            weight = weights.read(everything).mul_(1.0 - lr * group["weight_decay"])
            scale = step_scale(parameter.shape, self._muon.scale)
            weights.write(everything, weight.sub_(direction.reshape(weight.shape), alpha=lr * scale))

    def _momenta(self, group: dict[str, Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each of Muon's parameters with this process's part of its update before it is orthogonalised, in bfloat16."""
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state, noise = self._begin(parameter, {"momentum_buffer": True})
            block = width(parameter.shape)
            momentum = open_moment(state, "momentum_buffer", parameter.shape, noise, signed=True)
            gradient = local(parameter.grad)
            gradients = Plain(gradient, block, noise)
            update = torch.empty_like(gradient, dtype=torch.bfloat16)
            for rows in chunks(gradient.numel(), block):
                now = gradients.read(rows)
                mean = momentum.read(rows).lerp_(now, 1.0 - self._muon.momentum)
                momentum.write(rows, mean)
                update.view(-1, block)[rows] = now.lerp_(mean, self._muon.momentum) if self._muon.nesterov else mean
            yield parameter, update

    def _begin(self, parameter: torch.Tensor, moments: dict[str, bool]) -> tuple[dict[str, Any], torch.Generator]:
        """Count a parameter's step, after making its state if it has none; with its source of noise."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)  # on the host, where it is read
            for name in moments:
                new_moment(state, name, parameter, self._held or _own_type(parameter))
        state["step"] += 1
        return state, self._noise_of(parameter, int(state["step"]), stream=0)

    def _noise_of(self, parameter: torch.Tensor, step: int, *, stream: int) -> torch.Generator:
        """Noise that depends on the step and the parameter alone, so that a resumed run rounds as it would have."""
        noise = self._noise.setdefault(parameter.device, torch.Generator(parameter.device))
        return noise.manual_seed((step * len(self._places) + self._places[parameter]) * 2 + stream)


def make_optimizer(model: nn.Module, optim: OptimConfig, cost_model: CostModel) -> Optimizer:
    """Build the optimizer of the parameters that learn.

    Args:
        model: its parameters with `requires_grad`, as they are trained: sharded, if they will be.
        optim: rules, learning rates, decay and the precision of moments.
        cost_model: of this model, for the parts that settings name.

    Raises:
        ConfigError: as in `parameter_groups`.
    """
    return Optimizer(
        parameter_groups(model, optim, cost_model),
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        muon=optim.muon,
        held=None if optim.state == "auto" else optim.state,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group its share of a learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]


def _own_type(parameter: torch.Tensor) -> Held:
    return "bfloat16" if parameter.dtype is torch.bfloat16 else "float32"
