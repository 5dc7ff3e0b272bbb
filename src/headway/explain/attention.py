"""Attention of packs: which pack of a step, and which layer, each kernel of attention works for.

A pass of the whole model computes one pack, so a kernel belongs to the pack of the pass that launched it. Backward has
the pass of the forward that it differentiates, by the sequence number, and recomputation that of the backward around
it. The trace says what each layer's mask lets each pack attend to, in FLOPs.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from headway.errors import ConfigError
from headway.explain.attribute import Phase
from headway.explain.budget import NeededWork
from headway.explain.classes import Work, is_attention
from headway.explain.measure import MeasuredTrace
from headway.explain.trace import Kind, Trace

_FORWARD = "phase:forward"
_PARTS = (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTED)  # as a trace's `packs` have them


class PackLayer(NamedTuple):
    """Attention of one pack in one layer.

    Attributes:
        module: path of the module that attends.
        pack: number of the pack in its step, from 1; None where the trace does not tell them apart.
    """

    module: str
    pack: int | None

    def __str__(self) -> str:
        return f"{self.module}, pack {'unknown' if self.pack is None else self.pack}"


class StepAttention:
    """Attention of one step, by pack and layer.

    Attributes:
        flops: FLOPs of the pairs that the masks allow, by the cost model: forward, backward, and what is run again.

    Args:
        measured: the trace.
        step: number of the step.
        budget: what Headway wrote into the trace.

    Raises:
        ConfigError: the trace does not say what each pack of the step attends to.
    """

    def __init__(self, measured: MeasuredTrace, step: int, budget: NeededWork) -> None:
        packs = budget.packs(step)
        if packs is None:
            raise ConfigError(
                f"--by attention: {measured.trace.path} does not say what each pack of step {step} attends to. Profile "
                "again with this Headway, whose traces do."
            )
        self._measured = measured
        self.flops: Mapping[PackLayer, Mapping[Phase, int]] = _flops(packs)
        self._attending = {module for module, _ in self.flops}
        passes = _passes(measured.trace, step)
        self._pack_of = {at: number for number, at in enumerate(passes, start=1)} if len(passes) == len(packs) else {}
        self._attends_in: dict[str, str | None] = {}

    def of(self, event: int) -> PackLayer | None:
        """The pack and layer that an event attends for; None if it is no matmul-class event of attention."""
        attribution = self._measured.attribution
        if attribution.work[event] is not Work.MATMUL:
            return None
        module: str | None = attribution.module[event]
        if module not in self._attending:
            names, events = self._measured.trace.names, self._measured.events
            name = attribution.operator[event] or names[events.name[event]]
            module = self._within(attribution.module[event]) if is_attention(name) else None
        return None if module is None else PackLayer(module, self._pack_of.get(attribution.passes[event]))

    def _within(self, unit: str) -> str | None:
        """The one module that attends in a compiled block."""
        if unit not in self._attends_in:
            inside = [module for module in self._attending if module.startswith(f"{unit}.")]
            self._attends_in[unit] = inside[0] if len(inside) == 1 else None
        return self._attends_in[unit]


def _flops(packs: Sequence[Mapping[str, Sequence[int]]]) -> dict[PackLayer, dict[Phase, int]]:
    return {
        PackLayer(module, number): {phase: n for phase, n in zip(_PARTS, flops, strict=True) if n}
        for number, pack in enumerate(packs, start=1)
        for module, flops in pack.items()
    }


def _passes(trace: Trace, step: int) -> list[int]:
    """The annotations of a step's passes of the whole model, in order: indices of host events."""
    within = [(start, end) for number, start, end in trace.steps if number == step]
    host = trace.host
    forward = {index for index, name in enumerate(trace.names) if name == _FORWARD}
    passes = np.flatnonzero((host.kind == Kind.ANNOTATION) & np.isin(host.name, list(forward)))
    passes = passes[np.argsort(host.start_ns[passes], kind="stable")]
    return [i for i in passes.tolist() if any(start <= host.start_ns[i] < end for start, end in within)]
