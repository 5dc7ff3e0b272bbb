"""The best evaluation of a run so far, and how many have not bettered it since: state of a checkpoint."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from headway.answer.evaluate import Evaluation
from headway.report import format_share

Measure = Literal["loss", "exact_match"]


@dataclass
class BestEvaluation:
    """Judges whether an evaluation betters all before it.

    Attributes:
        by: the lowest loss, or the largest fraction of samples that are answered exactly; of pairs in the right order.
        step: after which the best one was; None before any.
        value: its loss or fraction.
        samples: how many it judged. Of another number, evaluations begin anew: they are not comparable.
        since: evaluations after it.
    """

    by: Measure
    step: int | None = None
    value: float = math.nan
    samples: int = 0
    since: int = 0

    @classmethod
    def of(cls, by: Measure, saved: Mapping[str, Any] | None) -> Self:
        """Go on from a checkpoint's state; anew where there is none, or where it is of another measure."""
        return cls(**saved) if saved is not None and saved.get("by") == by else cls(by)

    def add(self, step: int, evaluation: Evaluation) -> bool:
        """Take in an evaluation; whether it is the best so far.

        Args:
            step: after which it was.
            evaluation: the same on all processes.
        """
        value = evaluation.loss if self.by == "loss" else evaluation.score
        if evaluation.samples != self.samples:
            self.step, self.value, self.samples, self.since = None, math.nan, evaluation.samples, 0
        is_better = self.step is None or (value < self.value if self.by == "loss" else value > self.value)
        if is_better and math.isfinite(value):
            self.step, self.value, self.since = step, value, 0
            return True
        self.since += 1
        return False

    def has_ended(self, stop_after: int | None) -> bool:
        """True if the run is to end, because this many evaluations in a row were no better than the best."""
        return stop_after is not None and self.since >= stop_after

    @property
    def text(self) -> str:
        """Its value in words; "" before any."""
        if self.step is None:
            return ""
        value = f"loss {self.value:.4f}" if self.by == "loss" else f"{format_share(self.value)} right"
        return f"{value} after step {self.step:,}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; no value before any evaluation has one."""
        state = asdict(self)
        if self.step is None:
            state.pop("value")
        return state
