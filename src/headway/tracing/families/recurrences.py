"""Recurrences of linear attention and state-space layers, in their recurrent form for every kernel.

Such a layer carries a state, per head a matrix of key size x value size, from token to token. Kernels cut the tokens
into chunks, and PyTorch fallbacks loop; both do work that depends on the chunk and not on the model. The form that all
of them compute costs a fixed amount per token:

    S_t = decay_t * S_{t-1}                  elementwise on the state: not counted
    u_t = beta_t * (v_t - S_t^T k_t)         delta rule only: read the state at the key
    S_t = S_t + k_t u_t^T                    write: u_t is v_t where there is no delta rule
    o_t = S_t^T q_t                          read the state at the query

docs/counting.md derives each family's formula from its paper and says how others count.

The same recurrence has a PyTorch fallback in transformers and a kernel in flash-linear-attention or `mamba_ssm`; which
one a model calls depends on what is installed. Each is known here by its name, with a stand-in that takes its arguments
under the kernels' own names, records the recurrence and returns shapes: the ledger is the same on every machine.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from headway.errors import TraceError
from headway.tracing.operation import Operand, Operation, RecordedWork
from headway.tracing.phantom import Phantom, phantom
from headway.tracing.record import Recorder


def recur(
    recorder: Recorder,
    tokens: int,
    state: int,
    outputs: Sequence[Sequence[int]],
    *,
    query: Sequence[torch.Tensor | None],
    key: Sequence[torch.Tensor | None],
    value: Sequence[torch.Tensor | None],
    gates: Sequence[torch.Tensor | None] = (),
    after: Sequence[torch.Tensor | None] = (),
    delta: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Record one recurrence over `tokens` tokens and return phantoms of its outputs.

    Args:
        recorder: of the running trace.
        tokens: positions of the whole batch.
        state: elements of one sequence's state over all heads; 0 for a state that is one number per channel, whose
            update is an elementwise gate and not counted.
        outputs: shapes of what the recurrence returns.
        query: what the state is read with (C of a state-space model).
        key: what it is written with (B).
        value: what is written into it (x and its step size).
        gates: what else shapes the state: decays, learning rates, an initial state.
        after: what is applied to the output elementwise and never reaches the state (D, z).
        delta: whether the state is also read at the key before it is written.

    Source: forward, 2 FLOPs per element of the state for each of S^T q, S + k u^T and, with the delta rule, S^T k.
    Backward, two products of the same size for each: of o = S^T q, dq = S do and dS += q do^T; of S + k u^T,
    dk = dS u and du = dS^T k; of m = S^T k, dk += S dm and dS += k dm^T. Recomputing states is not useful work.
    """
    groups = [[_as_phantom(t) for t in group if t is not None] for group in (query, key, value, gates, after)]
    q_from, k_from, v_from, gates_from, _ = (_sources(group) for group in groups)
    state_from = k_from | v_from | gates_from
    products = [q_from, state_from, k_from, state_from if delta else v_from]
    if delta:
        products += [k_from, state_from]
    path = recorder.module
    operation = recorder.add(
        Operation(
            path,
            "recurrence",
            tokens,
            2 * state * (len(products) // 2),
            tuple(("dgrad", 2 * state, sources) for sources in products) if state else (),
            recorder.block_of(path),
        )
    )
    tensors = [t for group in groups for t in group]

    def make(first: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(first.new_empty(tuple(shape)) for shape in outputs)

    results: tuple[torch.Tensor, ...] = RecordedWork.apply(operation, make, *tensors)  # type: ignore[no-untyped-call]
    return results


def _as_phantom(tensor: torch.Tensor) -> Phantom:
    return tensor if isinstance(tensor, Phantom) else phantom(tensor, fed=True)


def _sources(tensors: Sequence[Phantom]) -> int:
    bits = 0
    for tensor in tensors:
        bits |= Operand.of(tensor).sources
    return bits


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, *names: str) -> Any:
    """Pick an argument by position or by any of the names that the kernels give it."""
    return args[position] if position < len(args) else next((kwargs[n] for n in names if n in kwargs), None)


def _linear_attention(recorder: Recorder, *args: Any, delta: bool, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand in for q, k [batch, tokens, heads, qk size], v [batch, tokens, v heads, v size] and their gates."""
    query = _argument(args, kwargs, 0, "q", "query")
    key = _argument(args, kwargs, 1, "k", "key")
    value = _argument(args, kwargs, 2, "v", "value")
    if query.dim() != 4 or query.shape != key.shape or query.shape[:2] != value.shape[:2]:
        raise TraceError(
            f"module {recorder.module or '(the model)'} runs a recurrence on q {tuple(query.shape)}, k "
            f"{tuple(key.shape)}, v {tuple(value.shape)}. Give q, k and v as [batch, tokens, heads, size], with q "
            "and k of one shape."
        )
    batch, length, heads, v_size = value.shape
    gates = [t for t in (*args[3:], *kwargs.values()) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    out, state = recur(
        recorder,
        batch * length,
        heads * key.shape[-1] * v_size,
        (value.shape, (batch, heads, key.shape[-1], v_size)),
        query=[query],
        key=[key],
        value=[value],
        gates=[t for t in gates if t is not query and t is not key and t is not value],
        delta=delta,
    )
    return out, state


def _selective_scan(
    recorder: Recorder,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    _delta_softplus: bool = False,
    return_last_state: bool = False,
    **_options: Any,
) -> Any:
    """Stand in for Mamba's scan: x and dt [batch, channels, tokens], A [channels, state], B and C over the tokens."""
    batch, channels, length = x.shape
    out, state = recur(
        recorder,
        batch * length,
        A.numel(),
        (x.shape, (batch, channels, A.shape[-1])),
        query=[C],
        key=[B],
        value=[x, dt],
        gates=[A, delta_bias],
        after=[D, z],
    )
    return (out, state) if return_last_state else out


def _chunk_scan(
    recorder: Recorder,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    _chunk_size: int = 0,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    **_options: Any,
) -> Any:
    """Stand in for Mamba-2's scan: x [batch, tokens, heads, head size], B and C [batch, tokens, groups, state]."""
    batch, length, heads, head_size = x.shape
    out, state = recur(
        recorder,
        batch * length,
        heads * head_size * B.shape[-1],
        (x.shape, (batch, heads, head_size, B.shape[-1])),
        query=[C],
        key=[B],
        value=[x, dt],
        gates=[A, dt_bias, initial_states],
        after=[D, z],
    )
    return (out, state) if return_final_states else out


def _wkv(
    recorder: Recorder,
    time_decay: torch.Tensor,
    time_first: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: Any = None,
    return_state: bool = False,
) -> tuple[torch.Tensor, Any]:
    """Stand in for RWKV-4's average of values: numerator and denominator are one number a channel each."""
    batch, length, channels = key.shape
    shapes = (value.shape, *[(batch, channels)] * 3)
    gates = [time_decay, time_first]
    out, *last = recur(recorder, batch * length, 0, shapes, query=[], key=[key], value=[value], gates=gates)
    return out, last if return_state or state is not None else None


def _lru(
    _module: nn.Module, recorder: Recorder, hidden_states: torch.Tensor, recurrent_gate: torch.Tensor, **_options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand in for Griffin's real-gated linear recurrent unit: one number a channel."""
    batch, length, channels = hidden_states.shape
    shapes = (hidden_states.shape, (batch, channels))
    out, state = recur(
        recorder, batch * length, 0, shapes, query=[], key=[], value=[hidden_states], gates=[recurrent_gate]
    )
    return out, state


def _mlstm(
    module: Any,
    recorder: Recorder,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    igate: torch.Tensor,
    fgate: torch.Tensor,
    c_initial: torch.Tensor | None = None,
    n_initial: torch.Tensor | None = None,
    m_initial: torch.Tensor | None = None,
    return_last_states: bool | None = None,
    mode: str | None = None,
) -> Any:
    """Stand in for xLSTM's matrix memory: q, k [batch, heads, tokens, qk size], v [batch, heads, tokens, v size]."""
    batch, heads, length, qk_size = key.shape
    v_size = value.shape[-1]
    out, *state = recur(
        recorder,
        batch * length,
        heads * qk_size * v_size,
        (value.shape, (batch, heads, qk_size, v_size), (batch, heads, qk_size), (batch, heads, 1)),
        query=[query],
        key=[key],
        value=[value],
        gates=[igate, fgate, c_initial, n_initial, m_initial],
    )
    if "inference" in (mode or module.config.mode):
        return out, tuple(state)
    wanted = module.config.return_last_states if return_last_states is None else return_last_states
    return (out, tuple(state)) if wanted else out


def _lightning(
    module: Any, recorder: Recorder, hidden_states: torch.Tensor, **_options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand in for MiniMax's mixer, whose recurrence is written out between its own projections."""
    batch, length, _ = hidden_states.shape
    heads, size = module.num_attention_heads, module.head_dim
    qkv = module.act_fn(module.qkv_proj(hidden_states)).reshape(batch, length, heads, 3 * size)
    out, state = _linear_attention(recorder, *qkv.split(size, dim=3), delta=False)
    out = module.norm(out.reshape(batch, length, heads * size))
    return module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * out), state


def _short_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *_more: Any,
    activation: str | None = None,
    **_options: Any,
) -> torch.Tensor:
    """Stand in for the `causal_conv1d` package: x [batch, channels, tokens], weight [channels, width]."""
    channels, width = weight.shape
    out = F.conv1d(x, weight[:, None], bias, padding=width - 1, groups=channels)[..., : x.shape[-1]]
    return F.silu(out) if activation else out


def written_out(kernel: Any) -> Callable[..., Any] | None:
    """Return the same function in PyTorch's own operations; None where nobody writes it out.

    Where transformers' version only returns None, its mixer then runs piece by piece.
    """
    function: Callable[..., Any] = inspect.unwrap(getattr(kernel, "forward", kernel))
    home = str(function.__module__)
    if home.startswith("transformers."):
        return function
    return _short_convolution if home.startswith("causal_conv1d") else None


_LINEAR = partial(_linear_attention, delta=False)
_DELTA = partial(_linear_attention, delta=True)

# kernels that transformers also writes out in PyTorch
KERNELS = ("causal_conv1d_fn", "mamba_inner_fn", "mamba2_split_conv1d_scan_combined")
# recurrences that are functions, by name: transformers' fallbacks first, then the kernels that take their place
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"), _DELTA),
    **dict.fromkeys(("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"), _DELTA),
    **{
        f"{form}_{rule}": stand_in
        for form in ("chunk", "fused_chunk", "fused_recurrent")
        for stand_in, rules in (
            (_DELTA, ("delta_rule", "gated_delta_rule", "kda")),
            (_LINEAR, ("linear_attn", "gla", "simple_gla", "retention", "lightning_attn")),
        )
        for rule in rules
    },
    **dict.fromkeys(("mamba_selective_scan", "selective_scan_fn"), _selective_scan),
    **dict.fromkeys(("mamba2_chunk_scan", "mamba_chunk_scan_combined"), _chunk_scan),
    **dict.fromkeys(("rwkv_linear_attention", "rwkv_linear_attention_cpu"), _wkv),
}
# recurrences that are methods: (class, method)
METHODS: dict[tuple[str, str], Callable[..., Any]] = {
    ("RecurrentGemmaRglru", "_rnn_scan"): _lru,
    ("xLSTMBackend", "forward"): _mlstm,
    ("MiniMaxLightningAttention", "forward"): _lightning,
}
PACKAGES = {"causal_conv1d_fn": "causal_conv1d", "selective_scan_fn": "mamba_ssm"}
"""Package of a function's kernel, by the function's name; flash-linear-attention ("fla") for delta rules."""
