"""Many parameters at a time: what comes out is what one at a time gives, in far fewer operations."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headway.config import OptimConfig
from headway.config.optim import EmaConfig, MuonConfig
from headway.count.updating import RULES
from headway.optim import Optimizer, WeightAverage, parts
from headway.optim.optimizer import take_step
from helpers.cases import some

SHAPES = [(64, 256), (33, 192), (7,), (3, 24, 128), (64, 256), (256, 64), (300, 61), (3, 24, 128)]
KINDS = [  # dtype of the parameters, how moments are held
    (torch.float32, None),
    (torch.float32, "bfloat16"),
    (torch.float32, "8bit"),
    (torch.bfloat16, None),
    (torch.bfloat16, "float32"),
    (torch.bfloat16, "8bit"),
]
OFTEN = [(torch.float32, None), (torch.float32, "8bit"), (torch.bfloat16, "float32")]


def parameters_of(rule, dtype, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1)
    shapes = [shape for shape in shapes if rule == "adamw" or len(shape) > 1]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def optimizer_of(parameters, rule, held, lr=1e-2):
    groups = [{"params": list(parameters), "rule": rule, "lr_factor": 1.0, "weight_decay": 0.1}]
    return Optimizer(groups, OptimConfig(steps=1, lr=lr, betas=(0.9, 0.95), eps=1e-8, state=held or "auto"))


def give_gradients(parameters, number, without=()):
    for place, parameter in enumerate(parameters):
        generator = torch.Generator().manual_seed(100 * number + place)
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = None if place in without else gradient


def everything(optimizer):
    held = {}
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            held[f"{place}"] = parameter.detach().clone()
            held |= {f"{place}.{name}": value.clone() for name, value in optimizer.state[parameter].items()}
    return held


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("at_once", [2**24, 5000, 300])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("dtype", "held"), some(KINDS, OFTEN.__contains__))
def test_parameters_together_are_parameters_one_by_one(rule, dtype, held, at_once, monkeypatch):
    """To the bit; rounded to nearest here, as a group draws noise of its own.

    PyTorch's AdamW on a CPU takes the last few values of a tensor without vector instructions, which rounds them
    otherwise; so where tensors are cut, single values held in few bits may fall to the other side of a step.
    """
    monkeypatch.setattr(
        parts, "round_stochastically_", lambda values, _: values.copy_(values.to(torch.bfloat16).to(values.dtype))
    )
    together, apart = parameters_of(rule, dtype), parameters_of(rule, dtype)
    optimizers = [optimizer_of(together, rule, held)], [optimizer_of([p], rule, held) for p in apart]
    for number in range(3):
        monkeypatch.setattr(parts, "AT_ONCE", at_once)
        give_gradients(together, number, without=(1,) if number == 1 else ())  # so counts of steps differ
        optimizers[0][0].step()
        monkeypatch.setattr(parts, "AT_ONCE", 2**24)
        give_gradients(apart, number, without=(1,) if number == 1 else ())
        for optimizer in optimizers[1]:
            optimizer.step()
    for one, other in zip(together, apart, strict=True):
        if rule == "muon" or at_once == 2**24:
            assert torch.equal(one, other), one.shape
        else:
            assert (~torch.isclose(one, other, rtol=1e-6, atol=1e-6)).float().mean() < 0.01
            torch.testing.assert_close(one, other, rtol=2**-7, atol=2e-4)  # a step of bfloat16; a fiftieth of lr
    assert [int(optimizers[0][0].state[p]["step"]) for p in together[:2]] == [3, 2]


class Calls(TorchDispatchMode):
    """Counts what is dispatched to the device, views left out, and names whatever would make a host wait for it."""

    def __init__(self):
        super().__init__()
        self.num, self.waits = 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_view = any(argument.alias_info is not None for argument in function._schema.arguments[:1]) and not (
            function._schema.is_mutable
        )
        self.num += not is_view
        if function is torch.ops.aten._local_scalar_dense.default or "nonzero" in str(function):
            self.waits.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("dtype", "held"), some(KINDS, OFTEN.__contains__))
def test_operations_do_not_grow_with_parameters_and_none_waits(rule, dtype, held, skips):
    """Matrices that are alike share their products, so a model four times as deep takes no more operations."""
    counts = []
    for repeats in (2, 8):
        parameters = parameters_of(rule, dtype, SHAPES * repeats)
        optimizer = optimizer_of(parameters, rule, held)
        give_gradients(parameters, 0)
        optimizer.step()  # makes the state
        with Calls() as calls:
            take_step(optimizer, torch.ones(2), factor=torch.tensor(0.5), skips=skips)
        counts.append(calls.num)
        assert calls.waits == []
    assert counts[1] <= counts[0]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("dtype", "held"), KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_left_out_leaves_weights_moments_and_counts_to_the_bit(rule, dtype, held, bad):
    parameters = parameters_of(rule, dtype)
    optimizer = optimizer_of(parameters, rule, held)
    give_gradients(parameters, 0)
    take_step(optimizer, torch.tensor([1.0, 2.0]), skips=True)
    before = everything(optimizer)
    give_gradients(parameters, 1)
    for parameter in parameters:
        parameter.grad.view(-1)[0] = bad
    take_step(optimizer, torch.tensor([1.0, bad]), factor=torch.tensor(1.0 / bad), skips=True)
    assert_same(everything(optimizer), before)
    give_gradients(parameters, 2)
    take_step(optimizer, torch.tensor([1.0, 2.0]), skips=True)
    assert all(p.isfinite().all() for p in parameters)
    assert int(optimizer.state[parameters[0]]["step"]) == 2


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("dtype", "held"), KINDS)
def test_looking_at_the_numbers_changes_nothing_where_they_are_finite(rule, dtype, held):
    outcomes = []
    for skips in (False, True):
        parameters = parameters_of(rule, dtype)
        optimizer = optimizer_of(parameters, rule, held)
        for number in range(2):
            give_gradients(parameters, number)
            take_step(optimizer, torch.ones(2), skips=skips)
        outcomes.append(everything(optimizer))
    assert_same(*outcomes)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("dtype", "held"), KINDS)
def test_a_factor_is_gradients_scaled_in_float32(rule, dtype, held):
    """To the bit, of gradients that were scaled beforehand by 1/4, which bfloat16 holds too."""
    outcomes = []
    for factor, before in ((torch.tensor(0.25), 1.0), (None, 0.25), (torch.tensor(1.0), 0.25)):
        parameters = parameters_of(rule, dtype)
        optimizer = optimizer_of(parameters, rule, held)
        for number in range(2):
            give_gradients(parameters, number)
            for parameter in parameters:
                parameter.grad.mul_(before)
            gradients = [parameter.grad.clone() for parameter in parameters]
            take_step(optimizer, torch.ones(2), factor=factor, skips=True)
            if dtype is torch.bfloat16:  # only read
                assert all(torch.equal(p.grad, gradient) for p, gradient in zip(parameters, gradients, strict=True))
        outcomes.append(everything(optimizer))
    assert_same(outcomes[0], outcomes[1])
    assert_same(outcomes[2], outcomes[1])


@pytest.mark.parametrize("rule", RULES)
def test_the_product_of_a_gradient_and_a_factor_is_not_rounded_to_bfloat16(rule):
    """Moments in float32 after a step: one of a gradient times 0.3 in float32, which bfloat16 cannot hold."""
    parameters = parameters_of(rule, torch.bfloat16)
    optimizer = optimizer_of(parameters, rule, "float32")
    give_gradients(parameters, 0)
    take_step(optimizer, torch.ones(2), factor=torch.tensor(0.3), skips=False)
    moment, rest = {"adamw": ("exp_avg", 1 - 0.9), "muon": ("momentum_buffer", 1 - MuonConfig().momentum)}[rule]
    for parameter in parameters:
        expected = rest * 0.3 * parameter.grad.double()
        torch.testing.assert_close(optimizer.state[parameter][moment].double(), expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("held", [None, "bfloat16", "8bit"])
def test_a_run_that_goes_on_rounds_as_it_would_have(rule, held):
    """After a left-out update too, which the parameters' own counts of steps do not have."""
    parameters, copies = (parameters_of(rule, torch.bfloat16) for _ in range(2))
    whole, resumed = (optimizer_of(each, rule, held) for each in (parameters, copies))
    for number, norm in enumerate((1.0, float("nan"), 1.0)):
        give_gradients(parameters, number)
        take_step(whole, torch.tensor([norm]), skips=True)
    give_gradients(copies, 0)
    resumed.step()
    for one, copy in zip(parameters, copies, strict=True):
        copy.data.copy_(one)
        for name, value in whole.state[one].items():
            resumed.state[copy][name].copy_(value)
    resumed.updates = whole.updates  # as a checkpoint's step says
    for each, optimizer in ((parameters, whole), (copies, resumed)):
        give_gradients(each, 3)
        optimizer.step()
    assert_same(everything(resumed), everything(whole))


@pytest.mark.parametrize("held", [None, "float32", "8bit"])
def test_bfloat16_weights_near_one_keep_the_updates_of_a_small_learning_rate(held):
    """With lr 1e-5 an update is a 390th of a bfloat16 step below 1: rounding to nearest would lose all of them."""
    parameter = torch.nn.Parameter(torch.ones(400, 256, dtype=torch.bfloat16))
    groups = [{"params": [parameter], "rule": "adamw", "lr_factor": 1.0, "weight_decay": 0.0}]
    optimizer = Optimizer(groups, OptimConfig(steps=1, lr=1e-5, betas=(0.9, 0.95), eps=1e-8, state=held or "auto"))
    theirs = torch.nn.Parameter(torch.ones(400, 256, dtype=torch.bfloat16))
    nearest = torch.optim.AdamW([theirs], lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    steps = 60
    for _ in range(steps):
        for one, its_optimizer in ((parameter, optimizer), (theirs, nearest)):
            one.grad = torch.ones_like(one)
            its_optimizer.step()
    assert torch.equal(theirs, torch.ones_like(theirs))
    # Each weight falls by 2**-8 with probability steps lr / 2**-8 = 0.154; the mean of n weights has the standard
    # deviation 2**-8 sqrt(0.154 * 0.846 / n) = 4.4e-6, a hundredth and a half of the fall of 6e-4.
    fall = 1.0 - parameter.double().mean().item()
    assert fall == pytest.approx(steps * 1e-5, abs=4 * 4.4e-6)


def test_an_average_of_many_weights_is_the_average_of_each(monkeypatch):
    monkeypatch.setattr(parts, "AT_ONCE", 1000)
    for dtype in (torch.float32, torch.bfloat16):
        model = torch.nn.ParameterList(parameters_of("adamw", dtype))
        average = WeightAverage(model, EmaConfig(decay=0.8, warmup=False))
        first = [p.detach().float().clone() for p in model]
        for p in model:
            p.data.mul_(3.0)
        average.update(1)
        for before, p, held in zip(first, model, average.state_dict().values(), strict=True):
            assert torch.equal(held, before.lerp(p.detach().float(), 1.0 - 0.8))
