"""Rules about the host: it launches late, waits for the device, or does something else than training."""

from headway.explain.attribute import Phase
from headway.explain.findings.compute import small_products
from headway.explain.findings.evidence import Evidence, Seen, as_number
from headway.explain.findings.optimizer import loop_over_parameters

_READ_BACK = "aten::item"
_READ_LATE = "keep numbers on the device until they are logged, and log every N steps (run.log_every)."
# In a step; models read some lengths and grids of a batch.
_MANY_READ_BACKS = 16
_BESIDE = {
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


def host_bound(evidence: Evidence) -> Seen | None:
    """A device waits for launches; a CPU launches nothing ahead, so there the time between operators says little."""
    if evidence.is_cpu:
        return None
    overheads_s = [as_number(evidence.fact("profiler_overhead_s", step.rank)) for step in evidence.steps]
    profiler_ns = sum(max(0, round(one * 1e9)) for one in overheads_s if one is not None)
    named = [*loop_over_parameters(evidence), *small_products(evidence)]  # which are findings of their own
    ns = max(0, evidence.ns("idle.launch") - profiler_ns - sum(one.late_ns for one in named))
    return Seen(
        ns,
        f"nothing ran for {evidence.share(ns)} of the time, since the host had not launched it yet.",
        "each step is many small operators, which Python takes longer to launch than they take to run.",
        "larger packs (data.tokens_per_pack) and speed.compile: true: fewer and larger launches.",
    )


def synchronisation(evidence: Evidence) -> Seen | None:
    """The host reads a number back from the device, which then waits for the host."""
    waits = {said: ns for said, ns in evidence.parts("idle.sync").items() if not said.startswith(_COPIES)}
    if not waits:
        return None
    ns, dearest = sum(waits.values()), max(sorted(waits), key=waits.__getitem__)
    return Seen(
        ns,
        f"the device idled for {evidence.share(ns)} of the time after the host had waited for it, mostly in {dearest}.",
        "a number is read back from the device within the step: .item(), .tolist(), print or an if.",
        _READ_LATE,
    )


def read_backs(evidence: Evidence) -> Seen | None:
    """The loop reads numbers out of tensors; a CPU waits for nothing, but the same loop on a device would each time."""
    if not evidence.is_cpu:
        return None
    inside = (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTED)
    found = [one for one in evidence.spent if one.operator == _READ_BACK and one.phase in inside]
    if len(found) < _MANY_READ_BACKS * evidence.num_steps:
        return None
    ns = sum(one.ns + one.late_ns for one in found)
    return Seen(
        ns,
        f"{len(found) / evidence.num_steps:,.0f} numbers a step are read out of tensors, in {evidence.share(ns)} of "
        "the time; on a device each would wait for all that was launched before.",
        "the loop calls .item() or float() within the step, for one number after the other.",
        _READ_LATE,
    )


def blocking_copies(evidence: Evidence) -> Seen | None:
    """Nothing computes while data are copied, or after the host has waited for a copy."""
    waits = sum(ns for said, ns in evidence.parts("idle.sync").items() if said.startswith(_COPIES))
    ns = evidence.ns("copies") + waits
    return Seen(
        ns,
        f"only copies ran, or the host waited for one, for {evidence.share(ns)} of the time.",
        "batches are copied from pageable memory, or right before they are used.",
        "pinned memory and copies ahead of the step: pin_memory=True and .to(device, non_blocking=True); headway train "
        "does so by itself, and parallel.offload: false keeps the weights on the device.",
    )


def beside_training(evidence: Evidence, phase: Phase) -> Seen | None:
    """The loop does something else than training within the steps.

    Args:
        evidence: of the steps.
        phase: what it does, a key of `_BESIDE`.
    """
    parts = evidence.parts("aside")
    ns = parts[phase.value] + parts[f"{phase.value}, idle"]
    seen, cause, advice = _BESIDE[phase]
    return Seen(ns, f"{seen} {evidence.share(ns)} of the time.", cause, advice)
