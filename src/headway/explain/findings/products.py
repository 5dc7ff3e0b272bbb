"""Rules about matrix products: those that ran beyond the counted ones, updates in each pass, and rates below the peak.

A profile has the sizes of all products that ran, and Headway's traces the FLOPs that the step was counted for. What ran
beyond them is work that nobody asked for: an evaluation, a second forward, a reference model, a second backward.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from headway.explain.attribution import Phase
from headway.explain.breakdown import ProductCall, product_calls
from headway.explain.budget import DeviceRates
from headway.explain.events import NONE, Kind
from headway.explain.explanation import StepWaterfall
from headway.explain.findings.evidence import RunEvidence, StepEvidence, as_number
from headway.explain.findings.patterns import dearest_parts, num_passes
from headway.explain.findings.rule import FindingPlace, Observation, Rule, RuleObserver, most_common, observe
from headway.explain.kernels import is_attention
from headway.explain.measurement import MATMUL
from headway.report import format_flops, format_rate
from headway.words import Argument

_UNCOUNTED = 1.15  # ran / counted FLOPs; losses and routers run a few products that no ledger has
_MOSTLY = 0.5  # part of what was not counted from which it has one cause
_UPDATE = "Optimizer.step#"
# Parts of the best rate: good sizes reach 50 to 80 % of it, attention 40 to 70 %.
_SLOW_PRODUCTS, _GOOD_PRODUCTS = 0.25, 0.5
_KNOWN = 0.5  # part of the products' time whose sizes must be known
_NEARLY_ALL = 0.8  # part of the time from which products alone decide how long a step takes
# And element of a head: a product of query and key, one of weight and value; in backward five products for two.
_FLOPS_PER_PAIR, _BACKWARD_TIMES = 4, 2.5
_TOKENS_FIRST = re.compile(r"::_?(efficient|flash)_attention_|^flash_attn")  # (batch, tokens, heads, head size)


@dataclass(slots=True)
class _Ran:
    """FLOPs of products of one phase that ran in the steps, and what was counted."""

    counted: float = 0.0  # FLOPs that the steps were counted for
    all: float = 0.0  # FLOPs that ran
    outside: float = 0.0  # FLOPs of it outside of the metered model's passes
    without_backward: float = 0.0  # FLOPs of it in passes of the model that no backward follows
    again: float = 0.0  # FLOPs of it that differentiate an operator another time
    modules: Counter[str] = field(default_factory=Counter)  # FLOPs by module

    @property
    def excess(self) -> float:
        """FLOPs beyond the counted ones; 0 where losses and routers may have run them."""
        return self.all - self.counted if self.all > _UNCOUNTED * self.counted > 0 else 0.0


def uncounted_products(evidence: StepEvidence) -> Observation | None:
    """Products that ran beyond those that the steps were counted for."""
    ran = {Phase.FORWARD: _Ran(), Phase.BACKWARD: _Ran()}
    for waterfall in evidence.measured_steps:
        counted = _counted(evidence, waterfall)
        if counted is None or waterfall.measured is None:
            return None
        for phase, flops in counted.items():
            ran[phase].counted += flops
        _add_products(ran, product_calls(*waterfall.measured), waterfall)
    times = {phase: _time_of(evidence, phase) for phase in ran}
    lost_ns = {phase: times[phase] * part.excess / part.all if part.all else 0.0 for phase, part in ran.items()}
    phase = max(lost_ns, key=lost_ns.__getitem__)
    if not lost_ns[phase]:
        return None
    part, ns = ran[phase], sum(lost_ns.values())
    kind = _kind(phase, part, has_both=all(lost_ns.values()))
    ran_flops, counted_flops = (format_flops(n / len(evidence.measured_steps)) for n in (part.all, part.counted))
    return observe(
        evidence,
        f"uncounted-products/{kind}" if kind else "uncounted-products",
        ns,
        ran=ran_flops,
        counted=counted_flops,
        times=part.all / part.counted,
        phase=phase.value,
        kind=kind,
        module=most_common(part.modules, "one of the model's"),
        by_module=Argument("by", example="module"),
        by_gemm=Argument("by", example="gemm"),
    )


def _counted(evidence: StepEvidence, waterfall: StepWaterfall) -> dict[Phase, float] | None:
    """FLOPs of a step's products that were counted, without attention, which has products of its own."""
    components = evidence.step_fact(waterfall, "useful_flops")
    if not isinstance(components, Mapping) or not components:
        return None
    counted = {Phase.FORWARD: 0.0, Phase.BACKWARD: 0.0}
    total = 0.0
    for name, flops in components.items():
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            number = as_number(flops.get(phase.value)) or 0.0
            total += number
            counted[phase] += 0.0 if str(name).endswith(".attention") else number
    # Checkpointed blocks run forward again in backward; a profile that does not say so has none.
    recomputed = evidence.step_fact(waterfall, "recomputed_flops")
    for name, flops in recomputed.items() if isinstance(recomputed, Mapping) else ():
        counted[Phase.BACKWARD] += 0.0 if str(name).endswith(".attention") else as_number(flops) or 0.0
    # Layers spend on padding what they spend on tokens, in both phases alike.
    padded = 1 + (as_number(evidence.step_fact(waterfall, "padding_flops")) or 0.0) / total if total else 1.0
    return {phase: flops * padded for phase, flops in counted.items()}


def _add_products(ran: Mapping[Phase, _Ran], calls: list[ProductCall], waterfall: StepWaterfall) -> None:
    """Add the products of a step: single ones, since attention may run as batches of more pairs than its mask has."""
    if waterfall.measured is None:
        return
    attribution, host = waterfall.measured[0].attribution, waterfall.measured[0].trace.host
    differentiated = set(host.sequence[host.forward_thread > 0].tolist()) - {NONE}  # numbers of forward operators
    first: dict[tuple[int, int], int] = {}  # operator of backward that differentiated an operator of forward first
    for call in sorted(calls, key=lambda call: call.event):
        phase = attribution.phase[call.event] if call.event != NONE else Phase.UNKNOWN
        if phase not in ran or call.product is None or call.product.batch > 1:
            continue
        flops, part = call.product.flops, ran[phase]
        part.all += flops
        part.modules[attribution.module[call.event]] += flops
        launch = int(attribution.launch[call.event])
        operator = attribution.contexts[launch].operator if launch != NONE else NONE
        # A forward of eval() is no pass, but its modules have their paths; other models have none.
        is_outside = attribution.passes[call.event] == NONE and not attribution.module[call.event]
        has_backward = operator != NONE and int(host.sequence[operator]) in differentiated
        part.outside += flops if is_outside and not has_backward else 0
        part.without_backward += flops if not is_outside and not has_backward else 0
        backward = attribution.contexts[launch].backward if launch != NONE else NONE
        if phase is Phase.BACKWARD and backward != NONE:
            node = int(host.forward_thread[backward]), int(host.sequence[backward])
            part.again += flops if first.setdefault(node, backward) != backward else 0


def _time_of(evidence: StepEvidence, phase: Phase) -> int:
    """Time of the operators of a phase, of the model and outside of it, with Python between them on a CPU [ns]."""
    return sum(
        event.ns + (event.late_ns if evidence.is_cpu else 0)
        for event in evidence.spent
        if event.phase is phase and event.line in (MATMUL, "memory", "")
    )


def _kind(phase: Phase, part: _Ran, *, has_both: bool) -> str:
    """Kind of the products that a phase did not count, by its name in `sentences.toml`; "" for a part of the model."""
    if part.again >= _MOSTLY * part.excess:
        return "backward"
    if has_both:
        return "pass"
    if phase is Phase.FORWARD and part.without_backward >= _MOSTLY * part.excess:
        return "forward"
    return "other model" if phase is Phase.FORWARD and part.outside >= _MOSTLY * part.excess else ""


def recorded_uncounted(evidence: RunEvidence) -> Observation | None:
    """Forwards of the model without a backward, or backwards through one graph, that nobody counted."""
    if any(step.loop_phases for step in evidence.steps):  # phases that the loop names have rules of their own
        return None
    kind = max(("forward", "backward"), key=lambda kind: _extra(evidence, kind)[0])
    ns, number, by_step = _extra(evidence, kind)
    return observe(evidence, f"uncounted-products/{kind}", ns, by_step=by_step, number=number, kind=kind)


def recorded_updates(evidence: RunEvidence) -> Observation | None:
    """An optimizer that updates the same weights after each pass of a step."""
    if any(step.loop_phases for step in evidence.steps):  # several updates on one rollout are how it learns
        return None
    ns, number, by_step = _extra(evidence, "update")
    return observe(evidence, "update-each-pass", ns, by_step=by_step, number=number + 1)


def _extra(evidence: RunEvidence, kind: str) -> tuple[float, float, Mapping[int, float]]:
    """Extra passes or updates of one kind: their time [ns], their number in a step, and their time by step."""
    sampled = [step for step in evidence.steps if step.phases_ns or step.extra]
    by_step = {step.step: step.extra[kind][1] for step in sampled if kind in step.extra}
    numbers = [step.extra[kind][0] for step in sampled if kind in step.extra]
    scale = evidence.duration_ns / sum(step.duration_ns for step in sampled) if sampled else 0.0
    # Steps that were not sampled tell nothing, so that what came in which step is known where all were.
    rare = by_step if len(sampled) == evidence.num_steps else {}
    return scale * sum(by_step.values()), median(numbers) if numbers else 0.0, rare


def update_each_pass(evidence: StepEvidence) -> Observation | None:
    """An optimizer that updates the same weights after each pass of a step."""
    if any(step.phases for step in evidence.steps):  # several updates on one rollout are how it learns
        return None
    again_ns, most = 0.0, 0
    for step, events, num_seen in zip(
        evidence.measured_steps, evidence.spent_by_step, num_passes(evidence), strict=True
    ):
        updates = _updates(step)
        packs = evidence.step_fact(step, "packs")  # passes are not seen if the loop calls parts of the model
        passes = max(num_seen, len(packs) if isinstance(packs, list) else 0)
        ns = sum(
            event.ns + (event.late_ns if evidence.is_cpu else 0) for event in events if event.phase is Phase.OPTIMIZER
        )
        if passes >= 2 and updates >= passes:
            again_ns += ns * (1 - 1 / updates)
            most = max(most, updates)
    if not most:
        return None
    return observe(evidence, "update-each-pass", again_ns, number=most)


def _updates(step: StepWaterfall) -> int:
    """Number of updates of the same weights in a step: calls of an optimizer that run as many operators; 0 of others.

    Two networks with an optimizer each, as of a GAN, differ in it.
    """
    if step.measured is None:
        return 0
    trace, window = step.measured[0].trace, step.measured[1].window
    host = trace.host
    names = [number for number, name in enumerate(trace.names) if name.startswith(_UPDATE)]
    inside = (host.start_ns >= window.start_ns) & (host.start_ns < window.end_ns) & (host.kind == Kind.ANNOTATION)
    calls = np.flatnonzero(inside & np.isin(host.name, names))
    operators = np.sort(host.start_ns[host.kind == Kind.OPERATOR])
    begins, ends = (np.searchsorted(operators, column[calls]) for column in (host.start_ns, host.end_ns))
    sizes = {(int(host.name[call]), int(number)) for call, number in zip(calls, ends - begins, strict=True)}
    return len(calls) if len(sizes) == 1 else 0


def slow_products(evidence: StepEvidence) -> Observation | None:
    """Products that take most of the time, at a small part of the rate that the device can reach."""
    if evidence.is_cpu or not evidence.measured_steps:
        return None
    rates = evidence.measured_steps[0].rates or DeviceRates()
    best, all_ns, sized = rates.best_flops_per_s, evidence.matmul_ns, _sized_products(evidence)
    known_ns = sum(ns for _, ns in sized.values())
    is_sized = known_ns > _KNOWN * all_ns
    if not best or not is_sized:
        return _of_unknown_rate(evidence, sized if is_sized else {}, rates.why_no_peak)
    flops = sum(flops for flops, _ in sized.values())
    rate = flops / known_ns * 1e9
    if rate >= _SLOW_PRODUCTS * best:
        return None
    lost_ns = {name: ns - flops / best * 1e9 for name, (flops, ns) in sized.items()}
    name = max(lost_ns, key=lost_ns.__getitem__)
    its_flops, its_ns = sized[name]
    return observe(
        evidence,
        "slow-products",
        known_ns * (1 - rate / (_GOOD_PRODUCTS * best)),
        reached=rate / best,
        best=format_rate(best),
        product=name,
        rate=format_rate(its_flops / its_ns * 1e9),
        all=all_ns,
    )


def _of_unknown_rate(
    evidence: StepEvidence, sized: Mapping[str, tuple[float, int]], why_no_peak: str
) -> Observation | None:
    """Name products without sizes or a peak, of which nobody knows how good they are, if they are nearly all."""
    all_ns = evidence.matmul_ns
    if all_ns < _NEARLY_ALL * evidence.duration_ns or evidence.useful_ns is not None:
        return None
    if not sized:
        return observe(evidence, "slow-products/no sizes", all_ns, all=all_ns, product=dearest_parts(evidence, MATMUL))
    name = max(sized, key=lambda name: sized[name][1])
    flops, ns = sized[name]
    return observe(
        evidence,
        "slow-products/no peak",
        all_ns,
        all=all_ns,
        product=name,
        rate=format_rate(flops / ns * 1e9),
        cause=why_no_peak,
        device=Argument("device"),
        by_gemm=Argument("by", example="gemm"),
    )


def _sized_products(evidence: StepEvidence) -> dict[str, tuple[float, int]]:
    """FLOPs and time [ns] of the products whose sizes are known, by a name with the sizes."""
    sized: dict[str, tuple[float, int]] = {}

    def add(name: str, flops: float, ns: int) -> None:
        before = sized.get(name, (0.0, 0))
        sized[name] = before[0] + flops, before[1] + ns

    for waterfall, events in zip(evidence.measured_steps, evidence.spent_by_step, strict=True):
        for call in product_calls(*waterfall.measured) if waterfall.measured is not None else ():
            if call.product is not None:
                batch, *sizes, dtype = call.product
                text = f"{f'{batch}*' if batch > 1 else ''}{'x'.join(map(str, sizes))}"
                add(f"products of {text} in {dtype}", call.product.flops, call.ns)
        called: dict[int, int] = {}  # operators of attention, with the time of their kernels [ns]
        for event in events:
            if event.line == MATMUL and is_attention(event.operator) and event.product is None:
                operator = event.trace.operator_of(event.event)
                called[operator] = called.get(operator, 0) + event.ns
        for operator, ns in called.items():
            pairs = _attention_flops(waterfall, operator)
            if pairs is not None:
                add(*pairs, ns)
    return sized


def _attention_flops(waterfall: StepWaterfall, operator: int) -> tuple[str, float] | None:
    """Sizes of an operator of attention, as a name, and its FLOPs with all pairs, the most that its mask may allow."""
    if waterfall.measured is None or operator == NONE:
        return None
    trace = waterfall.measured[0].trace
    name, index = trace.names[trace.host.name[operator]], int(trace.host.operands[operator])
    tensors = [size for size in trace.operands[index].sizes if len(size) == 4] if index != NONE else []
    is_backward = "backward" in name
    # The first operand of backward is the gradient of the result, which has the sizes of the queries.
    if len(tensors) < 2 + is_backward:
        return None
    queries, keys = tensors[0], tensors[1 + is_backward]
    batch, *middle, width = queries
    tokens, heads = middle if _TOKENS_FIRST.search(name) else middle[::-1]
    num_keys = keys[1] if _TOKENS_FIRST.search(name) else keys[2]
    flops = _FLOPS_PER_PAIR * batch * heads * tokens * num_keys * width * (_BACKWARD_TIMES if is_backward else 1)
    return f"{name} of {batch}x{heads}x{tokens:,}x{width}, {num_keys:,} keys", flops


_KERNELS = ("memory", "slow", "matmul", "idle.launch")
RULES = (
    # Losses, metrics and routers run some products; a tenth of the time is a part of a model.
    Rule(
        "uncounted-products",
        RuleObserver(uncounted_products, 0.10, lines=_KERNELS),
        RuleObserver(recorded_uncounted, 0.10),
    ),
    # A fused update is 1 to 5 % of a step, and several of them are as many times that.
    Rule(
        "update-each-pass",
        RuleObserver(update_each_pass, 0.03, lines=("optimizer",)),
        RuleObserver(recorded_updates, 0.03),
    ),
    # Products of good sizes reach half of the peak and more; a quarter leaves room for a mix of small ones.
    Rule(
        "slow-products",
        RuleObserver(slow_products, 0.20, place=FindingPlace.UNEXPLAINED, lines=("slow", "matmul")),
    ),
)
