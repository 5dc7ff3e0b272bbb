"""Rows that preferences are learnt from: answers to compare, or each wished for or not, and behind others' prompts.

The answers of a pack behind other prompts of the pack are as many tokens as the pack itself, so they fit where it does.

Tensor letters as in `encode`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headway.data.encode import Encoder
from headway.data.encoded import EncodedSample
from headway.data.feed.make import RowRule
from headway.data.samples import Chat, Preference, Sample, unusable
from headway.models.losses import IGNORED
from headway.objectives.preferences.settings import PreferenceConfig


@dataclass(frozen=True)
class PairRows(RowRule):
    """Rows with answers of which some are better than others."""

    def check(self, sample: Sample) -> None:
        """Refuse a row without; see `RowRule.check`."""
        if not isinstance(sample, Preference):
            raise unusable(
                sample,
                "the row is no preference, but the run trains on preferences. Delete the row, or train on it in "
                "another run.",
            )


@dataclass(frozen=True)
class GradedRows(RowRule):
    """Rows with answers each of which is wished for or not.

    Attributes:
        mismatches: whether a pack's answers are also laid out behind other prompts of it, as KTO needs them.
    """

    mismatches: bool

    def check(self, sample: Sample) -> None:
        """Refuse a row that does not say; see `RowRule.check`."""
        grades_of(sample)

    def marked(self, encoded: EncodedSample, sample: Sample) -> EncodedSample:
        """The row with its answers, each wished for or not."""
        return replace(encoded, answers=encoded.answers or (encoded.tokens,), desirable=grades_of(sample))

    def others(self, encoded: EncodedSample, sample: Sample, encoder: Encoder) -> list[EncodedSample]:
        """Each answer behind the prompt, as a sample of its own."""
        if not self.mismatches:
            return []
        chats = sample.chats if isinstance(sample, Preference) else ()
        return [encoder.encode(chat) for chat in chats] or [encoded]

    def without_companions(self) -> RowRule:
        """The same rows, without answers behind other prompts."""
        return GradedRows(mismatches=False)

    def companions(self, others: Sequence[Sequence[EncodedSample]]) -> list[EncodedSample] | None:
        """The answers behind other prompts of the pack."""
        return mismatched(others) if self.mismatches else None


def rule_of(settings: PreferenceConfig) -> RowRule:
    """The rows that a run's loss learns from."""
    return GradedRows(settings.loss == "kto") if settings.row.unpaired else PairRows()


def grades_of(sample: Sample) -> tuple[bool, ...]:
    """Tell of each answer of a row whether it is wished for; of a preference the best one is, and no other.

    Raises:
        DataError: the row says nothing of it.
    """
    if isinstance(sample, Preference):
        return (True, *(False for _ in sample.answers[1:]))
    if not isinstance(sample, Chat) or sample.desirable is None:
        raise unusable(
            sample,
            "the row does not say whether its answer is good or bad, but preference.loss needs that. Add a label "
            "(true or false), or give chosen and rejected answers.",
        )
    return (sample.desirable,)


def mismatched(rows: Sequence[Sequence[EncodedSample]]) -> list[EncodedSample]:
    """Put answers behind other rows' prompts: each row's prompt before the answer of the row before it.

    Rows are taken in the order of their first answers, then of their second ones, and the first gets the last answer.

    Args:
        rows: each row's answers with the prompt before it, as samples of their own.

    Returns:
        As many samples; none where all answers are of one row, and so of one prompt. Rows whose media stand among
        answers, and those of several views, are left out.

    Source: Ethayarajh et al. 2024, arXiv:2402.01306, section 4.1; the order is that of TRL 1.16's KTOTrainer.
    """
    answers = [
        (number, row[place])
        for place in range(max(map(len, rows), default=0))
        for number, row in enumerate(rows)
        if place < len(row) and not row[place].segments and row[place].media_end <= _first_learnt(row[place])
    ]
    if len({number for number, _ in answers}) < 2:
        return []
    samples = [sample for _, sample in answers]
    return [_joined(question, answer) for question, answer in zip(samples, [samples[-1], *samples[:-1]], strict=True)]


def _first_learnt(sample: EncodedSample) -> int:
    return int((sample.labels_S != IGNORED).nonzero()[0])


def _joined(question: EncodedSample, answer: EncodedSample) -> EncodedSample:
    end, begin = _first_learnt(question), _first_learnt(answer)
    answer_S = answer.input_ids_S[begin:]
    # An answer is words, so its positions follow the largest one of the prompt, whatever axes these have.
    prompt_RS = question.position_ids_RS[:, :end]
    after_RS = (prompt_RS.max() + 1 + torch.arange(len(answer_S))).expand(len(prompt_RS), -1)
    types_S = None
    if question.token_types_S is not None and answer.token_types_S is not None:
        types_S = torch.cat([question.token_types_S[:end], answer.token_types_S[begin:]])
    ids_S = torch.cat([question.input_ids_S[:end], answer_S])
    return replace(
        question,
        input_ids_S=ids_S,
        labels_S=torch.cat([question.labels_S[:end], answer.labels_S[begin:]]),
        position_ids_RS=torch.cat([prompt_RS, after_RS], dim=1),
        token_types_S=types_S,
        answers=(len(ids_S),),
        desirable=(True,),
    )


def into_pairs(path: Path) -> None:
    """Make preferences of a file of chats: each last answer, and its words the other way round as the worse one."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        *prompt, chosen = row.pop("messages", [None])
        if not prompt:
            continue  # a document
        words = chosen["content"].split()
        rejected = {**chosen, "content": " ".join([*words[::-1], "no"])}
        rows.append(row | {"prompt": prompt, "chosen": [chosen], "rejected": [rejected]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
