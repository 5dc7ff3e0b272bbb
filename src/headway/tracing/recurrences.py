"""Recurrences of linear attention and state-space layers, recorded in their recurrent form whatever kernel runs them.

Such a layer carries a state, per head a matrix of key size x value size, from token to token. Kernels cut the tokens
into chunks, and PyTorch fallbacks loop; both do work that depends on the chunk and not on the model. The form that all
of them compute costs a fixed amount per token:

    S_t = decay_t * S_{t-1}                  elementwise on the state: not counted
    u_t = beta_t * (v_t - S_t^T k_t)         delta rule only: read the state at the key
    S_t = S_t + k_t u_t^T                    write: u_t is v_t where there is no delta rule
    o_t = S_t^T q_t                          read the state at the query

docs/recurrences.md derives each family's formula from its paper and says how others count.
"""

from collections.abc import Sequence
from typing import Any

import torch

from headway.tracing.operation import Operand, Operation
from headway.tracing.phantom import Phantom, phantom
from headway.tracing.record import Recorder


class _Recur(torch.autograd.Function):
    """A recurrence on shapes: no arithmetic, but a node in the graph that tells whether backward reaches it."""

    @staticmethod
    def forward(
        ctx: Any, operation: Operation, shapes: Sequence[Sequence[int]], *tensors: Phantom
    ) -> tuple[torch.Tensor, ...]:
        ctx.operation = operation
        ctx.save_for_backward(*tensors)
        outputs = tuple(tensors[0].new_empty(tuple(shape)) for shape in shapes)
        for out in outputs:
            for t in tensors:
                out.sources |= t.sources  # type: ignore[attr-defined]  # new_empty of a phantom is one
            out.fed = True  # type: ignore[attr-defined]
        return outputs

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        ctx.operation.backward_flops += ctx.operation.expected_backward_flops
        return (None, None, *(torch.empty_like(t) for t in ctx.saved_tensors))


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
    made: tuple[torch.Tensor, ...] = _Recur.apply(operation, outputs, *tensors)  # type: ignore[no-untyped-call]
    return made


def _as_phantom(tensor: torch.Tensor) -> Phantom:
    return tensor if isinstance(tensor, Phantom) else phantom(tensor, fed=True)


def _sources(tensors: Sequence[Phantom]) -> int:
    found = 0
    for tensor in tensors:
        found |= Operand.of(tensor).sources
    return found
