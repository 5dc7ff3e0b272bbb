"""Forwards that a trainer has laid over a model's own: the twin runs them on itself, the model is not touched."""

import functools
import types

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from trl.trainer.utils import add_fused_lm_head

from headway.errors import TraceError
from headway.tracing import trace
from helpers.models import tiny_model


def tiny():
    return tiny_model("qwen3", dtype=torch.float32)


def around(forward):
    """Wrap a forward in a closure, as decorators do; it closes over itself as well."""

    @functools.wraps(forward)
    def wrapped(*args, again=False, **kwargs):
        return wrapped(*args, **kwargs) if again else forward(*args, **kwargs)

    return wrapped


def close_over_bound(model):
    model.forward = around(model.forward)


def bind_closure(model):
    original = model.forward
    named = functools.wraps(type(model).forward)  # a function whose first argument is the model
    model.forward = types.MethodType(named(lambda _self, *args, **kwargs: original(*args, **kwargs)), model)


def keep_part(model):
    model.forward = functools.partial(around(model.forward), again=True)


def default_to(model):
    """Functions in a loop hold each its own module as a default, as closures would all hold the last."""
    for module in (model.model.norm, model.lm_head):
        module.forward = lambda x, plain=module.forward, *, owner=module: plain(x) if owner.training is not None else x


def in_mixed_precision(model):
    add_fused_lm_head(model)
    Accelerator(mixed_precision="bf16", cpu=True).prepare_model(model)


@pytest.mark.parametrize(
    "lay_over", [add_fused_lm_head, close_over_bound, bind_closure, keep_part, default_to, in_mixed_precision]
)
def test_a_forward_laid_over_a_model_leaves_its_ledger_alone(lay_over):
    model = tiny()
    plain = trace(model)
    lay_over(model)
    calls = []
    model.model.register_forward_hook(lambda module, *_: calls.append(module))
    assert trace(model) == plain
    assert not any(module is model.model for module in calls)
    assert all(parameter.grad is None for parameter in model.parameters())


class Monitor:
    def __init__(self):
        self.seen = []

    def note(self, _module, _args, _output):
        self.seen.append(1)

    def __call__(self, _module, _args):
        self.seen.append(1)

    def __deepcopy__(self, memo):
        raise AssertionError("what watches a model is not copied")


def test_hooks_that_watch_a_model_do_not_run_in_its_trace():
    model = tiny()
    plain, monitor = trace(model), Monitor()
    for module in model.modules():
        module.register_forward_hook(monitor.note)
        module.register_forward_pre_hook(monitor)
        module.register_forward_pre_hook(functools.partial(Monitor.__call__, monitor))
        module.register_forward_hook(lambda *_: monitor.seen.append(1))
        if isinstance(module, nn.Linear):
            module.register_full_backward_hook(lambda *_: monitor.seen.append(1))
    assert trace(model) == plain
    assert not monitor.seen
    model(torch.tensor([[3, 4]])).logits.sum().backward()
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    run = [module for module in model.modules() if not isinstance(module, nn.ModuleList)]
    assert len(monitor.seen) == 4 * len(run) + len(linear)  # the model itself keeps them all


class Hooked(nn.Module):
    """Multiplies by a weight in a hook of its own, and by one that somebody laid on it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.first.register_forward_hook(self.more)

    def more(self, _module, _args, output):
        return self.second(output)

    def forward(self, x):
        return self.first(x)


def test_hooks_that_are_part_of_a_model_run_in_its_trace():
    model = Hooked()
    spectral = torch.nn.utils.spectral_norm(nn.Linear(8, 8, bias=False))

    def turned(_module, _args, output):
        return output @ torch.ones(8, 8)

    model.second.register_forward_hook(turned)
    x = torch.zeros(5, 8)
    assert [row.module for row in trace(model, inputs=(x,)).rows] == ["first", "second", ""]
    model.first = spectral  # whose hook makes its weight
    assert "first" in [row.module for row in trace(model, inputs=(x,)).rows]


class Elsewhere(nn.Module):
    """Runs a model that is none of its modules."""

    def __init__(self, model):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.run = {"model": [model]}.__getitem__

    def forward(self, input_ids):
        return self.run("model")[0](input_ids=input_ids).logits


def test_a_forward_that_leaves_the_traced_modules_is_refused():
    with pytest.raises(TraceError, match=r"computes on real tensors.*a patched method calls the original model"):
        trace(Elsewhere(tiny()))
