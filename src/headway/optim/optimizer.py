"""One optimizer for a whole model: AdamW, and Muon where it is asked for, on parameters sharded or not.

Each process updates its own part of every parameter. The state holds plain tensors, sharded as their parameters are, so
that PyTorch's distributed checkpoints save and reshard it like any other optimizer's.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from headway.config import OptimConfig
from headway.config.optim import MuonConfig
from headway.count import CostModel
from headway.count.updating import ONE_PASS_FROM
from headway.models.parallel import local
from headway.models.parallel.ranks import Ranks
from headway.optim.groups import parameter_groups
from headway.optim.moments import MomentType, new_moment, open_moment, width
from headway.optim.muon import orthogonalised, step_scale
from headway.optim.one_pass import fits_one_pass, numbers_of, update_, why_not
from headway.optim.parts import Values, cut_parameters, laid_as, uniform_lists

_MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}  # by the rule of a group


class Optimizer(torch.optim.Optimizer):
    """AdamW and Muon, by the `rule` of each group.

    Args:
        groups: as `parameter_groups` makes them.
        lr: learning rate until `set_learning_rate` gives another.
        betas: AdamW's decay rates.
        eps: AdamW's epsilon.
        muon: Muon's settings.
        moment_type: how moments are held; None for the parameters' own type.

    Attributes:
        updates: steps taken, left-out ones among them; what noise for rounding follows from.
        found_inf: 1.0, on a device, makes steps leave everything as it is, and 0.0 does nothing; None for no look.
        factor: what steps multiply gradients by as they read them, in float32, a scalar on a device; None for 1. Only
            gradients in float32 hold the product afterwards.
        one_pass_on: type of the devices on which AdamW runs in one pass, see `choose_update`; None for nowhere.
        notes: lines on it for the start of the run.

    Source: AdamW, Loshchilov and Hutter 2019 (arXiv:1711.05101); Muon, see `headway.optim.muon`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        muon: MuonConfig,
        moment_type: MomentType | None,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self.updates = 0
        self.found_inf: torch.Tensor | None = None
        self.factor: torch.Tensor | None = None
        self.one_pass_on: str | None = None
        self.notes: tuple[str, ...] = ()
        self._found_inf: torch.Tensor | None = None  # the flag on the parameters' device
        self._factor: torch.Tensor | None = None
        self._skip: torch.Tensor | None = None
        self._muon = muon
        self._moment_type = moment_type
        self._noise: dict[tuple[torch.device, int], torch.Generator] = {}
        self._places = {
            parameter: place
            for place, parameter in enumerate(p for group in self.param_groups for p in group["params"])
        }

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
        large = [p for p in large if self._moment_type != "8bit" and not self._is_float32(p)]
        kinds = {(p.dtype, getattr(torch, self._moment_type or _own_type(p))) for p in large}
        outcomes = ranks.gather_all((bool(kinds), why_not(kinds, local(large[0]).device) if kinds else None))
        problem = next((problem for _, problem in outcomes if problem is not None), None)
        if problem is not None:
            self.notes = (f"AdamW on CUDA: in float32 copies, several times slower than in one pass, as {problem}",)
        elif any(has_kinds for has_kinds, _ in outcomes):
            self.one_pass_on = "cuda"
            self.notes = ("AdamW on CUDA: in one pass over weights, gradients and moments (Triton)",)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure, so nothing to return
        """Update every parameter that has a gradient; no device is waited for."""
        assert closure is None
        self.updates += 1
        for group in self.param_groups:
            if group["rule"] == "muon":
                self._step_muon(group)
            else:
                self._step_adamw(group)

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
        for name in _MOMENTS[group["rule"]]:
            new_moment(state, name, twin, self._moment_type or _own_type(parameter))
        return sum(moment.nbytes for moment in state.values())

    def _step_adamw(self, group: dict[str, Any]) -> None:
        """Run AdamW: PyTorch's on float32 or on copies in it, or the kernel that makes one pass over bfloat16."""
        parameters = self._begin(group)
        in_float32 = [p for p in parameters if self._is_float32(p)]
        if in_float32:
            gradients = [local(p.grad) for p in in_float32 if p.grad is not None]
            if self._factor is not None:
                torch._foreach_mul_(gradients, self._factor)
            moments = ([local(self.state[p][name]) for p in in_float32] for name in _MOMENTS["adamw"])
            self._fused(group, in_float32, [local(p) for p in in_float32], gradients, *moments)
        others = [p for p in parameters if not self._is_float32(p)]
        in_one_pass = self._in_one_pass(group, others)
        # the rest: as many at a time as float32 copies may take room for, written back as they are held
        for kind in uniform_lists((p for p in others if p not in in_one_pass), self._block_of):
            noise = self._noise_of(kind[0], stream=0)
            for parts in cut_parameters(kind, self._block_of(kind[0].shape)):
                owners = [part.parameter for part in parts]
                states = [self.state[owner] for owner in owners]
                weights = Values([part.of(part.parameter) for part in parts])
                gradient = Values([part.gradient for part in parts])
                gradient.scale(self._factor)
                first = open_moment(states, "exp_avg", parts, signed=True)
                second = open_moment(states, "exp_avg_sq", parts, signed=False)
                self._fused(group, owners, weights.parts, gradient.parts, first.parts, second.parts)
                for values in (weights, first, second):
                    values.write(noise, self._skip)
        self._end(parameters)

    def _in_one_pass(self, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> set[torch.Tensor]:
        """Update the parameters that one launch each takes; returns these parameters."""
        if self.one_pass_on is None:
            return set()
        fitting = {}
        for parameter in parameters:
            moments = (self.state[parameter][name] for name in _MOMENTS["adamw"])
            tensors = [local(tensor) for tensor in (parameter, parameter.grad, *moments) if tensor is not None]
            if fits_one_pass(tensors, self.one_pass_on):
                fitting[parameter] = tensors
        if fitting:
            numbers_PK = numbers_of([self.state[p]["step"] for p in fitting], group, self._found_inf, self._factor)
            for (parameter, tensors), numbers_K in zip(fitting.items(), numbers_PK, strict=True):
                update_(tensors, numbers_K, group, self._seed_of(parameter))
        return set(fitting)

    def _is_float32(self, parameter: torch.Tensor) -> bool:
        return parameter.dtype is torch.float32 and self._moment_type in (None, "float32")

    def _fused(
        self,
        group: dict[str, Any],
        owners: Sequence[torch.Tensor],
        weights: list[torch.Tensor],
        gradients: list[torch.Tensor],
        first: list[torch.Tensor],
        second: list[torch.Tensor],
    ) -> None:
        """Update weights and moments in float32, one tensor for each owner, whose steps have been counted."""
        torch._fused_adamw_(
            weights,
            gradients,
            first,
            second,
            [],
            [self.state[owner]["step"] for owner in owners],
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=self._found_inf,
        )

    def _step_muon(self, group: dict[str, Any]) -> None:
        lr, decay = group["lr"], 1.0 - group["lr"] * group["weight_decay"]
        parameters = self._begin(group)
        for updates in orthogonalised(self._momenta(parameters)):
            directions, (parameter, _) = dict(updates), updates[0]
            noise = self._noise_of(parameter, stream=1)
            scale = step_scale(parameter.shape, self._muon.scale)
            for parts in cut_parameters(directions):
                weights = Values([part.of(part.parameter) for part in parts], copied=True)
                direction = Values([part.of(directions[part.parameter].contiguous()) for part in parts], copied=True)
                weight = (weights.flat * decay).sub_(direction.flat, alpha=lr * scale)
                weights.put(weight if self._skip is None else torch.where(self._skip, weights.flat, weight))
                weights.write(noise, self._skip)
        self._end(parameters)

    def _momenta(self, parameters: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield Muon's parameters with this process's part of the update before orthogonalisation, in bfloat16."""
        for kind in uniform_lists(parameters, self._block_of):
            noise, updates = self._noise_of(kind[0], stream=0), []
            for parts in cut_parameters(kind, self._block_of(kind[0].shape)):
                states = [self.state[part.parameter] for part in parts]
                momentum = open_moment(states, "momentum_buffer", parts, signed=True, copied=True)
                gradients = Values([part.gradient for part in parts], copied=True)
                gradients.scale(self._factor)
                # momentum, and Nesterov's step further, both in float32
                if self._skip is not None:  # the mean of a number and itself is that number
                    gradients.put(torch.where(self._skip, momentum.flat, gradients.flat))
                momentum.flat.lerp_(gradients.flat, 1.0 - self._muon.momentum)
                update = gradients.flat.lerp_(momentum.flat, self._muon.momentum).to(torch.bfloat16)
                momentum.write(noise, self._skip)
                # a parameter that was cut is put together again
                for part, values in zip(parts, laid_as(gradients.parts, update), strict=True):
                    updates.append(values)
                    if part.is_last:
                        update_of_all = updates[0] if len(updates) == 1 else torch.cat(updates)
                        updates = []
                        yield part.parameter, update_of_all.view(local(part.parameter).shape)

    def _begin(self, group: dict[str, Any]) -> list[torch.Tensor]:
        """Make the state of parameters that have none, and count the step of every parameter with a gradient."""
        parameters: list[torch.Tensor] = [p for p in group["params"] if p.grad is not None]
        for parameter in parameters:
            state: dict[str, Any] = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                for name in _MOMENTS[group["rule"]]:
                    new_moment(state, name, parameter, self._moment_type or _own_type(parameter))
        if parameters:
            torch._foreach_add_([self.state[p]["step"] for p in parameters], 1.0)
            # Weights that were offloaded to the host wait for these there, as they have for their gradients.
            found_inf, factor, device = self.found_inf, self.factor, parameters[0].device
            self._found_inf = None if found_inf is None else found_inf.to(device)
            self._factor = None if factor is None else factor.to(device)
            self._skip = None if self._found_inf is None else self._found_inf > 0
        return parameters

    def _end(self, parameters: Sequence[torch.Tensor]) -> None:
        """Undo the count where the step was left out."""
        if parameters and self._found_inf is not None:
            torch._foreach_sub_([self.state[p]["step"] for p in parameters], [self._found_inf] * len(parameters))

    def _block_of(self, shape: torch.Size) -> int:
        """Number of values of a parameter that share a scale."""
        return width(shape) if self._moment_type == "8bit" else 1

    def _noise_of(self, first: torch.Tensor, *, stream: int) -> torch.Generator:
        """Noise that depends on the update and its purpose alone, so that a resumed run rounds as it would have."""
        noise = self._noise.setdefault((first.device, stream), torch.Generator(first.device))
        return noise.manual_seed(self._seed_of(first) * 2 + stream)

    def _seed_of(self, parameter: torch.Tensor) -> int:
        return self.updates * len(self._places) + self._places[parameter]


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
    optimizer = Optimizer(
        parameter_groups(model, optim, cost_model),
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        muon=optim.muon,
        moment_type=None if optim.state == "auto" else optim.state,
    )
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


def _own_type(parameter: torch.Tensor) -> MomentType:
    return "bfloat16" if parameter.dtype is torch.bfloat16 else "float32"
