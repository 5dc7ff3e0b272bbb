"""AdamW: PyTorch's on float32 or on copies in it, or one kernel's pass over weights and moments held in bfloat16.

The kernel (`one_pass_kernel`, in Triton) reads weight, gradient and both moments of a parameter, computes in float32 in
registers, and writes weight and moments as they are held, bfloat16 rounded stochastically. Letters: P parameters.

Source: Loshchilov and Hutter 2019 (arXiv:1711.05101).
"""

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from headway.count.updating import ONE_PASS_FROM, RULES
from headway.optim.parts import Update, Values, is_float32, open_moment
from headway.tracing.unwrap import local

MOMENTS = RULES["adamw"].moments
_TYPES = (torch.float32, torch.bfloat16)


def update(step: Update) -> None:
    """Run AdamW on the parameters of a group."""
    in_float32 = [p for p in step.states if is_float32(p, step.settings)]
    if in_float32:
        gradients = [local(p.grad) for p in in_float32 if p.grad is not None]
        if step.factor is not None:
            torch._foreach_mul_(gradients, step.factor)
        moments = ([local(step.states[p][name]) for p in in_float32] for name in MOMENTS)
        _fused(step, in_float32, [local(p) for p in in_float32], gradients, *moments)
    others = [p for p in step.states if not is_float32(p, step.settings)]
    in_one_pass = _in_one_pass(step, others)
    # the rest: as many at a time as float32 copies may take room for, written back as they are held
    for first, groups in step.lists(p for p in others if p not in in_one_pass):
        noise = step.noise_of(first, stream=0)
        for parts in groups:
            owners = [part.parameter for part in parts]
            states = [step.states[owner] for owner in owners]
            weights = Values([part.of(part.parameter) for part in parts])
            gradient = Values([part.gradient for part in parts])
            gradient.scale(step.factor)
            mean = open_moment(states, "exp_avg", parts, signed=True)
            square = open_moment(states, "exp_avg_sq", parts, signed=False)
            _fused(step, owners, weights.parts, gradient.parts, mean.parts, square.parts)
            for values in (weights, mean, square):
                values.write(noise, step.skip)


def _fused(
    step: Update,
    owners: Sequence[torch.Tensor],
    weights: list[torch.Tensor],
    gradients: list[torch.Tensor],
    mean: list[torch.Tensor],
    square: list[torch.Tensor],
) -> None:
    """Update weights and both moments in float32, of each a tensor for each owner."""
    group, counts = step.group, [step.states[owner]["step"] for owner in owners]
    (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
    torch._fused_adamw_(
        weights, gradients, mean, square, [], counts, lr=lr, beta1=beta1, beta2=beta2, weight_decay=decay,
        eps=group["eps"], amsgrad=False, maximize=False, found_inf=step.found_inf,
    )  # fmt: skip


def _in_one_pass(step: Update, parameters: Sequence[torch.Tensor]) -> set[torch.Tensor]:
    if step.one_pass_on is None:
        return set()
    fitting = {}
    for parameter in parameters:
        moments = (step.states[parameter][name] for name in MOMENTS)
        tensors = [local(tensor) for tensor in (parameter, parameter.grad, *moments) if tensor is not None]
        if fits_one_pass(tensors, step.one_pass_on):
            fitting[parameter] = tensors
    if fitting:
        numbers_PK = numbers_of([step.states[p]["step"] for p in fitting], step.group, step.found_inf, step.factor)
        for (parameter, tensors), numbers_K in zip(fitting.items(), numbers_PK, strict=True):
            update_(tensors, numbers_K, step.group, step.seed_of(parameter))
    return set(fitting)


def fits_one_pass(tensors: Sequence[torch.Tensor], device_type: str) -> bool:
    """Tell whether the kernel updates a parameter, by its weight, gradient and moments: large ones in whole pieces."""
    return tensors[0].numel() >= ONE_PASS_FROM and all(
        tensor.device.type == device_type and tensor.dtype in _TYPES and tensor.is_contiguous() for tensor in tensors
    )


def numbers_of(
    steps: Sequence[torch.Tensor],
    group: dict[str, Any],
    found_inf: torch.Tensor | None,
    factor: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Compute a step's numbers for each of P parameters on their device, which nobody waits for.

    Args:
        steps: counts of steps with this one, a scalar on the device for each parameter.
        group: settings of the parameters' group.
        found_inf: above 0 where the step is left out; None for never.
        factor: of gradients; None for 1.

    Returns:
        For each parameter in float32: lr / (1 - beta1^step), 1 / sqrt(1 - beta2^step), lr x weight decay, above 0 if
        its step is left out, and the factor of its gradient.
    """
    (beta1, beta2), lr = group["betas"], group["lr"]
    count_P = torch.stack(list(steps)).double()  # 1 - 0.999 has four digits in float32
    zeros_P = torch.zeros_like(count_P)
    numbers = (
        lr / (1.0 - beta1**count_P),
        (1.0 - beta2**count_P).rsqrt(),
        zeros_P + lr * group["weight_decay"],
        zeros_P if found_inf is None else zeros_P + found_inf,
        zeros_P + (1.0 if factor is None else factor),
    )
    return torch.stack(numbers, dim=1).float().unbind()


def update_(tensors: Sequence[torch.Tensor], numbers: torch.Tensor, group: dict[str, Any], seed: int) -> None:
    """Update a parameter's weight and moments in place, in one launch.

    Args:
        tensors: this process's weight, gradient, which is only read, and moments, as `fits_one_pass` asks.
        numbers: this parameter's, by `numbers_of`.
        group: settings of its group.
        seed: of the noise for rounding.
    """
    from headway.optim.one_pass_kernel import HALF, adamw_one_pass  # the kernel needs Triton

    numel, (beta1, beta2) = tensors[0].numel(), group["betas"]
    blocks = -(-numel // (2 * HALF))
    settings = (beta1, beta2, 1.0 - beta1, 1.0 - beta2, group["eps"])
    with torch.cuda.device_of(tensors[0]):  # type: ignore[no-untyped-call]  # as torch leaves it
        adamw_one_pass[(blocks,)](*tensors, numbers, numel, seed, *settings, HALF=HALF)


def why_not(kinds: Iterable[tuple[torch.dtype, torch.dtype]], device: torch.device) -> str | None:
    """Try the kernel: compile it, and hold a step of some numbers against PyTorch's AdamW.

    Args:
        kinds: types of weights and of moments.
        device: to try it on.

    Returns:
        Why it does not run there, as a part of a sentence; None where it does.
    """
    if find_spec("triton") is None:
        return "Triton is not installed"
    for weight_type, moment_type in sorted(set(kinds), key=str):
        try:
            is_right = _is_right(weight_type, moment_type, device)
        except Exception as error:  # noqa: BLE001 - what compilers, drivers and their processes raise has no base of its own
            text = str(error).strip().splitlines() or [""]
            return f"it failed with {type(error).__name__}: {text[-1]}"
        if not is_right:
            return f"its result for {weight_type} with moments in {moment_type} is not that of PyTorch's AdamW"
    return None


def _is_right(weight_type: torch.dtype, moment_type: torch.dtype, device: torch.device) -> bool:
    """Tell whether the kernel's second step is PyTorch's, but for rounding of the types in which it is held.

    Gradients are halved by the kernel, and beforehand for PyTorch's.
    """
    generator = torch.Generator().manual_seed(0)
    types = (weight_type, weight_type, moment_type, moment_type)
    scales = (1.0, 1.0, 0.1, 0.01)
    values = [
        (torch.randn(5000, generator=generator).abs() * scale).to(device, dtype)  # two whole blocks, and an odd end
        for dtype, scale in zip(types, scales, strict=True)
    ]
    weight, gradient, first, second = (tensor.to(torch.float32, copy=True) for tensor in values)
    steps, group = (
        torch.full((), 2.0, device=device),
        {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-8},
    )
    torch._fused_adamw_(
        [weight], [gradient / 2], [first], [second], [], [steps], lr=0.1, beta1=0.9, beta2=0.95, weight_decay=0.1,
        eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    update_(values, numbers_of([steps], group, None, torch.full((), 0.5, device=device))[0], group, 1)
    results, expected = (values[0], *values[2:]), (weight, first, second)
    return all(
        torch.allclose(result.float(), value, rtol=4 * torch.finfo(result.dtype).eps, atol=1e-6)
        for result, value in zip(results, expected, strict=True)
    )
