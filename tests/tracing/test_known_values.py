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
