"""Bad rows: the policy for samples that cannot be used, and counts of all, so that none is left out unseen."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

from headway.data.samples import Origin, SampleError
from headway.errors import CheckpointError, ConfigError, DataError
from headway.log.jsonl import append_in_turn
from headway.stores import refuse

BadPolicy = Literal["error", "skip"]

Outcome = Literal["read", "used", "skipped", "dropped", "truncated", "split"]
"""Outcomes of a sample.

Every sample read is used, skipped (it could not be used) or dropped (it was longer than a pack, or nothing of it would
have been learnt). Of those used, some were truncated or split; the tokens of truncated samples are those cut off.
"""

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

_ENOUGH_TO_JUDGE = 100  # fewest samples of which a share says much


class RowTally(NamedTuple):
    """Samples with one outcome.

    Attributes:
        samples: how many.
        tokens: tokens of these samples [tokens]; 0 for samples whose tokens could not be counted.
    """

    samples: int = 0
    tokens: int = 0


class SampleCounts:
    """Samples and tokens by source and outcome.

    >>> counts = SampleCounts()
    >>> counts.count("chats", "read", tokens=12)
    >>> counts.count("chats", "used", tokens=12)
    >>> counts["chats"]["used"]
    RowTally(samples=1, tokens=12)
    """

    def __init__(self) -> None:
        self._tallies: dict[str, dict[Outcome, RowTally]] = {}

    def count(self, source: str, outcome: Outcome, samples: int = 1, tokens: int = 0) -> None:
        """Count samples of a source.

        Args:
            source: its name.
            outcome: their outcome.
            samples: how many.
            tokens: their tokens, together [tokens].
        """
        tallies = self._tallies.setdefault(source, dict.fromkeys(OUTCOMES, RowTally()))
        before = tallies[outcome]
        tallies[outcome] = RowTally(before.samples + samples, before.tokens + tokens)

    def add(self, other: "SampleCounts") -> None:
        """Add the counts of another rank."""
        for source in other.sources:
            for outcome, tally in other[source].items():
                self.count(source, outcome, tally.samples, tally.tokens)

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources that something was counted of, in the order of their first samples."""
        return tuple(self._tallies)

    def __getitem__(self, source: str) -> Mapping[Outcome, RowTally]:
        """A source's tallies by outcome; all 0 for one that nothing was counted of."""
        return self._tallies.get(source) or dict.fromkeys(OUTCOMES, RowTally())

    def total(self, outcome: Outcome) -> RowTally:
        """Samples and tokens with one outcome, over all sources."""
        tallies = [tallies[outcome] for tallies in self._tallies.values()]
        return RowTally(sum(tally.samples for tally in tallies), sum(tally.tokens for tally in tallies))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SampleCounts) and self._tallies == other._tallies

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"SampleCounts({self.to_dict()})"

    def to_dict(self) -> dict[str, dict[str, dict[str, int]]]:
        """By source and outcome, as plain JSON values."""
        return {
            source: {outcome: tally._asdict() for outcome, tally in tallies.items()}
            for source, tallies in self._tallies.items()
        }

    @classmethod
    def from_dict(cls, content: Any) -> Self:
        """Read the dictionary that `to_dict` gave.

        Raises:
            CheckpointError: it is something else.
        """
        counts = cls()
        try:
            for source, tallies in content.items():
                for outcome in OUTCOMES:
                    counts.count(source, outcome, int(tallies[outcome]["samples"]), int(tallies[outcome]["tokens"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"The saved counts of samples are damaged ({error!r}). Resume from another checkpoint."
            ) from error
        return counts


@dataclass(frozen=True)
class BadSamples:
    """Policy for samples that cannot be used.

    Attributes:
        policy: "error" stops at the first; "skip" leaves them out, counts them, and stops beyond a limit.
        limit: skipped samples of all sources that are one too many when exceeded; None for any number.
        fraction: skipped samples as a share of those read that is too much when exceeded, from 100 samples read on;
            None for any share.
        quarantine: file that names every skipped sample on a line of JSON; None writes none. Processes of one machine
            may share it; ranks on several machines need one each.

    Raises:
        ConfigError: an unknown policy, a limit that cannot take effect, or one out of range.
    """

    policy: BadPolicy = "error"
    limit: int | None = 1000
    fraction: float | None = 0.05
    quarantine: Path | None = None

    def __post_init__(self) -> None:
        if self.policy not in get_args(BadPolicy):
            raise ConfigError(
                f"Unknown policy for bad samples {self.policy!r}. Allowed: {', '.join(get_args(BadPolicy))}."
            )
        if self.limit is not None and self.limit < 0:
            raise ConfigError(f"The limit of bad samples is {self.limit}; it must be 0 or more, or none.")
        if self.fraction is not None and not 0 <= self.fraction <= 1:
            raise ConfigError(f"The share of bad samples is {self.fraction}; it must be from 0 to 1, or none.")
        refuse(self.quarantine or Path(), "the quarantine")
        if self.policy == "error" and self.quarantine is not None:
            raise ConfigError(
                f'The quarantine {self.quarantine} would stay empty: with the policy "error" nothing is skipped. '
                'Choose "skip", or name no quarantine.'
            )

    @property
    def skips(self) -> bool:
        """True if bad samples are left out instead of ending the run."""
        return self.policy == "skip"

    def handle(self, error: SampleError, counts: SampleCounts, tokens: int = 0) -> None:
        """Leave a sample out, or stop.

        Args:
            error: what is wrong with it.
            counts: where it is counted as skipped; samples read must be counted there already.
            tokens: its planned length [tokens]; 0 where that is not known.

        Raises:
            SampleError: by the policy "error".
            DataError: beyond a limit, or the quarantine cannot be written.
        """
        if not self.skips:
            raise error
        counts.count(error.origin.source, "skipped", tokens=tokens)
        if self.quarantine is not None:
            _append(self.quarantine, error)
        self.check(counts, error)

    def check(self, counts: SampleCounts, last: Exception | None = None) -> None:
        """Make sure that no more samples were skipped than allowed.

        Raises:
            DataError: there were more.
        """
        skipped, num_read = counts.total("skipped").samples, counts.total("read").samples
        allowed = f"{self.limit:,}" if self.limit is not None and skipped > self.limit else ""
        if self.fraction is not None and num_read >= _ENOUGH_TO_JUDGE and skipped > self.fraction * num_read:
            allowed = f"{self.fraction:.2%}"
        if allowed:
            by_source = ", ".join(f"{counts[name]['skipped'].samples} of {name}" for name in counts.sources)
            hint = f"{self.quarantine} names them" if self.quarantine else "name a quarantine file to see them all"
            raise DataError(
                f"{skipped:,} of {num_read:,} samples could not be used ({by_source}), and at most {allowed} may be "
                f"skipped. The last: {last}. Repair the data ({hint}), or allow more."
            ) from last


def sample_error(error: DataError, origin: Origin) -> SampleError:
    """Give an error about a sample its origin, unless it has one."""
    if isinstance(error, SampleError):
        return error
    place = () if error.where in ("", str(origin)) else (f"{error.where}: ",)
    return SampleError(origin, *place, *error.pieces)


def _append(quarantine: Path, error: SampleError) -> None:
    """Add a line to a file that other processes may add to as well, and keep it even if this one is killed later."""
    origin = error.origin
    record = asdict(origin) | {"reason": error.reason}
    line = json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
    try:
        append_in_turn(quarantine, line)
    except OSError as failure:
        raise DataError(
            f"The quarantine {quarantine} cannot be written: {failure.strerror or failure}. Free space there, or name "
            "another file."
        ) from failure
