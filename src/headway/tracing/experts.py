"""Experts that are modules of their own, of which a router picks some for each token.

Which experts run is decided by data, and a trace has none: a made-up choice sends every token to the same few of them.
How many rows that makes does not depend on which they are, so what those few did is billed to all of the list, as one
product over rows of tokens x top-k, like experts whose weights are one tensor.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from headway.tracing.classify import inside, members
from headway.tracing.loops import one
from headway.tracing.record import Recorder


def merge_experts(model: nn.Module, recorder: Recorder) -> None:
    """Merge what a token's few experts ran into one operation of the list that holds them all, in place.

    Any gradient that depends on a parameter of one expert then depends on that parameter of each.
    """
    lists = dict(_routed(model, recorder))
    if not lists:
        return
    alike: dict[int, int] = {}  # bit of an expert's parameter -> bits of that parameter in each expert
    for experts in lists.values():
        for tied in zip(*(expert.parameters() for expert in experts), strict=True):
            bits = 0
            for parameter in tied:
                bits |= parameter.sources
            alike |= {parameter.sources: bits for parameter in tied}

    def spread(sources: int) -> int:
        for one_bit, bits in alike.items():
            sources |= bits if sources & one_bit else 0
        return sources

    found: dict[Any, list[Any]] = {}
    numbers: defaultdict[tuple[str, str], int] = defaultdict(int)
    for op in recorder.operations:
        products = tuple((phase, flops, spread(sources)) for phase, flops, sources in op.products)
        home = next((path for path in lists if inside(op.module, [path])), None)
        if home is None:
            found[len(found)] = [replace(op, products=products)]
            continue
        name, _, leaf = op.module.removeprefix(f"{home}.").partition(".")
        number = numbers[home, name]  # each expert runs the same operations in the same order
        numbers[home, name] += 1
        merged = replace(op, module=home, products=products)
        if op.kind == "matmul" and op.weight:
            merged = replace(merged, kind="experts", weight=(len(lists[home]), *op.weight))
        found.setdefault((home, leaf, number), []).append(merged)
    recorder.operations[:] = [one(same) for same in found.values()]


def _routed(model: nn.Module, recorder: Recorder) -> Iterator[tuple[str, list[nn.Module]]]:
    """Find lists of like modules of which some rested, beside a choice, while the others were handed picked rows."""
    for path, held in model.named_modules():
        experts = members(path, held)
        ran = [name for name in experts if name in recorder.handed]
        if not ran or len(ran) == len(experts) or not all(recorder.handed[name] for name in ran):
            continue
        beside = [m for m in recorder.choices if inside(m, [path.rpartition(".")[0]]) and not inside(m, experts)]
        shapes = {tuple(p.shape for p in expert.parameters()) for expert in experts.values()}
        if beside and len(shapes) == 1:
            yield path, list(experts.values())


def keep_every_row(model: nn.Module) -> None:
    """Lift the capacity beyond which a router drops tokens: how many it drops is the data's choice."""
    for module in model.modules():
        if isinstance(getattr(module, "expert_capacity", None), int):
            module.expert_capacity = sys.maxsize  # type: ignore[assignment]  # an integer, as was just seen
