"""All rules in one table, and what they find in the steps of a job."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from headway.explain.attribution import Phase
from headway.explain.explanation import MOST, Finding
from headway.explain.findings import compute, data, device, host, optimizer, ranks
from headway.explain.findings.evidence import AnyStep, Evidence, Observation
from headway.explain.ranks import WaitedFor


@dataclass(frozen=True, slots=True)
class Rule:
    """One cause of lost time, and how it is seen.

    Attributes:
        id: the finding's.
        least: share of the steps below which it stays silent.
        look: what is seen in the evidence; None where the evidence does not tell, or tells otherwise.
    """

    id: str
    least: float
    look: Callable[[Evidence], Observation | None]


# Below its share a finding is not worth a change, or is what every run has.
RULES: tuple[Rule, ...] = (
    # A loader that keeps up is not waited for at all; 5 % is more than a batch that is late now and then.
    Rule("data-storage", 0.05, partial(data.waiting, part="read")),
    Rule("data-decoding", 0.05, partial(data.waiting, part="decode")),
    Rule("data-tokenising", 0.05, partial(data.waiting, part="tokenise")),
    Rule("data-bound", 0.05, partial(data.waiting, part="")),
    # A device that is launched ahead never waits; 10 % leaves the step's begin and end, and what a profiler adds.
    Rule("host-bound", 0.10, host.host_bound),
    # One read-back of a number per step costs a device some 1 %; a loop of them more.
    Rule("synchronisation", 0.03, host.synchronisation),
    # A CPU waits for nothing, so what counts is their number; a thousandth leaves out what cannot be measured.
    Rule("read-back", 0.001, host.read_backs),
    Rule("blocking-copy", 0.03, host.blocking_copies),
    # After the first steps nothing should be compiled at all.
    Rule("recompilation", 0.02, partial(host.beside_training, phase=Phase.COMPILE)),
    # Young's formula puts a checkpoint's cost at a few per cent where devices fail daily; more is too often.
    Rule("checkpoint", 0.10, partial(host.beside_training, phase=Phase.CHECKPOINT)),
    Rule("logging", 0.05, partial(host.beside_training, phase=Phase.LOGGING)),
    # Judging is useful work, but a fifth of the time is much of it.
    Rule("evaluation", 0.20, partial(host.beside_training, phase=Phase.EVALUATION)),
    # A fused AdamW moves 28 bytes a parameter: some 1 to 5 % of a step; a loop adds its launches to that.
    Rule("optimizer-loop", 0.05, optimizer.optimizer_loop),
    # A few small products, of norms' gains and routers, are in every model.
    Rule("small-gemms", 0.10, compute.small_gemms),
    Rule("misaligned-gemms", 0.05, compute.misaligned_gemms),
    # Fused norms and activations still take 5 to 10 % of an ordinary step.
    Rule("unfused-chains", 0.10, compute.unfused_chains),
    Rule("slow-attention", 0.03, compute.slow_attention),
    # Recomputing attention alone costs some 3 %; a whole forward again is a fifth to a quarter.
    Rule("recomputation", 0.05, compute.recomputation),
    # Packs of a balanced plan are 95 to 99 % full.
    Rule("padding", 0.10, compute.padding),
    # A frozen tower of ordinary images takes 10 to 20 %; its backward alone more than this is worth the question.
    Rule("vision-tower", 0.30, compute.vision_tower),
    Rule("uneven-experts", 0.05, compute.uneven_experts),
    # Equal ranks still come a few per cent apart.
    Rule("heavy-pack", 0.05, ranks.heavy_pack),
    Rule("slow-rank", 0.05, ranks.slow_rank),
    # What is exchanged last and first in a step cannot hide.
    Rule("exposed-gathers", 0.05, ranks.exposed_gathers),
    Rule("exposed-communication", 0.10, ranks.exposed_communication),
    # Boards vary by some per cent, and a product at its power limit runs 5 to 10 % below the highest clock.
    Rule("throttled-clocks", 0.10, device.throttled_clocks),
)


def find(
    steps: Sequence[AnyStep],
    facts: Mapping[int, Mapping[str, Any]] | None = None,
    waits: Sequence[WaitedFor] = (),
) -> tuple[Finding, ...]:
    """Find what costs the steps of a job most, and say what to try first.

    Args:
        steps: waterfalls of one job, of a trace or of a run's records.
        facts: by rank, what the loop said of itself, as the key `headway` of a trace has it; that of the traces where
            it is not given. A key that is missing is not known, and a rule that needs it stays silent.
        waits: of each step of several ranks, the one that the others waited for, and why.

    Returns:
        At most five, the dearest first.
    """
    if not steps:
        return ()
    of_traces = {step.rank: step.measured[0].trace.headway or {} for step in steps if step.measured is not None}
    evidence = Evidence(steps, {**of_traces, **(facts or {})}, waits)
    findings = []
    for rule in RULES:
        observation = rule.look(evidence)
        if observation is not None and observation.ns >= rule.least * evidence.duration_ns:
            findings.append(_finding(rule.id, observation, evidence))
    findings.sort(key=lambda finding: (-finding.ns, finding.id))
    return tuple(findings[:MOST])


def _finding(rule_id: str, observation: Observation, evidence: Evidence) -> Finding:
    useful_ns = [step.mfu * step.duration_ns for step in evidence.steps if step.mfu is not None]
    needed_ns = sum(useful_ns) if len(useful_ns) == evidence.num_steps else None
    left_ns = evidence.duration_ns - observation.ns
    return Finding(
        id=rule_id,
        seen=observation.message,
        cause=observation.cause,
        next=observation.next,
        ns=round(observation.ns / evidence.num_steps),
        share=observation.ns / evidence.duration_ns,
        mfu_from=None if needed_ns is None else needed_ns / evidence.duration_ns,
        mfu_to=None if needed_ns is None or left_ns <= 0 else min(1.0, needed_ns / left_ns),
    )
