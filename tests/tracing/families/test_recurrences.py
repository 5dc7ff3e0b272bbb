"""Recurrences against literal loops over tokens, written from the papers' equations and counted by PyTorch.

Each loop is one sequence, heads first: a state S [heads, key, value] is decayed, written with an outer product and
read with a vector, each as a batched matrix product that FlopCounterMode sees. The loop's output is that of
transformers' function, so it is the same recurrence, and its FLOPs, forward and backward, are those of the ledger.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.falcon_h1 import modeling_falcon_h1
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba import modeling_mamba
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.xlstm import modeling_xlstm

from headway.count import Workload
from headway.tracing import trace
from headway.tracing.build import model_class
from headway.tracing.stand_ins import watched
from headway.tracing.verify import CountedStep, verify
from helpers.cases import some
from helpers.models import RECURRENT_FAMILIES, tiny_config, tiny_ledger, tiny_model

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
    q, k = (x.repeat_interleave(2, dim=1) for x in (q, k))  # transformers 5.17 takes them so alone
    chunks = modeling_qwen3_next.torch_chunk_gated_delta_rule
    theirs = chunks(*(x[None] for x in (q, k, v, log_decay, rate)), chunk_size=8, use_qk_l2norm_in_kernel=True)[0][0]
    q, k = unit(q), unit(k)
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
    row = next(row for row in tiny_ledger(family).rows if row.op == "recurrence")
    assert (row.driver, row.component) == ("tokens", "language.recurrence")
    assert row.forward * TOKENS == forward.get_total_flops()
    assert sum(g.flops for g in row.gradients) * TOKENS == backward.get_total_flops()


@pytest.mark.parametrize("family", ["kimi_linear", "mamba", "zamba"])
def test_known_sizes_give_the_formula_of_the_table(family):
    # KDA: 4 heads, state 12 x 12, three products; Mamba: 64 channels with a state of 6 in all, two products
    expected = {"kimi_linear": [6 * 4 * 12 * 12], "mamba": [4 * 64 * 6] * 2, "zamba": [4 * 32 * 6] * 12}[family]
    rows = [row for row in tiny_ledger(family).rows if row.op == "recurrence"]
    assert [row.forward for row in rows] == expected
    assert [sum(g.flops for g in row.gradients) for row in rows] == [2 * forward for forward in expected]


@pytest.mark.parametrize("family", ["rwkv", "recurrent_gemma"])
def test_one_number_a_channel_is_a_gate_and_costs_nothing(family):
    rows = [row for row in tiny_ledger(family).rows if row.op == "recurrence"]
    assert [(row.component, row.forward, row.gradients) for row in rows] == [("language.recurrence", 0, ())] * 2


def real_model(family, **options):
    return tiny_model(family, dtype=torch.float32, **options).train()


OFTEN = [("qwen3_next", 1), ("qwen3_next", 7), ("mamba", 1), ("mamba", 7), ("rwkv", 1)]  # every 7th is trained


@pytest.mark.parametrize(
    ("family", "every"), some([(name, every) for name in RECURRENT_FAMILIES for every in (1, 7)], OFTEN.__contains__)
)
def test_everything_around_a_recurrence_is_what_pytorch_counts(family, every):
    model = real_model(family)
    for i, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(i % every == every - 1)
    lines, unseen = verify(model, Workload([67], images=[(1, 4, 6)] if family == "qwen3_5_vl" else []))
    assert unseen == set()
    assert [line for line in lines if line.explanation is None] == []
    differing = {line.op for line in lines if line.explanation}
    assert differing <= {"recurrence", "convolution", "attention", "-"}
    assert any(line.op == "recurrence" for line in lines)


def test_short_convolutions_cost_their_width_for_each_token():
    (row,) = [r for r in tiny_ledger("mamba").rows if r.op == "convolution" and "layers.0" in r.module]
    # 64 channels of width 4; the input's gradient and the weight's
    assert (row.driver, row.component, row.forward) == ("tokens", "language.projections", 2 * 64 * 4)
    assert [(g.phase, g.flops) for g in row.gradients] == [("dgrad", 2 * 64 * 4), ("wgrad", 2 * 64 * 4)]


def test_projections_around_a_recurrence_are_projections():
    rows = tiny_ledger("xlstm").rows
    assert {r.component for r in rows if ".mlstm_layer." in r.module and r.op == "linear"} == {"language.projections"}
    assert {r.component for r in rows if ".ffn." in r.module} == {"language.mlp"}


def test_a_recurrence_costs_the_same_however_tokens_are_packed():
    cost = tiny_ledger("mamba2")
    assert {row.driver for row in cost.rows} == {"tokens"}
    assert cost.count(Workload([64])) == cost.count(Workload([1, 20, 43]))


def test_states_kept_from_an_earlier_forward_do_not_matter():
    model = model_class(config := tiny_config("recurrent_gemma"))(config)
    model(torch.zeros(1, 5, dtype=torch.long), use_cache=True)
    assert trace(model).count(Workload([9])) == trace(config).count(Workload([9]))


def counted(family, checkpointed):
    model = real_model(family, attn_implementation="eager", experts_implementation="eager")
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    counter = CountedStep(model)
    with counter, watched(model, counter.recurrence):
        model(torch.zeros(1, 67, dtype=torch.long), use_cache=False).logits.sum().backward()
    return model, counter


# the method has two names: the old one is all that transformers 5.17 has, the new one the only one without a warning
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("family", ["qwen3_next", "minimax", "mamba", "falcon_h1", "xlstm"])
def test_checkpointing_runs_again_what_the_ledger_says(family):
    model, plain = counted(family, checkpointed=False)
    _, again = counted(family, checkpointed=True)
    rows = [(row.module + " (recurrence)" * (row.op == "recurrence"), row.recomputed) for row in trace(model).rows]
    extra = sum(plain.forward[path] for path in {path for path, recomputed in rows if recomputed})
    assert sum(again.backward.values()) - sum(plain.backward.values()) == extra
