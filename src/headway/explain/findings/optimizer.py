"""Rules about the optimizer: one tensor after the other, or all at once in many passes over weights and moments."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from headway.explain.attribution import Chore, Phase
from headway.explain.events import NONE, Operands
from headway.explain.findings.evidence import EventTime, RunEvidence, StepEvidence
from headway.explain.findings.loops import AT_ONCE, MANY_UPDATES, total_ns
from headway.explain.findings.rule import Observation, Rule, RuleObserver
from headway.report import format_share, format_traffic

_MOST_OF_IT = 0.6  # part of the optimizer's traffic from which one pass would save little
_KNOWN = 0.8  # part of the optimizer's time whose operators must have known bytes
_WORTH_A_NAME = 0.01  # part of the optimizer's time from which an operator counts
_UPDATE = re.compile(r"aten::_fused_(adamw?|sgd|adagrad)_$")
_NORM = re.compile(r"aten::_foreach_(norm|max)$")
_ON_LISTS = "aten::_foreach_"
# Types of elements in the template arguments of a kernel on lists, the first of which is the result's. Source:
# ForeachFunctors.cuh, fused_adam_utils.cuh and ForeachBinaryOpScalarList.cu of ATen (torch 2.0 to 2.13).
_FUNCTOR = re.compile(r"(?:Functor|TwoOps)<(double|float|c10::\w+)(?:, (double|float|c10::\w+))?")
_SIZES = {"double": 8, "float": 4, "c10::BFloat16": 2, "c10::Half": 2}  # [byte]
# Tensors that one pass reads and writes: weights and moments both, gradients once; with two moments as Adam's, whose
# last operator divides by a root, and with one.
_ADAM_PASS, _MOMENTUM_PASS = 7, 5
# Operators on lists that update weights: a loop too clips gradients at once (_foreach_norm, _foreach_mul_).
_UPDATES = re.compile(r"aten::(_fused_|_foreach_(add|sub|lerp))")
# Part of a loop's time that a fused update takes. AdamW's operators read and write a tensor 20 times (mul_ 2, lerp_ 3,
# mul_ 2, addcmul_ 3, sqrt 2, div 2, add_ 2, addcdiv_ 4), fused 7 times (weight, gradient, two averages). For small
# tensors the calls count: 9 for each in place of 31, as a profile shows.
# Source: torch/optim/adam.py, _single_tensor_adam and _fused_adam (PyTorch 2.13).
FUSED_PART = 7 / 20
_DIVIDES = "aten::_foreach_addcdiv_"


class _Traffic(NamedTuple):
    """Bytes that an optimizer moves, or where they are not known tensors of each weight's size."""

    moved: float  # by all its operators
    least: float  # by one pass over its state
    ns: int  # time of the operators [ns]
    is_in_bytes: bool  # the unit


def unfused_optimizer(evidence: StepEvidence) -> Observation | None:
    """An optimizer on lists of tensors that goes over its state in several operators."""
    if evidence.is_cpu or loop_over_parameters(evidence):
        return None
    events = [event for event in evidence.spent if event.line == "optimizer"]
    traffic = _bytes(events) or _passes(events)
    if traffic is None or traffic.least > _MOST_OF_IT * traffic.moved:
        return None
    all_ns = sum(event.ns for event in events)
    least = traffic.least / traffic.moved
    by_operator = Counter[str]()
    for event in events:
        by_operator[event.operator or event.name] += event.ns
    names = ", ".join(f"{name[:60]} ({evidence.share(ns)})" for name, ns in by_operator.most_common(4))
    advice = (
        "an optimizer that is one kernel on weights as they are held (Apex's FusedAdam with master weights; those of "
        "bitsandbytes and torchao, also with moments in 8 bits)"
        if traffic.is_in_bytes
        else "AdamW(fused=True), SGD(fused=True), or another optimizer that is one kernel (Apex, bitsandbytes, torchao)"
    )
    # One pass would run at the rate that the operators reach: memory bounds both.
    saved_ns = traffic.ns * (1 - least)
    if traffic.is_in_bytes:
        moved, least_moved = (format_traffic(n / evidence.num_steps) for n in (traffic.moved, traffic.least))
        what = f"read and wrote {moved} a step, where one pass over weights, gradients and moments moves {least_moved}"
    else:
        what = (
            f"read and wrote as much as {traffic.moved:.0f} tensors of each weight's size, where one pass over "
            f"weights, gradients and moments moves {traffic.least:.0f}"
        )
    return Observation(
        saved_ns,
        f"the optimizer and what clips gradients took {evidence.share(all_ns)} of the time: they {what}, which takes "
        f"{evidence.share(round(traffic.ns * least))} at the same rate.",
        f"the update is not one kernel, so each operator goes over all of its tensors again: {names}.",
        f"{advice}; more packs or batches for each update, which then share its time.",
        setting="adamw with optim.state: auto or bfloat16, which on CUDA one kernel updates in one pass (a run says at "
        "its start if not, and why); a larger optim.accumulation",
    )


def _bytes(events: list[EventTime]) -> _Traffic | None:
    """Bytes of the operators, and of one pass; None without a fused update, or if too few bytes are known.

    A fused update names all that a pass goes over. What it updates may be copies in a wider type: one pass would read
    and write the type that they are held in.
    """
    moved = norm_bytes = held_values = known_ns = 0
    counted: set[tuple[int, int]] = set()
    has_bytes: dict[tuple[int, int], bool] = {}
    widths: set[int] = set()  # widths of elements that are copied or updated [byte]
    for event in events:
        operator, operands = event.trace.operator_of(event.event), event.trace.operands_of(event.event)
        key = id(event.trace), operator
        if operator == NONE or operands is None:
            continue
        if key not in counted:
            counted.add(key)
            num_bytes = _bytes_of(event, operands, widths)
            has_bytes[key] = num_bytes is not None
            moved += num_bytes or 0
            norm_bytes += num_bytes or 0 if _NORM.match(event.operator) else 0
            if _UPDATE.match(event.operator):
                held_values += _values_of_update(operands)
        known_ns += event.ns if has_bytes[key] else 0
    all_ns = sum(event.ns for event in events)
    if not held_values or not widths or known_ns < _KNOWN * all_ns:
        return None
    return _Traffic(moved, held_values * min(widths) + norm_bytes, known_ns, is_in_bytes=True)


def _bytes_of(event: EventTime, operands: Operands, widths: set[int]) -> int | None:
    """Bytes that an operator of the optimizer reads and writes; None if they are unknown."""
    if not operands.has_list:
        return operands.bytes_moved(event.operator)
    types = _FUNCTOR.search(event.name)
    if types is None or not operands.list_numel or not operands.list_numel[0]:
        return None
    result = _SIZES.get(types[1])
    source = _SIZES.get(types[2] or types[1])
    if result is None or source is None:
        return None
    if _UPDATE.match(event.operator):
        widths.add(result)
        return _values_of_update(operands) * result
    if "_foreach_copy_" in event.operator:
        widths.update((result, source))
        return operands.list_numel[0] * (result + source)
    written = 0 if _NORM.match(event.operator) else operands.list_numel[0]
    return (sum(operands.list_numel) + written) * result


def _values_of_update(operands: Operands) -> int:
    """Elements that a fused update reads and writes: all lists both, but gradients, the second, once."""
    _, gradients = operands.list_numel[:2] if len(operands.list_numel) > 1 else (0, 0)
    return 2 * sum(operands.list_numel) - gradients


def _passes(events: list[EventTime]) -> _Traffic | None:
    """Tensors of a weight's size that operators on lists read and write; None if other operators take most of the time.

    Each operator is called once for each group of tensors (of a type, of a device), with lists of as many elements.
    """
    spent, calls, tensors = Counter[str](), Counter[str](), dict[str, int]()
    counted: set[tuple[int, int]] = set()
    for event in (event for event in events if event.operator.startswith(_ON_LISTS)):
        spent[event.operator] += event.ns
        operator, operands = event.trace.operator_of(event.event), event.trace.operands_of(event.event)
        if operands is not None and (id(event.trace), operator) not in counted:
            counted.add((id(event.trace), operator))
            calls[event.operator] += 1
            tensors[event.operator] = len(operands.list_numel) + (not _NORM.match(event.operator))
    all_ns = sum(event.ns for event in events)
    if spent.total() < _KNOWN * all_ns or not tensors:
        return None
    large = [name for name in tensors if spent[name] >= _WORTH_A_NAME * all_ns]
    groups = min(calls[name] for name in large)
    moved = sum(tensors[name] * calls[name] / groups for name in large)
    norm = sum(tensors[name] for name in large if _NORM.match(name))
    return _Traffic(
        moved, norm + (_ADAM_PASS if _DIVIDES in large else _MOMENTUM_PASS), spent.total(), is_in_bytes=False
    )


def optimizer_loop(evidence: StepEvidence) -> Observation | None:
    """An optimizer that updates one tensor after the other."""
    events = loop_over_parameters(evidence)
    if not events:
        return None
    ns = total_ns(events)
    return Observation(
        ns * (1 - FUSED_PART),
        f"the optimizer ran {len(events) / evidence.num_steps:,.0f} operators a step, one tensor after the other, for "
        f"{evidence.share(ns)} of the time; fused it takes about {FUSED_PART:.0%} of that.",
        "the optimizer is not fused: each tensor's update is a dozen operators of its own.",
        "AdamW(fused=True), or foreach=True.",
        setting="optim.name: adamw, which is fused",
    )


def recorded_optimizer_loop(evidence: RunEvidence) -> Observation | None:
    """An optimizer that updates one tensor after the other."""
    updates = [step.facts.get("optimizer") for step in evidence.steps]
    loops = [update for update in updates if isinstance(update, Mapping) and update.get("mode") == "loop"]
    if not loops or len(loops) < len(updates):
        return None
    ns = sum(step.phases_ns.get("optimizer", 0) for step in evidence.steps)
    return Observation(
        ns * (1 - FUSED_PART),
        f"the optimizer took {format_share(ns / evidence.duration_ns)} of the time: {loops[-1].get('name')} updates "
        f"{loops[-1].get('num_tensors')} tensors one after the other; fused it takes about {FUSED_PART:.0%} of that.",
        "it is neither fused nor in lists (foreach), so that Python launches some ten operators for each tensor.",
        "fused=True, or foreach=True where there is no fused kernel.",
    )


def loop_over_parameters(evidence: StepEvidence) -> list[EventTime]:
    """Events of an optimizer that updates one tensor after the other; none of one that takes all at once."""
    # Clipping and averages, which take lists of tensors, say nothing of the update.
    events = [
        event
        for event in evidence.spent
        if event.phase is Phase.OPTIMIZER and event.trace.attribution.chore[event.event] is not Chore.LISTS
    ]
    if any(_UPDATES.match(event.operator) for event in events):
        return []
    # On a device a kernel that no operator of PyTorch launched is a whole update, as those of bitsandbytes are.
    one_by_one = [
        event
        for event in events
        if not event.operator.startswith(AT_ONCE) and (evidence.is_cpu or event.operator.startswith("aten::"))
    ]
    return one_by_one if len(one_by_one) > MANY_UPDATES * evidence.num_steps else []


RULES = (
    # A fused AdamW moves 28 bytes a parameter: some 1 to 5 % of a step; a loop adds its launches to that.
    Rule(
        "optimizer-loop",
        RuleObserver(optimizer_loop, 0.05, lines=("optimizer", "idle.launch")),
        RuleObserver(recorded_optimizer_loop, 0.10),
    ),
    # An update of one pass takes 1 to 5 % itself; what one saves below that is no reason for another optimizer.
    Rule("unfused-optimizer", RuleObserver(unfused_optimizer, 0.03, lines=("optimizer",))),
)
