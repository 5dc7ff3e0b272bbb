"""Merge the repeats of one operation, of which the data decide how many there are: loops, and experts in a list.

A recurrent cell steps through time, a loss walks over chunks, a tower takes one image after another: how often they run
changes with the workload, what they compute in all does not change its kind. The repeats of one operation become one
operation that did the work of them all.

Of experts that are modules of their own a router picks some for each token. Which ones run is decided by data, and a
trace has none: a made-up choice sends every token to the same few of them. How many rows that makes does not depend on
which they are, so what those few did is billed to all of the list, as one product over rows of tokens x top-k, like
experts whose weights are one tensor.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from torch import nn

from headway.errors import TraceError
from headway.tracing.classify import members
from headway.tracing.operation import Operation
from headway.tracing.record import Recorder
from headway.tracing.unwrap import lies_within


def check_loops(runs: Sequence[Recorder], tokens: Sequence[int]) -> None:
    """Refuse a module that goes from token to token in Python on a recurrence that is written out elementwise.

    Its state updates are multiply-adds that no product shows, so without a formula they would count as nothing. A cell
    whose state meets a weight shows its products, in the module or below it; the gates beside them are elementwise and
    of the state's own size. A loop in which no pass reads what an earlier one made, as over the blocks of an indexer,
    carries no state.

    Raises:
        TraceError: a module multiplies activations at least once more for each token more, each time what it made of
            the token before, with no product beside.
    """
    later = [i for i in range(1, len(tokens)) if tokens[i] > tokens[i - 1]]

    def steps(counts: Sequence[int]) -> bool:
        return bool(later) and all(counts[i] - counts[i - 1] >= tokens[i] - tokens[i - 1] for i in later)

    for path, spread in runs[-1].multiplied:
        counts = [run.multiplied[path, spread] for run in runs]
        chains = [last - first for first, last in (run.chains.get(path, (0, 0)) for run in runs)]
        products = [sum(f"{op.module}.".startswith(path and f"{path}.") for op in run.operations) for run in runs]
        if steps(counts) and steps(chains) and (spread or not steps(products)):
            raise TraceError(
                f"module {path or '(the model)'} runs {counts[0]} elementwise operations on {tokens[0]} tokens and "
                f"{counts[-1]} on {tokens[-1]}. It loops over tokens one by one, in a recurrence that no known "
                "formula explains. Call one of the functions that docs/counting.md lists."
            )


def are_alike(runs: Sequence[Recorder]) -> bool:
    """Say whether all runs did the same operations, whatever their sizes."""
    kinds = [[(op.module, op.kind) for op in run.operations] for run in runs]
    return all(other == kinds[0] for other in kinds)


def merge_repeats(runs: Sequence[Recorder]) -> list[list[Operation]]:
    """Merge a module's repeats in every run: the same product, of the same past, with the same gradients.

    What differs stays apart: the first step of a recurrence, whose state no parameter has touched, has no gradient to
    send back.

    Raises:
        TraceError: an operation occurs on one workload and not on another.
    """
    groups = [_groups(run.operations) for run in runs]
    if any(run.keys() != groups[0].keys() for run in groups):  # a mask may look like another kind on a small workload
        groups = [_groups(run.operations, by_mask=False) for run in runs]
    for run in groups[1:]:
        for key in groups[0].keys() ^ run.keys():
            op = (groups[0].get(key) or run[key])[0]
            raise TraceError(
                f"{op.kind} in module {op.module or '(the model)'} runs on one workload and not on another, or has "
                "another backward there, so its loop over the data has no fixed cost."
            )
    return [[_merge(run[key]) for key in groups[0]] for run in groups]


def _groups(run: Sequence[Operation], *, by_mask: bool = True) -> dict[Any, list[Operation]]:
    """Group operations by their fixed properties: not their sizes, and masks by name only if `by_mask`."""
    groups: dict[Any, list[Operation]] = {}
    for op in run:
        shares = tuple((phase, Fraction(flops, op.unit_flops or 1), sources) for phase, flops, sources in op.products)
        needed = (op.block and op.saves_after, bool(op.backward_flops), shares)
        key = (op.module, op.kind, op.weight, op.fed, op.driver if by_mask else "", op.block, needed)
        groups.setdefault(key, []).append(op)
    return groups


def _merge(repeats: list[Operation]) -> Operation:
    """Add up one operation's repeats; where their units differ, a unit becomes the least that gradients share out."""
    first = repeats[0]
    if any(op.driver != first.driver for op in repeats):
        first = replace(first, driver="")
    unit = first.unit_flops
    if not unit:  # an elementwise recurrence
        return replace(first, units=sum(op.units for op in repeats))
    if any(op.unit_flops != unit for op in repeats):
        unit = math.lcm(*(Fraction(flops, first.unit_flops).denominator for _, flops, _ in first.products))
    return replace(
        first,
        units=sum(op.forward_flops for op in repeats) // unit,
        unit_flops=unit,
        products=tuple((phase, flops * unit // first.unit_flops, sources) for phase, flops, sources in first.products),
        from_input=any(op.from_input for op in repeats),
        backward_flops=sum(op.backward_flops for op in repeats),
        executed_flops=sum(op.executed_flops or op.forward_flops for op in repeats),
    )


def merge_experts(model: nn.Module, recorder: Recorder) -> None:
    """Merge what a token's few experts ran into one operation of the list that holds them all, in place.

    Any gradient that depends on a parameter of one expert then depends on that parameter of each.
    """
    lists = dict(_routed(model, recorder))
    if not lists:
        return
    # source bit of an expert's parameter -> bits of that parameter in every expert of the list
    bits_in_all: dict[int, int] = {}
    for experts in lists.values():
        for counterparts in zip(*(expert.parameters() for expert in experts), strict=True):
            bits = 0
            for parameter in counterparts:
                bits |= parameter.sources
            bits_in_all |= {parameter.sources: bits for parameter in counterparts}

    def spread(sources: int) -> int:
        for own_bit, bits in bits_in_all.items():
            sources |= bits if sources & own_bit else 0
        return sources

    # the operations of a list's experts by their place in an expert; any other operation is a group by itself
    groups: dict[Any, list[Any]] = {}
    numbers: defaultdict[tuple[str, str], int] = defaultdict(int)
    for op in recorder.operations:
        products = tuple((phase, flops, spread(sources)) for phase, flops, sources in op.products)
        home = next((path for path in lists if lies_within(op.module, [path])), None)
        if home is None:
            groups[len(groups)] = [replace(op, products=products)]
            continue
        name, _, leaf = op.module.removeprefix(f"{home}.").partition(".")
        number = numbers[home, name]  # each expert runs the same operations in the same order
        numbers[home, name] += 1
        of_list = replace(op, module=home, products=products)
        if op.kind == "matmul" and op.weight:
            of_list = replace(of_list, kind="experts", weight=(len(lists[home]), *op.weight))
        groups.setdefault((home, leaf, number), []).append(of_list)
    recorder.operations[:] = [_merge(group) for group in groups.values()]


def _routed(model: nn.Module, recorder: Recorder) -> Iterator[tuple[str, list[nn.Module]]]:
    """Find lists of like modules beside a choice: some modules rested, and the rest got picked rows."""
    for path, module in model.named_modules():
        experts = members(path, module)
        ran = [name for name in experts if name in recorder.handed]
        if not ran or len(ran) == len(experts) or not all(recorder.handed[name] for name in ran):
            continue
        mixture = path.rpartition(".")[0]
        routers = [m for m in recorder.choices if lies_within(m, [mixture]) and not lies_within(m, experts)]
        shapes = {tuple(p.shape for p in expert.parameters()) for expert in experts.values()}
        if routers and len(shapes) == 1:
            yield path, list(experts.values())
