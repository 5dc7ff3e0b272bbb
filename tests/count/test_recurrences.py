"""Recurrences against literal loops over tokens, written from the papers' equations and counted by PyTorch.

Each loop is one sequence, heads first: a state S [heads, key, value] is decayed, written with an outer product and
read with a vector, each as a batched matrix product that FlopCounterMode sees. The loop's output is that of
transformers' function, so it is the same recurrence, and its FLOPs, forward and backward, are those of the ledger.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.falcon_h1 import modeling_falcon_h1
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba import modeling_mamba
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.xlstm import modeling_xlstm

from headway.count import Workload, trace
from headway.count.tracing.build import model_class
from headway.count.tracing.verify import verify
from headway.errors import TraceError
from tiny_models import RECURRENT_FAMILIES, tiny_config

TOKENS = 21


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def read(state: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """S^T x of each head: [heads, key, value] and [heads, key] to [heads, value]."""
    return (vector[:, None] @ state)[:, 0]


def written(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Outer product k v^T of each head."""
    return key[:, :, None] @ value[:, None]


def linear_attention(q, k, v, decay, beta=None):
    """[tokens, heads, size] each; `decay` multiplies the state's rows; with `beta`, the delta rule.

    Gated Delta Networks (Yang et al. 2024), section 3.1; Kimi Linear (2025), equation 1 with a decay per row; without
    beta, linear attention with decay as in RetNet (Sun et al. 2023), equation 6, and Lightning Attention.
    """
    state, outputs = torch.zeros(*k.shape[1:], v.shape[-1]), []
    for t in range(len(q)):
        state = state * decay[t][..., None]
        new = v[t] if beta is None else beta[t][:, None] * (v[t] - read(state, k[t]))
        state = state + written(k[t], new)
        outputs.append(read(state, q[t]))
    return torch.stack(outputs)


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def qwen3_next():
    q, k, v = leaf(TOKENS, 2, 8), leaf(TOKENS, 2, 8), leaf(TOKENS, 4, 12)
    g, beta = leaf(TOKENS, 4), leaf(TOKENS, 4)
    log_decay, rate = -F.softplus(g), beta.sigmoid()
    arguments = [x[None] for x in (q, k, v, log_decay, rate)]
    theirs = modeling_qwen3_next.torch_chunk_gated_delta_rule(*arguments, chunk_size=8, use_qk_l2norm_in_kernel=True)[
        0
    ][0]
    q, k = (unit(x).repeat_interleave(2, dim=1) for x in (q, k))
    return (q / math.sqrt(8), k, v, log_decay.exp()[..., None], rate), linear_attention, theirs


def kimi_linear():
    q, k, v = leaf(TOKENS, 4, 12), leaf(TOKENS, 4, 12), leaf(TOKENS, 4, 12)
    log_decay, rate = -F.softplus(leaf(TOKENS, 4, 12)), leaf(TOKENS, 4).sigmoid()
    arguments = [x[None] for x in (q, k, v, log_decay, rate)]
    theirs = modeling_kimi_linear.chunk_kimi_delta_attention(*arguments, chunk_size=8, use_qk_l2norm_in_kernel=True)[0][
        0
    ]
    return (unit(q) / math.sqrt(12), unit(k), v, log_decay.exp(), rate), linear_attention, theirs


def minimax():
    mixer = model_class(config := tiny_config("minimax"))(config).model.layers[0].self_attn
    x = leaf(1, TOKENS, 32)
    seen = []
    mixer.norm.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    mixer(x, None, None)
    q, k, v = F.silu(mixer.qkv_proj(x)).reshape(TOKENS, 4, 24).split(8, dim=-1)
    decay = torch.exp(-mixer.slope_rate[:, :, 0]).expand(TOKENS, 4, 1)
    return (q, k, v, decay), linear_attention, seen[0].reshape(TOKENS, 4, 8)


def mamba():
    """Mamba (Gu and Dao 2023), algorithm 2: a state of 6 per channel, h = exp(dt A) h + dt B x, y = C h."""
    x, dt, a, b, c = leaf(TOKENS, 64), leaf(TOKENS, 64), leaf(64, 6), leaf(TOKENS, 6), leaf(TOKENS, 6)
    step, a = F.softplus(dt), -a.exp()
    theirs = modeling_mamba.mamba_selective_scan(x.T[None], step.T[None], a, b.T[None], c.T[None])[0].T
    b, c = (m[:, None].expand(TOKENS, 64, 6) for m in (b, c))
    decay = (step[..., None] * a).exp()
    return (c, b, (step * x)[..., None], decay), linear_attention, theirs[..., None]


def mamba2():
    """Mamba-2 (Dao and Gu 2024), equation 2: a state of 16 x 6 per head, decayed by one number a head."""
    x, dt, a = leaf(TOKENS, 4, 16), leaf(TOKENS, 4), leaf(4)
    b, c = leaf(TOKENS, 2, 6), leaf(TOKENS, 2, 6)
    step, a = F.softplus(dt), -a.exp()
    theirs = modeling_falcon_h1.mamba2_chunk_scan(x[None], step[None], a, b[None], c[None], chunk_size=8)[0]
    b, c = (m.repeat_interleave(2, dim=1) for m in (b, c))
    return (c, b, step[..., None] * x, (step * a).exp()[..., None]), linear_attention, theirs


def xlstm():
    """xLSTM (Beck et al. 2024), equations 19 to 27: the normaliser n is a vector, kept elementwise."""
    q, k, v = leaf(TOKENS, 4, 4), leaf(TOKENS, 4, 4), leaf(TOKENS, 4, 8)
    i, f = leaf(TOKENS, 4), leaf(TOKENS, 4)
    arguments = [x.transpose(0, 1)[None] for x in (q, k, v, i, f)]
    theirs = modeling_xlstm.mlstm_recurrent_sequence_native(*arguments)[0].transpose(0, 1)
    return (q, k, v, i, f), mlstm, theirs


def mlstm(q, k, v, i, f):
    state, norm, top, outputs = torch.zeros(4, 4, 8), torch.zeros(4, 4), torch.zeros(4), []
    for t in range(TOKENS):
        new_top = torch.maximum(F.logsigmoid(f[t]) + top, i[t])
        keep, take = (F.logsigmoid(f[t]) + top - new_top).exp(), (i[t] - new_top).exp()
        top = new_top
        state = keep[:, None, None] * state + written(take[:, None] * k[t], v[t])
        norm = keep[:, None] * norm + take[:, None] * k[t]
        scaled = q[t] / math.sqrt(4)
        below = torch.maximum((scaled * norm).sum(-1).abs(), (-top).exp())
        outputs.append(read(state, scaled) / (below[:, None] + 1e-6))
    return torch.stack(outputs)


LITERAL = {f.__name__: f for f in (qwen3_next, kimi_linear, minimax, mamba, mamba2, xlstm)}


@pytest.mark.parametrize("family", LITERAL)
def test_a_recurrence_costs_what_a_literal_loop_over_tokens_costs(family):
    torch.manual_seed(0)
    arguments, loop, theirs = LITERAL[family]()
    arguments = [x.detach().requires_grad_() for x in arguments]
    with FlopCounterMode(display=False) as forward:
        ours = loop(*arguments)
    torch.testing.assert_close(ours, theirs.reshape(ours.shape), rtol=1e-4, atol=1e-4)
    with FlopCounterMode(display=False) as backward:
        ours.sum().backward()
    row = next(row for row in trace(tiny_config(family)).rows if row.op == "recurrence")
    assert (row.driver, row.component) == ("tokens", "language.recurrence")
    assert row.forward * TOKENS == forward.get_total_flops()
    assert sum(g.flops for g in row.gradients) * TOKENS == backward.get_total_flops()


@pytest.mark.parametrize("family", ["kimi_linear", "mamba", "zamba"])
def test_known_sizes_give_the_formula_of_the_table(family):
    # KDA: 4 heads, state 12 x 12, three products; Mamba: 64 channels with a state of 6 in all, two products
    expected = {"kimi_linear": [6 * 4 * 12 * 12], "mamba": [4 * 64 * 6] * 2, "zamba": [4 * 32 * 6] * 12}[family]
    rows = [row for row in trace(tiny_config(family)).rows if row.op == "recurrence"]
    assert [row.forward for row in rows] == expected
    assert [sum(g.flops for g in row.gradients) for row in rows] == [2 * forward for forward in expected]


@pytest.mark.parametrize("family", ["rwkv", "recurrent_gemma"])
def test_one_number_a_channel_is_a_gate_and_costs_nothing(family):
    rows = [row for row in trace(tiny_config(family)).rows if row.op == "recurrence"]
    assert [(row.component, row.forward, row.gradients) for row in rows] == [("language.recurrence", 0, ())] * 2


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_everything_around_a_recurrence_is_what_pytorch_counts(family):
    torch.manual_seed(0)
    model = model_class(config := tiny_config(family))._from_config(config, dtype=torch.float32).train()
    lines, unseen = verify(model, Workload([67]))
    assert unseen == set()
    assert [line for line in lines if line.explanation is None] == []
    differing = {line.op for line in lines if line.explanation}
    assert differing <= {"recurrence", "convolution", "attention", "-"}
    assert any(line.op == "recurrence" for line in lines)


def test_short_convolutions_cost_their_width_for_each_token():
    (row,) = [r for r in trace(tiny_config("mamba")).rows if r.op == "convolution" and "layers.0" in r.module]
    # 64 channels of width 4; the input's gradient and the weight's
    assert (row.driver, row.component, row.forward) == ("tokens", "language.projections", 2 * 64 * 4)
    assert [(g.phase, g.flops) for g in row.gradients] == [("dgrad", 2 * 64 * 4), ("wgrad", 2 * 64 * 4)]


def test_projections_around_a_recurrence_are_projections():
    rows = trace(tiny_config("xlstm")).rows
    assert {r.component for r in rows if ".mlstm_layer." in r.module and r.op == "linear"} == {"language.projections"}
    assert {r.component for r in rows if ".ffn." in r.module} == {"language.mlp"}


def chunk_gated_delta_rule(*_arguments, **_options):
    raise AssertionError("a kernel met a tensor without data")


chunk_gla = selective_scan_fn = mamba_chunk_scan_combined = causal_conv1d_fn = chunk_gated_delta_rule


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
        state = state + written(k[t], g[t][:, None] * (v[t] - read(state, k[t])))
        outputs.append(read(state, q[t]))
    return torch.stack(outputs)


def test_a_recurrence_costs_the_same_however_tokens_are_packed():
    cost = trace(tiny_config("mamba2"))
    assert {row.driver for row in cost.rows} == {"tokens"}
    assert cost.count(Workload([64])) == cost.count(Workload([1, 20, 43]))


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
    with pytest.raises(TraceError, match=r"operations on 131 tokens .* it loops over them one by one"):
        trace(Mixer(elementwise_scan))


def test_the_short_convolution_package_is_read_as_a_convolution():
    def run(q, k, v, g):
        return causal_conv1d_fn(q.mT, torch.ones(12, 3), None, activation="silu").mT + k + v + g

    (row,) = [row for row in trace(Mixer(run)).rows if row.op == "convolution"]
    assert (row.driver, row.forward) == ("tokens", 2 * 12 * 3)
