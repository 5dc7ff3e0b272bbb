"""Rules about the host: it comes late with data or with launches, waits for the device, or does not train."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping

from headway.explain.attribution import Phase
from headway.explain.findings.evidence import EventTime, Observation, StepEvidence, as_number
from headway.explain.measurement import MATMUL

_UNKNOWN = ""
_DATA_ADVICE = {
    "read": ("reading rows and media from storage", "storage is slow or far away, and every sample is read when it is "
             "needed.", "more data.workers, which read side by side, a larger data.prefetch_bytes, or a copy of the "
             "data on a local disk."),
    "decode": ("decoding images, videos and sounds", "media are large, or stored in a way that is slow to decode.",
               "more data.workers; media that are stored at the size at which the model reads them."),
    "tokenise": ("tokenising", "long texts or templates are tokenised anew in every epoch.",
                 "more data.workers; documents that are tokenised once (data.train.N.format: tokens)."),
    _UNKNOWN: ("the loader", "batches take longer to make than to train on.",
               "more data.workers and a larger data.prefetch_bytes; in a DataLoader num_workers and prefetch_factor."),
}  # fmt: skip
# A launch takes the host some 5 us, and an operator of PyTorch on a CPU as long, so a product that takes less at peak
# costs its launch.
_LAUNCH_S = 5e-6
_MANY_PRODUCTS = 16  # small products of one module in a step, from which they are a loop
_AT_ONCE = ("aten::_fused_", "aten::_foreach_")
# Of these, what updates weights: gradients are clipped at once (_foreach_norm, _foreach_mul_) beside a loop too.
_UPDATES = re.compile(r"aten::(_fused_|_foreach_(add|sub|lerp))")
# A fused update is a few kernels for each group of parameters, with clipping some tens; a loop is about ten for each of
# hundreds of tensors.
_MANY_UPDATES = 100
_READ_BACK = "aten::item"
_READ_LATE_HINT = "keep numbers on the device until they are logged, and log every N steps (run.log_every)."
# In a step; models read some lengths and grids of a batch.
_MANY_READ_BACKS = 16
_CHORES = {
    Phase.COMPILE: ("compiling (torch.compile) took",
                    "something that the compiled code was specialised to changes from step to step, such as a length.",
                    "mark what changes as dynamic (torch.compile(dynamic=True)), or pad packs to few sizes "
                    "(data.bucket_tokens); speed.recompiles: error names the guard that failed."),
    Phase.CHECKPOINT: ("checkpoints took",
                       "the state is saved often, or training waits until it is written.",
                       "save less often (checkpoint.every), and write while training goes on (checkpoint.asynchronous: "
                       "true)."),
    Phase.LOGGING: ("logging took",
                    "numbers are read back and written at every step.",
                    "log less often (run.log_every) or to fewer places (run.trackers); keep numbers on the device "
                    "until then."),
    Phase.EVALUATION: ("evaluation took",
                       "the model is judged often, or on many samples.",
                       "judge less often (eval.every) or on fewer samples (eval.max_samples)."),
}  # fmt: skip
_COPIES = ("aten::copy_", "aten::_to_copy", "aten::to ", "cudaMemcpy", "hipMemcpy", "cuMemcpy")


def data_wait(evidence: StepEvidence, part: str) -> Observation | None:
    """Waiting for data, of whose making one part takes longest.

    Args:
        evidence: of the steps.
        part: read, decode, tokenise; "" where nobody took down what the workers did.
    """
    spent_s = _making_s(evidence)
    all_s = sum(spent_s.values())
    dearest = max(sorted(spent_s), key=spent_s.__getitem__) if all_s else _UNKNOWN
    if dearest != part:
        return None
    ns = evidence.ns("idle.data")
    what, cause, advice = _DATA_ADVICE[part]
    message = f"the step waited for data {evidence.share(ns)} of the time"
    if all_s:
        message += f"; of {all_s / evidence.num_steps:.2f} s that workers spent on a step's packs, "
        message += f"{spent_s[part] / all_s:.0%} was {what}"
    return Observation(ns, f"{message}.", cause, advice)


def _making_s(evidence: StepEvidence) -> dict[str, float]:
    """Time that workers spent on the packs of all steps by part [s]."""
    spent_s: defaultdict[str, float] = defaultdict(float)
    for step in evidence.steps:
        seconds_by_part = evidence.step_fact(step, "making_s")
        if isinstance(seconds_by_part, Mapping):
            for part, seconds in seconds_by_part.items():
                spent_s[part] += as_number(seconds) or 0.0
    return spent_s


def host_bound(evidence: StepEvidence) -> Observation | None:
    """Launches that come late; a CPU launches nothing ahead, so there the time between operators says little."""
    if evidence.is_cpu:
        return None
    overheads_s = [as_number(evidence.fact("profiler_overhead_s", step.rank)) for step in evidence.steps]
    profiler_ns = sum(max(0, round(overhead_s * 1e9)) for overhead_s in overheads_s if overhead_s is not None)
    other_findings = [*_loop_over_parameters(evidence), *_small_products(evidence)]  # which are findings of their own
    ns = max(0, evidence.ns("idle.launch") - profiler_ns - sum(event.late_ns for event in other_findings))
    return Observation(
        ns,
        f"nothing ran for {evidence.share(ns)} of the time, since the host had not launched it yet.",
        "each step is many small operators, which Python takes longer to launch than they take to run.",
        "larger packs (data.tokens_per_pack) and speed.compile: true: fewer and larger launches.",
    )


def small_gemms(evidence: StepEvidence) -> Observation | None:
    """Matrix products that take less than their launch."""
    products = _small_products(evidence)
    names = Counter(event.operator for event in products if event.product is not None)
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


def _small_products(evidence: StepEvidence) -> list[EventTime]:
    """Matrix products that take less than their launch at peak, or where no peak is known did.

    Of a module in which there are many, all events: slices, transposes and sums are how the loop hands them around.
    """
    small = [event for event in evidence.spent if _is_small(event)]
    number_in = Counter(event.module for event in small if event.module)
    loops = {module for module, number in number_in.items() if number >= _MANY_PRODUCTS * evidence.num_steps}
    return [event for event in small if event.module not in loops] + [
        event for event in evidence.spent if event.module in loops
    ]


def _is_small(event: EventTime) -> bool:
    product = event.product
    if product is None or event.line not in (MATMUL, ""):
        return False
    headway = event.trace.trace.headway or {}
    peak = as_number(headway.get("ceiling_flops_per_s") or headway.get("peak_flops_per_s"))
    if peak:
        return product.flops / peak < _LAUNCH_S
    # Measured, the whole of it: of a product that begins with the step's end little is this step's, but all its wait.
    events = event.trace.events
    at_best_s = int(events.end_ns[event.event] - events.start_ns[event.event]) / 1e9
    return at_best_s < _LAUNCH_S


def optimizer_loop(evidence: StepEvidence) -> Observation | None:
    """An optimizer that updates one tensor after the other."""
    events = _loop_over_parameters(evidence)
    if not events:
        return None
    ns = sum(event.ns + event.late_ns for event in events)
    return Observation(
        ns,
        f"the optimizer ran {len(events) / evidence.num_steps:,.0f} operators a step, one tensor after the other, for "
        f"{evidence.share(ns)} of the time.",
        "the optimizer is not fused: each tensor's update is a dozen operators of its own.",
        "AdamW(fused=True), or foreach=True; headway train's AdamW is fused (optim.name: adamw).",
    )


def _loop_over_parameters(evidence: StepEvidence) -> list[EventTime]:
    """Events of an optimizer that updates one tensor after the other; none of one that takes all at once."""
    all_of_it = [event for event in evidence.spent if event.phase is Phase.OPTIMIZER]
    if any(_UPDATES.match(event.operator) for event in all_of_it):
        return []
    one_by_one = [event for event in all_of_it if not event.operator.startswith(_AT_ONCE)]
    return one_by_one if len(one_by_one) > _MANY_UPDATES * evidence.num_steps else []


def synchronisation(evidence: StepEvidence) -> Observation | None:
    """Numbers that the host reads back from the device, which then waits for the host."""
    waits = {call: ns for call, ns in evidence.parts("idle.sync").items() if not call.startswith(_COPIES)}
    if not waits:
        return None
    ns, dearest = sum(waits.values()), max(sorted(waits), key=waits.__getitem__)
    return Observation(
        ns,
        f"the device idled for {evidence.share(ns)} of the time after the host had waited for it, mostly in {dearest}.",
        "a number is read back from the device within the step: .item(), .tolist(), print or an if.",
        _READ_LATE_HINT,
    )


def read_backs(evidence: StepEvidence) -> Observation | None:
    """Numbers that are read out of tensors on a CPU, which waits for nothing; on a device each would wait."""
    if not evidence.is_cpu:
        return None
    inside = (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTED)
    reads = [event for event in evidence.spent if event.operator == _READ_BACK and event.phase in inside]
    if len(reads) < _MANY_READ_BACKS * evidence.num_steps:
        return None
    ns = sum(event.ns + event.late_ns for event in reads)
    return Observation(
        ns,
        f"{len(reads) / evidence.num_steps:,.0f} numbers a step are read out of tensors, in {evidence.share(ns)} of "
        "the time; on a device each would wait for all that was launched before.",
        "the loop calls .item() or float() within the step, for one number after the other.",
        _READ_LATE_HINT,
    )


def blocking_copies(evidence: StepEvidence) -> Observation | None:
    """Copies while nothing computes, and time after the host has waited for one."""
    waits = sum(ns for call, ns in evidence.parts("idle.sync").items() if call.startswith(_COPIES))
    ns = evidence.ns("copies") + waits
    return Observation(
        ns,
        f"only copies ran, or the host waited for one, for {evidence.share(ns)} of the time.",
        "batches are copied from pageable memory, or right before they are used.",
        "pinned memory and copies ahead of the step: pin_memory=True and .to(device, non_blocking=True); headway train "
        "does so by itself, and parallel.offload: false keeps the weights on the device.",
    )


def beside_training(evidence: StepEvidence, phase: Phase) -> Observation | None:
    """Time within the steps in which the loop does something else than training.

    Args:
        evidence: of the steps.
        phase: what it does, a key of `_CHORES`.
    """
    parts = evidence.parts("aside")
    ns = parts[phase.value] + parts[f"{phase.value}, idle"]
    message, cause, advice = _CHORES[phase]
    return Observation(ns, f"{message} {evidence.share(ns)} of the time.", cause, advice)
