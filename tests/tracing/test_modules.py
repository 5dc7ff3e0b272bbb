"""Modules of torch.nn, by themselves: attention with its fast path, transformers, and convolutions of every kind."""

import pytest
import torch
from torch import nn

from headway.count import Workload
from headway.errors import TraceError
from headway.tracing import trace
from helpers.counter import counted, dispatched

WIDTH, HEADS, BATCH, TOKENS = 12, 2, 2, 9
SQUARE = BATCH * TOKENS * TOKENS
CAUSAL = BATCH * TOKENS * (TOKENS + 1) // 2
CAUSAL_MASK = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)  # true hides, in torch.nn's masks
FLOAT_MASK = nn.Transformer.generate_square_subsequent_mask(TOKENS)
PADDING = torch.arange(TOKENS).expand(BATCH, -1) >= torch.tensor([[TOKENS], [4]])


def pairs_of(cost, layers=1):
    """Attention's pairs on one example; a pair costs 2 (6 + 6) FLOPs a head forward, and twice that backward."""
    rows = [row for row in cost.rows if row.op == "attention"]
    assert len(rows) == layers
    found = set()
    for row in rows:
        pairs, rest = divmod(row.forward, 2 * 2 * WIDTH)
        assert rest == 0
        assert sum(g.flops for g in row.gradients) == 2 * row.forward
        found.add(pairs)
    return found.pop() if len(found) == 1 else found


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({}, SQUARE),
        ({"attn_mask": CAUSAL_MASK}, CAUSAL),
        ({"attn_mask": FLOAT_MASK}, CAUSAL),
        ({"attn_mask": FLOAT_MASK, "is_causal": True}, CAUSAL),
        ({"key_padding_mask": PADDING}, TOKENS * TOKENS + TOKENS * 4),
        ({"key_padding_mask": PADDING, "attn_mask": CAUSAL_MASK}, CAUSAL // 2 + 1 + 2 + 3 + 4 * 6),
        ({"attn_mask": CAUSAL_MASK.expand(BATCH * HEADS, -1, -1)}, CAUSAL),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_multihead_attention_counts_the_pairs_of_its_masks(options, pairs, need_weights, training):
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).train(training)
    x = torch.randn(BATCH, TOKENS, WIDTH)
    example = {"query": x, "key": x, "value": x, "need_weights": need_weights, **options}
    assert pairs_of(trace(model, inputs=example)) == pairs


@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention_counts_what_pytorch_dispatches_where_nothing_is_masked(need_weights):
    model = nn.MultiheadAttention(WIDTH, HEADS, kdim=5, vdim=7)
    q, k, v = torch.randn(TOKENS, BATCH, WIDTH), torch.randn(4, BATCH, 5), torch.randn(4, BATCH, 7)
    example = {"query": q, "key": k, "value": v, "need_weights": need_weights}
    assert counted(trace(model, inputs=example)) == dispatched(model, **example)


def test_attention_weights_have_their_shape_and_their_gradient():
    class Pooled(nn.Module):
        def __init__(self, averaged):
            super().__init__()
            self.attention, self.averaged = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), averaged

        def forward(self, x):
            out, weights = self.attention(x, x, x, average_attn_weights=self.averaged)
            assert weights.shape == ((BATCH, TOKENS, TOKENS) if self.averaged else (BATCH, HEADS, TOKENS, TOKENS))
            return out.sum() + weights.sum()

    for averaged in (True, False):
        assert pairs_of(trace(Pooled(averaged), inputs=(torch.randn(BATCH, TOKENS, WIDTH),))) == SQUARE


def encoder(training=True, layers=2):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 20, batch_first=True)
    return nn.TransformerEncoder(layer, layers).train(training)


@pytest.mark.parametrize("training", [True, False])
def test_an_encoder_counts_what_pytorch_dispatches(training):
    model, x = encoder(training), torch.randn(BATCH, TOKENS, WIDTH)
    assert counted(trace(model, inputs=(x,))) == dispatched(model, x)


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({"mask": FLOAT_MASK}, CAUSAL),
        ({"mask": FLOAT_MASK, "is_causal": True}, CAUSAL),
        ({"src_key_padding_mask": PADDING}, TOKENS * TOKENS + TOKENS * 4),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_an_encoder_counts_the_pairs_of_its_masks(options, pairs):
    cost = trace(encoder(False), inputs={"src": torch.randn(BATCH, TOKENS, WIDTH), **options})
    assert pairs_of(cost, layers=2) == pairs


def test_an_encoder_finds_its_drivers():
    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = encoder()

        def forward(self, x):
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            return self.encoder(x, mask=mask)

    cost = trace(Causal(), inputs=lambda w: torch.zeros(1, w.tokens, WIDTH))
    assert {row.driver for row in cost.rows if row.op == "attention"} == {"pairs:causal"}
    assert {row.driver for row in cost.rows if row.op != "attention"} == {"tokens"}


def test_a_translator_counts_its_encoder_its_decoder_and_their_crossing():
    model = nn.Transformer(WIDTH, HEADS, 1, 1, 20, batch_first=True)

    def example(workload):
        (sources,) = workload.sources.tolist()
        return {
            "src": torch.randn(1, sources, WIDTH),
            "tgt": torch.randn(1, workload.tokens, WIDTH),
            "tgt_mask": nn.Transformer.generate_square_subsequent_mask(workload.tokens),
        }

    cost = trace(model, inputs=example)
    drivers = [row.driver for row in cost.rows if row.op == "attention"]
    assert drivers == ["source_pairs:full", "pairs:causal", "pairs:cross"]
    step = Workload([9], sources=[14])
    forward, backward = dispatched(model, **example(step))
    hidden = 2 * 2 * WIDTH * (9 * 9 - 9 * 10 // 2)  # PyTorch runs the whole square of the decoder's scores
    assert counted(cost, step) == (forward - hidden, backward - 2 * hidden)


@pytest.mark.parametrize("training", [True, False])
def test_a_decoder_layer_counts_what_pytorch_dispatches(training):
    model = nn.TransformerDecoderLayer(WIDTH, HEADS, 20, batch_first=True).train(training)
    x, memory = torch.randn(BATCH, TOKENS, WIDTH), torch.randn(BATCH, 5, WIDTH)
    assert counted(trace(model, inputs=(x, memory))) == dispatched(model, x, memory)


# (module, input, output positions, multiply-adds per output position, or per input position where transposed)
CONVOLUTIONS = {
    "1d": (nn.Conv1d(6, 8, 3), (2, 6, 11), 2 * 9, 8 * 6 * 3),
    "strided and dilated": (nn.Conv1d(6, 8, 3, stride=2, dilation=2), (2, 6, 11), 2 * 4, 8 * 6 * 3),
    "2d": (nn.Conv2d(6, 8, (3, 5), padding=(1, 2)), (2, 6, 7, 9), 2 * 63, 8 * 6 * 15),
    "same": (nn.Conv2d(6, 8, 3, padding="same"), (2, 6, 7, 9), 2 * 63, 8 * 6 * 9),
    "3d": (nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4)), (2, 3, 4, 8, 12), 2 * 2 * 2 * 3, 8 * 3 * 32),
    "grouped": (nn.Conv2d(6, 8, 3, groups=2), (2, 6, 7, 9), 2 * 35, 8 * 3 * 9),
    "depthwise": (nn.Conv2d(6, 6, 3, groups=6, padding=1), (2, 6, 7, 9), 2 * 63, 6 * 9),
    "depthwise with a multiplier": (nn.Conv1d(6, 12, 4, groups=6), (2, 6, 11), 2 * 8, 12 * 4),
    "unbatched": (nn.Conv1d(6, 8, 3), (6, 11), 9, 8 * 6 * 3),
    "transposed": (nn.ConvTranspose1d(6, 8, 4, stride=2), (2, 6, 11), 2 * 11, 8 * 6 * 4),
    "transposed 2d": (nn.ConvTranspose2d(6, 8, 3, stride=2, padding=1), (2, 6, 7, 9), 2 * 63, 8 * 6 * 9),
    "transposed and grouped": (nn.ConvTranspose2d(6, 8, 3, groups=2), (2, 6, 7, 9), 2 * 63, 8 * 3 * 9),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_is_its_positions_times_its_weight(name):
    model, shape, positions, per_position = CONVOLUTIONS[name]
    one = 2 * positions * per_position
    # the gradient of the weight sums over the same positions, and so does that of the input where it is needed
    assert counted(trace(model, inputs=(torch.randn(shape),))) == (one, one)
    scaling = 2 * torch.Size(shape).numel()
    assert counted(trace(Behind(model), inputs=(torch.randn(shape),))) == (one + scaling, 2 * one + scaling)


class Behind(nn.Module):
    """A module behind a product by one weight, so that its input needs a gradient."""

    def __init__(self, model):
        super().__init__()
        self.one, self.model = nn.Linear(1, 1, bias=False), model

    def forward(self, x):
        return self.model(self.one(x[..., None])[..., 0])


@pytest.mark.parametrize("name", [name for name in CONVOLUTIONS if "group" not in name and "depth" not in name])
def test_a_dense_convolution_counts_what_pytorch_counts(name):
    model, shape, *_ = CONVOLUTIONS[name]
    x = torch.randn(shape)
    assert counted(trace(model, inputs=(x,))) == dispatched(model, x)


def test_a_learnt_bias_may_join_the_scores_and_unknown_floats_may_not():
    class Biased(nn.Module):
        def __init__(self, mask):
            super().__init__()
            self.qkv, self.mask = nn.Linear(WIDTH, 3 * WIDTH), mask

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(q @ k.transpose(-2, -1)))

    x = torch.randn(BATCH, TOKENS, WIDTH)
    with pytest.raises(TraceError, match="attends under a mask of floats"):
        trace(Biased(lambda scores: scores.tril()), inputs=(x,))


def test_a_fourier_transform_is_refused_by_name():
    class Mixing(nn.Module):
        def forward(self, x):
            return torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real

    model = nn.Sequential(nn.Linear(8, 8), Mixing())
    with pytest.raises(TraceError, match=r"module 1 runs fft\.fft\. A Fourier transform is no matrix product"):
        trace(model, inputs=lambda workload: {"input": torch.zeros(1, workload.tokens, 8)})
