"""Backward over autograd's own nodes, in the engine's order.

torch's engine asks a CUDA driver for streams before it runs a node on CUDA tensors, fake ones too. The nodes themselves
do not: here they are called one by one, the newest first as the engine does, and freed as soon as they have run.
"""

import itertools
from collections import defaultdict
from contextlib import ExitStack
from heapq import heappop, heappush
from typing import Any
from unittest.mock import patch

import torch


def backward(total: torch.Tensor, watch: Any = None) -> None:
    """Differentiate a scalar and leave the gradients in the parameters, as `torch.autograd.backward` does.

    Args:
        total: detached from its graph here, so that nodes and what they saved are freed while it runs.
        watch: is told which node runs.
    """
    # Nobody else may hold the root: it holds all nodes, and they what they saved. Before torch 2.13 a function of
    # Python ends with the node above it, though it has yet to run: there the whole graph stays until the end.
    root = [total.grad_fn]
    held = root[:] if torch.__version__ < "2.13" else []
    total.detach_()
    with torch.no_grad(), ExitStack() as stack:
        # Checkpoints recompute once for each backward, which they tell apart by this number.
        stack.enter_context(patch("torch._C._current_graph_task_id", lambda: 0))
        _run(root, torch.ones_like(total), watch)
    held.clear()
    if watch is not None:
        watch.node = ""


def _run(root: list[Any], seed: torch.Tensor, watch: Any) -> None:
    waiting = _dependencies(root[0])
    arrived: dict[Any, list[torch.Tensor | None]] = defaultdict(list)
    arrived[root[0]] = [seed]
    order, ready = itertools.count(), []
    heappush(ready, (_rank(root[0]), next(order), root.pop()))
    while ready:
        node = heappop(ready)[-1]
        grads = arrived.pop(node)
        if hasattr(node, "variable"):
            _accumulate(node.variable, grads[0])
            del waiting[node], node, grads
            continue
        edges = node.next_functions
        if watch is not None:
            watch.node = node.name()
        found = _call(node, grads)
        del waiting[node], node, grads
        for edge, (following, slot) in enumerate(edges):
            grad, found[edge] = found[edge], None
            if following is None:
                continue
            _add(arrived[following], slot, grad, following)
            del grad
            waiting[following] -= 1
            if not waiting[following]:
                heappush(ready, (_rank(following), next(order), following))
        del edges


def _dependencies(root: Any) -> dict[Any, int]:
    """How many gradients each node waits for."""
    waiting = {root: 0}
    pending = [root]
    while pending:
        for following, _ in pending.pop().next_functions:
            if following is None:
                continue
            if following not in waiting:
                waiting[following] = 0
                pending.append(following)
            waiting[following] += 1
    return waiting


def _rank(node: Any) -> int:
    """The engine runs what was noted last first, and takes gradients in at once."""
    return -(1 << 62) if hasattr(node, "variable") else -node._sequence_nr()


def _call(node: Any, grads: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Run a node; returns a gradient for each of its edges."""
    metadata = node._input_metadata
    grads = grads + [None] * (len(metadata) - len(grads))
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        found = node(*grads)
        return list(found) if isinstance(found, tuple) else [found]
    # A function of Python is given zeros where nothing arrived, and returns a gradient for every argument; edges are of
    # those that are tensors.
    grads = [
        torch.zeros(m.shape, dtype=m.dtype, device=m.device) if g is None and m.dtype.is_floating_point else g
        for g, m in zip(grads, metadata, strict=True)
    ]
    found = node.apply(*grads)
    wanted = iter(
        [
            grad
            for grad, needs in zip(found if isinstance(found, tuple) else (found,), node.needs_input_grad, strict=False)
            if needs
        ]
    )
    return [None if following is None else next(wanted) for following, _ in node.next_functions]


def _add(slots: list[torch.Tensor | None], slot: int, grad: torch.Tensor | None, node: Any) -> None:
    """Add a gradient to what has arrived at a node, in the dtype of the node's output and on its device."""
    slots += [None] * (slot + 1 - len(slots))
    if grad is None:
        return
    meta = node._input_metadata[slot]
    if grad.device != meta.device:
        raise RuntimeError(f"{node.name()} wants a gradient on {meta.device} and is given one on {grad.device}")
    if grad.shape != torch.Size(meta.shape):
        grad = grad.sum_to_size(meta.shape)  # of what was broadcast
    grad = grad.to(meta.dtype)
    slots[slot] = grad if slots[slot] is None else slots[slot] + grad


def _accumulate(parameter: torch.Tensor, grad: torch.Tensor | None) -> None:
    if grad is None:
        return
    if parameter.grad is None:
        parameter.grad = grad.detach() if grad.is_contiguous() else grad.contiguous()
    else:
        parameter.grad += grad
