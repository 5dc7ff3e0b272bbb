"""Rules about what runs: products too small, chains of element-wise operators, attention, recomputation, padding."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from headway.explain.attribution import Phase
from headway.explain.events import NONE, Kind, Product
from headway.explain.findings.evidence import EventTime, Evidence, Observation, as_number
from headway.explain.measurement import MATMUL

# A launch takes the host some 5 us, and an operator of PyTorch on a CPU as long, so a product that takes less at peak
# costs its launch.
_LAUNCH_S = 5e-6
# Elements of two bytes in 16 bytes, which rows of operands are to be a multiple of.
# Source: NVIDIA, Matrix Multiplication Background User's Guide, "Requirements to use Tensor Cores".
_ALIGNED = 8
_UNALIGNED_LOSS = 0.5  # assumed, as a bound: newer versions of cuBLAS lose less
_MANY = 16  # small products of one module in a step, from which they are a loop
_CHAIN = 4  # kernels: a norm that is written out has five or more, one that is fused has one or two


def small_gemms(evidence: Evidence) -> Observation | None:
    """Many matrix products take less than their launch."""
    products = small_products(evidence)
    names = Counter(event.operator for event in products if _product(event) is not None)
    if not names:
        return None
    ns = sum(event.ns + event.late_ns for event in products)
    ((name, number),) = names.most_common(1)
    modules = Counter(event.module for event in products if event.module)
    where = f", most of them in {modules.most_common(1)[0][0]}" if modules else ""
    return Observation(
        ns,
        f"{names.total() / evidence.num_steps:,.0f} matrix products a step, {number / names.total():.0%} of them {name}"
        f"{where}, take less than {_LAUNCH_S * 1e6:.0f} us at peak each; with what stands around them "
        f"{evidence.share(ns)} of the time.",
        "a loop over tokens, heads or experts multiplies small matrices one after the other.",
        "one batched product (torch.bmm, a linear layer on the whole pack) in place of the loop, or larger packs "
        "(data.tokens_per_pack).",
    )


def misaligned_gemms(evidence: Evidence) -> Observation | None:
    """Matrix products have a side that tensor cores cannot read well."""
    if evidence.is_cpu:
        return None
    sides: Counter[int] = Counter()
    ns = 0
    for event in evidence.spent:
        product = _product(event)
        if product is not None and event.line == MATMUL:
            # the weight's sides: along them rows of the operands are contiguous
            odd = [side for side in (product.k, product.n) if side % _ALIGNED and side > 1]
            if odd:
                ns += round(event.ns * _UNALIGNED_LOSS)
                sides.update(dict.fromkeys(odd, event.ns))
    if not sides:
        return None
    ((side, _),) = sides.most_common(1)
    return Observation(
        ns,
        f"matrix products with a side of {side:,}, which is no multiple of {_ALIGNED}, took "
        f"{evidence.share(round(ns / _UNALIGNED_LOSS))} of the time.",
        "a vocabulary or a width that is no multiple of 8 keeps tensor cores from reading whole lines.",
        f"pad that side to {math.ceil(side / 64) * 64:,} (model.resize_token_embeddings(pad_to_multiple_of=64)); for "
        "lengths, data.bucket_tokens: 64.",
    )


def small_products(evidence: Evidence) -> list[EventTime]:
    """Matrix products that take less than their launch at peak, or where no peak is known did.

    Of a module in which there are many, all events: slices, transposes and sums are how the loop hands them around.
    """
    small = [event for event in evidence.spent if _is_small(event)]
    number_in = Counter(event.module for event in small if event.module)
    loops = {module for module, number in number_in.items() if number >= _MANY * evidence.num_steps}
    return [event for event in small if event.module not in loops] + [
        event for event in evidence.spent if event.module in loops
    ]


def _is_small(event: EventTime) -> bool:
    product = _product(event)
    if product is None or event.line not in (MATMUL, ""):
        return False
    headway = event.trace.trace.headway or {}
    peak = as_number(headway.get("ceiling_flops_per_s") or headway.get("peak_flops_per_s"))
    at_best_s = product.flops / peak if peak else event.ns / 1e9
    return at_best_s < _LAUNCH_S


def _product(event: EventTime) -> Product | None:
    """Sizes of the matrix product that an event belongs to; None if it is none, or they were not recorded."""
    operands = event.trace.operands_of(event.event)
    return None if operands is None else operands.product(event.operator)


def unfused_chains(evidence: Evidence) -> Observation | None:
    """Modules that hold no others and are chains of memory-bound kernels, such as norms that are written out."""
    of_module: dict[str, list[EventTime]] = defaultdict(list)
    for event in evidence.spent:
        if event.module and event.line in ("memory", MATMUL) and event.ns:
            of_module[event.module].append(event)
    calls = _calls(evidence)
    holds_others = {module.rpartition(".")[0] for module in calls}
    ns, modules = 0.0, 0
    for module, events in of_module.items():
        if module in holds_others:
            continue
        forward = [event for event in events if event.phase in (Phase.FORWARD, Phase.RECOMPUTED)]
        length = _num_kernels(forward, is_cpu=evidence.is_cpu) / calls[module] if calls[module] else 0.0
        if length >= _CHAIN and all(event.line == "memory" for event in events):
            modules += 1
            ns += sum(event.ns for event in events) * (1 - 1 / length)
    if not modules:
        return None
    return Observation(
        round(ns),
        f"{modules} modules without matrix products, such as norms and activations, are chains of {_CHAIN} or more "
        f"memory-bound kernels; one kernel each would save {evidence.share(round(ns))} of the time.",
        "norms, activations or rotary embeddings are written out in PyTorch, so each operator reads and writes all.",
        "speed.compile: true, or speed.kernels: liger; in your own model torch.nn.RMSNorm and torch.compile.",
    )


def _num_kernels(events: Sequence[EventTime], *, is_cpu: bool) -> int:
    """Count the kernels among events; on a CPU the operators that a module calls directly, not those inside them."""
    if not is_cpu:
        return len(events)
    depths: dict[Phase, Counter[int]] = defaultdict(Counter)
    for event in events:
        depths[event.phase][event.trace.attribution.contexts[event.event].depth] += 1
    return sum(counted[min(counted)] for counted in depths.values())


def _calls(evidence: Evidence) -> Counter[str]:
    """Count how often each module was called in the steps."""
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


def slow_attention(evidence: Evidence) -> Observation | None:
    """Attention runs by a kernel that is not the best the device has."""
    flash2 = [event for event in evidence.spent if "flash_attention" in event.operator and "flash_" in event.name]
    memory = [event for event in evidence.spent if "efficient_attention" in event.operator]
    capability = _capability(evidence)
    if memory and capability >= (8, 0):
        events, kind, advice = memory, "the memory-efficient kernel", "speed.attention: auto, whose masks are segments"
    elif flash2 and capability[0] == 9:
        events, kind, advice = flash2, "FlashAttention-2 on a Hopper device", "speed.attention: fa3"
    else:
        return None
    ns = sum(event.ns for event in events) // 2
    return Observation(
        ns,
        f"attention ran by {kind}, for {evidence.share(2 * ns)} of the time.",
        "the device has a faster kernel; FlashAttention-3 is 1.5 to 2 times as fast as 2 (arXiv 2407.08608).",
        f"{advice}; in a model of transformers attn_implementation.",
    )


def _capability(evidence: Evidence) -> tuple[int, int]:
    """Compute capability of the device; (0, 0) where no trace tells it."""
    return max(
        (step.measured[0].trace.capability or (0, 0) for step in evidence.steps if step.measured), default=(0, 0)
    )


def recomputation(evidence: Evidence) -> Observation | None:
    """Activations are computed again though there is memory to keep them."""
    memory = evidence.fact("memory")
    if not isinstance(memory, Mapping):
        return None
    total, peak = as_number(memory.get("total_bytes")), as_number(memory.get("peak_bytes"))
    if total is None or peak is None or total - peak < total / 4:  # less may be what a larger pack or the heap needs
        return None
    free = total - peak
    ns = sum(event.ns for event in evidence.spent if event.phase is Phase.RECOMPUTED) or evidence.ns("recomputation")
    how = evidence.fact("recompute")
    return Observation(
        ns,
        f"recomputation (speed.recompute: {how}) took {evidence.share(ns)} of the time, and {free / 2**30:,.1f} of "
        f"{total / 2**30:,.1f} GiB were free at the peak.",
        "more blocks are recomputed than memory asks for.",
        f"speed.recompute: memory:{max(1, int(0.8 * free / 2**30))}GiB, which recomputes only as much as it must, or "
        "full,-attention.",
    )


def padding(evidence: Evidence) -> Observation | None:
    """Slots that hold no token are computed like others."""
    tokens, slots = evidence.total("tokens"), evidence.total("slots")
    if not tokens or not slots or tokens >= slots:
        return None
    empty = 1 - tokens / slots
    ns = round(empty * (evidence.matmul_ns + evidence.ns("memory")))
    return Observation(
        ns,
        f"{empty:.0%} of the slots were padding, on which layers spend as much as on tokens: about "
        f"{evidence.share(ns)} of the time.",
        "samples are padded to the longest of a batch, or packs to a large bucket.",
        "pack samples end to end: data.strategy: balanced with data.tokens_per_pack; a smaller data.bucket_tokens, or "
        "null.",
    )


def component_ns(evidence: Evidence, begins: str) -> int:
    """Time of the matmul-class kernels of the components whose names begin with a prefix [ns]."""
    split = (evidence.parts(key) for key in ("useful", "ceiling", "recomputation", "padding"))
    shared = sum(ns for parts in split for name, ns in parts.items() if name.startswith(begins))
    slow = {name.removeprefix("slow.") for step in evidence.steps for line in step.lines for name in [line.key]}
    return shared + sum(evidence.ns(f"slow.{name}") for name in slow if name.startswith(begins))


def vision_tower(evidence: Evidence) -> Observation | None:
    """The vision tower learns, and its backward takes time."""
    ns = component_ns(evidence, "vision")
    flops: Counter[str] = Counter()
    for step in evidence.steps:
        for name, phases in (evidence.step_fact(step, "useful_flops") or {}).items():
            if name.startswith("vision"):
                flops.update(phases)
    if ns <= 0 or not flops["backward"]:
        return None
    saved = round(ns * flops["backward"] / flops.total())
    return Observation(
        saved,
        f"matrix products of the vision tower took {evidence.share(ns)} of the time, {evidence.share(saved)} in its "
        "backward.",
        "images are many or large, and the tower learns with the rest.",
        "model.freeze: [vision], if the tower need not learn; or smaller images (the processor's size).",
    )


def uneven_experts(evidence: Evidence) -> Observation | None:
    """Some experts have more tokens than others, and the busiest is waited for."""
    routers = [evidence.step_fact(step, "router") for step in evidence.steps]
    numbers = [as_number(router.get("max_over_mean")) for router in routers if isinstance(router, Mapping)]
    ratios = [ratio for ratio in numbers if ratio is not None]
    if not ratios:
        return None
    ratio = sum(ratios) / len(ratios)
    ns = round(component_ns(evidence, "language.experts") * (1 - 1 / max(1.0, ratio)))
    return Observation(
        ns,
        f"the busiest expert of a layer had {ratio:.1f} times the mean of its experts; waiting for it costs up to "
        f"{evidence.share(ns)} of the time.",
        "the router prefers some experts, so others and their devices idle.",
        "a larger router_aux_loss_coef in the model's config.json, or fewer parallel.expert.",
    )
