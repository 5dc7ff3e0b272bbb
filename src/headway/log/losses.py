"""Losses and norms of gradients of a run's steps, as a log or the records of the run tell them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class StepLoss:
    """Numbers of one step on learning; None where they are not known."""

    step: int  # number of the step
    loss: float | None = None  # training loss, which may be NaN or infinite
    grad_norm: float | None = None  # norm of all gradients, which may be NaN or infinite
    num_skipped: int = 0  # updates that were left out since the line before
    num_nan: int = 0  # steps since the line before whose loss was NaN or infinite

    @property
    def is_broken(self) -> bool:
        """True if the loss of the step, or of one since the line before, is NaN or infinite."""
        return self.num_nan > 0 or (self.loss is not None and not math.isfinite(self.loss))


def learning_sentence(losses: Sequence[StepLoss]) -> str:
    """Summarise the losses and norms of a run, in the order of its steps; "" without any.

    >>> learning_sentence([StepLoss(1, 12.25, 2.0), StepLoss(2, 9.5, 4.0), StepLoss(3, float("nan"), 2.5)])
    'loss 12.25 at step 1, NaN at step 3, lowest 9.5 at step 2; gradient norm 2.5 (median), highest 4 at step 2.'
    """
    parts = []
    # A tool may leave a loss out that is NaN.
    series = [(math.nan if row.loss is None else row.loss, row.step) for row in losses if row.loss or row.is_broken]
    if series:
        text = f"loss {_number(series[0][0])} at step {series[0][1]:,}"
        finite = [pair for pair in series if math.isfinite(pair[0])]
        text += f", {_number(series[-1][0])} at step {series[-1][1]:,}" if len(series) > 1 else ""
        if len(series) > 2 and finite and min(finite) not in (series[0], series[-1]):
            text += f", lowest {_number(min(finite)[0])} at step {min(finite)[1]:,}"
        parts.append(text)
    norms = [(row.grad_norm, row.step) for row in losses if row.grad_norm is not None and math.isfinite(row.grad_norm)]
    if norms:
        highest, step = max(norms)
        usual = median(norm for norm, _ in norms)
        parts.append(f"gradient norm {_number(usual)} (median), highest {_number(highest)} at step {step:,}")
    if skipped := sum(row.num_skipped for row in losses):
        parts.append(f"{skipped:,} updates left out")
    return f"{'; '.join(parts)}." if parts else ""


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "NaN" if math.isnan(value) else "infinite"
