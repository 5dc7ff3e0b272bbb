"""Attention functions that are no module: each is billed for the pairs that its mask allows, wherever it is held."""

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from headway.count import Workload, masks
from headway.errors import TraceError
from headway.tracing import trace

HEADS, KV_HEADS, SIZE = 4, 2, 6
PER_PAIR = 2 * HEADS * (SIZE + SIZE)


class Attending(nn.Module):
    """Projects queries and keys, and hands them [tokens, heads, size] to a function; keys may come from elsewhere."""

    def __init__(self, function, kv_heads=HEADS):
        super().__init__()
        self.q, self.kv = nn.Linear(8, HEADS * SIZE), nn.Linear(8, 2 * kv_heads * SIZE)
        self.function, self.kv_heads = function, kv_heads

    def forward(self, x, other=None):
        q = self.q(x).unflatten(-1, (HEADS, SIZE))
        k, v = self.kv(x if other is None else other).unflatten(-1, (2, self.kv_heads, SIZE)).unbind(-3)
        return self.function(q, k, v)


def attention_row(function, *inputs, kv_heads=HEADS):
    """Trace on one example; returns its attention's pairs, and checks what a pair costs forward and backward."""
    cost = trace(Attending(function, kv_heads), inputs=inputs)
    (row,) = [row for row in cost.rows if row.op == "attention"]
    pairs, rest = divmod(row.forward, PER_PAIR)
    # dV, dP, dQ and dK: each as large as a product of forward
    assert (rest, [g.flops for g in row.gradients]) == (0, [pairs * 2 * HEADS * SIZE] * 4)
    return pairs


def driver_of(function, kv_heads=HEADS):
    cost = trace(Attending(function, kv_heads), inputs=lambda w: torch.zeros(1, w.tokens, 8))
    (row,) = [row for row in cost.rows if row.op == "attention"]
    assert row.forward == PER_PAIR
    return row.driver


def brute(queries, keys, allowed):
    return sum(bool(allowed(i, j)) for i in range(queries) for j in range(keys))


def heads_first(function, **options):
    """Call a function that takes [batch, heads, tokens, size]."""
    return lambda *qkv: function(*(t.transpose(1, 2) for t in qkv), **options)


# queries see keys up to their own number from the first on, whatever the lengths
TOP_LEFT = brute(5, 9, lambda i, j: j <= i)
# the last query sees the last key
BOTTOM_RIGHT = brute(5, 9, lambda i, j: j <= i + 4)


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({}, 5 * 9),
        ({"is_causal": True}, TOP_LEFT),
        ({"attn_mask": torch.ones(5, 9, dtype=torch.bool).tril(3)}, brute(5, 9, lambda i, j: j <= i + 3)),
        ({"attn_mask": torch.zeros(5, 9).masked_fill(torch.arange(9) > 6, -torch.inf)}, 5 * 7),
    ],
)
def test_sdpa_with_queries_and_keys_of_two_lengths(options, pairs):
    function = heads_first(F.scaled_dot_product_attention, **options)
    assert attention_row(function, torch.zeros(2, 5, 8), torch.zeros(2, 9, 8)) == 2 * pairs


def test_sdpa_with_grouped_heads_costs_every_query_head():
    function = heads_first(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    assert attention_row(function, torch.zeros(3, 7, 8), kv_heads=KV_HEADS) == 3 * 28
    assert driver_of(function, KV_HEADS) == "pairs:causal"


def banded(window):
    """SDPA under a mask that does not say its window, as modules with tables of positions build it."""

    def function(q, k, v):
        place = torch.arange(q.shape[1])
        behind = place[:, None] - place
        options = {"attn_mask": (behind >= 0) & (behind < window)}
        return heads_first(F.scaled_dot_product_attention, **options)(q, k, v)

    return function


@pytest.mark.parametrize(("window", "driver"), [(16, "pairs:sliding:16"), (1024, "pairs:sliding:1024")])
def test_a_window_is_read_off_a_mask_without_a_name(window, driver):
    assert driver_of(banded(window)) == driver


def test_a_window_is_looked_for_as_far_as_the_model_has_positions():
    class Placed(nn.Module):
        def __init__(self):
            super().__init__()
            self.places = nn.Parameter(torch.zeros(1, 700, 8))
            self.attention = Attending(banded(300))

        def forward(self, x):
            return self.attention(x + self.places[:, : x.shape[1]])

    cost = trace(Placed(), inputs=lambda w: torch.zeros(1, w.tokens, 8))
    assert [row.driver for row in cost.rows if row.op == "attention"] == ["pairs:sliding:300"]


# flex_attention


def causal(_b, _h, q, k):
    return q >= k


def sliding(_b, _h, q, k):
    return (q >= k) & (q - k < 9)


def prefix(_b, _h, q, k):
    return (k < 40) | (q >= k)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (causal, masks.causal_pairs([200])),
        (sliding, masks.sliding_pairs([200], 9)),
        (prefix, masks.prefix_pairs([200], 40)),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_flex_attention_counts_what_its_mask_function_allows(rule, expected, compiled):
    function = torch.compile(flex_attention, backend="eager") if compiled else flex_attention
    mask = create_block_mask(rule, None, None, 200, 200, device="cpu")
    attend = heads_first(
        function, block_mask=mask, enable_gqa=True, score_mod=lambda score, _b, _h, q, k: score + q - k
    )
    assert attention_row(attend, torch.zeros(2, 200, 8), kv_heads=KV_HEADS) == 2 * expected


_ADDED = torch.zeros(1, 1, 30, 30).masked_fill(torch.ones(30, 30, dtype=torch.bool).triu(1), -torch.inf)
_LEARNT = nn.Parameter(torch.zeros(HEADS, 30, 30))


@pytest.mark.parametrize(
    ("modify", "expected"),
    [
        (lambda score, _b, _h, q, k: torch.where(q >= k, score, -torch.inf), masks.causal_pairs([30])),
        (lambda score, _b, _h, q, k: torch.where(q >= k, score, -1e9), masks.causal_pairs([30])),
        (
            lambda score, _b, h, q, k: torch.where(q >= k, score + _LEARNT[h, q, k], -torch.inf),
            masks.causal_pairs([30]),
        ),
        (
            lambda score, b, _h, q, k: score + _ADDED[b][0][q][k],
            masks.causal_pairs([30]),
        ),  # as transformers adds a mask
        (lambda score, _b, h, q, k: score + _LEARNT[h, q, k], 30 * 30),
        (lambda score, _b, _h, _q, _k: 20 * torch.tanh(score / 20), 30 * 30),
    ],
    ids=["-inf", "-1e9", "beside a learnt bias", "an added mask", "a learnt bias", "a cap"],
)
def test_flex_attention_counts_no_pair_whose_score_is_modified_away(modify, expected):
    assert attention_row(heads_first(flex_attention, score_mod=modify), torch.zeros(1, 30, 8)) == expected


def test_flex_attention_keeps_documents_apart():
    document = torch.tensor([0] * 70 + [1] * 130)

    def rule(_b, _h, q, k):
        return (q >= k) & (document[q] == document[k])

    mask = create_block_mask(rule, 1, 1, 200, 200, device="cpu")
    attend = heads_first(flex_attention, block_mask=mask)
    assert attention_row(attend, torch.zeros(1, 200, 8)) == masks.causal_pairs([70, 130])


def test_flex_attention_without_a_mask_is_full_and_with_blocks_alone_is_those_blocks():
    assert attention_row(heads_first(flex_attention), torch.zeros(1, 30, 8)) == 30 * 30
    # each of 3 rows of 16 queries names 2 of 3 blocks of 16 keys; the last row and column hold 40 - 32 = 8
    number, indices = torch.full((1, 1, 3), 2, dtype=torch.int32), torch.tensor([[[[0, 2], [1, 0], [2, 1]]]])
    mask = BlockMask.from_kv_blocks(number, indices.int(), BLOCK_SIZE=16, seq_lengths=(40, 40))
    expected = 16 * (16 + 8) + 16 * (16 + 16) + 8 * (8 + 16)
    assert attention_row(heads_first(flex_attention, block_mask=mask), torch.zeros(1, 40, 8)) == expected


@pytest.mark.parametrize(
    ("rule", "driver"), [(causal, "pairs:causal"), pytest.param(sliding, "pairs:sliding:9", marks=pytest.mark.slow)]
)
def test_flex_attention_names_its_driver(rule, driver):
    def function(q, k, v):
        mask = create_block_mask(rule, None, None, q.shape[1], k.shape[1], device="cpu")
        return heads_first(flex_attention, block_mask=mask)(q, k, v)

    assert driver_of(function) == driver


def test_flex_attention_returns_its_statistics_as_shapes():
    def function(q, k, v):
        out, lse = heads_first(flex_attention, return_lse=True)(q, k, v)
        assert lse.shape == (2, HEADS, 30)
        return out

    assert attention_row(function, torch.zeros(2, 30, 8)) == 2 * 30 * 30


# segments laid end to end, and flash-attn, which is not installed: its functions' true signatures, none of its code

CU = torch.tensor([0, 3, 10], dtype=torch.int32)
CU_KEYS = torch.tensor([0, 5, 11], dtype=torch.int32)


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    raise AssertionError("a trace runs no kernel")


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    raise AssertionError("a trace runs no kernel")


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
    raise AssertionError("a trace runs no kernel")


def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
    raise AssertionError("a trace runs no kernel")


def flash_attn_varlen_qkvpacked_func(
    qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)
):
    raise AssertionError("a trace runs no kernel")


def flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
):
    raise AssertionError("a trace runs no kernel")


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    raise AssertionError("a trace runs no kernel")


FLASH = [
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_qkvpacked_func,
    flash_attn_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
]


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Stand in for the packages; this file already holds references to their functions."""
    for name, functions in (
        ("flash_attn.flash_attn_interface", FLASH),
        ("xformers.ops.fmha", [memory_efficient_attention]),
    ):
        module = ModuleType(name)
        for function in functions:
            setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, module)


def packed_qkv(q, k, v):
    return torch.stack([q, k, v], dim=-3)


def packed_kv(k, v):
    return torch.stack([k, v], dim=-3)


PACKED = {
    "varlen_attn": lambda q, k, v: varlen_attn(q, k, v, CU, CU, 7, 7, window_size=(-1, 0)),
    "varlen": lambda q, k, v: flash_attn_varlen_func(q, k, v, CU, CU, 7, 7, causal=True),
    "varlen qkv": lambda q, k, v: flash_attn_varlen_qkvpacked_func(packed_qkv(q, k, v), CU, 7, causal=True),
    "varlen kv": lambda q, k, v: flash_attn_varlen_kvpacked_func(q, packed_kv(k, v), CU, CU, 7, 7, causal=True),
}


@pytest.mark.parametrize("name", PACKED)
def test_segments_attend_within_themselves(name):
    assert attention_row(PACKED[name], torch.zeros(10, 8)) == 1 + 2 + 3 + sum(range(1, 8))


BATCHED = {
    "plain": lambda q, k, v: flash_attn_func(q, k, v, 0.0, None, True),
    "qkv": lambda q, k, v: flash_attn_qkvpacked_func(packed_qkv(q, k, v), causal=True),
    "kv": lambda q, k, v: flash_attn_kvpacked_func(q, packed_kv(k, v), causal=True),
}


@pytest.mark.parametrize("name", BATCHED)
def test_flash_attention_in_batches(name):
    assert attention_row(BATCHED[name], torch.zeros(3, 7, 8)) == 3 * 28
    assert driver_of(BATCHED[name]) == "pairs:causal"


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({}, lambda _i, _j: True),
        ({"causal": True}, lambda i, j: j <= i + 4),
        ({"causal": True, "window_size": (2, 0)}, lambda i, j: i + 4 - 2 <= j <= i + 4),
        ({"window_size": (3, 1)}, lambda i, j: i + 4 - 3 <= j <= i + 4 + 1),
        ({"window_size": (-1, 2)}, lambda i, j: j <= i + 4 + 2),
    ],
)
def test_flash_attention_aligns_its_mask_with_the_last_key(options, allowed):
    pairs = attention_row(lambda *qkv: flash_attn_func(*qkv, **options), torch.zeros(2, 5, 8), torch.zeros(2, 9, 8))
    assert pairs == 2 * brute(5, 9, allowed)


def test_segments_of_keys_may_have_other_lengths():
    def function(q, k, v):
        return flash_attn_varlen_func(q, k, v, CU, CU_KEYS, 7, 6, causal=True)

    # 3 queries over 5 keys, then 7 over 6, whose first query sees none
    expected = brute(3, 5, lambda i, j: j <= i + 2) + brute(7, 6, lambda i, j: j <= i - 1)
    assert attention_row(function, torch.zeros(10, 8), torch.zeros(11, 8)) == expected


def test_a_window_of_flash_attention_names_its_driver():
    assert driver_of(lambda *qkv: flash_attn_func(*qkv, causal=True, window_size=(15, 0))) == "pairs:sliding:16"


def test_flash_attention_returns_its_statistics_as_shapes():
    def function(q, k, v):
        out, _lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
        return out

    assert attention_row(function, torch.zeros(2, 5, 8)) == 2 * 25


class Triangle:
    """What xformers' biases can do: write themselves out as a tensor to add."""

    def materialize(self, shape):
        return torch.full(shape, -torch.inf).triu(1)


@pytest.mark.parametrize(("bias", "pairs"), [(None, 49), (Triangle(), 28), (torch.zeros(2, HEADS, 7, 7), 49)])
def test_xformers_attention_reads_its_bias(bias, pairs):
    def function(q, k, v):
        return memory_efficient_attention(q, k, v, attn_bias=bias)

    assert attention_row(function, torch.zeros(2, 7, 8)) == 2 * pairs


def test_xformers_attention_with_grouped_heads():
    def function(q, k, v):
        groups = q.unflatten(2, (KV_HEADS, HEADS // KV_HEADS))
        k, v = (t.unsqueeze(3).expand(groups.shape) for t in (k, v))
        return memory_efficient_attention(groups, k, v).flatten(2, 3)

    assert attention_row(function, torch.zeros(2, 7, 8), kv_heads=KV_HEADS) == 2 * 49


def test_functions_are_themselves_again_after_a_trace():
    attention_row(BATCHED["plain"], torch.zeros(3, 7, 8))
    with pytest.raises(AssertionError, match="a trace runs no kernel"):
        flash_attn_func(1, 2, 3)


def test_boundaries_that_do_not_cover_the_tokens_are_refused():
    with pytest.raises(TraceError, match=r"attends over 12 queries in segments of \[3, 7\]"):
        attention_row(PACKED["varlen"], torch.zeros(12, 8))


def test_a_mask_that_depends_on_floats_is_refused():
    def function(q, k, v):
        threshold = q.mean()
        mask = create_block_mask(lambda _b, _h, i, j: i * threshold > j + 1, None, None, 30, 30, device="cpu")
        return heads_first(flex_attention, block_mask=mask)(q, k, v)

    with pytest.raises(TraceError, match="masks all of its attention scores"):
        attention_row(function, torch.zeros(1, 30, 8))


def test_packing_does_not_change_the_cost_of_a_segment():
    cost = trace(
        Attending(lambda *qkv: flash_attn_func(*qkv, causal=True)), inputs=lambda w: torch.zeros(1, w.tokens, 8)
    )
    assert cost.count(Workload([3, 7])) == cost.count(Workload([3])) + cost.count(Workload([7]))
