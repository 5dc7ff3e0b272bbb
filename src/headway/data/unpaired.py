"""Rows with one answer that is wished for or not, as KTO learns from, and their answers behind the prompts of others.

The answers of a pack behind other prompts of the pack are as many tokens as the pack itself, so they fit where it does.

Tensor letters as in `encode`.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from headway.data.encoded import EncodedSample
from headway.data.samples import Chat, Preference, Sample, unusable
from headway.models.losses import IGNORED


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
            "the row does not say whether its answer is wished for, and preference.loss learns from answers that are "
            "or are not. Give it as label, true or false, or as chosen and rejected answers.",
        )
    return (sample.desirable,)


def graded(encoded: EncodedSample, grades: tuple[bool, ...]) -> EncodedSample:
    """An encoded row with its answers, each of which is wished for or not."""
    return replace(encoded, answers=encoded.answers or (encoded.tokens,), desirable=grades)


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
    """The prompt of one sample with the answer of another."""
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
