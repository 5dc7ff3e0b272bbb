"""Length of a planned run: in tokens, epochs or samples."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headway.errors import UsageError

if TYPE_CHECKING:
    from headway.packing.lengths import LengthTable
    from headway.predict.dry_run import Packs


@dataclass(frozen=True)
class RunLength:
    """Length of a run, as one of three options says."""

    tokens: float | None
    epochs: float | None
    samples: int | None

    @property
    def is_given(self) -> bool:
        """True if any says it."""
        return any(value is not None for value in (self.tokens, self.epochs, self.samples))

    @property
    def passes(self) -> float:
        """Times that the run plays its data, at least 1; 1 where nothing says it."""
        return max(1.0, self.epochs or 1.0)

    def rows(self, own: "tuple[str, LengthTable] | None", lengths: Path | None) -> int:
        """Samples of the data that --epochs repeats; 0 where something else says how long the run is."""
        from headway.packing.lengths import read_lengths

        if self.epochs is None or self.samples:
            return 0
        return len((own[1] if own else read_lengths(lengths or "")).tokens)

    def total(self, packs: "Packs", rows: int) -> float | None:
        """Count the tokens to train on; None where nothing says how long the run is.

        Args:
            packs: planned, whose samples stand for all.
            rows: samples of the data that --epochs repeats, where --samples does not say it.
        """
        if self.tokens is not None or not self.is_given:
            return self.tokens
        passes = 1.0 if self.epochs is None else self.epochs
        return passes * (rows if self.samples is None else self.samples) * packs.tokens_per_sample


def refuse_halves(
    ends: RunLength,
    price: float | None,
    lengths: Path | None,
    data: list[str] | None,
    segments: str | int | None,
    within: float | None,
) -> None:
    """Refuse options that two places would answer, or none."""
    places = [("--lengths", lengths), ("--data", data), ("--segments", segments)]
    names = [name for name, value in places if value]
    if len(names) > 1:
        raise UsageError(f"{' and '.join(names)} are two places for lengths; give one of them.")
    for name, value in (("--epochs", ends.epochs), ("--samples", ends.samples)):
        if ends.tokens is not None and value is not None:
            raise UsageError(f"--tokens and {name} both say how long the run is; give one of them.")
    if within is not None and not 0 < within < math.inf:
        raise UsageError(f"--within {within:g} is no time; give a positive one, such as 7d or 36h.")
    if ends.samples is not None and names and names[0] != "--segments":
        raise UsageError(f"--samples {ends.samples} says again what {names[0]} holds; give --epochs instead.")
    for name, length in (("--tokens", ends.tokens), ("--epochs", ends.epochs)):
        if length is not None and not 0 < length < math.inf:
            raise UsageError(f"{name} {length:g} is no length of a run; give a positive number.")
    if price is not None and not ends.is_given:
        raise UsageError("--price is for a whole run; give its --tokens, --epochs or --samples too.")
