"""Inference against cached keys and values: pairs by brute force, and real decode steps under PyTorch's counter."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from headway.count import Workload, drivers, load_cost_model
from headway.errors import WorkloadError
from headway.tracing import trace
from helpers.counter import build, count_forward

TEXT = load_cost_model("qwen3-8b")
lengths = st.integers(1, 40)
pasts = st.integers(0, 40)


def ones(driver: str, new: int, past: int) -> int:
    """Count the ones of the mask that queries past + 1 to past + new lay over the keys 1 to past + new."""
    query, key = np.mgrid[past : past + new, 0 : past + new]
    allowed = key <= query
    name, _, size = driver.removeprefix("pairs:").partition(":")
    if name == "sliding":
        allowed &= query - key < int(size)
    elif name == "chunked":
        allowed &= query // int(size) == key // int(size)
    return int(allowed.sum())


@given(st.lists(st.tuples(lengths, pasts), max_size=4))
@pytest.mark.parametrize("driver", ["pairs:causal", "pairs:sliding:7", "pairs:chunked:6"])
def test_new_tokens_see_what_the_mask_leaves_them_of_the_past(driver, segments):
    step = Workload([new for new, _ in segments], past=[past for _, past in segments])
    assert drivers.parse_driver(driver)(step) == sum(ones(driver, new, past) for new, past in segments)


@given(st.lists(lengths, min_size=1, max_size=5))
def test_a_prompt_read_in_parts_costs_what_it_costs_whole(parts):
    before = np.cumsum([0, *parts[:-1]]).tolist()
    steps = [Workload([n], past=[p]) for n, p in zip(parts, before, strict=True)]
    assert sum(TEXT.count(s, forward_only=True) for s in steps) == TEXT.count(Workload([sum(parts)]), forward_only=True)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3", "mistral_sliding"])
@pytest.mark.parametrize("new", [1, 5])
def test_a_decode_step_counts_what_pytorch_dispatches(family, new):
    model, past = build(family).eval(), 23
    cost = trace(model)
    ids, cache = torch.randint(10, 160, (2, past + new)), DynamicCache(config=model.config)
    step = Workload([new] * 2, past=[past] * 2)
    # eager attention multiplies every new query with every key that the cache kept, which for a window of 16 is the
    # last 15; the mask leaves out the keys that come after a query, or before its window
    cached = 15 if family == "mistral_sliding" else past
    scores = 2 * new * (cached + new)
    expected = Counter()
    for row in cost.rows:
        units = scores if row.op == "attention" else drivers.parse_driver(row.driver)(step)
        if row.module.endswith("kv_b_proj"):  # this cache keeps latents, and expands those of the past again
            units += 2 * past
        expected[row.module] += units * row.forward
    pairs = scores - 2 * (new * (new - 1) // 2 * (2 if family == "mistral_sliding" else 1))
    assert {drivers.parse_driver(row.driver)(step) for row in cost.rows if row.op == "attention"} == {pairs}
    with torch.no_grad():
        model(input_ids=ids[:, :past], past_key_values=cache, use_cache=True)
        _, seen = count_forward(model, {"input_ids": ids[:, past:], "past_key_values": cache, "use_cache": True})
    assert seen == expected


def test_a_decoder_that_reads_an_encoder_runs_it_once():
    # an encoder layer and a decoder layer by hand: the past of a segment was computed with its sources read
    sources = Workload([3, 1], sources=[9, 4], past=[0, 6])
    assert drivers.parse_driver("sources")(sources) == 9
    assert drivers.parse_driver("source_pairs:full")(sources) == 81
    assert drivers.parse_driver("pairs:cross")(sources) == 3 * 9 + 1 * 4


def test_a_past_has_no_backward_and_no_second_direction():
    step = Workload([1], past=[7])
    with pytest.raises(WorkloadError, match=r"7 past tokens.*Count with forward_only"):
        TEXT.count(step)
    with pytest.raises(WorkloadError, match="attends in both directions"):
        drivers.parse_driver("pairs:full")(step)


def test_pasts_follow_their_segments_through_sums():
    step = Workload([3, 2], past=[7, 0])
    assert (step + Workload([5])).past.tolist() == [7, 0, 0]
    assert (Workload([5]) + step).past.tolist() == [0, 7, 0]
    assert Workload([5], past=[0]) == Workload([5])
    assert "7 past tokens" in repr(step)
    with pytest.raises(WorkloadError, match="past must be one length per segment: got 1 for 2 segments"):
        Workload([3, 2], past=[7])
