"""Attention in blocks or streams that are masked differently, against real eager models."""

import functools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LEDConfig,
    LEDForConditionalGeneration,
    LongT5Config,
    LongT5ForConditionalGeneration,
    PegasusXConfig,
    PegasusXForConditionalGeneration,
    ProphetNetConfig,
)
from transformers import ProphetNetForConditionalGeneration as ProphetNet

from headway.count import Workload, drivers
from headway.tracing import trace
from helpers.counter import expected_step, real_step

TOKENS, SOURCES = 23, 37
WORKLOAD = Workload([TOKENS], sources=[SOURCES])
RADIUS, HEADS, SIZE = 7, 4, 8


class Kept(TorchDispatchMode):
    """Collects the probabilities of every softmax over so many axes."""

    def __init__(self, axes=5):
        super().__init__()
        self.axes, self.seen = axes, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket is torch.ops.aten._softmax and out.dim() == self.axes:
            self.seen.append(out)
        return out


def arguments(sources=SOURCES):
    ids = torch.randint(4, 60, (1, sources))
    return {"input_ids": ids, "decoder_input_ids": ids[:, :TOKENS]}


@functools.cache
def ledger(build):
    return trace(build())


def longt5() -> nn.Module:
    torch.manual_seed(0)
    config = LongT5Config(
        vocab_size=64, d_model=32, d_kv=SIZE, d_ff=48, num_layers=2, num_heads=HEADS, local_radius=RADIUS
    )
    return LongT5ForConditionalGeneration._from_config(config, attn_implementation="eager").train()


def prophetnet() -> nn.Module:
    torch.manual_seed(0)
    config = ProphetNetConfig(
        vocab_size=64,
        hidden_size=HEADS * SIZE,
        encoder_ffn_dim=48,
        decoder_ffn_dim=40,
        num_encoder_layers=1,
        num_decoder_layers=1,
        num_encoder_attention_heads=HEADS,
        num_decoder_attention_heads=HEADS,
    )
    return ProphetNet._from_config(config).train()


@pytest.mark.slow
def test_blocks_are_billed_for_the_neighbours_that_each_position_sees():
    model = longt5()
    neighbours = sum(abs(i - j) <= RADIUS for i in range(SOURCES) for j in range(SOURCES))
    cost = ledger(longt5)
    rows = [row for row in cost.rows if row.op == "attention" and "LocalSelf" in row.module]
    driver = f"source_pairs:local:{RADIUS}:{RADIUS}"
    assert [(row.driver, row.forward) for row in rows] == [(driver, 2 * HEADS * SIZE)] * 4  # scores and values
    assert drivers.parse_driver(driver)(WORKLOAD) == neighbours

    with torch.no_grad(), Kept() as probe:
        model.eval()(**arguments())
    for found in probe.seen:  # blocks of 8 positions, which see three blocks
        real = found.transpose(2, 3).reshape(-1, HEADS, 24)[:SOURCES]  # padding's rows are hidden whole
        assert int(torch.count_nonzero(real)) == HEADS * neighbours
    assert len(probe.seen) == 2


def test_streams_are_billed_for_the_keys_that_each_of_them_sees():
    cost = ledger(prophetnet)
    rows = [row for row in cost.rows if row.op == "attention" and row.module.endswith("decoder.layers.0.self_attn")]
    billed = sum(row.forward * drivers.parse_driver(row.driver)(WORKLOAD) for row in rows)
    with torch.no_grad(), Kept() as probe:
        prophetnet().eval()(**arguments())
    (streams,) = probe.seen  # beside them, the main stream is causal
    pairs = int(torch.count_nonzero(streams)) // HEADS + TOKENS * (TOKENS + 1) // 2
    # of two streams, the first sees its tokens as the main one does and itself, the second one token less
    assert pairs == 3 * TOKENS * (TOKENS + 1) // 2 + TOKENS + 1
    assert billed == 2 * 2 * HEADS * SIZE * pairs


@pytest.mark.slow
def test_a_real_step_runs_what_the_ledger_says():
    # five blocks of eight, each over three; the causal square
    executed = {f"source_pairs:local:{RADIUS}:{RADIUS}": 5 * 8 * 24, "pairs:causal": TOKENS**2}
    assert real_step(longt5(), arguments()) == expected_step(ledger(longt5), WORKLOAD, executed)


_BART = {
    "vocab_size": 64,
    "d_model": HEADS * SIZE,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
}
BLOCK, WHOLE = 8, 40  # five whole blocks: no padding
WHOLE_BLOCKS = Workload([TOKENS], sources=[WHOLE])


def led() -> nn.Module:
    torch.manual_seed(0)
    config = LEDConfig(**_BART, attention_window=BLOCK)
    return LEDForConditionalGeneration._from_config(config, attn_implementation="eager").train()


def pegasus_x() -> nn.Module:
    torch.manual_seed(0)
    config = PegasusXConfig(**_BART, block_size=BLOCK, num_global_tokens=3)
    return PegasusXForConditionalGeneration._from_config(config, attn_implementation="eager").train()


def test_windows_cut_out_of_chunks_are_billed_for_the_neighbours_that_each_position_sees():
    driver, side = f"source_pairs:local:{BLOCK // 2}:{BLOCK // 2}", BLOCK // 2
    cost = ledger(led)
    attention = "led.encoder.layers.0.self_attn.longformer_self_attn"
    assert [(r.driver, r.forward) for r in cost.rows if r.module == attention] == [(driver, 2 * 2 * HEADS * SIZE)]
    assert cost.source["without"] == "global_attention_mask"
    neighbours = sum(abs(i - j) <= side for i in range(WHOLE) for j in range(WHOLE))
    assert drivers.parse_driver(driver)(WHOLE_BLOCKS) == neighbours
    with torch.no_grad(), Kept(axes=4) as probe:
        led().eval()(**arguments(WHOLE))
    windows = [found for found in probe.seen if found.shape[-1] == 2 * side + 1]
    assert [int(torch.count_nonzero(found)) for found in windows] == [HEADS * neighbours] * 2


def test_a_real_step_with_windows_runs_what_the_ledger_says_beside_its_chunks():
    forward, backward = real_step(led(), arguments(WHOLE))
    expected, expected_backward = expected_step(ledger(led), WHOLE_BLOCKS, {"pairs:causal": TOKENS**2})
    side, per_score = BLOCK // 2, 2 * HEADS * SIZE
    for i in range(2):  # nine chunks of 8 x 8 scores that overlap, and ten of 4 rows over 12 values
        chunks, values = (WHOLE // side - 1) * BLOCK**2, (WHOLE // side) * side * 3 * side
        module = f"led.encoder.layers.{i}.self_attn.longformer_self_attn"
        more = per_score * (chunks + values) - expected[module]
        expected[module] += more
        expected_backward += 2 * more
    assert (forward, backward) == (expected, expected_backward)


def test_global_tokens_are_billed_where_an_example_has_them():
    batch = arguments(WHOLE) | {"global_attention_mask": torch.zeros(1, WHOLE, dtype=torch.long)}
    batch["global_attention_mask"][0, [0, 9, 30]] = 1
    rows = trace(led(), inputs=batch).rows
    attention = "led.encoder.layers.0.self_attn.longformer_self_attn"
    billed = sum(row.forward for row in rows if row.module == attention)
    with torch.no_grad(), Kept(axes=4) as windows, Kept(axes=3) as whole:
        led().eval()(**batch)
    local = windows.seen[0][0][[i for i in range(WHOLE) if i not in (0, 9, 30)]]  # those of global tokens are not used
    assert whole.seen[0].shape == (HEADS, 3, WHOLE)
    pairs = int(torch.count_nonzero(local)) + int(torch.count_nonzero(whole.seen[0]))
    assert billed == 2 * 2 * SIZE * pairs
    queries = {row.module.rpartition(".")[2]: row.forward for row in rows if row.module.startswith(f"{attention}.")}
    assert queries["query_global"] * WHOLE == queries["key_global"] * 3 == queries["query"] * 3


def test_staggered_blocks_beside_global_tokens_count_what_pytorch_dispatches():
    forward, backward = real_step(pegasus_x(), arguments(WHOLE))
    cost = ledger(pegasus_x)
    # every second layer runs six blocks, the outer halves of which are padding; all run whole
    executed = {f"source_pairs:staggered:{BLOCK}": 6 * BLOCK**2, "pairs:causal": TOKENS**2}
    expected, expected_backward = expected_step(cost, WHOLE_BLOCKS, executed)
    staggered = [r.module for r in cost.rows if "staggered" in r.driver]
    assert staggered == ["model.encoder.layers.1.self_attn"]
    assert drivers.parse_driver(f"source_pairs:staggered:{BLOCK}")(WHOLE_BLOCKS) == 4**2 + 4 * 8**2 + 4**2
    # and 8 rows of padding meet 4 projections, 3 global keys and 3 global queries, whose states meet no loss any more
    width = HEADS * SIZE
    projected, scored = BLOCK * 2 * width**2, BLOCK * 3 * 2 * 2 * width
    for leaf in ("q_proj", "k_proj", "v_proj", "out_proj"):
        expected[f"{staggered[0]}.{leaf}"] += projected
    expected[staggered[0]] += 2 * scored
    assert (forward, backward) == (expected, expected_backward + 2 * (4 * projected + scored))


def test_a_source_that_fills_no_block_is_billed_for_what_it_has():
    rows = [r for r in ledger(pegasus_x).rows if r.op == "attention" and "encoder.layers" in r.module]
    # each layer: pairs in blocks, then every position with three global tokens, both ways, and these among themselves
    beside = ["sources", "sources", "segments"]
    assert [r.driver for r in rows] == [
        *(f"source_pairs:block:{BLOCK}", *beside),
        *(f"source_pairs:staggered:{BLOCK}", *beside),
    ]
    blocks, staggered = (drivers.parse_driver(rows[i].driver)(WORKLOAD) for i in (0, 4))
    assert blocks == sum(i // 8 == j // 8 for i in range(SOURCES) for j in range(SOURCES))
    assert staggered == sum((i + 4) // 8 == (j + 4) // 8 for i in range(SOURCES) for j in range(SOURCES))
