"""Laws of the kernel on a CPU; `test_one_pass.py` runs them with TRITON_INTERPRET=1, so that Triton uses NumPy."""

import math
from copy import deepcopy

import pytest
import torch

from headway.config import OptimConfig
from headway.optim import Optimizer
from headway.optim.adamw import numbers_of, update_
from headway.optim.optimizer import take_step

LARGE = 2**13
BF16, FP32 = torch.bfloat16, torch.float32
TYPES = [(BF16, BF16), (BF16, FP32), (FP32, BF16)]  # of weights and gradients, of moments
GROUP = {"lr": 0.03, "betas": (0.9, 0.999), "weight_decay": 0.1, "eps": 1e-8}


def tensors_of(numel, weight_type, moment_type, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight, gradient, first = (torch.randn(numel, generator=generator) for _ in range(3))
    second = torch.rand(numel, generator=generator) * 0.01
    return [weight.to(weight_type), gradient.to(weight_type), first.to(moment_type), second.to(moment_type)]


def update(tensors, count=3, seed=1, group=GROUP, found_inf=None, factor=None):
    tensors = [tensor.clone() for tensor in tensors]
    update_(tensors, numbers_of([torch.tensor(float(count))], group, found_inf, factor)[0], group, seed)
    return tensors


def exact(tensors, count=3, group=GROUP):
    """The same step by PyTorch's AdamW in float32, nothing rounded."""
    weight, gradient, first, second = (tensor.to(FP32, copy=True) for tensor in tensors)
    torch._fused_adamw_(
        [weight], [gradient], [first], [second], [], [torch.tensor(float(count))], lr=group["lr"],
        beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"], eps=group["eps"],
        amsgrad=False, maximize=False,
    )  # fmt: skip
    return [weight, gradient, first, second]


@pytest.mark.parametrize("numel", [1, 1023, 1024, 1025, 2047, 2048, 2049, 5001])
@pytest.mark.parametrize("types", TYPES)
def test_the_kernel_computes_pytorch_s_adamw_to_the_end_and_no_further(types, numel):
    for count in (1, 2, 1000):
        longer = tensors_of(numel + 40, *types)
        before = [tensor.clone() for tensor in longer]
        update_([t[:numel] for t in longer], numbers_of([torch.tensor(float(count))], GROUP, None)[0], GROUP, 1)
        for result, expected in zip(longer, exact([t[:numel] for t in before], count), strict=True):
            # to some roundings of float32, also of sums that cancel out; what is held in bfloat16, to a step of it
            eps = 4 * torch.finfo(FP32).eps
            rtol, atol = (eps, eps) if result.dtype is FP32 else (torch.finfo(BF16).eps, eps)
            torch.testing.assert_close(result[:numel].float(), expected, rtol=rtol, atol=atol)
        assert torch.equal(longer[1], before[1])
        assert all(torch.equal(a[numel:], b[numel:]) for a, b in zip(longer, before, strict=True))


def test_rounding_goes_to_either_neighbour_and_its_mean_is_the_float32_value():
    """Of each quantity, and independently: a share p of n values goes up, within 5 of its standard deviations."""
    numel = 2**16
    tensors = [torch.full((numel,), value, dtype=BF16) for value in (1.0, 0.37, 0.21, 0.044)]
    ups = []
    for result, expected in zip(update(tensors), exact(tensors), strict=True):
        value = expected[0]
        assert (expected == value).all()
        below = (value.view(torch.int32) & -(2**16)).view(FP32)
        above = (below.view(torch.int32) + 2**16).view(FP32)
        if result is not None and value == below:  # the gradient
            assert (result == value).all()
            continue
        is_up = result.float() == above
        assert (is_up | (result.float() == below)).all()
        share = ((value - below) / (above - below)).item()
        assert 0.02 < share < 0.98
        assert is_up.double().mean().item() == pytest.approx(share, abs=5 * math.sqrt(share * (1 - share) / numel))
        ups.append(is_up.double())
    assert len(ups) == 3
    # nor do values follow each other, or the value of the other half of their block
    pairs = [(ups[0], ups[1]), (ups[0], ups[2]), (ups[1], ups[2])]
    pairs += [(up[: numel - lag], up[lag:]) for up in ups for lag in (1, 1024, 2048)]
    for one, other in pairs:
        assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1].item()) < 5 / math.sqrt(len(one))


def test_noise_follows_from_the_seed_alone():
    tensors = tensors_of(5001, BF16, BF16)
    first, same, other, beyond = (update(tensors, seed=seed) for seed in (7, 7, 8, 7 + 2**32))
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    for results in (other, beyond):
        assert all((a != b).float().mean() > 0.2 for a, b in zip(first[2:], results[2:], strict=True))


@pytest.mark.parametrize("types", TYPES)
def test_a_step_that_is_left_out_changes_nothing(types):
    tensors = tensors_of(5001, *types)
    tensors[1][3] = math.nan
    after = update(tensors, found_inf=torch.tensor(1.0))
    assert all(torch.equal(a, b) for a, b in zip(after[::2] + after[3:], tensors[::2] + tensors[3:], strict=True))
    assert not torch.equal(update(tensors, found_inf=torch.tensor(0.0))[0], tensors[0])


@pytest.mark.parametrize("types", TYPES)
def test_a_factor_multiplies_the_gradient_in_float32_and_leaves_it(types):
    tensors, factor = tensors_of(5001, *types), torch.tensor(0.3)
    scaled = [tensors[0], tensors[1].float() * factor, *tensors[2:]]
    eps = 4 * torch.finfo(FP32).eps
    after = update(tensors, factor=factor)
    for result, expected in zip(after[::2] + after[3:], [exact(scaled)[place] for place in (0, 2, 3)], strict=True):
        rtol = eps if result.dtype is FP32 else torch.finfo(BF16).eps
        torch.testing.assert_close(result.float(), expected, rtol=rtol, atol=eps)
    assert torch.equal(after[1], tensors[1])
    # a product rounded to bfloat16 would have been another one, and a factor of 1 is none
    assert not torch.equal(scaled[1].to(BF16).float(), scaled[1])
    for one, none in zip(update(tensors, factor=torch.tensor(1.0)), update(tensors), strict=True):
        assert torch.equal(one, none)


def test_nan_stays_nan_whatever_its_bits():
    tensors = tensors_of(4096, BF16, BF16)
    tensors[1].view(torch.int16).fill_(0x7FFF)
    assert all(tensor.isnan().all() for tensor in update(tensors))


@pytest.fixture
def takes_large_ones(monkeypatch):
    monkeypatch.setattr("headway.optim.adamw.ONE_PASS_FROM", LARGE)


def optimizer_of(parameters, held=None, updates=0):
    groups = [{"params": parameters, "rule": "adamw", "lr_factor": 1.0, "weight_decay": 0.1}]
    optimizer = Optimizer(groups, OptimConfig(steps=1, lr=0.01, betas=(0.9, 0.95), eps=1e-8, state=held or "auto"))
    optimizer.one_pass_on, optimizer.updates = "cpu", updates
    return optimizer


def parameters_of(dtype=BF16):
    generator = torch.Generator().manual_seed(1)
    shapes = [(7,), (80, 103), (64, 64), (LARGE,)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(parameters, number):
    for place, parameter in enumerate(parameters):
        generator = torch.Generator().manual_seed(100 * number + place)
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@pytest.mark.parametrize("held", [None, "float32"])
def test_an_optimizer_steps_skips_and_goes_on_with_the_kernel_as_without(held, monkeypatch, takes_large_ones):
    parameters, copies = parameters_of(), parameters_of()
    optimizer, by_copies = optimizer_of(parameters, held), optimizer_of(copies, held)
    by_copies.one_pass_on = None
    launched = []
    monkeypatch.setattr(
        "headway.optim.adamw.update_",
        lambda tensors, numbers, group, seed: (launched.append(seed), update_(tensors, numbers, group, seed)),
    )
    for number, norm in enumerate((1.0, math.nan, 1.0)):
        before = [p.detach().clone() for p in parameters]
        for each, its_optimizer in ((parameters, optimizer), (copies, by_copies)):
            give_gradients(each, number)
            take_step(its_optimizer, torch.tensor([norm]), factor=torch.tensor(0.25 * norm), skips=True)
        assert math.isnan(norm) == all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    assert len(set(launched)) == len(launched) == 2 * 3  # two large parameters, each with noise of its own
    # two steps' rounding apart, of weights and moments
    for one, other in zip(parameters, copies, strict=True):
        torch.testing.assert_close(one, other, rtol=4 * torch.finfo(BF16).eps, atol=1e-3)
        assert int(optimizer.state[one]["step"]) == int(by_copies.state[other]["step"]) == 2

    # a resumed run rounds as the run would have
    resumed = parameters_of()
    theirs = optimizer_of(resumed, held)
    for one, copy in zip(parameters, resumed, strict=True):
        copy.data.copy_(one.detach())
    theirs.load_state_dict(deepcopy(optimizer.state_dict()))
    theirs.updates = optimizer.updates
    for copy in (resumed, parameters):
        give_gradients(copy, 9)
    for each in (theirs, optimizer):
        take_step(each, torch.ones(1), skips=False)
    assert all(torch.equal(one, copy) for one, copy in zip(parameters, resumed, strict=True))


def test_weights_near_one_keep_the_updates_of_a_small_learning_rate(takes_large_ones):
    """As `test_together` asks of copies: 10 steps of 1e-5 lower the mean by 1e-4, to 4 standard deviations."""
    parameter = torch.nn.Parameter(torch.ones(2 * LARGE, dtype=BF16))
    optimizer = optimizer_of([parameter])
    optimizer.param_groups[0].update(lr=1e-5, weight_decay=0.0)
    for _ in range(10):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    share = 10 * 1e-5 * 2**8
    deviation = 2**-8 * math.sqrt(share * (1 - share) / parameter.numel())
    assert 1.0 - parameter.double().mean().item() == pytest.approx(10e-5, abs=4 * deviation)
