"""Rules about the host: it launches late, waits for the device, or does something else than training."""

from headway.explain.attribution import Phase
from headway.explain.findings.compute import small_products
from headway.explain.findings.evidence import Evidence, Observation, as_number
from headway.explain.findings.optimizer import loop_over_parameters

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


def host_bound(evidence: Evidence) -> Observation | None:
    """A device waits for launches; a CPU launches nothing ahead, so there the time between operators says little."""
    if evidence.is_cpu:
        return None
    overheads_s = [as_number(evidence.fact("profiler_overhead_s", step.rank)) for step in evidence.steps]
    profiler_ns = sum(max(0, round(overhead_s * 1e9)) for overhead_s in overheads_s if overhead_s is not None)
    other_findings = [*loop_over_parameters(evidence), *small_products(evidence)]  # which are findings of their own
    ns = max(0, evidence.ns("idle.launch") - profiler_ns - sum(event.late_ns for event in other_findings))
    return Observation(
        ns,
        f"nothing ran for {evidence.share(ns)} of the time, since the host had not launched it yet.",
        "each step is many small operators, which Python takes longer to launch than they take to run.",
        "larger packs (data.tokens_per_pack) and speed.compile: true: fewer and larger launches.",
    )


def synchronisation(evidence: Evidence) -> Observation | None:
    """The host reads a number back from the device, which then waits for the host."""
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


def read_backs(evidence: Evidence) -> Observation | None:
    """The loop reads numbers out of tensors; a CPU waits for nothing, but the same loop on a device would each time."""
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


def blocking_copies(evidence: Evidence) -> Observation | None:
    """Nothing computes while data are copied, or after the host has waited for a copy."""
    waits = sum(ns for call, ns in evidence.parts("idle.sync").items() if call.startswith(_COPIES))
    ns = evidence.ns("copies") + waits
    return Observation(
        ns,
        f"only copies ran, or the host waited for one, for {evidence.share(ns)} of the time.",
        "batches are copied from pageable memory, or right before they are used.",
        "pinned memory and copies ahead of the step: pin_memory=True and .to(device, non_blocking=True); headway train "
        "does so by itself, and parallel.offload: false keeps the weights on the device.",
    )


def beside_training(evidence: Evidence, phase: Phase) -> Observation | None:
    """The loop does something else than training within the steps.

    Args:
        evidence: of the steps.
        phase: what it does, a key of `_CHORES`.
    """
    parts = evidence.parts("aside")
    ns = parts[phase.value] + parts[f"{phase.value}, idle"]
    message, cause, advice = _CHORES[phase]
    return Observation(ns, f"{message} {evidence.share(ns)} of the time.", cause, advice)
