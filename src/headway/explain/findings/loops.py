"""Rules about loops in Python, over small products, parameters and numbers, and about optimizers in many passes."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import groupby, pairwise
from typing import NamedTuple

from headway.explain.attribution import Chore, Phase
from headway.explain.events import NONE, Operands
from headway.explain.findings.evidence import EventTime, RunEvidence, StepEvidence, as_number
from headway.explain.findings.gaps import Pause, StepPauses, pauses_of, purpose_of, recorded_pause, stacks_of
from headway.explain.findings.rule import Observation, Rule, RuleObserver, most_common, observe
from headway.explain.measurement import MATMUL
from headway.report import format_traffic

# A launch takes the host some 5 us, and an operator of PyTorch on a CPU as long, so a product that takes less at peak
# costs its launch.
_LAUNCH_S = 5e-6
_PAUSE_NS = 5_000_000  # most of a gap before an operator that counts with it; a longer gap has a cause of its own
_MANY_PRODUCTS = 16  # small products of one module in a step, from which they are a loop
AT_ONCE = ("aten::_fused_", "aten::_foreach_")
# A fused update is a few kernels for each group of parameters, with clipping some tens; a loop is about ten for each of
# hundreds of tensors.
MANY_UPDATES = 100
_MODEL_PRODUCTS = 8  # products a step from which what runs there is a model; each may be three nested operators
_SEEN_NS = 200_000  # gap from which a look at the stack may have fallen into it
_MANY_SIZES = 4  # parameters of a model have several
_READ_BACK = "aten::item"
# In a step; models read some lengths and grids of a batch.
_MANY_READ_BACKS = 16
_FEEDING = 6  # operators before a read that made its number: a square, a sum, a root and their calls
# Operators that make a tensor's number: most numbers that are read back come from one of these.
_REDUCES = re.compile(
    r"aten::(linalg_|_)?(vector_)?(std|var|norm|sum|mean|max|min|amax|amin|any|all|pow|abs|sqrt|eq|ne|isnan|isfinite|"
    r"square|mul|add|detach|argmax|select|_local_scalar_dense|item|to|_to_copy|copy_)(_mean|_dense)?$"
)
_ELSEWHERE = {Phase.OPTIMIZER, Phase.LOGGING, Phase.CHECKPOINT, Phase.EVALUATION, Phase.COMPILE, Phase.DATA_WAIT}


def small_gemms(evidence: StepEvidence) -> Observation | None:
    """Matrix products that take less than their launch."""
    small = _small(evidence)
    products = _with_loops(evidence, small)
    names = Counter(event.operator for event in products if event.product is not None)
    if not names:
        return None
    ns = total_ns(products)
    ((name, number),) = names.most_common(1)
    return observe(
        evidence,
        f"small-gemms{'/loop' * _is_loop(evidence, small)}",
        ns,
        number=names.total(),
        part=number / names.total(),
        operator=name,
        module=most_common(Counter(event.module for event in products)),
    )


def _is_loop(evidence: StepEvidence, small: list[EventTime]) -> bool:
    """Tell whether one module runs many small products, or without modules many of one size run in a row."""
    if any(event.module for event in small):
        return bool(_looping_modules(evidence, small))
    sizes = [[event.product for event in events if event.product is not None] for events in evidence.spent_by_step]
    return any(len(list(row)) >= _MANY_PRODUCTS for step in sizes for _, row in groupby(step))


def product_loop(evidence: StepEvidence) -> Observation | None:
    """Small products of modules that run many of them; see `small_gemms`."""
    return small_gemms(evidence) if _looping_modules(evidence, _small(evidence)) else None


def small_products(evidence: StepEvidence) -> list[EventTime]:
    """Matrix products that take less than their launch at peak, or where no peak is known did.

    Of a module in which there are many, all events: slices, transposes and sums are how the loop hands them around.
    """
    return _with_loops(evidence, _small(evidence))


def _small(evidence: StepEvidence) -> list[EventTime]:
    return [event for event in evidence.spent if _is_small(event)]


def _with_loops(evidence: StepEvidence, small: list[EventTime]) -> list[EventTime]:
    loops = _looping_modules(evidence, small)
    return [event for event in small if event.module not in loops] + [
        event for event in evidence.spent if event.module in loops
    ]


def _looping_modules(evidence: StepEvidence, small: list[EventTime]) -> set[str]:
    number_in = Counter(event.module for event in small if event.module)
    return {module for module, number in number_in.items() if number >= _MANY_PRODUCTS * evidence.num_steps}


def _is_small(event: EventTime) -> bool:
    product = event.product
    if product is None or event.line not in (MATMUL, ""):
        return False
    headway = event.trace.trace.headway or {}
    peak = as_number(headway.get("ceiling_flops_per_s") or headway.get("peak_flops_per_s"))
    if peak:
        return product.flops / peak < _LAUNCH_S
    # The whole of it: of a product that begins with the step's end little is this step's, but all its wait.
    return event.duration_ns / 1e9 < _LAUNCH_S


def parameter_loop(evidence: StepEvidence) -> Observation | None:
    """Operators of the loop itself, one tensor after the other, which read no numbers."""
    events = _parameter_loop(evidence)
    if not events or len(_reads(evidence)) >= _MANY_READ_BACKS:
        return None
    ns = _loop_ns(evidence, events)
    names = ", ".join(name for name, _ in Counter(event.operator for event in events).most_common(3))
    return observe(evidence, "parameter-loop", ns, number=len(events), operators=names)


def _parameter_loop(evidence: StepEvidence) -> list[EventTime]:
    """Events of a loop over tensors of several sizes; none where the loop calls few operators, or on one size.

    What multiplies matrices there is another model, such as a reference.
    """
    events = _beside_the_model(evidence)
    has_products = sum(event.line == MATMUL for event in events) >= _MODEL_PRODUCTS * evidence.num_steps
    if has_products or len(events) <= MANY_UPDATES * evidence.num_steps:
        return []
    operands = (event.trace.operands_of(event.event) for event in events)
    sizes = {operand.sizes for operand in operands if operand is not None}
    return events if len(sizes) >= _MANY_SIZES else []


def _loop_ns(evidence: StepEvidence, events: list[EventTime]) -> int:
    """Time of a loop over tensors: its operators, Python between them, and its pauses [ns]."""
    pauses = {(id(step.measured), gap.event) for step in pauses_of(evidence) for gap in step.gaps if gap.is_long}
    between_ns = sum(event.late_ns for event in events if (id(event.trace), event.event) not in pauses)
    return sum(event.ns for event in events) + between_ns + sum(gap.own_ns for gap in pauses_in_loop(evidence))


def pauses_in_loop(evidence: StepEvidence) -> list[Pause]:
    """Long gaps beside the operators of a loop over tensors, at a line of code that the loop comes to again and again.

    What the loop does with a large tensor outside of PyTorch takes long, and is no pause of another cause; one that
    the loop makes once a step, at a line of its own, is.
    """
    loop = {(id(event.trace), event.event) for event in _parameter_loop(evidence)}
    if not loop:
        return []
    lines: Counter[str] = Counter()  # gaps of the loop at each line
    pauses: list[tuple[str, Pause]] = []
    for step, events in zip(pauses_of(evidence), evidence.spent_by_step, strict=True):
        before = {following.event: event.event for event, following in pairwise(events)}
        last = events[-1].event if events else NONE
        for gap in step.gaps:
            neighbours = {gap.event, before.get(gap.event, last if gap.event == NONE else NONE)}
            if gap.ns > _SEEN_NS and any((id(step.measured), neighbour) in loop for neighbour in neighbours):
                line = _line(evidence, step, gap)
                lines[line] += 1
                pauses += [(line, gap)] if gap.is_long else []
    return [gap for line, gap in pauses if line and lines[line] > _MANY_SIZES * evidence.num_steps]


def _line(evidence: StepEvidence, step: StepPauses, gap: Pause) -> str:
    """Line of the loop's own code that a gap was at for longest; "" without samples, or if a cause is named."""
    stacks = stacks_of(evidence, step, gap).most_common(1)
    if not stacks or purpose_of(stacks[0][0]).name:
        return ""
    return next((frame for frame in stacks[0][0] if not frame.startswith("~")), "")


def _beside_the_model(evidence: StepEvidence) -> list[EventTime]:
    """Events of the loop itself: in no pass of the model, no backward, no phase of another kind.

    None where the trace does not tell passes of the model from the rest.
    """
    traces = {id(event.trace) for event in evidence.spent if event.trace.attribution.passes[event.event] != NONE}
    return [
        event
        for event in evidence.spent
        if id(event.trace) in traces
        and event.phase is Phase.FORWARD
        and not event.module
        and event.line != "communication"
        and event.trace.attribution.passes[event.event] == NONE
        and event.trace.attribution.chore[event.event] is Chore.NONE
        and not event.operator.startswith(AT_ONCE)
    ]


def total_ns(events: Iterable[EventTime]) -> int:
    """Time of events, and of the short gaps before them [ns]."""
    return sum(event.ns + min(event.late_ns, _PAUSE_NS) for event in events)


def _reads(evidence: StepEvidence) -> list[EventTime]:
    return [
        event
        for event in evidence.spent
        if event.operator == _READ_BACK and event.phase not in _ELSEWHERE and event.name
    ]


def read_backs(evidence: StepEvidence) -> Observation | None:
    """Numbers that are read out of tensors on a CPU, which waits for nothing; on a device each would wait."""
    # Anomaly mode reads whether a gradient is NaN, of every operator.
    if not evidence.is_cpu or evidence.is_anomaly_mode:
        return None
    reads = _reads(evidence)
    if len(reads) < _MANY_READ_BACKS * evidence.num_steps:
        return None
    # In the loop itself what makes the numbers is there for them; in a module, the operators right before the reading.
    loop_events = _beside_the_model(evidence)
    own = loop_events if sum(event.operator == _READ_BACK for event in loop_events) * 2 > len(reads) else []
    positions = {id(event) for event in own}
    makers = []
    feeding = 0
    for event in reversed(evidence.spent):
        if event.operator == _READ_BACK and event.phase not in _ELSEWHERE:
            feeding = _FEEDING
        elif feeding and not _REDUCES.match(event.operator):
            feeding = 0
        if feeding and id(event) not in positions:
            makers.append(event)
            feeding -= 1
    ns = (_loop_ns(evidence, own) if own else 0) + total_ns(makers)
    return observe(evidence, "read-back", ns, number=len(reads))


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
    by_operator = Counter[str]()
    for event in events:
        by_operator[event.operator or event.name] += event.ns
    names = ", ".join(f"{name[:60]} ({evidence.share(ns)})" for name, ns in by_operator.most_common(4))
    moved, least = traffic.moved, traffic.least
    if traffic.is_in_bytes:
        texts = [format_traffic(n / evidence.num_steps) for n in (moved, least)]
    else:
        texts = [f"as much as {moved:.0f} tensors of each weight's size", f"{least:.0f}"]
    words = {"moved": texts[0], "least": texts[1], "operators": names}
    # One pass would run at the rate that the operators reach: memory bounds both.
    return observe(evidence, "unfused-optimizer", traffic.ns * (1 - least / moved), all=all_ns, **words)


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
    values = {"number": len(events), "all": ns, "fused": FUSED_PART}
    return observe(evidence, "optimizer-loop", ns * (1 - FUSED_PART), **values)


def recorded_optimizer_loop(evidence: RunEvidence) -> Observation | None:
    """An optimizer that updates one tensor after the other."""
    updates = [step.facts.get("optimizer") for step in evidence.steps]
    loops = [
        update for update in updates if isinstance(update, Mapping) and update.get("mode") not in ("fused", "foreach")
    ]
    if not loops or len(loops) < len(updates):
        return None
    ns = sum(step.phases_ns.get("optimizer", 0) for step in evidence.steps)
    # An optimizer that is none of torch's has neither option.
    kind = "/other" * ("mode" not in loops[-1])
    values = {"name": loops[-1].get("name"), "number": loops[-1].get("num_tensors"), "all": ns, "fused": FUSED_PART}
    return observe(evidence, f"optimizer-loop{kind}", ns * (1 - FUSED_PART), **values)


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
    # A few small products, of norms' gains and routers, are in every model.
    Rule("small-gemms", RuleObserver(small_gemms, 0.10, lines=("slow", "memory", "idle.launch"))),
    # A CPU waits for nothing, so what counts is their number; a thousandth leaves out what cannot be measured.
    Rule(
        "read-back",
        RuleObserver(read_backs, 0.001, lines=("memory", "idle.launch")),
        RuleObserver(partial(recorded_pause, purpose="read-back"), 0.10),
    ),
    # The same parts of the time as for an optimizer that goes over tensors one by one.
    Rule(
        "parameter-loop",
        RuleObserver(parameter_loop, 0.05, lines=("memory", "idle.launch")),
        RuleObserver(partial(recorded_pause, purpose="parameter-loop"), 0.10),
    ),
    # A fused AdamW moves 28 bytes a parameter: some 1 to 5 % of a step; a loop adds its launches to that.
    Rule(
        "optimizer-loop",
        RuleObserver(optimizer_loop, 0.05, lines=("optimizer", "idle.launch")),
        RuleObserver(recorded_optimizer_loop, 0.10),
    ),
    # An update of one pass takes 1 to 5 % itself; what one saves below that is no reason for another optimizer.
    Rule("unfused-optimizer", RuleObserver(unfused_optimizer, 0.03, lines=("optimizer",))),
)
