"""Rules about the host: it comes late with data, waits for the device, or does something else than training."""

from collections import defaultdict
from collections.abc import Mapping

from headway.explain.attribution import Phase
from headway.explain.findings.evidence import Observation, StepEvidence, as_number
from headway.explain.findings.loops import READ_LATE_HINT, READ_LATE_SETTING
from headway.explain.findings.pauses import is_allocation, paused_for

_UNKNOWN = ""
_DATA_ADVICE = {  # what takes long, why, what to do in any loop, and in `headway train`
    "read": ("reading rows and media from storage", "storage is slow or far away, and every sample is read when it is "
             "needed.", "a copy of the data on a local disk; more workers, which read side by side.",
             "more data.workers, a larger data.prefetch_bytes"),
    "decode": ("decoding images, videos and sounds", "media are large, or stored in a way that is slow to decode.",
               "media that are stored at the size at which the model reads them; more workers.", "more data.workers"),
    "tokenise": ("tokenising", "long texts or templates are tokenised anew in every epoch.",
                 "documents that are tokenised once; more workers.",
                 "data.train.N.format: tokens; more data.workers"),
    _UNKNOWN: ("the loader", "batches take longer to make than to train on.",
               "more workers and batches ahead: in a DataLoader num_workers and prefetch_factor.",
               "more data.workers and a larger data.prefetch_bytes"),
}  # fmt: skip
_CHORES = {  # what took time, why, what to do in any loop, and in `headway train`
    Phase.COMPILE: ("compiling (torch.compile) took",
                    "something that the compiled code was specialised to changes from step to step, such as a length.",
                    "mark what changes as dynamic (torch.compile(dynamic=True)), or pad to few sizes; "
                    "TORCH_LOGS=recompiles names the guard that failed.",
                    "data.bucket_tokens; speed.recompiles: error names the guard that failed"),
    Phase.CHECKPOINT: ("checkpoints took",
                       "the state is saved often, or training waits until it is written.",
                       "save less often, and write while training goes on (async_save of torch.distributed).",
                       "a larger checkpoint.every, checkpoint.asynchronous: true"),
    Phase.LOGGING: ("logging took",
                    "numbers are read back and written at every step.",
                    "log less often or to fewer places; keep numbers on the device until then.",
                    "a larger run.log_every, fewer run.trackers"),
    Phase.EVALUATION: ("evaluation took",
                       "the model is judged often, or on many samples.",
                       "judge less often or on fewer samples.",
                       "a larger eval.every, a smaller eval.max_samples"),
}  # fmt: skip
_READS = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal", "tolist")
_WHY_WAITED = {
    True: "a number is read back from the device within the step: .item(), .tolist(), print or an if.",
    False: "the host waits for the device within the step; what for, the call does not tell: a barrier, a "
    "synchronisation for timing, or a library's own.",
}
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
    what, cause, advice, setting = _DATA_ADVICE[part]
    message = f"the step waited for data {evidence.share(ns)} of the time"
    if all_s:
        message += f"; of {all_s / evidence.num_steps:.2f} s that workers spent on a step's packs, "
        message += f"{spent_s[part] / all_s:.0%} was {what}"
    return Observation(ns, f"{message}.", cause, advice, setting)


def _making_s(evidence: StepEvidence) -> dict[str, float]:
    """Time that workers spent on the packs of all steps by part [s]."""
    spent_s: defaultdict[str, float] = defaultdict(float)
    for step in evidence.steps:
        seconds_by_part = evidence.step_fact(step, "making_s")
        if isinstance(seconds_by_part, Mapping):
            for part, seconds in seconds_by_part.items():
                spent_s[part] += as_number(seconds) or 0.0
    return spent_s


def synchronisation(evidence: StepEvidence) -> Observation | None:
    """Numbers that the host reads back from the device, which then waits for the host."""
    waits = {
        call: ns
        for call, ns in evidence.parts("idle.sync").items()
        if not call.startswith(_COPIES) and not is_allocation(call)
    }
    if not waits:
        return None
    ns, dearest = sum(waits.values()), max(sorted(waits), key=waits.__getitem__)
    return Observation(
        ns,
        f"the device idled for {evidence.share(ns)} of the time after the host had waited for it, mostly in {dearest}.",
        _WHY_WAITED[_is_read(dearest)],
        READ_LATE_HINT,
        setting=READ_LATE_SETTING,
    )


def _is_read(call: str) -> bool:
    return any(name in call for name in _READS)


def blocking_copies(evidence: StepEvidence) -> Observation | None:
    """Copies while nothing computes, and time after the host has waited for one."""
    waits = sum(ns for call, ns in evidence.parts("idle.sync").items() if call.startswith(_COPIES))
    ns = evidence.ns("copies") + waits
    return Observation(
        ns,
        f"only copies ran, or the host waited for one, for {evidence.share(ns)} of the time.",
        "batches are copied from pageable memory, or right before they are used.",
        "pinned memory and copies ahead of the step: pin_memory=True and .to(device, non_blocking=True).",
        setting="parallel.offload: false, which keeps the weights on the device; batches are copied ahead by itself",
    )


def beside_training(evidence: StepEvidence, phase: Phase) -> Observation | None:
    """Time within the steps in which the loop does something else than training.

    Args:
        evidence: of the steps.
        phase: what it does, a key of `_CHORES`.
    """
    parts = evidence.parts("aside")
    paused_ns, place = paused_for(evidence, phase)
    ns = parts[phase.value] + parts[f"{phase.value}, idle"] + paused_ns
    message, cause, advice, setting = _CHORES[phase]
    where = f" Python was in {place}." if place else ""
    return Observation(ns, f"{message} {evidence.share(ns)} of the time.{where}", cause, advice, setting)
