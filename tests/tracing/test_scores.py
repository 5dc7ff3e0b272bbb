"""How masks are named, and how what hides scores is followed to where they end."""

import pytest
import torch
from torch import nn

from headway.count import Workload, drivers
from headway.errors import TraceError
from headway.tracing import scores, trace

LENGTH = 61
PLACE = torch.arange(LENGTH)
CAUSAL = PLACE[:, None] >= PLACE


def compressed(rate: int, most: int | None = None) -> torch.Tensor:
    """Write out a mask over compressed keys: key j stands for the tokens up to (j + 1) rate - 1."""
    ends = (torch.arange(LENGTH // rate) + 1) * rate - 1
    mask = ends <= PLACE[:, None]
    return mask if most is None else mask & (mask.cumsum(-1) <= most)


def picked(count: int) -> torch.Tensor:
    """Write out a causal mask of which each query keeps some keys, drawn by chance."""
    chances = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)).masked_fill(~CAUSAL, -1)
    return torch.zeros_like(CAUSAL).scatter(-1, chances.topk(count).indices, True) & CAUSAL


def pooled(size, most):
    """Show each query the last whole pools that end with it or before, and the tokens that fill no pool yet."""
    after = (PLACE[:, None] + 1) // size  # the pool of the tail
    return CAUSAL & (PLACE // size >= after - most)


@pytest.mark.parametrize(
    ("mask", "driver"),
    [
        (CAUSAL, "pairs:causal"),
        (torch.ones(LENGTH, LENGTH, dtype=torch.bool), "pairs:full"),
        (CAUSAL & (PLACE[:, None] - PLACE < 9), "pairs:sliding:9"),
        (picked(9), "pairs:topk:9"),
        (CAUSAL & (PLACE[:, None] // 9 == PLACE // 9), "pairs:chunked:9"),
        (CAUSAL & (PLACE[:, None] // 4 - PLACE // 4 < 3), "pairs:blocks:4:3"),
        (pooled(4, 3), "pairs:pools:4:3"),
        (compressed(4), "pairs:compressed:4"),
        (compressed(4, 7), "pairs:compressed:topk:4:7"),
        (torch.cat([CAUSAL, compressed(8)], dim=1), "pairs:causal+pairs:compressed:8"),
        (CAUSAL & (PLACE % 3 > 0), ""),
        (torch.cat([CAUSAL, CAUSAL[:, :7].flip(0)], dim=1), ""),
    ],
)
def test_a_mask_that_is_written_out_is_named_by_a_driver_of_its_count(mask, driver):
    assert scores.mask_driver(mask) == driver
    if driver:
        assert sum(drivers.parse_driver(d)(Workload([LENGTH])) for d in driver.split("+")) == int(mask.sum())


class ByHand(nn.Module):
    """Attention of one head of 8, written out; `between` turns scores into what is normalised."""

    def __init__(self, between):
        super().__init__()
        self.embed, self.bias, self.between = nn.Embedding(9, 8), nn.Parameter(torch.zeros(1)), between

    def forward(self, input_ids):
        x = self.embed(input_ids)
        assert x.shape[1] < 400, "as long as its table of positions would be"
        return self.between(self, x @ x.transpose(1, 2)).softmax(dim=-1) @ x


def hidden(s):
    """Write out what is hidden from causal attention over as many tokens as scores `s` have."""
    return torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)


def in_a_bias(m, s):
    bias = m.bias.expand(s.shape).masked_fill(hidden(s), -1e9)
    return s + bias[:, :, : s.shape[2]]


def in_a_constant_of_the_same_shape(_m, s):
    return s + torch.zeros_like(s).masked_fill_(hidden(s), float("-inf"))


def above_a_constants_diagonal(_m, s):
    return s + torch.full_like(s, float("-inf")).triu(1)


def by_subtraction(_m, s):
    return s - 1e30 * hidden(s).to(s.dtype)


def turned(_m, s):
    return s.transpose(1, 2).masked_fill(hidden(s), -1e9).transpose(1, 2).transpose(1, 2)


@pytest.mark.parametrize(
    ("between", "driver"),
    [
        (in_a_bias, "pairs:causal"),
        (in_a_constant_of_the_same_shape, "pairs:causal"),
        (above_a_constants_diagonal, "pairs:causal"),
        (by_subtraction, "pairs:causal"),
        (turned, "pairs:causal"),
        (lambda m, s: s + m.bias, "pairs:full"),
        (lambda _m, s: s.masked_fill(hidden(s), 0.0), "pairs:full"),  # a score of 0 is a score
        (lambda _m, s: s * 0.5, "pairs:full"),
    ],
)
def test_what_hides_scores_is_followed_to_where_they_end(between, driver):
    rows = [row for row in trace(ByHand(between)).rows if row.op == "attention"]
    assert [(row.driver, row.forward) for row in rows] == [(driver, 2 * 8)] * 2


@pytest.mark.parametrize(
    "between",
    [
        lambda m, s: s + (s * m.bias).triu(1),
        lambda m, s: s + torch.zeros_like(s).index_fill(1, torch.arange(3), m.bias[0]),
        lambda _m, s: s.masked_fill((torch.rand(3, *s.shape[1:]) > 0.5).any(0), -1e9)[:, :, torch.arange(s.shape[2])],
    ],
)
def test_scores_that_something_unknown_may_hide_are_refused(between):
    with pytest.raises(TraceError):
        trace(ByHand(between))
