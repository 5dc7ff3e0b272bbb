"""Kernels of recurrences known by name: in any module, put back afterwards, and refused where they are not known."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen3_next import modeling_qwen3_next

from headway.errors import TraceError
from headway.tracing import trace
from headway.tracing.build import model_class
from helpers.models import tiny_config

TOKENS = 21


def chunk_gated_delta_rule(*_arguments, **_options):
    raise AssertionError("a kernel met a tensor without data")


def causal_conv1d_fn(*_arguments, **_options):
    raise AssertionError("a kernel met a tensor without data")


chunk_gla = selective_scan_fn = mamba_chunk_scan_combined = chunk_gated_delta_rule
causal_conv1d_fn.__module__ = "causal_conv1d.causal_conv1d_interface"  # where the package has it


class Mixer(nn.Module):
    """A model whose queries, keys, values and gates are four layers; `run` calls the kernel."""

    def __init__(self, run):
        super().__init__()
        self.embed, self.head, self.run = nn.Embedding(50, 12), nn.Linear(12, 50), run
        self.q, self.k, self.v, self.g = (nn.Linear(12, 12, bias=False) for _ in range(4))

    def forward(self, input_ids):
        x = self.embed(input_ids)
        return (self.head(self.run(*(layer(x) for layer in (self.q, self.k, self.v, self.g)))),)


def heads(*tensors):
    return [t.unflatten(-1, (3, 4)) for t in tensors]


def gated_delta(q, k, v, g):
    rates = g[..., :3]
    return chunk_gated_delta_rule(*heads(q, k, v), g=rates, beta=rates.sigmoid())[0].flatten(2)


def gated_linear(q, k, v, g):
    return chunk_gla(*heads(q, k, v, g))[0].flatten(2)


def selective(q, k, v, g):
    rows = torch.ones(12, 4)
    b, c = k.mT[:, :4], q.mT[:, :4]
    return selective_scan_fn(v.mT, g.mT, rows, b, c, None, None, None, True).mT


def state_space_duality(q, k, v, g):
    b, c = (t[..., None, :4] for t in (k, q))
    x, rates = v.unflatten(-1, (3, 4)), g[..., :3]
    return mamba_chunk_scan_combined(x, rates, torch.ones(3), b, c, 64, D=None)[..., :].flatten(2)


@pytest.mark.parametrize("run", [gated_delta, gated_linear, selective, state_space_duality])
def test_kernels_are_known_by_name_in_any_module(run):
    # the state has 3 heads of 4 x 4, or 12 channels of 4
    (row,) = [row for row in trace(Mixer(run)).rows if row.op == "recurrence"]
    assert (row.module, row.driver) == ("", "tokens")
    assert row.forward == (6 if run is gated_delta else 4) * 48
    assert sum(g.flops for g in row.gradients) == 2 * row.forward


@pytest.mark.parametrize(
    ("trained", "products"),
    [
        ("q", 1),  # dq
        ("k", 5),  # the two products of the state's gradient, of u's, of k's in the write and in the delta's read
        ("v", 3),  # the state's gradient from o and from m, and u's
        ("g", 3),  # as v: the state changes, its keys do not
        ("head", 0),
    ],
)
def test_backward_computes_what_the_trained_parts_need(trained, products):
    cost = trace(Mixer(gated_delta)).freeze(["*"])
    kept = [i for i, p in enumerate(cost.parameters) if p.name == f"{trained}.weight"]
    (row,) = [row for row in cost.rows if row.op == "recurrence"]
    assert sum(g.flops for g in row.gradients if g.needs >> kept[0] & 1) == products * 2 * 48

    def forward():
        x = [torch.randn(TOKENS, 3, 4, requires_grad=name == trained) for name in "qkv"]
        g = torch.randn(TOKENS, 3, requires_grad=trained == "g")
        # a ledger bills each token alike; the first state gets a gradient here as all later ones do
        first = torch.zeros(3, 4, 4, requires_grad=trained in ("k", "v", "g"))
        return delta_rule_from(first, *x, g)

    out = forward()
    with FlopCounterMode(display=False) as counter:
        if out.requires_grad:
            out.sum().backward()
    assert counter.get_total_flops() == products * 2 * 48 * TOKENS


def delta_rule_from(state, q, k, v, g):
    outputs = []
    for t in range(len(q)):
        state = state * g[t][:, None, None]
        new = g[t][:, None, None] * (v[t][:, None] - k[t][:, None] @ state)
        state = state + k[t][:, :, None] @ new
        outputs.append(q[t][:, None] @ state)
    return torch.stack(outputs)


def test_functions_and_methods_are_put_back():
    functions = (modeling_qwen3_next.torch_chunk_gated_delta_rule, modeling_qwen3_next.causal_conv1d_fn)
    trace(tiny_config("qwen3_next"))
    with pytest.raises(TraceError, match=r"module \(the model\) runs a recurrence on q \(1, 131, 12\)"):
        trace(Mixer(lambda q, k, v, g: chunk_gla(q, k, v, g)[0]))
    assert (modeling_qwen3_next.torch_chunk_gated_delta_rule, modeling_qwen3_next.causal_conv1d_fn) == functions
    model = model_class(config := tiny_config("minimax"))(config)
    trace(model)
    assert "forward" not in vars(model.model.layers[0].self_attn)


def elementwise_scan(q, k, v, g):
    state, outputs = torch.zeros(1, 12), []
    for t in range(q.shape[1]):
        state = state * g[:, t].sigmoid() + k[:, t] * v[:, t]
        outputs.append(state * q[:, t])
    return torch.stack(outputs, 1)


def test_a_scan_written_as_a_loop_is_refused():
    with pytest.raises(TraceError, match=r"operations on 131 tokens .* It loops over tokens one by one"):
        trace(Mixer(elementwise_scan))


class ShortConvolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head, self.weight = nn.Embedding(50, 12), nn.Linear(12, 50), nn.Parameter(torch.ones(12, 3))

    def forward(self, input_ids):
        x = self.embed(input_ids).mT
        return (self.head(causal_conv1d_fn(x, self.weight, None, activation="silu").mT),)


def test_the_short_convolution_package_is_read_as_a_convolution():
    (row,) = [row for row in trace(ShortConvolution()).rows if row.op == "convolution"]
    assert (row.driver, row.forward, sum(g.flops for g in row.gradients)) == ("tokens", 2 * 12 * 3, 2 * 2 * 12 * 3)


class KernelInterface:
    """As Triton's: `kernel[grid](...)` launches."""

    def __getitem__(self, grid):
        raise AssertionError("a kernel met a tensor without data")


class Autotuned(KernelInterface):
    fn = type("JITFunction", (), {"__name__": "hgrn_forward"})()


def launched(*tensors):
    return Autotuned()[1,](*tensors)


def test_a_triton_kernel_that_is_not_known_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", SimpleNamespace(KernelInterface=KernelInterface))
    launch = KernelInterface.__getitem__
    with pytest.raises(TraceError, match=r"module \(the model\) launches the Triton kernel hgrn_forward"):
        trace(Mixer(launched))
    assert KernelInterface.__getitem__ is launch
