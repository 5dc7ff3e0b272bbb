"""Masks that ride along with activations: what was joined to them is known when it is taken out again."""

import pytest
import torch
from torch import nn

from headway.count import Workload
from headway.errors import TraceError
from headway.tracing import trace

SIZE = 8


class Joining(nn.Module):
    """Attention of one head whose causal mask lies beside the states, in the channels after them."""

    def __init__(self, take):
        super().__init__()
        self.embed, self.take = nn.Embedding(9, SIZE), take

    def forward(self, input_ids):
        x, n = self.embed(input_ids), input_ids.shape[1]
        assert n < 400, "as long as its table of positions would be"
        mask = torch.ones(n, n).tril()[None]
        nothing = torch.zeros(0)  # as a cache that holds no token yet
        packed = torch.cat([x, mask, nothing], dim=-1)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=self.take(packed, n).bool())


def split(packed, n):
    return packed.split([SIZE, n], dim=-1)[1]


def cut(packed, _n):
    return packed[..., SIZE:]


def picked(packed, n):
    return torch.stack([packed[..., SIZE + i] for i in range(n)], dim=-1)


def rotated(packed, _n):
    return (packed + 0)[..., SIZE:]


@pytest.mark.parametrize("take", [split, cut, picked])
def test_a_mask_that_was_joined_to_activations_is_read_when_it_is_taken_out(take):
    cost = trace(Joining(take))
    assert [row.driver for row in cost.rows if row.op == "attention"] == ["pairs:causal"]
    assert cost.count(Workload([5])).forward == 15 * 2 * 2 * SIZE


def test_what_was_computed_with_a_joined_mask_is_not_known():
    with pytest.raises(TraceError, match="under a mask that depends on floats"):
        trace(Joining(rotated))


class Choosing(nn.Module):
    """A layer for rows alone that scores choose, as detectors keep boxes and mixtures of depths keep tokens."""

    def __init__(self, choose):
        super().__init__()
        self.score, self.layer, self.choose = nn.Linear(SIZE, 1), nn.Linear(SIZE, SIZE), choose

    def forward(self, x):
        return self.layer(self.choose(x, self.score(x)[:, 0]))


def _kept(x, scores):
    out = torch.zeros_like(x)
    out[scores.sigmoid() <= 0.5] = 2 * x[scores.sigmoid() <= 0.5]
    return out


CHOICES = {
    "booleans": lambda x, s: x[s > 0],
    "their complement": lambda x, s: x[~(s > 0)],
    "places": lambda x, s: x[(s > 0).nonzero()[:, 0]],
    "places of a tuple": lambda x, s: x[torch.where(s > 0)],
    "places by argwhere": lambda x, s: x.index_select(0, torch.argwhere(s > 0)[:, 0]),
    "an order and booleans": lambda x, s: x[s.argsort()[s.sort().values > 0.5]],
    "a running sum": lambda x, s: x[s.softmax(0).cumsum(0) < 0.9],
    "a number": lambda x, _scores: x[x[:, 0] == 1.0],
    "a cast": lambda x, s: x[s.bool()],
}


@pytest.mark.parametrize("name", CHOICES)
def test_rows_that_floats_select_are_told_as_missing(name):
    with pytest.warns(RuntimeWarning, match=r"leaves out the work on rows that Choosing selects by comparing"):
        cost = trace(Choosing(CHOICES[name]), inputs=lambda workload: (torch.rand(workload.tokens, SIZE),))
    assert cost.unknown == ("the work on rows that Choosing selects by comparing floats",)
    assert cost.count(Workload([5])).forward == 5 * 2 * SIZE  # of the scores, which see every row


def test_a_choice_that_is_written_back_fits_its_places():
    with pytest.warns(RuntimeWarning, match="selects by comparing floats"):
        cost = trace(Choosing(_kept), inputs=lambda workload: (torch.rand(workload.tokens, SIZE),))
    assert cost.count(Workload([5])).forward == 5 * (2 * SIZE + 2 * SIZE * SIZE)


@pytest.mark.parametrize(
    "choose",
    [
        lambda x, s: x[torch.isfinite(s) & ~torch.isnan(s)],
        lambda x, _scores: x[x.ne(0).any(-1)],  # a padded picture is all zeros
        lambda x, s: torch.cat([x[s.topk(3).indices], x[3:]]),
    ],
)
def test_rows_that_every_batch_has_count(choose):
    cost = trace(Choosing(choose), inputs=lambda workload: (torch.rand(workload.tokens, SIZE),))
    assert cost.count(Workload([5])).forward == 5 * (2 * SIZE + 2 * SIZE * SIZE)
    assert not cost.unknown


@pytest.mark.parametrize(
    "choose",
    [
        lambda x, s: x[: int((s > 0).sum())],
        lambda x, s: x.repeat_interleave(s.exp().long(), dim=0),
        lambda x, s: x[torch.unique(s.long())],
    ],
)
def test_lengths_that_floats_decide_are_refused(choose):
    with pytest.raises(TraceError, match="reads a number, such as a length, that depends on floats"):
        trace(Choosing(choose), inputs=lambda workload: (torch.rand(workload.tokens, SIZE),))
