"""Rules about loops in Python: over small products, over parameters beside the optimizer, over numbers."""

import re
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import pairwise

from headway.explain.attribution import Chore, Phase
from headway.explain.events import NONE
from headway.explain.findings.evidence import EventTime, StepEvidence, as_number
from headway.explain.findings.gaps import Pause, StepPauses, pauses_of, purpose_of, recorded_pause, stacks_of
from headway.explain.findings.rule import Observation, Rule, RuleObserver
from headway.explain.measurement import MATMUL

# A launch takes the host some 5 us, and an operator of PyTorch on a CPU as long, so a product that takes less at peak
# costs its launch.
_LAUNCH_S = 5e-6
_PAUSE_NS = 5_000_000  # most of a gap before an operator that counts with it; a longer gap has a cause of its own
_MANY_PRODUCTS = 16  # small products of one module in a step, from which they are a loop
AT_ONCE = ("aten::_fused_", "aten::_foreach_")
# A fused update is a few kernels for each group of parameters, with clipping some tens; a loop is about ten for each of
# hundreds of tensors.
MANY_UPDATES = 100
_SEEN_NS = 200_000  # gap from which a look at the stack may have fallen into it
_MANY_SIZES = 4  # parameters of a model have several
_READ_BACK = "aten::item"
READ_LATE_HINT = "keep numbers on the device until they are logged, and log every N steps."
READ_LATE_SETTING = "run.log_every"
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
    products = small_products(evidence)
    names = Counter(event.operator for event in products if event.product is not None)
    if not names:
        return None
    ns = total_ns(products)
    ((name, number),) = names.most_common(1)
    modules = Counter(event.module for event in products if event.module)
    where = f", most of them in {modules.most_common(1)[0][0]}" if modules else ""
    return Observation(
        ns,
        f"{names.total() / evidence.num_steps:,.0f} matrix products a step, {number / names.total():.0%} of them {name}"
        f"{where}, take less than {_LAUNCH_S * 1e6:.0f} us at peak each; with what stands around them "
        f"{evidence.share(ns)} of the time.",
        "many small matrices are multiplied one after the other, as a loop over tokens, heads or experts does.",
        "one batched product (torch.bmm, a linear layer on the whole batch) in place of the loop, or larger batches.",
        setting="larger packs (data.tokens_per_pack)",
    )


def product_loop(evidence: StepEvidence) -> Observation | None:
    """Small products of modules that run many of them; see `small_gemms`."""
    return small_gemms(evidence) if _looping_modules(evidence) else None


def small_products(evidence: StepEvidence) -> list[EventTime]:
    """Matrix products that take less than their launch at peak, or where no peak is known did.

    Of a module in which there are many, all events: slices, transposes and sums are how the loop hands them around.
    """
    small = [event for event in evidence.spent if _is_small(event)]
    loops = _looping_modules(evidence)
    return [event for event in small if event.module not in loops] + [
        event for event in evidence.spent if event.module in loops
    ]


def _looping_modules(evidence: StepEvidence) -> set[str]:
    """Modules with many small products in a step."""
    number_in = Counter(event.module for event in evidence.spent if event.module and _is_small(event))
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
    return Observation(
        ns,
        f"{len(events) / evidence.num_steps:,.0f} operators a step ({names}) run outside of the model, its backward "
        f"and the optimizer, for {evidence.share(ns)} of the time.",
        "the loop goes over tensors one by one, as for an average of the weights, clipping or statistics.",
        "operators that take a list of tensors at once (torch._foreach_*, clip_grad_norm_, AveragedModel with a "
        "multi_avg_fn), or do it every some steps.",
        setting="optim.ema and optim.clip, which take all tensors at once",
    )


def _parameter_loop(evidence: StepEvidence) -> list[EventTime]:
    """Events of a loop over tensors of several sizes; none where the loop calls few operators, or on one size."""
    events = _beside_the_model(evidence)
    if len(events) <= MANY_UPDATES * evidence.num_steps:
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
    return Observation(
        ns,
        f"{len(reads) / evidence.num_steps:,.0f} numbers a step are read out of tensors, which with what makes them "
        f"takes {evidence.share(ns)} of the time; on a device each would wait for all that was launched before.",
        "the loop or a hook calls .item(), float() or bool() within the step, for one tensor after the other.",
        f"{READ_LATE_HINT} Norms of all tensors at once: torch.nn.utils.get_total_norm, torch._foreach_norm.",
        setting=READ_LATE_SETTING,
    )


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
)
