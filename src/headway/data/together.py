"""Several encoded texts as one sample: the views of a chat, or the answers of a preference.

Answers stand apart, each behind its own prompt, or the prompt stands before all of them once. The token before an
answer's first target is what predicts it. So each answer begins with a copy of that token, and the shared prompt ends
before it: every target has a slot of its own that predicts it, as where answers stand apart.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from headway.data.media.joining import Joinable, joined
from headway.data.media.placeholders import SampleTokens
from headway.data.media.tensors import joined_media
from headway.data.samples import MediaPart, Preference, SampleLengths
from headway.models.losses import IGNORED

if TYPE_CHECKING:
    from headway.data.encode import EncodedSample


def joined_views(views: "Sequence[EncodedSample]") -> "EncodedSample":
    """The views of a chat one after the other, as one sample; of a single view itself."""
    if len(views) == 1:
        return views[0]
    # Lengths follow the rule by which packs are planned, so that a plan's and a pack's agree.
    lengths = SampleLengths.joined([view.lengths for view in views])
    for view in views[1:]:
        view.labels_S[0] = IGNORED  # which the view before must not predict
    processed: dict[str, list[Joinable]] = {}
    for view in views:
        for name, joinable in view.processed.items():
            processed.setdefault(name, []).append(joinable)
    return replace(
        views[0],
        input_ids_S=torch.cat([view.input_ids_S for view in views]),
        labels_S=torch.cat([view.labels_S for view in views]),
        position_ids_RS=torch.cat([view.position_ids_RS for view in views], dim=1),
        token_types_S=_end_to_end([view.token_types_S for view in views]),
        media=joined_media([view.media for view in views]),
        processed={
            name: Joinable(joined([joinable.tensor_X for joinable in parts], parts[0].rule), parts[0].rule)
            for name, parts in processed.items()
        },
        media_end=lengths.media_end,
        segments=lengths.segments,
    )


def joined_answers(chats: "Sequence[EncodedSample]") -> "EncodedSample":
    """The answers of a preference one after the other, each behind the prompt, as one sample that is never cut."""
    answers = joined_views(chats)
    return replace(answers, answers=tuple(chat.tokens for chat in chats), media_end=answers.tokens)


def _end_to_end(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors) if tensors else None


def prompt_tokens(sample: Preference, answers: Sequence[SampleTokens]) -> int:
    """Count the tokens that can stand before all answers once [tokens].

    Args:
        sample: the preference.
        answers: tokens of each answer behind the prompt.

    Returns:
        Tokens that all begin with, up to two before the first target of any; 0 where answers have media of their own,
        or a prompt's media are written in other ways.
    """
    if not sample.prompt or any(isinstance(part, MediaPart) for a in sample.answers for t in a for part in t.parts):
        return 0
    most = min(int(np.flatnonzero(tokens.supervised_S[1:])[0]) for tokens in answers)
    ids_S = answers[0].ids_S[:most]
    differs_S = np.any([tokens.ids_S[:most] != ids_S for tokens in answers[1:]], axis=0)
    shared = int(differs_S.argmax()) if differs_S.any() else most
    return shared if shared >= max(tokens.media_end for tokens in answers) else 0


def with_prompt_once(answers: "Sequence[EncodedSample]", prompt: int) -> "EncodedSample":
    """Put the prompt before all answers once, as one sample that is never cut.

    Args:
        answers: each behind the prompt; media of the first are used.
        prompt: as `prompt_tokens` counts it [tokens].
    """
    first = answers[0]

    def once(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([parts[0][..., :prompt], *(part[..., prompt:] for part in parts)], dim=-1)

    types = [answer.token_types_S for answer in answers if answer.token_types_S is not None]
    sample = replace(
        first,
        input_ids_S=once([answer.input_ids_S for answer in answers]),
        labels_S=once([answer.labels_S for answer in answers]),
        # Each answer goes on from the prompt's end, where its separate segment would have.
        position_ids_RS=once([answer.position_ids_RS for answer in answers]),
        token_types_S=once(types) if types else None,
        answers=tuple(answer.tokens - prompt for answer in answers),
        prompt=prompt,
    )
    return replace(sample, media_end=sample.tokens)
