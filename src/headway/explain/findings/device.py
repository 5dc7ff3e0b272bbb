"""Rules about the device's work: products, chains of kernels, attention, recomputation, padding, its clock."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from headway.explain.attribution import Phase
from headway.explain.breakdown import StepAttention
from headway.explain.budget import NeededWork
from headway.explain.events import NONE, Kind
from headway.explain.explanation import StepWaterfall
from headway.explain.findings.evidence import EventTime, RunEvidence, StepEvidence, as_number
from headway.explain.findings.rule import FindingPlace, Observation, Rule, RuleObserver, observe
from headway.explain.measurement import MATMUL
from headway.report import format_share
from headway.report.step_lines import SLOW

# Elements of two bytes in 16 bytes, which rows of operands are to be a multiple of.
# Source: NVIDIA, Matrix Multiplication Background User's Guide, "Requirements to use Tensor Cores".
_ALIGNED = 8
_UNALIGNED_LOSS = 0.5  # assumed, as a bound: newer versions of cuBLAS lose less
# Time of FlashAttention-2 / time of cuDNN's ragged attention, forward and backward, by the keys that a query sees on
# average: short questions; a window of 1,024; images with text. Beyond it stays between 1.5 and 1.6.
# Source: benchmarks/results/attention_gpu_nvidia-h200_202611.json (head sizes 128 and 72, torch 2.11).
_CUDNN_SPEEDUPS = ((313, 685, 1276), (0.6, 1.4, 1.5))
# cuDNN's names hold sm90_flash_fprop, those of FlashAttention-3 FlashAttnFwdSm90.
_FLASH_2 = re.compile(r"(?<![a-z0-9]_)flash_(fwd|bwd)_")
_FLOPS_PER_PAIR = 4  # and element of a head: a product of query and key, one of weight and value
# Families of devices with faster kernels, by the major compute capability: Hopper and Blackwell.
_FASTER_THAN_FLASH_2 = {9: "slow-attention/Hopper", 10: "slow-attention"}
_CHAIN = 4  # kernels: a norm that is written out has five or more, one that is fused has one or two


def misaligned_gemms(evidence: StepEvidence) -> Observation | None:
    """Matrix products with a side that tensor cores cannot read well."""
    if evidence.is_cpu:
        return None
    sides: Counter[tuple[int, bool]] = Counter()
    ns = 0
    for event in evidence.spent:
        product = event.product
        if product is not None and event.line == MATMUL:
            # the weight's sides: along them rows of the operands are contiguous
            odd = {side for side in (product.k, product.n) if side % _ALIGNED and side > 1}
            if odd:
                ns += round(event.ns * _UNALIGNED_LOSS)
                # both factors of a batched product are activations, so its sides are sequence lengths
                is_batched = event.operator.endswith(("::bmm", "::baddbmm")) or product.batch > 1
                sides.update({(side, is_batched): event.ns for side in odd})
    if not sides:
        return None
    (((side, is_length), _),) = sides.most_common(1)
    kind, padded = "/length" * is_length, math.ceil(side / 64) * 64
    all_ns = round(ns / _UNALIGNED_LOSS)
    return observe(evidence, f"misaligned-gemms{kind}", ns, side=side, padded=padded, all=all_ns)


def unfused_chains(evidence: StepEvidence) -> Observation | None:
    """Chains of memory-bound kernels, such as norms that are written out, by innermost module."""
    of_module: dict[str, list[EventTime]] = defaultdict(list)
    for event in evidence.spent:
        if event.module and event.line in ("memory", MATMUL) and event.ns:
            of_module[event.module].append(event)
    # A module that holds others counts through these; one with a matrix product is no chain of memory-bound kernels.
    calls = _calls(evidence)
    holds_others = {module.rpartition(".")[0] for module in calls}
    lengths: dict[str, float] = {}  # kernels a call, by module; chains alone
    for module, events in of_module.items():
        if module in holds_others:
            continue
        forward = [event for event in events if event.phase in (Phase.FORWARD, Phase.RECOMPUTED)]
        length = _num_kernels(forward, is_cpu=evidence.is_cpu) / calls[module] if calls[module] else 0.0
        if length >= _CHAIN and all(event.line == "memory" for event in events):
            lengths[module] = length
    if not lengths:
        return None
    # Each kernel of the chain reads and writes all of its operand, so of `length` passes one would do. Of the steps the
    # median counts: what comes once, as a core that is taken away, is not the chain's.
    shares = [
        sum(event.ns * (1 - 1 / lengths[event.module]) for event in events if event.module in lengths)
        / step.duration_ns
        for step, events in zip(evidence.measured_steps, evidence.spent_by_step, strict=True)
    ]
    ns = median(shares) * evidence.duration_ns
    return observe(evidence, "unfused-chains", round(ns), number=len(lengths))


def _num_kernels(events: Sequence[EventTime], *, is_cpu: bool) -> int:
    """Count the kernels among events; on a CPU the operators that a module calls directly, none within them."""
    if not is_cpu:
        return len(events)
    depths: dict[Phase, Counter[int]] = defaultdict(Counter)
    for event in events:
        depths[event.phase][event.trace.attribution.contexts[event.event].depth] += 1
    return sum(counted[min(counted)] for counted in depths.values())


def _calls(evidence: StepEvidence) -> Counter[str]:
    calls: Counter[str] = Counter()
    for step in evidence.steps:
        if step.measured is None:
            continue
        measured, own = step.measured
        host, names = measured.trace.host, measured.trace.names
        owned = own.owned
        if not owned:
            continue
        launches = [int(measured.attribution.launch[owned_time.event]) for owned_time in owned]
        moments = [int(host.start_ns[i]) for i in launches if i != NONE]
        if not moments:
            continue
        inside = (host.kind == Kind.ANNOTATION) & (host.end_ns > min(moments)) & (host.start_ns <= max(moments))
        for index in host.name[inside].tolist():
            if names[index].startswith("module:"):
                calls[names[index].removeprefix("module:")] += 1
    return calls


def slow_attention(evidence: StepEvidence) -> Observation | None:
    """Attention by a kernel that is not the best the device has."""
    memory = [event for event in evidence.spent if "efficient_attention" in event.operator]
    capability = _capability(evidence)
    if memory and capability >= (8, 0):
        ns = sum(event.ns for event in memory)
        return observe(evidence, "slow-attention/efficient", ns // 2, all=ns)
    return _flash_attention_2(evidence, capability[0]) if capability[0] in _FASTER_THAN_FLASH_2 else None


def _flash_attention_2(evidence: StepEvidence, major: int) -> Observation | None:
    """FlashAttention-2 on a device for which there are faster kernels."""
    all_ns = 0
    saved_ns = 0.0
    for step, events in zip(evidence.measured_steps, evidence.spent_by_step, strict=True):
        flash2 = [e for e in events if "flash_attention" in e.operator and _FLASH_2.search(e.name)]
        attention = _attention_of(step) if flash2 else None
        for event in flash2:
            keys = _keys_of_a_query(event, attention)
            speedup = float(np.interp(math.inf if keys is None else keys, *_CUDNN_SPEEDUPS))
            all_ns += event.ns
            saved_ns += event.ns * (1 - 1 / speedup)
    if saved_ns <= 0:
        return None
    (fewest, *_, most), (slowest, *_, fastest) = _CUDNN_SPEEDUPS
    values = {"fewest": fewest, "most": most, "slowest": slowest, "fastest": fastest, "all": all_ns}
    return observe(evidence, _FASTER_THAN_FLASH_2[major], saved_ns, **values)


def _attention_of(step: StepWaterfall) -> StepAttention | None:
    if step.measured is None or step.measured[0].trace.headway is None:
        return None
    trace = step.measured[0].trace
    budget = NeededWork(step.measured[0].trace.headway, str(trace.path))
    return None if budget.packs(step.step) is None else StepAttention(step.measured[0], step.step, budget)


def _keys_of_a_query(event: EventTime, attention: StepAttention | None) -> float | None:
    """Mean number of keys that a query of a call of attention sees; None if it is unknown."""
    operands = event.trace.operands_of(event.event)
    if operands is None or not operands.sizes or len(operands.sizes[0]) < 3:
        return None
    # The first operand: queries, or in backward gradients of their results: (batches x) tokens x heads x head size.
    first = operands.sizes[0]
    layer = None if attention is None else attention.of(event.event)
    if attention is not None and layer is not None and layer in attention.flops:
        return attention.flops[layer].get(Phase.FORWARD, 0) / (_FLOPS_PER_PAIR * math.prod(first))
    # Else lengths tell: segments are ends in a row, with a 0 before them. Half the keys, as of causal ones.
    ends = next((size[0] for size in operands.sizes if len(size) == 1 and size[0] > 1), None)
    if len(first) == 3:
        return None if ends is None else first[0] / (ends - 1) / 2
    return first[1] / 2


def _capability(evidence: StepEvidence) -> tuple[int, int]:
    return max(
        (step.measured[0].trace.capability or (0, 0) for step in evidence.steps if step.measured), default=(0, 0)
    )


def recomputation(evidence: StepEvidence) -> Observation | None:
    """Activations that are computed again though there is memory to keep them."""
    memory = evidence.fact("memory")
    if not isinstance(memory, Mapping):
        return None
    total, peak = as_number(memory.get("total_bytes")), as_number(memory.get("peak_bytes"))
    if total is None or peak is None or total - peak < total / 4:  # less may be what a larger pack or the heap needs
        return None
    free = total - peak
    again = [event for event in evidence.spent if event.phase is Phase.RECOMPUTED]
    # On a CPU Python runs again as well, between the operators.
    ns = sum(event.ns + (event.late_ns if evidence.is_cpu else 0) for event in again) or evidence.ns("recomputation")
    how = evidence.fact("recompute") or "of some modules"
    needed_ns = evidence.ns("recomputation")
    # The table's line is what its products need; what they take beyond it is in the lines `slow`.
    of_products = f", {evidence.share(needed_ns)} if its products reached the ceiling" if 0 < needed_ns < ns else ""
    return observe(
        evidence,
        "recomputation",
        ns,
        how=how,
        of_products=of_products,
        free=free / 2**30,
        total=total / 2**30,
        keep=max(1, int(0.8 * free / 2**30)),
    )


def padding(evidence: StepEvidence) -> Observation | None:
    """Slots that hold no token, and are computed like the slots of tokens."""
    tokens, slots = evidence.total("tokens"), evidence.total("slots")
    if not tokens or not slots or tokens >= slots:
        return None
    empty = 1 - tokens / slots
    ns = round(empty * (evidence.matmul_ns + evidence.ns("memory")))
    return observe(evidence, "padding", ns, empty=empty)


def _component_ns(evidence: StepEvidence, begins: str) -> int:
    """Time of the matmul-class kernels of components whose names begin with a prefix [ns]."""
    split = (evidence.parts(key) for key in ("useful", "ceiling", "recomputation", "padding"))
    shared = sum(ns for parts in split for name, ns in parts.items() if name.startswith(begins))
    return shared + sum(evidence.ns_of(key) for key in evidence.keys if key.startswith(f"{SLOW}.{begins}"))


def vision_tower(evidence: StepEvidence) -> Observation | None:
    """Backward of the vision tower."""
    ns = _component_ns(evidence, "vision")
    flops: Counter[str] = Counter()
    for step in evidence.steps:
        for name, phases in (evidence.step_fact(step, "useful_flops") or {}).items():
            if name.startswith("vision"):
                flops.update(phases)
    if ns <= 0 or not flops["backward"]:
        return None
    saved = round(ns * flops["backward"] / flops.total())
    return observe(evidence, "vision-tower", saved, all=ns)


def uneven_experts(evidence: StepEvidence) -> Observation | None:
    """Experts that have more tokens than the rest, which waits for them."""
    routers = [evidence.step_fact(step, "router") for step in evidence.steps]
    numbers = [as_number(router.get("max_over_mean")) for router in routers if isinstance(router, Mapping)]
    ratios = [ratio for ratio in numbers if ratio is not None]
    if not ratios:
        return None
    ratio = sum(ratios) / len(ratios)
    ns = round(_component_ns(evidence, "language.experts") * (1 - 1 / max(1.0, ratio)))
    return observe(evidence, "uneven-experts", ns, ratio=ratio)


def throttled_clocks(evidence: StepEvidence) -> Observation | None:
    """A clock of the device below its highest, so that computing takes longer."""
    slower = 0.0
    for rank in evidence.ranks:
        clocks = evidence.fact("clocks", rank)
        if isinstance(clocks, Mapping):
            now, most = as_number(clocks.get("sm_mhz")), as_number(clocks.get("most_sm_mhz"))
            slower = max(slower, 1 - now / most if now and most else 0.0)
    if not slower:
        return None
    ns = round(slower * evidence.matmul_ns)
    return observe(evidence, "throttled-clocks", ns, slower=slower)


def recorded_clocks(evidence: RunEvidence) -> Observation | None:
    """A clock below its highest in samples beside the steps, with the reasons that the driver gives."""
    sampled = [step for step in evidence.steps if step.clock is not None]
    if not sampled:
        return None
    slower = 1 - median(step.clock or 1.0 for step in sampled)
    ns = round(slower * sum(step.duration_ns - step.waited_ns for step in evidence.steps))
    reasons = [name for name, _ in Counter(limit for step in sampled for limit in step.limits).most_common()]
    limits = f", held by {' and '.join(reasons)}" if reasons else ""
    return observe(evidence, "throttled-clocks", ns, slower=slower, number=len(sampled), reasons=limits)


def recorded_padding(evidence: RunEvidence) -> Observation | None:
    """Slots without a token, on which layers spend as much as on tokens."""
    ns = sum(step.padding_ns for step in evidence.steps)
    if not ns:
        return None
    empty = sum(step.empty_share * step.duration_ns for step in evidence.steps) / evidence.duration_ns
    return observe(evidence, "padding", ns, empty=empty)


def recorded_recomputation(evidence: RunEvidence) -> Observation | None:
    """Activations that are computed again, where memory would keep them, as far as is known."""
    ns = sum(step.recomputed_ns for step in evidence.steps)
    memory = max((step.memory_share or 0.0 for step in evidence.steps), default=0.0)
    if not ns or memory > 0.75:  # less may be what a larger batch or the heap needs
        return None
    free = f", and {format_share(1 - memory)} of the device's memory were free at the peak" if memory else ""
    return observe(evidence, "recomputation", ns, of_products=free, keep="N")


_KERNELS = ("memory", "slow", "matmul", "optimizer")
RULES = (
    Rule("misaligned-gemms", RuleObserver(misaligned_gemms, 0.05, lines=("slow", "matmul"))),
    # Norms and activations of an ordinary step take 5 to 10 % on a device, written out 10 to 16 % on a CPU.
    Rule("unfused-chains", RuleObserver(unfused_chains, 0.20, lines=("memory",))),
    Rule("slow-attention", RuleObserver(slow_attention, 0.03, lines=("slow", "matmul"))),
    # Recomputing attention alone costs some 3 %; a whole forward again is a fifth to a quarter.
    Rule(
        "recomputation",
        RuleObserver(recomputation, 0.05, lines=("recomputation", *_KERNELS)),
        RuleObserver(recorded_recomputation, 0.05),
    ),
    # Packs of a balanced plan are 95 to 99 % full.
    Rule("padding", RuleObserver(padding, 0.10, lines=("padding", *_KERNELS)), RuleObserver(recorded_padding, 0.10)),
    # A frozen tower of ordinary images takes 10 to 20 %; its backward alone more than this is worth the question.
    Rule("vision-tower", RuleObserver(vision_tower, 0.30, place=FindingPlace.CHOICE, lines=("slow", "matmul"))),
    Rule("uneven-experts", RuleObserver(uneven_experts, 0.05, lines=("slow", "communication"))),
    # Boards vary by some per cent, and a product at its power limit runs 5 to 10 % below the highest clock.
    Rule(
        "throttled-clocks",
        RuleObserver(throttled_clocks, 0.10, lines=("slow", "matmul")),
        RuleObserver(recorded_clocks, 0.10),
    ),
)
