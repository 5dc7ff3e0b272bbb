"""What attention costs under any mask: the pairs that NumPy counts."""

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from headway.tracing import trace


@st.composite
def masks(draw):
    """Draw axes of the queries before tokens and size, and a mask of any shape that broadcasts to their scores."""
    rows = draw(st.lists(st.integers(1, 3), min_size=0, max_size=3))
    queries, keys = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    full = [*rows, queries, keys]
    axes = draw(st.integers(2, len(full)))  # PyTorch wants queries and keys of a mask
    shape = [draw(st.sampled_from([1, size])) for size in full[len(full) - axes :]]
    shape[-1] = keys  # a mask of one key is none that PyTorch's kernels take
    bits = draw(st.lists(st.booleans(), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    mask = np.array(bits).reshape(shape)
    mask[..., 0] = True  # a query without keys has no probabilities
    return rows, queries, mask


@given(masks(), st.sampled_from(["bool", "float", "learnt"]))
def test_masked_attention_costs_the_pairs_that_numpy_counts(drawn, kind):
    rows, queries, mask = drawn
    keys, size, values = mask.shape[-1], 3, 5
    pairs = int(np.broadcast_to(mask, (*rows, queries, keys)).sum())  # of all rows and heads together
    laid = torch.from_numpy(mask)
    if kind != "bool":
        laid = torch.zeros(mask.shape).masked_fill(~laid, -torch.inf)

    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(2, size, bias=False), nn.Linear(2, size), nn.Linear(2, values)
            self.bias = nn.Parameter(torch.zeros(mask.shape))

        def forward(self, x, y):
            bias = self.bias + laid if kind == "learnt" else laid
            return F.scaled_dot_product_attention(self.q(x), self.k(y), self.v(y), attn_mask=bias)

    cost = trace(Attending(), inputs=(torch.randn(*rows, queries, 2), torch.randn(*rows, keys, 2)))
    attention = [row for row in cost.rows if row.op == "attention"]
    # Q K^T and P V forward; backward dV and dP by the size of values, dQ and dK by that of keys
    assert sum(row.forward for row in attention) == 2 * pairs * (size + values)
    assert sum(g.flops for row in attention for g in row.gradients) == 2 * pairs * 2 * (size + values)
    assert {g.phase for row in attention for g in row.gradients} == {"dgrad"}


def test_layers_that_share_a_mask_each_count_their_own_queries():
    mask = torch.arange(5) < 3

    class Sharing(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, y):
            q, k = self.q(x), self.k(y)
            return [F.scaled_dot_product_attention(part, k, k, attn_mask=mask) for part in (q, q[:, :2])]

    cost = trace(Sharing(), inputs=(torch.randn(3, 7, 4), torch.randn(3, 5, 4)))
    # three heads, and 7 or 2 queries that see 3 keys each
    assert sum(row.forward for row in cost.rows if row.op == "attention") == 3 * (7 + 2) * 3 * 2 * (4 + 4)
