"""Plain modules of every build count as they run, beside an independent counter.

What a mask forbids is derived beside each: `forbidden` FLOPs of the forward, twice as many of the backward. A module
that cannot be counted is refused with the reason that the table names.
"""

import math
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headway.errors import TraceError
from headway.tracing import trace
from helpers.counter import Example

N, D = 10, 8  # tokens, and the size of each head
UPPER = N * (N - 1) // 2  # pairs that a causal mask forbids
TRIANGLE = torch.ones(N, N, dtype=torch.bool).tril()
BAND = TRIANGLE.triu(-2)
ADDED = torch.zeros(N, N).masked_fill(~TRIANGLE, -torch.inf)
PADDED = torch.arange(N) < torch.tensor([[N], [4]])  # of two samples, the second is short


class Function(nn.Module):
    """A linear layer, then a function of its output and of what else is given; parameters by name."""

    def __init__(self, function, sizes=(D, D), **parameters):
        super().__init__()
        self.linear, self.function = nn.Linear(*sizes), function
        for name, tensor in parameters.items():
            setattr(self, name, tensor if isinstance(tensor, nn.Module) else nn.Parameter(tensor))

    def forward(self, x, *more):
        return self.function(self, self.linear(x), *more)


def _own(function, *shapes, sizes=(D, D), forbidden=0, more=(), refused="", **parameters) -> Example:
    return Example(
        lambda: Function(function, sizes, **parameters),
        lambda: (*(torch.randn(s) for s in shapes), *more),
        forbidden,
        refused,
    )


def _of_module(model, *shapes, more=()) -> Example:
    return Example(lambda: model, lambda: (*(torch.randn(s) for s in shapes), *more))


def _attention(shape, mask=None, forbidden=0, **options) -> Example:
    """Attend over `forbidden` pairs too many: each costs 2 (8 + 8) FLOPs forward."""
    function = lambda _self, h: F.scaled_dot_product_attention(h, h, h, attn_mask=mask, **options)  # noqa: E731 - a table of them
    return _own(function, shape, forbidden=forbidden * 2 * (D + D))


SHAPES = [(N, D), (6, N, D), (2, 3, N, D), (2, 5, 3, N, D)]
ATTENTION = {}
for shape in SHAPES:
    rows = math.prod(shape[:-2])
    ATTENTION |= {
        f"attention{shape}": _attention(shape),
        f"attention{shape}-flag": _attention(shape, None, rows * UPPER, is_causal=True),
        f"attention{shape}-bool": _attention(shape, TRIANGLE, rows * UPPER),
        f"attention{shape}-float": _attention(shape, ADDED, rows * UPPER),
        f"attention{shape}-band": _attention(shape, BAND, rows * (N * N - int(BAND.sum()))),
        f"attention{shape}-keys": _attention(shape, torch.arange(N) < 4, rows * N * (N - 4)),
    }
FOLDED = PADDED.repeat_interleave(3, 0)[:, None]  # (b h) 1 n
ATTENTION |= {
    "attention-folded-padding": _attention((6, N, D), FOLDED, 3 * N * (N - 4)),
    "attention-sample-padding": _attention((2, 3, N, D), PADDED[:, None, None], 3 * N * (N - 4)),
    "attention-heads-differ": _attention(
        (2, 3, N, D),
        torch.stack([TRIANGLE, BAND, torch.ones(N, N, dtype=torch.bool)]),
        2 * (UPPER + N * N - int(BAND.sum())),
    ),
    "attention-windows-by-mask": _attention((2, 5, 3, N, D), PADDED[:, None, None, None], 5 * 3 * N * (N - 4)),
    "attention-learnt-bias": _own(
        lambda s, h: F.scaled_dot_product_attention(h, h, h, attn_mask=s.bias), (6, N, D), bias=torch.zeros(6, N, N)
    ),
    "attention-learnt-bias-masked": _own(
        lambda s, h: F.scaled_dot_product_attention(h, h, h, attn_mask=s.bias + ADDED),
        (2, 3, N, D),
        forbidden=6 * UPPER * 2 * (D + D),
        bias=torch.zeros(3, N, N),
    ),
    "attention-grouped": _own(
        lambda _, h: F.scaled_dot_product_attention(h, h[:, :2], h[:, :2], is_causal=True, enable_gqa=True),
        (2, 4, N, D),
        forbidden=8 * UPPER * 2 * (D + D),
    ),
    "attention-one-key-head": _own(
        lambda _, h: F.scaled_dot_product_attention(h, h[:, :1].expand_as(h), h[:, :1].expand_as(h)), (2, 4, N, D)
    ),
    "attention-cross": _own(lambda _, h, y: F.scaled_dot_product_attention(h, y, y), (2, 3, N, D), (2, 3, 7, D)),
    "by-hand": _own(lambda _, h: (h @ h.transpose(-1, -2)).softmax(-1) @ h, (2, 3, N, D)),
}


@dataclass
class Pair:
    first: Any
    second: Any


Named = namedtuple("Named", "first second")


def _heads(container, refused="") -> Example:
    return _own(
        lambda s, h: container(s.a(h), s.b(h)),
        (4, D),
        refused=refused,
        a=nn.Linear(D, 3),
        b=nn.Sequential(nn.Linear(D, 32), nn.Linear(32, 4)),
    )


RESULTS = {
    "tuple": _heads(lambda a, b: (a, b)),
    "list": _heads(lambda a, b: [a, b]),
    "dict": _heads(lambda a, b: {"a": a, "b": b}),
    "named-tuple": _heads(Named),
    "dataclass": _heads(Pair),
    "nested": _heads(lambda a, b: {"x": [a, {"y": (b, None, 3)}]}),
    "dataclass-in-dict": _heads(lambda a, b: {"x": Pair(a, [Pair(b, None)])}),
    "twice": _heads(lambda a, b: (a, a, b, {"b": b})),
    "loss-of-both": _heads(lambda a, b: {"loss": a.sum() + b.sum(), "a": a, "b": b}),
    "detached": _heads(lambda a, b: (a, b.detach())),
    "loss-without-gradient": _heads(lambda a, b: {"loss": torch.zeros(()), "a": a, "b": b}),
    "constant-beside": _heads(lambda a, b: (torch.arange(3), torch.ones(3), a, b)),
    "nothing-to-train": _heads(lambda a, _: a.detach()),
    "loss-of-one": _heads(lambda a, b: {"loss": a.sum(), "b": b}, refused="does not depend on b"),
}


def _guarded(_, h):
    if torch.isnan(h).any() or not torch.isfinite(h).all():
        raise ValueError("not finite")
    return torch.distributions.Normal(h, h.exp()).rsample() @ h.T


def _mixture(s, h):
    weights, chosen = s.router(h).softmax(-1).topk(2)
    return (
        sum(weights[..., i : i + 1] * torch.stack([e(h) for e in (s.first, s.second)]).mean(0) for i in range(2))
        + 0 * chosen[..., :1]
    )


def _lengths(s, h, mask):
    shown = torch.arange(N)[None] < mask.sum(1).int()[:, None]
    return F.scaled_dot_product_attention(h, h, h, attn_mask=shown[:, None])


def _by_hand(hide):
    """Attend by hand, over as many keys as a mask of floats sums to."""

    def attend(_, h, mask):
        hidden = torch.arange(N)[None] >= mask.sum(1).int()[:, None]
        return hide(h @ h.transpose(-1, -2), hidden[:, None]).softmax(-1) @ h

    return attend


def _cut(_, h, mask):
    pieces = [row[:length] for row, length in zip(h, mask.sum(1).int().tolist(), strict=True)]
    return torch.cat(pieces) @ h[0].T


def _rotated(s, h):
    turn = torch.polar(torch.ones(N, D // 2), torch.arange(N)[:, None] / torch.arange(1, D // 2 + 1))
    return torch.view_as_real(torch.view_as_complex(h.unflatten(-1, (-1, 2))) * turn).flatten(-2)


def _asking(s, x):
    x = x.detach()
    x.requires_grad = True
    return s.again(x)


PLAIN = {
    "tied": _own(lambda s, h: h @ s.linear.weight, (4, D)),
    "reused": _own(lambda s, h: s.linear(h), (4, D)),
    "long-way-round": _own(lambda s, h: s.a(h).relu().mean(0).outer(h.sum(0)), (4, D), a=nn.Linear(D, 5)),
    "soft-mixture": _own(_mixture, (4, D), router=nn.Linear(D, 4), first=nn.Linear(D, D), second=nn.Linear(D, D)),
    "hypernetwork": _own(
        lambda s, h: torch.einsum("bi,bij->bj", h, s.a(h).unflatten(-1, (D, 3))), (4, D), a=nn.Linear(D, 3 * D)
    ),
    "factors": _own(lambda s, h: h @ (s.a @ s.b), (4, D), a=torch.randn(D, 3), b=torch.randn(3, 5)),
    "gru": _of_module(nn.GRU(D, 6, batch_first=True), (2, N, D)),
    "lstm-both-ways": _of_module(nn.LSTM(D, 6, bidirectional=True), (N, 2, D)),
    "lstm-projected": _of_module(nn.LSTM(D, 6, proj_size=3), (N, 2, D)),
    "grouped": _of_module(nn.Conv2d(8, 12, 3, groups=4), (2, 8, 9, 9)),
    "depthwise": _of_module(nn.Conv1d(8, 8, 3, groups=8), (2, 8, 9)),
    "dilated": _of_module(nn.Conv2d(4, 6, 3, dilation=2, padding=2), (2, 4, 9, 9)),
    "transposed": _of_module(nn.ConvTranspose2d(4, 6, 2, stride=2), (2, 4, 5, 5)),
    "three-dimensional": _of_module(nn.Conv3d(3, 4, (1, 2, 2), stride=(1, 2, 2)), (1, 3, 2, 4, 4)),
    "encoder-layer": _of_module(nn.TransformerEncoderLayer(D, 2, 16, batch_first=True), (2, N, D)),
    "linear-attention": _own(lambda _, h: h.relu() @ (h.relu().transpose(-1, -2) @ h), (2, N, D)),
    "rotated-by-complex": _own(_rotated, (2, N, D)),
    "asks-for-its-input": _own(_asking, (4, D), again=nn.Linear(D, 5)),
    "spectral": _of_module(nn.utils.parametrizations.weight_norm(nn.Linear(D, 5)), (4, D)),
    "frozen-teacher": _own(lambda s, h: (h, torch.no_grad()(s.a)(h)), (4, D), a=nn.Linear(D, 5)),
    "lengths-of-ones": _own(_lengths, (2, N, D), more=(torch.ones(2, N),)),
    "lengths-of-a-mask": _own(_lengths, (2, N, D), forbidden=N * (N - 4) * 2 * (D + D), more=(PADDED.float(),)),
    "lengths-of-unknown-floats": _own(
        _lengths, (2, N, D), more=(torch.rand(2, N),), refused="mask that depends on floats"
    ),
    **{
        f"by-hand-{way}-{name}": _own(
            _by_hand(hide), (2, N, D), forbidden=forbidden * 2 * (D + D), more=(mask,), refused=refused
        )
        for way, hide in {
            "filled": lambda scores, hidden: scores.masked_fill(hidden, -1e9),
            "added": lambda scores, hidden: scores + hidden.float() * -1e9,
            "chosen": lambda scores, hidden: torch.where(hidden, torch.tensor(-1e9), scores),
        }.items()
        for name, mask, forbidden, refused in [
            ("ones", torch.ones(2, N), 0, ""),
            ("padding", PADDED.float(), N * (N - 4), ""),
            ("unknown", torch.rand(2, N), 0, "Headway cannot follow the mask"),
        ]
    },
    "cut-to-lengths": _own(_cut, (2, N, D), more=(PADDED.float(),)),
    "cut-to-unknown-lengths": _own(
        _cut, (2, N, D), more=(torch.rand(2, N),), refused="reads a number, such as a length"
    ),
    "inverse": _own(lambda _, h: torch.linalg.inv(h), (2, D, D), refused="LinalgInv"),
    "fourier": _own(lambda _, h: torch.fft.fft(h).abs(), (2, D), refused="Fourier"),
    "complex-weight": _own(
        lambda s, h: (h.to(torch.complex64) @ s.a).abs(),
        (4, D),
        a=torch.randn(D, 5, dtype=torch.complex64),
        refused="complex numbers",
    ),
    "guarded-sample": _own(_guarded, (4, D)),
    "log-determinant": _own(lambda _, h: torch.linalg.slogdet(h).logabsdet, (2, D, D)),
}
OWN = ATTENTION | {f"results-{name}": model for name, model in RESULTS.items()} | PLAIN


@pytest.mark.parametrize("name", OWN)
def test_modules_of_every_build_count_as_they_run(name):
    OWN[name].check()


def test_a_mask_of_more_axes_than_its_scores_is_refused():
    model = OWN["attention-learnt-bias"].build()
    model.function = lambda _, h: F.scaled_dot_product_attention(h, h, h, attn_mask=torch.ones(2, 1, 10, 10) > 0)
    with pytest.raises(
        TraceError, match=r"lays a mask of shape \(2, 1, 10, 10\) over scores of shape \(1, 6, 10, 10\)"
    ):
        trace(model, inputs=(torch.randn(6, 10, 8),))
