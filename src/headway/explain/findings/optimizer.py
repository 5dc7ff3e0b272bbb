"""Rules about the optimizer's step."""

import re

from headway.explain.attribution import Phase
from headway.explain.findings.evidence import EventTime, Evidence, Observation

_AT_ONCE = ("aten::_fused_", "aten::_foreach_")
# Of these, what updates weights: gradients are clipped at once (_foreach_norm, _foreach_mul_) beside a loop too.
_UPDATES = re.compile(r"aten::(_fused_|_foreach_(add|sub|lerp))")
# A fused update is a few kernels for each group of parameters, with clipping some tens; a loop is about ten for each of
# hundreds of tensors.
_MANY = 100


def optimizer_loop(evidence: Evidence) -> Observation | None:
    """The optimizer updates one tensor after the other."""
    events = loop_over_parameters(evidence)
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


def loop_over_parameters(evidence: Evidence) -> list[EventTime]:
    """Events of an optimizer that updates one tensor after the other; none of one that takes all at once."""
    all_of_it = [event for event in evidence.spent if event.phase is Phase.OPTIMIZER]
    if any(_UPDATES.match(event.operator) for event in all_of_it):
        return []
    one_by_one = [event for event in all_of_it if not event.operator.startswith(_AT_ONCE)]
    return one_by_one if len(one_by_one) > _MANY * evidence.num_steps else []
