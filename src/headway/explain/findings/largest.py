"""Rule about the largest loss where no other names its cause: what is known of its gaps, kernels and modules."""

from collections import Counter
from collections.abc import Collection

from headway.explain.events import NONE
from headway.explain.findings.evidence import Observation, StepEvidence
from headway.explain.findings.gaps import StepPauses, pauses_of
from headway.explain.findings.patterns import dearest_parts
from headway.explain.measurement import MATMUL
from headway.report import format_ms
from headway.report.step_lines import NAMES, SLOW

LEAST = 0.20  # of the steps
_NO_LOSS = ("useful", MATMUL, "ceiling")
_COVERED = 0.25  # of a loss, from which a finding counts as one about it
_NOT_KNOWN_MESSAGE = "not known: the trace holds no evidence of one."
_LOOK_HINT = {
    "idle": "the trace in https://ui.perfetto.dev at the longest gap; a profile with stacks (with_stack=True, or "
    "headway.profile) names what the host did.",
    "kernels": "the same step by module, by kernel and by product (`headway explain` with these breakdowns).",
}


def largest_loss(evidence: StepEvidence, covered: Collection[tuple[str, int]]) -> Observation | None:
    """Say what is known of the largest loss, if it is large and no finding is about it.

    Args:
        evidence: of the steps.
        covered: of each finding, the beginning of the key of a line that its loss lies in, and the loss [ns].
    """
    if not evidence.spent_by_step:
        return None
    lines = Counter({key: evidence.ns_of(key) for key in evidence.keys if not key.startswith(_NO_LOSS)})
    if not lines:
        return None
    ((key, ns),) = lines.most_common(1)
    named_ns = sum(loss for line, loss in covered if key.startswith(line))
    if ns < LEAST * evidence.duration_ns or named_ns >= _COVERED * ns:
        return None
    if key.startswith("idle"):
        facts, hint = _gaps(evidence, key), _LOOK_HINT["idle"]
    elif key.startswith(f"{SLOW}."):
        facts, hint = f"most of it in {dearest_parts(evidence, MATMUL)} of all products", _LOOK_HINT["kernels"]
    else:
        facts, hint = f"most of it in {dearest_parts(evidence, key.partition('.')[0])}", _LOOK_HINT["kernels"]
    name = NAMES.get(key) or f"{SLOW}: {key.removeprefix(f'{SLOW}.')}"
    if evidence.is_cpu:
        name = name.replace("kernels", "operators").replace("idle: host late (launches)", "Python between operators")
    return Observation(
        ns,
        f"the largest loss is {name}, {evidence.share(ns)} of the time; {facts}.",
        _NOT_KNOWN_MESSAGE,
        hint,
    )


def _gaps(evidence: StepEvidence, key: str) -> str:
    """Number and length of gaps, and what the host and the device had around the longest one."""
    steps = pauses_of(evidence)
    gaps = [(step, gap) for step in steps for gap in step.gaps] if key == "idle.launch" else []
    if key == "idle.other":
        return _launched_before(steps)
    if not gaps:
        parts = evidence.parts(key).most_common(2)
        return (
            "most of it " + ", ".join(f"{name} ({evidence.share(ns)})" for name, ns in parts) if parts else "no parts"
        )
    step, longest = max(gaps, key=lambda pair: pair[1].ns)
    around = step.surrounding(longest)
    place = step.measured.trace.names[step.host.name[around]] if around != NONE else ""
    where = f"while the host was in {place}" if place else "while the trace shows nothing that the host did"
    return f"{len(gaps) / len(steps):,.0f} gaps a step, the longest of {format_ms(longest.ns)} ms {where}"


def _launched_before(steps: list[StepPauses]) -> str:
    """Describe the longest gap before a kernel that had been launched already, and how long before."""
    gaps = [(step, gap) for step in steps for gap in step.waiting_gaps]
    if not gaps:
        return "its gaps lie between the events of several streams"
    step, (ns, event) = max(gaps, key=lambda pair: pair[1][0])
    attribution, trace = step.measured.attribution, step.measured.trace
    launch = int(attribution.launch[event])
    name = trace.names[trace.device.name[event]][:60]
    text = f"{len(gaps) / len(steps):,.0f} gaps a step, the longest of {format_ms(ns)} ms before the kernel {name}"
    if launch == NONE:
        return f"{text}, whose launch the trace does not have"
    before_ns = int(trace.device.start_ns[event]) - int(trace.host.start_ns[launch])
    call = trace.names[trace.host.name[launch]]
    return f"{text}, which {call} had launched {format_ms(before_ns)} ms before: the device waited for itself"
