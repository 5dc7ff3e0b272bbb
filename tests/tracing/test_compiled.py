"""Compiled models have the ledger of the model that they compile: the same rows, under the same names."""

import pytest
import torch
from torch import nn

from headway.tracing import trace

INPUTS = (torch.zeros(6, 8),)


@torch.compile(backend="eager")
def gelu(x):
    return nn.functional.gelu(x)


class Block(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.up, self.down, self.activation = nn.Linear(8, 16), nn.Linear(16, 8), activation

    def forward(self, x):
        return x + self.down(self.activation(self.up(x)))


def stack(activation=nn.functional.gelu):
    model = nn.Sequential(Block(activation), Block(activation))
    model[0].up.requires_grad_(False)
    return model


def whole(model):
    return torch.compile(model, backend="eager")


def each_block(model):
    for i, block in enumerate(model):
        model[i] = torch.compile(block, backend="eager")
    return torch.compile(model, backend="eager")


def in_place(model):
    model.compile(backend="eager")
    model[0].compile(backend="eager")
    return model


def method(model):
    model[1].forward = torch.compile(model[1].forward, backend="eager")
    return model


@pytest.mark.parametrize("compiled", [whole, each_block, in_place, method])
def test_compiling_changes_nothing_in_a_ledger(compiled):
    plain = trace(stack(), inputs=INPUTS)
    assert [row.module for row in plain.rows] == ["0.up", "0.down", "1.up", "1.down"]
    cost = trace(compiled(stack()), inputs=INPUTS, name=plain.name)
    assert (cost.rows, cost.parameters) == (plain.rows, plain.parameters)


def test_a_model_that_has_run_compiled_is_traced_without_its_graphs():
    model = whole(stack())
    model(torch.randn(6, 8))
    assert trace(model, inputs=INPUTS).rows == trace(stack(), inputs=INPUTS).rows
    assert model(torch.randn(6, 8)).isfinite().all()


def test_compiled_functions_inside_a_model_run_eagerly():
    assert trace(stack(gelu), inputs=INPUTS).rows == trace(stack(), inputs=INPUTS).rows
