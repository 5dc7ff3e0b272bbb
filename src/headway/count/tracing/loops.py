"""Bring runs of different workloads to the same operations, where a model loops over its data.

A recurrent cell steps through time, a loss walks over chunks, a tower takes one image after another: how often they run
changes with the workload, what they compute in all does not change its kind. The repeats of one operation become one
operation that did the work of them all.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from headway.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headway.count.tracing.operation import Operation


def alike(runs: Sequence[Sequence[Operation]]) -> bool:
    """Say whether all runs did the same operations, whatever their sizes."""
    kinds = [[(op.module, op.kind) for op in run] for run in runs]
    return all(other == kinds[0] for other in kinds)


def merged(runs: Sequence[Sequence[Operation]]) -> list[list[Operation]]:
    """Merge in every run what one module repeats: the same product, of the same past, with the same gradients.

    What differs stays apart: the first step of a recurrence, whose state no parameter has touched, has no gradient to
    send back.

    Args:
        runs: operations of forward and backward, one list for each workload.

    Raises:
        TraceError: an operation occurs on one workload and not on another.
    """
    groups = [_groups(run) for run in runs]
    for run in groups[1:]:
        for key in groups[0].keys() ^ run.keys():
            op = (groups[0].get(key) or run[key])[0]
            raise TraceError(
                f"{op.kind} in module {op.module or '(the model)'} runs on one workload and not on another, or has "
                "another backward there: the cost of its loop over the data is not fixed."
            )
    return [[_one(run[key]) for key in groups[0]] for run in groups]


def _groups(run: Sequence[Operation]) -> dict[Any, list[Operation]]:
    """Group operations by all that is fixed about them; their sizes are not."""
    groups: dict[Any, list[Operation]] = {}
    for op in run:
        shares = tuple((phase, Fraction(flops, op.unit_flops or 1), sources) for phase, flops, sources in op.products)
        whole = all(share == 1 for _, share, _ in shares)
        needed = (op.block and op.saves_after, bool(op.backward_flops), shares)
        key = (op.module, op.kind, op.weight, op.fed, op.driver, op.block, needed, None if whole else op.unit_flops)
        groups.setdefault(key, []).append(op)
    return groups


def _one(repeats: list[Operation]) -> Operation:
    """Add up the work of repeats; a unit becomes 1 FLOP where they differ in what a unit is."""
    first = repeats[0]
    same = all(op.unit_flops == first.unit_flops for op in repeats)
    size: Callable[[Operation], int] = (lambda op: op.units) if same else (lambda op: op.forward_flops)
    return replace(
        first,
        units=sum(size(op) for op in repeats),
        unit_flops=first.unit_flops if same else 1,
        products=first.products if same else tuple((phase, 1, sources) for phase, _, sources in first.products),
        from_input=any(op.from_input for op in repeats),
        backward_flops=sum(op.backward_flops for op in repeats),
        executed_flops=sum(op.executed_flops or op.forward_flops for op in repeats),
    )
