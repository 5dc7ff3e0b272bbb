"""A recurrent layer's state stays within a pack's segments."""

import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headway.errors import ConfigError, TraceError
from headway.models import load_model
from headway.models.delta_rule import packed_convolution, packed_gated_delta_rule, segment_numbers
from headway.models.precision import Precision
from headway.models.recurrent import recurrent_layers
from headway.train.build import recurrences_line
from helpers.models import tiny_config

LENGTHS = (9, 70, 1, 5)  # the rule of Qwen3.5 works in chunks of 64


def packed(model):
    ids = torch.arange(sum(LENGTHS))[None] % 150 + 7
    places = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    boundaries = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    pack = {"pack_cu_seqlens": boundaries, "pack_max_seqlen": max(LENGTHS)}
    return ids, model(input_ids=ids, position_ids=places, use_cache=False, **pack).logits


def assert_close(ours, theirs, error):
    """Compare tensors by an error relative to the largest expected value."""
    assert (ours - theirs).abs().max() <= error * theirs.abs().max()


# Layers that run over a pack, and one that runs each segment. Most of the difference is that of transformers' own rule.
# It takes differences of summed decays and is 8e-7 from the rule in float64; ours is 5e-8 from it.
@pytest.mark.parametrize(
    "family", ["qwen3_5", "qwen3_next", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "minimax", "lfm2"]
)
def test_each_segment_of_a_pack_runs_as_if_it_were_alone(family):
    torch.manual_seed(0)
    model = load_model(tiny_config(family), random_init=True)
    ids, logits = packed(model)
    parts = [model(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, dim=1)]
    assert_close(logits, torch.cat(parts, dim=1), 1e-5)


@pytest.mark.parametrize("family", ["mamba2", "rwkv"])
def test_a_layer_that_boundaries_do_not_reach_refuses_a_pack(family):
    model = load_model(tiny_config(family), random_init=True)
    with pytest.raises(ConfigError, match=r"cannot train this model on packs.* docs/models\.md"):
        packed(model)


def one_token_after_another(q, k, v, g, beta):
    """The gated delta rule as it is defined, in float64."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    g = g if g.dim() == 4 else g[..., None]
    state, outs = 0.0, []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None]
        read = torch.einsum("bhkv,bhk->bhv", state, k[:, t]) if t else 0.0
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * (v[:, t] - read))
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1)


@pytest.mark.parametrize("gates", [(3,), (3, 8)])  # a gate for a head, and a gate for a channel of its keys
@pytest.mark.parametrize("lengths", [(200,), (9, 70, 1, 5), (64, 64, 1, 63, 130), (1,) * 70, (5, 0, 60, 0)])
def test_a_packed_gated_delta_rule_is_the_rule_of_each_segment(lengths, gates):
    tokens = sum(lengths)
    q, k, v = (torch.randn(1, tokens, 3, size) for size in (8, 8, 6))
    g, beta = -60 * torch.rand(1, tokens, *gates) ** 4, torch.rand(1, tokens, 3)
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
    boundaries = torch.tensor([0, *lengths]).cumsum(0).int()
    out, _ = packed_gated_delta_rule(*inputs, cu_seqlens=boundaries, use_qk_l2norm_in_kernel=True)
    parts = zip(*(x.split(lengths, 1) for x in inputs), strict=True)
    alone = torch.cat([one_token_after_another(*part) for part in parts if part[0].shape[1]], 1)
    assert_close(out, alone, 1e-6)
    slopes = torch.randn_like(out)
    for ours, theirs in zip(*(torch.autograd.grad(x, inputs, slopes) for x in (out, alone)), strict=True):
        assert_close(ours, theirs, 1e-5)


@pytest.mark.parametrize("lengths", [(20,), (9, 1, 2, 8), (5, 0, 6)])
def test_a_packed_convolution_is_that_of_each_segment(lengths):
    x, weight, bias = torch.randn(2, 5, sum(lengths)), torch.randn(5, 4), torch.randn(5)
    numbers = segment_numbers(torch.tensor([0, *lengths]).cumsum(0).int(), sum(lengths))
    out = packed_convolution(x, weight, bias, "silu", seq_idx=numbers)
    pad = torch.nn.functional.pad
    parts = [
        torch.nn.functional.silu(torch.nn.functional.conv1d(pad(part, (3, 0)), weight[:, None], bias, groups=5))
        for part in x.split(lengths, 2)
        if part.shape[2]
    ]
    assert torch.allclose(out, torch.cat(parts, 2), atol=1e-6)


class Dispatched(TorchDispatchMode):
    """Counts operations; one that reads a number of a tensor fails on the meta device."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


AT_ONCE = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "lfm2"]


@pytest.mark.parametrize("family", AT_ONCE)
def test_layers_of_known_functions_run_once_for_any_number_of_segments_and_read_nothing_on_the_host(family):
    model = load_model(tiny_config(family), random_init=True).to("meta")
    layer = recurrent_layers(model)[0]
    width = model.config.get_text_config().hidden_size
    hidden = torch.empty(1, 1024, width, device="meta", requires_grad=True)
    ran = []
    for segments in (1, 16, 64):
        boundaries = torch.empty(segments + 1, dtype=torch.int32, device="meta")
        with Dispatched() as dispatched:
            grads = [hidden, *layer.parameters()]
            torch.autograd.grad(layer(hidden_states=hidden, pack_cu_seqlens=boundaries).sum(), grads)
        ran.append(dispatched.counts)
    assert ran[0] == ran[1] == ran[2]


@pytest.mark.parametrize(
    ("family", "code"),
    [
        (
            "kimi_linear",
            "the gated delta rule by PyTorch operations .* and the short convolution by PyTorch operations",
        ),
        ("lfm2", "the short convolution by PyTorch operations of Headway over the pack"),
        ("minimax", "each segment of a pack by itself"),
    ],
)
def test_a_run_says_which_code_runs_recurrent_layers_and_what_it_launches(family, code):
    model = load_model(tiny_config(family), random_init=True)
    config = SimpleNamespace(data=SimpleNamespace(tokens_per_pack=64), optim=SimpleNamespace(accumulation=4))
    precision = Precision("float32", torch.float32, torch.float32, "cpu")
    (line,) = recurrences_line(model, config, precision, fused=False)
    assert re.match(rf"\d+ recurrent layers run {code}.* Their blocks launch [\d,]+ operators a step", line)


def test_a_model_that_cannot_be_traced_trains_without_the_number_of_launches(monkeypatch):
    def refuse(*_args, **_options):
        raise TraceError("no driver explains it")

    monkeypatch.setattr("headway.train.build.saved_by_block", refuse)
    model = load_model(tiny_config("lfm2"), random_init=True)
    precision = Precision("float32", torch.float32, torch.float32, "cpu")
    (line,) = recurrences_line(model, None, precision, fused=False)
    assert re.fullmatch(r"\d+ recurrent layers run the short convolution .*", line)
    assert "launch" not in line


def test_a_run_says_nothing_of_recurrent_layers_where_there_are_none():
    model = load_model(tiny_config("llama"), random_init=True)
    assert recurrences_line(model, None, None, fused=False) == ()
