"""Loss on held-out samples beside that of training, taken down as the records of a run pass: where the two part."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from headway.report import format_share
from headway.report.quantity import number

RISEN = 1.05
"""Times its least, from which on held-out loss has risen.

The held-out samples are the same at every evaluation, so that their loss changes with the weights alone; a step at a
high learning rate moves it up and down by a few percent.
"""
LEAST_RISE = 0.01
"""The least that it must have risen besides: 1 % in perplexity, below which a loss near zero doubles for nothing [nats
per supervised token]."""


class Judgement(NamedTuple):
    """An evaluation, and the state of training at the time.

    Attributes:
        step: after which the held-out samples were judged.
        loss: of these [nats per supervised token].
        training: mean loss of the steps since the evaluation before; None without any.
    """

    step: int
    loss: float
    training: float | None


class Parting(NamedTuple):
    """Two evaluations between which held-out loss rose and training loss fell."""

    least: Judgement
    last: Judgement

    def __str__(self) -> str:
        least, last = self.least, self.last
        return (
            f"held-out loss was least after step {least.step:,}, {least.loss:.4f}, and is {last.loss:.4f} after step "
            f"{last.step:,}, {format_share(last.loss / least.loss - 1)} more, while training loss fell from "
            f"{least.training:.4f} to {last.training:.4f}"
        )


@dataclass
class HeldOutTally:
    """Finds where held-out loss parts from training loss: the model learns its training samples by heart.

    They part where held-out loss is above its least by 5 % and by 0.01 nats, and the mean training loss of the steps
    before the last evaluation is below that of the steps before the best one. Where both rise, the run diverges, which
    is another matter.

    >>> tally = HeldOutTally()
    >>> for step, loss, held_out in ((10, 2.0, 2.1), (20, 1.0, 1.9), (30, 0.4, 2.2)):
    ...     tally.add({"kind": "step", "step": step, "loss": loss})
    ...     tally.add({"kind": "evaluation", "step": step, "loss": held_out})
    >>> tally.parting.least.step, tally.parting.last.step
    (20, 30)
    """

    least: Judgement | None = None
    last: Judgement | None = None
    _sum: float = 0.0
    _count: int = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Take down a record, if it is one of a step or of an evaluation."""
        kind, loss, step = record.get("kind"), number(record.get("loss")), number(record.get("step"))
        if loss is None or step is None:
            return
        if kind == "step":
            self._sum, self._count = self._sum + loss, self._count + 1
        elif kind == "evaluation":
            self.last = Judgement(int(step), loss, self._sum / self._count if self._count else None)
            self._sum, self._count = 0.0, 0
            if self.least is None or loss < self.least.loss:
                self.least = self.last

    @property
    def parting(self) -> Parting | None:
        """The best evaluation and the last one, if the losses have parted between them; None otherwise."""
        if self.least is None or self.last is None or self.least.training is None or self.last.training is None:
            return None
        has_risen = self.last.loss > max(RISEN * self.least.loss, self.least.loss + LEAST_RISE)
        return Parting(self.least, self.last) if has_risen and self.last.training < self.least.training else None
