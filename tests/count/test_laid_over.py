"""Forwards that a trainer has laid over a model's own: the twin runs them on itself, the model is not touched."""

import functools
import types

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from trl.trainer.utils import add_fused_lm_head

from headway.count import trace
from headway.count.tracing.build import model_class
from headway.errors import TraceError
from tiny_models import tiny_config


def tiny():
    config = tiny_config("qwen3")
    return model_class(config)._from_config(config, dtype=torch.float32)


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


def in_mixed_precision(model):
    add_fused_lm_head(model)
    Accelerator(mixed_precision="bf16", cpu=True).prepare_model(model)


@pytest.mark.usefixtures("fresh_accelerator")
@pytest.mark.parametrize("lay_over", [add_fused_lm_head, close_over_bound, bind_closure, keep_part, in_mixed_precision])
def test_a_forward_laid_over_a_model_leaves_its_ledger_alone(lay_over):
    model = tiny()
    plain = trace(model)
    lay_over(model)
    calls = []
    model.model.register_forward_hook(lambda module, *_: calls.append(module))
    assert trace(model) == plain
    assert not any(module is model.model for module in calls)
    assert all(parameter.grad is None for parameter in model.parameters())


class Elsewhere(nn.Module):
    """Runs a model that is none of its modules."""

    def __init__(self, model):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.run = {"model": [model]}.__getitem__

    def forward(self, input_ids):
        return self.run("model")[0](input_ids=input_ids).logits


def test_a_forward_that_leaves_the_traced_modules_is_refused():
    with pytest.raises(TraceError, match=r"computes on real tensors.*leads back to the original model"):
        trace(Elsewhere(tiny()))
