"""What autograd saves, read off forwards on shapes; real forwards of whole models are in meter/test_traffic.py."""

import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headway.tracing.activations import saved_activations

WIDTH = 8


class Made(nn.Module):
    """A linear layer to 12 numbers a token, and what a test does with them."""

    def __init__(self, rest):
        super().__init__()
        self.into = nn.Linear(WIDTH, 12, bias=False)
        self.first = nn.Parameter(torch.zeros(1, 12))
        self.rest = rest

    def forward(self, x):
        return self.rest(self, self.into(x))


def rows(workload):
    return (torch.zeros(workload.tokens, WIDTH),)


def saved(rest, **options):
    return saved_activations(Made(rest), inputs=rows, **options)


@pytest.mark.parametrize(
    ("rest", "numbers"),
    [
        (lambda _, h: h.relu(), 12),
        (lambda _, h: h.relu().relu(), 24),
        (lambda _, h: h.sin() + h.cos(), 12),  # both save the same
        (lambda _, h: h.view(-1, 3, 4).transpose(0, 1).sin() + h.sin().view(-1, 3, 4).transpose(0, 1), 12),
        (lambda _, h: h[:, :4] * h[:, 8:], 8),  # two views of one storage
        (lambda _, h: h[:, :6] * h[:, 4:10], 10),  # which overlap
        (lambda _, h: h[:, ::2] * h[:, ::2], 6),
        (lambda _, h: h * 2, 0),
        (lambda _, h: h.detach() * 2 + h, 0),
        (lambda _, h: h + torch.arange(len(h))[:, None].float().cos(), 0),  # by position alone
    ],
)
def test_each_element_that_backward_sees_counts_once(rest, numbers):
    found = saved(rest)
    assert dict(found.rows) == ({"tokens": 4 * numbers} if numbers else {})
    assert found.left_out == ()


def test_parameters_and_the_batch_are_no_activations():
    assert dict(saved(lambda made, h: h @ (made.first.T * 2).sin()).rows) == {"tokens": 4 * 12}  # h, not the weight


def test_what_is_there_once_is_billed_once_a_pack():
    found = saved(lambda made, h: torch.cat([made.first, h]).sin())
    assert dict(found.rows) == {"tokens": 4 * 12, "packs": 4 * 12}


def test_dtypes_are_the_models_own_and_those_of_autocast():
    def rest(made, h):
        return F.linear(h, made.first).sin()

    assert dict(saved(rest).rows) == {"tokens": 4 * (12 + 1)}
    assert dict(saved(rest, autocast=torch.bfloat16).rows) == {"tokens": 2 * (WIDTH + 12 + 1)}  # the batch is cast too
    half = Made(rest).bfloat16()
    assert dict(saved_activations(half, inputs=rows).rows) == {"tokens": 2 * (12 + 1)}
    assert dict(saved_activations(half, inputs=rows, products_only=True).rows) == {"tokens": 2 * 12}


def test_attention_keeps_queries_keys_and_values_whole_and_its_result():
    def rest(_, h):
        q, k, v = h.view(1, -1, 3, 4).transpose(1, 2).unsqueeze(2).unbind(1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    for products_only in (False, True):
        assert dict(saved(rest, products_only=products_only).rows) == {"tokens": 4 * (12 + 4)}


def test_only_what_is_trained_makes_autograd_save():
    model = Made(lambda made, h: (h @ made.first.T).sin())
    model.into.weight.requires_grad_(False)
    found = saved_activations(model, inputs=rows)
    assert dict(found.rows) == {"tokens": 4 * (12 + 1)}
    assert found.reached == sum(1 << i for i, (name, _) in enumerate(model.named_parameters()) if name == "first")
    frozen = saved_activations(model.requires_grad_(False), inputs=rows)
    assert (frozen.rows, frozen.reached) == ((), 0)


def test_a_module_whose_bytes_nothing_explains_is_named():
    found = saved(lambda _, h: h[: math.isqrt(len(h))].clone().sin())
    assert found.left_out == ("(the model)",)
    assert found.rows == ()


def test_an_example_is_billed_per_segment():
    model = Made(lambda _, h: h.relu())
    found = saved_activations(model, inputs=(torch.zeros(7, WIDTH),))
    assert found.rows == (("segments", Fraction(7 * 12 * 4)),)
