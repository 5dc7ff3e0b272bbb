"""Rules about what the records of a run tell of its steps beside their rates: where a step's time went."""

from collections import Counter
from collections.abc import Mapping
from statistics import median

from headway.explain.findings import ranks, rollout
from headway.explain.findings.evidence import Observation, SteadyEvidence
from headway.explain.findings.loops import FUSED_PART
from headway.report import format_share

_GAPS = {
    "input": "between the batch's arrival and the forward",
    "gradients": "between the backward and the update",
    "after": "behind the update",
}
_LEAST_GAP = 0.02  # share of the time below which a gap is what every loop has
_PURPOSES = {
    "logging": (
        "a logging handler or tracker is waited for at every step.",
        "log every N steps, or from a thread of its own (logging.handlers.QueueHandler).",
    ),
    "checkpoint": (
        "the state is written within the steps, and training waits for the disk.",
        "save less often, and write from a copy while training goes on (async_save of PyTorch's distributed "
        "checkpoints); `with meter.away('checkpoint')` keeps it out of the steps' time.",
    ),
    "read-back": (
        "numbers are read out of tensors one after the other: .item(), float(), .numpy().",
        "keep numbers on the device, add them up there, and read them every N steps.",
    ),
    "parameter-loop": (
        "Python goes through the parameters, one small operator after the other.",
        "one call for all of them, such as clip_grad_norm_ or torch._foreach_add_ and its like; or do it every N "
        "steps.",
    ),
    "": (
        "the loop does something else than training there, and the device waits.",
        "do it less often, in another thread or in the data loader's workers.",
    ),
}


def collections(evidence: SteadyEvidence) -> Observation | None:
    """Python's garbage collections, for which all its threads stand still."""
    ns = sum(step.collection_ns for step in evidence.steps)
    return Observation(
        ns,
        f"Python collected garbage for {format_share(ns / evidence.duration_ns)} of the time.",
        "gc.collect() is called in the loop, or a large heap of Python's objects is gone through again and again.",
        "gc.freeze() after the set-up, gc.disable() with a collection every some hundred steps, or fewer and larger "
        "objects (tensors, arrays) in place of many small ones.",
    )


def pause(evidence: SteadyEvidence, purpose: str) -> Observation | None:
    """Time between the phases of a step, in which the loop does something else.

    Args:
        evidence: of the steps.
        purpose: what the code in the gap is for, a key of `_PURPOSES`; "" where nothing is known of it.
    """
    if not purpose and rollout.rest_without_work(evidence):
        return None  # `host_phase` tells of it
    gaps = {gap: ns for gap, ns in _gaps(evidence).items() if _purpose(evidence, gap) == purpose}
    if not gaps:
        return None
    ns = sum(gaps.values())
    codes: Counter[str] = Counter()
    for step in evidence.steps:
        for gap, code, _, spent_ns in step.places:
            codes[code] += spent_ns if gap in gaps else 0
    where = " and ".join(_GAPS[gap] for gap in gaps)
    message = f"the loop spent {format_share(ns / evidence.duration_ns)} of the time {where}"
    if codes and (top := codes.most_common(1)[0])[1]:
        message += f", mostly in {top[0]}"
    cause, advice = _PURPOSES[purpose]
    return Observation(ns, f"{message}.", cause, advice)


def _gaps(evidence: SteadyEvidence) -> dict[str, int]:
    """Time of the gaps that are worth a word, in all steps, without collections of garbage [ns].

    Without an optimizer that is seen, its update is in a gap itself, and none behind the backward can be told.
    """
    timed = [step for step in evidence.steps if step.phases_ns]
    timed_ns = sum(step.duration_ns for step in timed)
    if not timed_ns:
        return {}
    gaps = _GAPS if any(step.phases_ns.get("optimizer") for step in timed) else ("input",)
    shares = {gap: sum(step.phases_ns.get(gap, 0) for step in timed) / timed_ns for gap in gaps}
    # Where no look fell on code of the loop, its usual length is all that is known: other processes stretch some.
    for gap in shares.keys() - {place_gap for step in evidence.steps for place_gap, *_ in step.places}:
        usual_ns = median(step.phases_ns.get(gap, 0) for step in timed) * len(timed)
        shares[gap] = min(shares[gap], usual_ns / timed_ns)
    # Phases that the loop names lie in the gaps too, and have rules of their own.
    if any(step.loop_phases for step in timed):
        workless = sum(map(rollout.workless_ns, evidence.steps)) / evidence.duration_ns
        shares = {gap: max(0.0, share - workless) for gap, share in shares.items()}
    # A collection is where the loop calls it, or where most objects are made: in the longest gap as far as it fits.
    dearest = max(shares, key=lambda gap: shares[gap])
    shares[dearest] -= sum(step.collection_ns for step in evidence.steps) / evidence.duration_ns
    return {gap: round(share * evidence.duration_ns) for gap, share in shares.items() if share > _LEAST_GAP}


def _purpose(evidence: SteadyEvidence, gap: str) -> str:
    """Name what the code in a gap is for, where most of the looks at it agree."""
    purposes: Counter[str] = Counter()
    for step in evidence.steps:
        for place_gap, _, purpose, ns in step.places:
            purposes[purpose] += ns if place_gap == gap else 0
    if not purposes.total():
        return ""
    purpose, ns = purposes.most_common(1)[0]
    return purpose if ns > purposes.total() / 2 and purpose in _PURPOSES else ""


def optimizer_loop(evidence: SteadyEvidence) -> Observation | None:
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


def double_precision(evidence: SteadyEvidence) -> Observation | None:
    """Weights of 64 bits, whose products take at least twice as long."""
    if any(step.facts.get("weights_dtype") != "float64" for step in evidence.steps):
        return None
    ns = sum(step.phases_ns.get(phase, 0) for step in evidence.steps for phase in ("forward", "backward"))
    return Observation(
        ns // 2,
        "the model's weights have 64 bits, and its forward and backward took "
        f"{format_share(ns / evidence.duration_ns)} of the time.",
        "weights were made from NumPy's numbers, or torch.set_default_dtype(torch.float64) is set.",
        "weights of 32 bits (`.float()`), and bfloat16 where the device has it.",
    )


def anomaly_mode(evidence: SteadyEvidence) -> Observation | None:
    """Anomaly mode, which slows forward and backward by an amount that records do not tell."""
    if not all(step.facts.get("anomaly_mode") for step in evidence.steps):
        return None
    return Observation(
        0,
        "torch.autograd.set_detect_anomaly is on: forward notes a stack for each operator, and backward looks at every "
        "gradient.",
        "it was switched on to look for a number that is not finite, and left on.",
        "torch.autograd.set_detect_anomaly(False).",
    )


def slow_rank(evidence: SteadyEvidence) -> Observation | None:
    """One rank that the others wait for: by when it comes to its backward, else by the rate of its forwards."""
    lateness = _late_rank(evidence)
    if lateness is not None and lateness.ns >= 0.05 * evidence.duration_ns:  # equal ranks come a few per cent apart
        return lateness
    return ranks.slow_device(evidence)


def _late_rank(evidence: SteadyEvidence) -> Observation | None:
    """One rank that comes later to its backward than all others, which wait for its gradients."""
    compared = [step for step in evidence.steps if step.late_rank is not None]
    if not compared:
        return None
    rank, times = Counter(step.late_rank for step in compared).most_common(1)[0]
    if times < 0.8 * len(compared):  # otherwise it is now this one and now that one
        return None
    slow = [step for step in compared if step.late_rank == rank]
    ns = sum(step.late_ns for step in slow)
    phase = Counter({step.late_phase: 0 for step in slow})
    for step in slow:
        phase[step.late_phase] += step.late_ns
    dearest = phase.most_common(1)[0][0]
    reasons = {
        "data": ("it waits longer for its data.", "its loader's workers and its storage."),
        "forward": ("its device or its cores are slower, or its batches larger.", "clocks and other processes there, "
                    "and the tokens of each rank (rank_flops)."),
    }  # fmt: skip
    other = ("its host does something before the forward that the others do not.", "what the loop does on that rank.")
    cause, advice = reasons.get(dearest, other)
    return Observation(
        ns,
        f"rank {rank} came to its backward {ns / len(slow) / 1e6:,.1f} ms later than any other in {times} of "
        f"{len(compared)} steps, most of it in the phase '{dearest}'; the others wait for it.",
        cause,
        advice,
    )


def host_bound(evidence: SteadyEvidence) -> Observation | None:
    """A host that is never ahead of its device, which then waits for each launch."""
    led = [step for step in evidence.steps if step.lead_ns is not None and step.phases_ns]
    if not led or len(led) < len(evidence.steps) / 10:
        return None
    led_ns = sum(step.duration_ns for step in led)
    lead = sum(step.lead_ns or 0 for step in led) / led_ns
    if lead > 0.05:
        return None
    launching_ns = sum(step.phases_ns.get(phase, 0) for step in led for phase in ("forward", "backward", "optimizer"))
    share = launching_ns / led_ns
    ns = share * evidence.duration_ns - (evidence.useful_ns or 0.0)
    return Observation(
        ns,
        f"the host was at most {format_share(lead)} of a step ahead of the device, and took {format_share(share)} of "
        "the time for forward, backward and update: the device waits for its launches.",
        "the steps are many small operators, which Python takes longer to launch than they take to run, or the host "
        "waits for the device again and again.",
        "larger batches or packs, torch.compile or CUDA graphs: fewer and larger launches; a profile tells which.",
    )


def padding(evidence: SteadyEvidence) -> Observation | None:
    """Slots without a token, on which layers spend as much as on others."""
    ns = sum(step.padding_ns for step in evidence.steps)
    if not ns:
        return None
    empty = sum(step.empty_share * step.duration_ns for step in evidence.steps) / evidence.duration_ns
    return Observation(
        ns,
        f"{format_share(empty)} of the slots were padding, on which layers spend as much as on tokens: up to "
        f"{format_share(ns / evidence.duration_ns)} of the time.",
        "samples are padded to the longest of a batch or to a fixed length, or packs to a large bucket.",
        "samples laid end to end (in headway train data.strategy: balanced with data.tokens_per_pack, and a smaller "
        "data.bucket_tokens or null); elsewhere batches of like lengths, padded to their own longest.",
    )


def recomputation(evidence: SteadyEvidence) -> Observation | None:
    """Activations that are computed again, where memory would keep them, as far as is known."""
    ns = sum(step.recomputed_ns for step in evidence.steps)
    memory = max((step.memory_share or 0.0 for step in evidence.steps), default=0.0)
    if not ns or memory > 0.75:  # less may be what a larger batch or the heap needs
        return None
    free = f", and {format_share(1 - memory)} of the device's memory were free at the peak" if memory else ""
    return Observation(
        ns,
        f"activations are computed again in backward: up to {format_share(ns / evidence.duration_ns)} of the time"
        f"{free}.",
        "more blocks are recomputed than memory asks for.",
        "no activation checkpointing, or of fewer blocks (in headway train speed.recompute: none, or memory:NGiB, "
        "which recomputes only as much as it must).",
    )
