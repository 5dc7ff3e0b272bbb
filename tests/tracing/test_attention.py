"""What attention costs under any mask: the pairs that NumPy counts."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from headway.models.attention.backend import use_attention
from headway.tracing import trace
from helpers.models import tiny_model


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


class _Unmasked(nn.Module):
    """Attends through transformers' interface without a mask, as cross-modal layers and towers do."""

    num_key_value_groups = 1

    def __init__(self, config, flag, options, by_interface):
        super().__init__()
        self.config, self.options, self.by_interface = config, options, by_interface
        self.qkv = nn.Linear(32, 96)
        if flag is not None:
            self.is_causal = flag

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        name = self.config._attn_implementation
        if self.by_interface:
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        else:  # as models wrote it before the interface had a method for it
            attend = eager_attention_forward if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        return attend(self, q, k, v, None, dropout=0.0, scaling=8**-0.5, **self.options)[0].flatten(2)


class _UnmaskedConfig(PretrainedConfig):
    model_type = "unmasked"


class _UnmaskedModel(PreTrainedModel):
    config_class = _UnmaskedConfig
    _supports_sdpa = True

    def __init__(self, config, *how):
        super().__init__(config)
        self.attention = _Unmasked(config, *how)
        self.post_init()

    def forward(self, x):
        return self.attention(x)


@torch.no_grad()
def _pairs_that_move(model, length):
    """Count the pairs (query, key) of which the query's result moves with the key's input."""
    x = torch.randn(1, length, 32)
    out = model(x)
    pairs = 0
    for key in range(length):
        changed = x.clone()
        changed[0, key] += 1
        pairs += int(((model(changed) - out).abs().sum(-1) > 1e-7).sum())
    return pairs


@pytest.mark.parametrize("by_interface", [True, False], ids=["interface", "looked-up"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"is_causal": False}, {"sliding_window": 4}], ids=str)
@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention", "flash_attention_2"])
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_attention_without_a_mask_costs_what_its_implementation_attends_to(implementation, flag, options, by_interface):
    length, window = 9, options.get("sliding_window", 9)
    config = _UnmaskedConfig()
    model = _UnmaskedModel(config, flag, options, by_interface)
    config._attn_implementation_internal = implementation  # whether or not its kernel is installed here
    causal = options.get("is_causal", flag)
    if implementation == "flash_attention_2":  # runs on GPUs alone: its flag and window, as its documentation has them
        if causal is None:
            pytest.skip("transformers itself fails: its flash attention needs a flag")
        rows = range(length)
        pairs = sum(-window < key - query < (1 if causal else window) for query in rows for key in rows)
    else:
        with torch.compiler.set_stance("force_eager"):
            pairs = _pairs_that_move(model, length)
    (row,) = (r for r in trace(model, inputs=(torch.zeros(1, length, 32),)).rows if r.op == "attention")
    assert row.forward == pairs * 2 * 4 * (8 + 8)


def test_learnt_queries_without_a_mask_see_every_key():
    class Learnt(_Unmasked):  # as Kosmos-2 reads a picture
        def forward(self, x):
            k, v = self.qkv(x)[..., 32:].view(*x.shape[:2], 2, 4, 8).permute(2, 0, 3, 1, 4)
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
            return attend(self, self.queries, k, v, None, scaling=1.0)[0]

    config = _UnmaskedConfig()
    config._attn_implementation_internal = "eager"
    module = Learnt(config, True, {}, True)
    module.queries = nn.Parameter(torch.zeros(1, 4, 3, 8))
    (row,) = (r for r in trace(module, inputs=(torch.zeros(1, 9, 32),)).rows if r.op == "attention")
    assert row.forward == 3 * 9 * 2 * 4 * (8 + 8)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_a_kernel_that_does_not_run_on_shapes_is_billed_by_its_flag(family):
    # Headway's own backend calls PyTorch's kernel for the CPU by its name; its towers see all of a picture or window
    plain, switched = (tiny_model(family, dtype=torch.float32) for _ in range(2))
    use_attention(switched)
    assert trace(switched).rows == trace(plain).rows
