"""Divergence of the policy from its reference, as KTO estimates it for each step: on answers behind other prompts.

Each pack has a second one of the same length: its prompts, each with the answer of the row before it (`rows.py`).
Before a step learns, the policy runs on these forward alone; a reference with adapters off runs on them too. A stored
one has run on all packs of the plan before the first step, and the run folder holds a sum for each.

Tensor letters as in `headway.objectives.preferences.losses`.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

import torch

from headway.data import Batch
from headway.data.blank_media import vision_kinds
from headway.data.feed import Feed, IndexedFeed
from headway.errors import CheckpointError, DataError
from headway.log.run_files import write_json
from headway.log.working import working
from headway.models.parallel.ranks import Ranks
from headway.objectives.preferences.reference import FOLDER, Scoring
from headway.report import format_count, format_duration
from headway.train.objective import LoopStep

_FILE = "mismatched.json"
Refer = Callable[[Batch, LoopStep], torch.Tensor]
"""Gives the log-probabilities of a pack's answers under the reference, as a phase of a step [nats], shape (A,)."""


class Mismatches:
    """Estimates the divergence of the policy from the reference for each step.

    Args:
        scoring: of the policy.
        refer: computes what the reference gives in each step; None where it is stored.
        stored: by pack, the summed log-probabilities under the reference [nats]; None where it is computed.
        note: on what was computed beforehand, for the start of the run.
    """

    def __init__(
        self, scoring: Scoring, refer: Refer | None, stored: Mapping[str, float] | None = None, note: str = ""
    ) -> None:
        self._scoring, self._refer, self._stored = scoring, refer, stored
        self.note = note

    def sums(self, batches: Sequence[Batch], step: LoopStep, feed: Feed, ranks: Ranks) -> torch.Tensor:
        """Log-ratios of a step's mismatched answers and their number, summed over all ranks, shape (2,).

        Args:
            batches: packs of the step, of this process, on the CPU.
            step: that they are of; counts the forwards, as the phases `kl` and `reference`.
            feed: what handed them out.
            ranks: the processes.

        Raises:
            DataError: the stored reference lacks a pack.
        """
        scoring = self._scoring
        sums_2 = torch.zeros(2, dtype=torch.float64, device=scoring.device)
        for batch, wanted in zip(batches, step.share.kinds, strict=True):
            other = batch.companion
            assert other is not None
            if other.answers is None and ranks.size == 1:
                continue
            ready = feed.with_blanks(other, wanted).dealt(scoring.group).to(scoring.device)
            with step.forward("kl", other, skips_unlabelled=scoring.model_with_loss.skips_unlabelled):
                log_p_A = scoring.log_probabilities(ready)
            values_A = None if self._refer is None else self._refer(ready, step)
            if other.answers is None or not ranks.bills:  # processes that share a pack all know its answers
                continue
            reference = self._of(batch) if values_A is None else values_A.sum()
            sums_2 += torch.stack([log_p_A.sum() - reference, log_p_A.new_tensor(len(log_p_A))])
        ranks.sum_(sums_2)
        return sums_2

    def _of(self, batch: Batch) -> float:
        assert self._stored is not None
        if _key(batch) not in self._stored:
            raise DataError(
                "the reference was computed for other packs than the one that begins here, because the run goes on "
                "with other packs per step, or with more steps, than it began with. Go on with the first settings, "
                "or start another run. With preference.reference 'adapters-off' Headway computes nothing ahead.",
                where=batch.sources[0],
            )
        return self._stored[_key(batch)]


def divergence(sums_2: torch.Tensor) -> torch.Tensor:
    """The estimate that a step learns with: the mean log-ratio, at least 0 [nats]."""
    return (sums_2[0] / sums_2[1].clamp_min(1)).clamp_min(0)


def stored_mismatches(feed: IndexedFeed, scoring: Scoring, ranks: Ranks, steps: int, run_folder: Path) -> Mismatches:
    """Run the present weights on the mismatched answers of all packs that a run will learn from, and keep the sums.

    Args:
        feed: its plan says which packs.
        scoring: of the model.
        ranks: the processes; each takes its packs.
        steps: of the run.
        run_folder: where the sums are kept for a continuation.
    """
    values: dict[str, float] = {}
    model, began_s = scoring.model_with_loss.model, time.monotonic()
    was_training = model.training
    model.train(False)
    with working("computing the reference of answers behind other prompts"):
        for batch in feed.planned(steps):
            other = batch.companion
            assert other is not None
            kinds = frozenset[str]().union(*ranks.gather_all(vision_kinds(other)))
            ready = feed.with_blanks(other, kinds).dealt(scoring.group).to(scoring.device)
            total = float(scoring.log_probabilities(ready).sum())
            values |= dict(ranks.gather((_key(batch), total)))
    model.train(was_training)
    ranks.by_first(lambda: write_json(run_folder / FOLDER / _FILE, values))
    spent = format_duration(time.monotonic() - began_s)
    note = f"the reference of answers behind other prompts of {format_count(len(values))} packs took {spent}"
    return Mismatches(scoring, None, values, note)


def saved_mismatches(scoring: Scoring, run_folder: Path) -> Mismatches:
    """Read the sums that a run folder has.

    Raises:
        CheckpointError: they cannot be read.
    """
    path = run_folder / FOLDER / _FILE
    try:
        values: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} with the reference of answers behind other prompts cannot be read: {error}. Put the file back, "
            "or start another run."
        ) from error
    return Mismatches(scoring, None, values)


def _key(batch: Batch) -> str:
    rows = "\0".join(f"{origin.source}\0{origin.file}\0{origin.row}" for origin in batch.origins)
    return blake2b(rows.encode(errors="surrogatepass"), digest_size=12).hexdigest()
