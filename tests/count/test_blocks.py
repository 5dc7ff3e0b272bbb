"""Attention in blocks or streams that are masked differently, against real eager models."""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LongT5Config, LongT5ForConditionalGeneration, ProphetNetConfig
from transformers import ProphetNetForConditionalGeneration as ProphetNet

from headway.count import Workload, drivers, trace
from witness import expected_step, real_step

TOKENS, SOURCES = 23, 37
WORKLOAD = Workload([TOKENS], sources=[SOURCES])
RADIUS, HEADS, SIZE = 7, 4, 8


class Kept(TorchDispatchMode):
    """Collects the probabilities of every softmax over more than one row of heads."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket is torch.ops.aten._softmax and out.dim() == 5:
            self.seen.append(out)
        return out


def arguments():
    ids = torch.randint(4, 60, (1, SOURCES))
    return {"input_ids": ids, "decoder_input_ids": ids[:, :TOKENS]}


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


def test_blocks_are_billed_for_the_neighbours_that_each_position_sees():
    model = longt5()
    neighbours = sum(abs(i - j) <= RADIUS for i in range(SOURCES) for j in range(SOURCES))
    cost = trace(model)
    rows = [row for row in cost.rows if row.op == "attention" and "LocalSelf" in row.module]
    driver = f"source_pairs:local:{RADIUS}:{RADIUS}"
    assert [(row.driver, row.forward) for row in rows] == [(driver, 2 * HEADS * SIZE)] * 4  # scores and values
    assert drivers.parse(driver)(WORKLOAD) == neighbours

    with torch.no_grad(), Kept() as probe:
        model.eval()(**arguments())
    for found in probe.seen:  # blocks of 8 positions, which see three blocks
        real = found.transpose(2, 3).reshape(-1, HEADS, 24)[:SOURCES]  # padding's rows are hidden whole
        assert int(torch.count_nonzero(real)) == HEADS * neighbours
    assert len(probe.seen) == 2


def test_streams_are_billed_for_the_keys_that_each_of_them_sees():
    cost = trace(prophetnet())
    rows = [row for row in cost.rows if row.op == "attention" and row.module.endswith("decoder.layers.0.self_attn")]
    billed = sum(row.forward * drivers.parse(row.driver)(WORKLOAD) for row in rows)
    with torch.no_grad(), Kept() as probe:
        prophetnet().eval()(**arguments())
    (streams,) = probe.seen  # beside them, the main stream is causal
    pairs = int(torch.count_nonzero(streams)) // HEADS + TOKENS * (TOKENS + 1) // 2
    # of two streams, the first sees its tokens as the main one does and itself, the second one token less
    assert pairs == 3 * TOKENS * (TOKENS + 1) // 2 + TOKENS + 1
    assert billed == 2 * 2 * HEADS * SIZE * pairs


def test_a_real_step_runs_what_the_ledger_says():
    # five blocks of eight, each over three; the causal square
    executed = {f"source_pairs:local:{RADIUS}:{RADIUS}": 5 * 8 * 24, "pairs:causal": TOKENS**2}
    assert real_step(longt5(), arguments()) == expected_step(trace(longt5()), WORKLOAD, executed)
