"""Rules that know a pattern of operators: attention that is written out, a large head, 64 bits, checks for NaN."""

import re
from collections import Counter, defaultdict
from statistics import median

from headway.explain.attribution import Phase
from headway.explain.breakdown import kind_of_module
from headway.explain.events import NONE
from headway.explain.findings.evidence import EventTime, RunEvidence, StepEvidence
from headway.explain.findings.rule import FindingPlace, Observation, Rule, RuleObserver, most_common, observe
from headway.explain.measurement import MATMUL
from headway.meter.slow_code import SlowCode, slow_code_table

_BATCHED = re.compile(r"aten::(bmm|baddbmm|matmul|einsum)$")
_SOFTMAX = re.compile(r"aten::(_safe)?_?softmax$")
_SOFTMAX_BACKWARD = re.compile(r"aten::_softmax_backward\w*$")
_WEIGHTS = re.compile(r"aten::(mm|addmm|linear|convolution|_convolution)$")
_NEAR = 30  # operators between the products and the softmax: scales, masks, casts, dropout, and what they call
_LEAST_VOCABULARY = 4096  # sides of a product: what is smaller is no vocabulary
# Vocabulary over width from which a head outweighs a block of the usual twelve widths squared.
_MANY_TIMES_THE_WIDTH = 32
_LEAST_ELEMENTS = 1024  # elements of an operand in 64 bits; single numbers and small tables are often in 64 bits
_CHECKS = re.compile(r"aten::(ne|any|is_nonzero|item|_local_scalar_dense|isnan)$")
_TRACEBACK = "traceback.py"
_VIEWS = re.compile(
    r"aten::(view|t|transpose|unsqueeze|squeeze|expand|slice|select|permute|_unsafe_view|_reshape_alias|alias)$"
)


def eager_attention(evidence: StepEvidence) -> Observation | None:
    """Attention that is written out: a batched product, masks, a softmax over all pairs, another product."""
    products_ns = passes_ns = number = 0
    modules: Counter[str] = Counter()
    for events in _in_order(evidence):
        for place, event in enumerate(events):
            is_backward = _SOFTMAX_BACKWARD.match(event.operator) is not None
            # On a CPU `aten::softmax` calls `aten::_softmax`: the outermost one counts.
            is_inner = place > 0 and _SOFTMAX.match(events[place - 1].operator)
            if not is_backward and (is_inner or not _SOFTMAX.match(event.operator)):
                continue
            # In backward stand two products on each side of the softmax: of scores and values, of queries and keys.
            before = _towards_product(events, place, -1, 2 if is_backward else 1)
            after = _towards_product(events, place, 1, 2 if is_backward else 1)
            if before is None or after is None:
                continue
            for member in events[before : after + 1]:
                is_product = member.line == MATMUL
                products_ns += member.ns if is_product else 0
                passes_ns += 0 if is_product else member.ns
            number += not is_backward
            modules[event.module] += 1
    if not number:
        return None
    return observe(
        evidence, "eager-attention", passes_ns, number=number, module=most_common(modules), products=products_ns
    )


def _in_order(evidence: StepEvidence) -> list[list[EventTime]]:
    """Events of each step and thread of work in their order; small parts of operators among them."""
    per_step: dict[tuple[int, int], list[EventTime]] = defaultdict(list)
    for step_number, events in enumerate(evidence.spent_by_step):
        for event in events:
            if event.line in ("memory", MATMUL):
                per_step[step_number, int(event.trace.events.track[event.event])].append(event)
    return list(per_step.values())


def _towards_product(events: list[EventTime], place: int, direction: int, number: int) -> int | None:
    """Place of the so-and-so-many-th batched product before or behind an event; None where weights come first."""
    last = None
    for at in range(place + direction, place + direction * _NEAR, direction):
        if not 0 <= at < len(events) or _WEIGHTS.match(events[at].operator):
            break
        if _BATCHED.match(events[at].operator) and events[at].line == MATMUL:
            number -= 1
            last = at
            if not number:
                return at
    return last


def large_head(evidence: StepEvidence) -> Observation | None:
    """A projection on a vocabulary that outweighs the rest of the model, with the loss over it."""
    sides: Counter[tuple[int, int]] = Counter()
    for event in evidence.spent:
        # Only in forward are both sides the weight's; of its gradient one is the number of tokens.
        product = event.product if event.phase is Phase.FORWARD and event.line == MATMUL else None
        least = max(_LEAST_VOCABULARY, _MANY_TIMES_THE_WIDTH * product.k) if product is not None else 0
        if product is not None and product.batch == 1 and product.n >= least:
            sides[product.n, product.k] += event.ns
    if not sides:
        return None
    vocabulary, width = max(sides, key=lambda pair: (sides[pair], pair))
    ns = 0
    for event in evidence.spent:
        operands = event.trace.operands_of(event.event)
        # 64 bits have a finding of their own.
        if operands is not None and "double" not in operands.types and any(vocabulary in s for s in operands.sizes):
            ns += event.ns
    # Time goes with the vocabulary: up to the size from which it is large every model has a head.
    ordinary = max(_LEAST_VOCABULARY, _MANY_TIMES_THE_WIDTH * width)
    return observe(
        evidence,
        "large-head",
        ns * (1 - ordinary / vocabulary),
        vocabulary=vocabulary,
        width=width,
        ordinary=ordinary,
        all=ns,
    )


def double_precision(evidence: StepEvidence) -> Observation | None:
    """Work on numbers of 64 bits."""
    events = []
    for event in evidence.spent:
        operands = event.trace.operands_of(event.event)
        if operands is not None and any(
            kind == "double" and count >= _LEAST_ELEMENTS
            for kind, count in zip(operands.types, operands.num_read, strict=True)
        ):
            events.append(event)
    if not events:
        return None
    all_ns = sum(event.ns for event in events)
    modules: Counter[str] = Counter()
    for event in events:
        modules[event.module] += event.ns
    return observe(evidence, "double-precision", all_ns // 2, all=all_ns, module=most_common(modules))


def anomaly_mode(evidence: StepEvidence) -> Observation | None:
    """Anomaly mode, which keeps a stack of every operator and looks for NaN in every gradient."""
    if not evidence.is_anomaly_mode:
        return None
    checks_ns = sum(
        event.ns + event.late_ns
        for event in evidence.spent
        if event.phase is Phase.BACKWARD and _CHECKS.match(event.operator)
    )
    return observe(evidence, "anomaly-mode", checks_ns + _stacks_ns(evidence))


def _stacks_ns(evidence: StepEvidence) -> int:
    """Time of the stacks that anomaly mode keeps, one for each operator of forward that autograd notes.

    Operators that only change how a tensor is seen compute nothing, so what they take is the stack; of others as much
    as of these (the median).
    """
    times: dict[tuple[int, int], int] = {}  # time of each operator, by trace and number
    views: dict[tuple[int, int], int] = {}  # the same for operators that compute nothing
    for event in evidence.spent:
        number = int(event.trace.trace.host.sequence[event.event]) if evidence.is_cpu else NONE
        if number == NONE or event.phase is not Phase.FORWARD:
            continue
        key = id(event.trace), number
        times[key] = max(times.get(key, 0), event.ns)
        if _VIEWS.match(event.operator):
            views[key] = max(views.get(key, 0), event.ns)
    if not views:  # on a device the operators' own times are not known
        return evidence.time_in(_TRACEBACK)
    stack_ns = median(views.values())
    return round(sum(views.get(key, min(ns, stack_ns)) for key, ns in times.items()))


def memory_bound(evidence: StepEvidence) -> Observation | None:
    """Kernels without products on a device, beyond the time in which full bandwidth would move their bytes."""
    traffic = [step.traffic for step in evidence.steps]
    parts = [part for part in traffic if part is not None and part.at_bandwidth_ns is not None]
    if evidence.is_cpu or len(parts) < len(traffic):
        return None
    # Kernels with unknown operands are left out: nobody can tell what they could save.
    ns = sum(max(0, part.known_ns - (part.at_bandwidth_ns or 0)) for part in parts)
    least_ns = sum(part.at_bandwidth_ns or 0 for part in parts)
    where = dearest_parts(evidence, "memory")
    return observe(evidence, "memory-bound", ns, all=evidence.ns("memory"), parts=where, least=least_ns)


def dearest_parts(evidence: StepEvidence, line: str) -> str:
    """Name the three modules, or the operators where no modules are known, that took most of a line's time."""
    parts: Counter[str] = Counter()
    for event in evidence.spent:
        if event.line == line:
            # Layers of one kind are one part: their numbers are left out.
            parts[kind_of_module(event.module) or event.operator or event.name] += event.ns
    return ", ".join(f"{name[:60]} ({evidence.share(ns)})" for name, ns in parts.most_common(3))


def num_passes(evidence: StepEvidence) -> list[int]:
    """Number of the model's forward passes of each step that was measured."""
    return [
        len({event.trace.attribution.passes[event.event] for event in events} - {NONE})
        for events in evidence.spent_by_step
    ]


def recorded_double_precision(evidence: RunEvidence) -> Observation | None:
    """Weights of 64 bits, whose products take at least twice as long."""
    if any(step.facts.get("weights_dtype") != "float64" for step in evidence.steps):
        return None
    ns = sum(step.phases_ns.get(phase, 0) for step in evidence.steps for phase in ("forward", "backward"))
    return observe(evidence, "double-precision", ns // 2, all=ns)


def recorded_anomaly_mode(evidence: RunEvidence) -> Observation | None:
    """Anomaly mode, which slows forward and backward by an amount that records do not tell."""
    if not all(step.facts.get("anomaly_mode") for step in evidence.steps):
        return None
    return observe(evidence, "anomaly-mode", 0)


def known_slow_code(evidence: StepEvidence) -> Observation | None:
    """Code that others have found to be slow, by its kernels, or by functions of Python and the modules around them."""
    dearest: tuple[int, SlowCode, str] | None = None
    frames = evidence.names
    for rank in evidence.ranks:
        frames.update(str(frame) for stack in evidence.host_fact("stacks", rank) or () for frame in stack)
    for row in slow_code_table():
        has_frame, is_tower = row.is_among(frames), bool(row.most_patches) and not evidence.is_cpu
        events = [
            event
            for event in evidence.spent
            if (row.kernels and re.search(row.kernels, f"{event.operator} {event.name}"))
            or ((has_frame or is_tower) and row.is_at([event.module]))
        ]
        # On a device the host is what a loop of Python keeps waiting.
        late_ns = sum(event.late_ns for event in events)
        ns = sum(event.ns for event in events) + (late_ns if row.frames else 0)
        if is_tower:  # told by its launches, which take longer than what they launch
            ns = late_ns if late_ns > ns else 0
        if ns > (dearest[0] if dearest else 0):
            names = Counter(event.operator or event.name for event in events)
            dearest = ns, row, names.most_common(1)[0][0]
    if dearest is None:
        return None
    ns, row, name = dearest
    factor = f", which others measured at {row.factor} times as long" if row.factor else ""
    words = {"factor": factor, "operator": name, "cause": row.cause, "advice": row.remedy}
    return observe(evidence, "known-slow-code", ns, code=row.name, **words)


_KERNELS = ("memory", "slow", "matmul", "optimizer")
RULES = (
    # A tenth of a step is worth another version of a package.
    Rule("known-slow-code", RuleObserver(known_slow_code, 0.10, lines=(*_KERNELS, "idle.launch"))),
    # Nobody leaves it on for its use, so what can be measured is worth a word.
    Rule(
        "anomaly-mode",
        RuleObserver(anomaly_mode, 0.01, lines=_KERNELS),
        RuleObserver(recorded_anomaly_mode, 0.0, place=FindingPlace.LIMIT),
    ),
    # Sums in 64 bits, as of a norm, take some thousandths.
    Rule(
        "double-precision",
        RuleObserver(double_precision, 0.05, lines=_KERNELS),
        RuleObserver(recorded_double_precision, 0.0),
    ),
    # The matrix of all pairs is small for short sequences, so a fused kernel saves little there.
    Rule("eager-attention", RuleObserver(eager_attention, 0.10, lines=_KERNELS)),
    # A head is a fifth to a quarter of a model of half a billion parameters.
    Rule("large-head", RuleObserver(large_head, 0.40, lines=_KERNELS)),
    # Memory-bound kernels take a fifth of an eager step of a large model, a part of that at full bandwidth.
    Rule("memory-bound", RuleObserver(memory_bound, 0.20, lines=("memory",))),
)
