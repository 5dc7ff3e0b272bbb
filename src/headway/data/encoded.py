"""A sample as tensors, and several of them as one: the views of a chat, or the answers of a preference.

Answers stand apart, each behind its own prompt, or the prompt stands before all of them once. The token before an
answer's first target is what predicts it. So each answer begins with a copy of that token, and the shared prompt ends
before it: every target has a slot of its own that predicts it, as where answers stand apart.

Tensor letters: S tokens of one sample, R rows of positions (1, or 3 for M-RoPE).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch

from headway.data.media.joining import Joinable, joined_tensors
from headway.data.media.placeholders import SampleTokens
from headway.data.media.tensors import MediaTensors, joined_media
from headway.data.samples import MediaPart, Origin, Preference, SampleLengths
from headway.models.losses import IGNORED
from headway.packing.budget import Size, segments_within
from headway.packing.parts import SamplePart
from headway.packing.pieces import target_runs


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedSample:
    """One chat or document as tensors on the CPU.

    Attributes:
        input_ids_S: token ids, placeholders expanded.
        labels_S: the token's own id where it is supervised, else -100; not shifted.
        position_ids_RS: positions; one row, or three for M-RoPE.
        origin: where the sample came from.
        token_types_S: 0 for text, 1 for images, 2 for videos, 3 for sounds; None for models that do not read it.
        types_name: the model's argument that takes them; in PaliGemma's, 1 begins with the first answer instead.
        media: tensors of each kind of media that there is, by the names of `headway.count.modalities`. Patches of
            images are bytes of one frame where the encoder has a `pixel_scale`, else what the model reads.
        processed: tensors of all images, by the model's own names, where they are as its processor gives them.
        media_end: one past the last placeholder of an image, video or sound; 0 without any [tokens].
        segments: length of each view of a chat that has several, which do not see each other; else empty [tokens].
        answers: length of each answer of a preference, the best first; else empty [tokens].
        prompt: what stands before all answers once; 0 where each has the prompt before it, as part of it [tokens].
        desirable: whether each of the answers is wished for; empty where they are compared with each other.
        parts: of what the sample is made, of families with parts; empty for others.
        latent_images: images whose latents are among the tokens, -1 to 1, shape (3, height, width) each.
    """

    input_ids_S: torch.Tensor
    labels_S: torch.Tensor
    position_ids_RS: torch.Tensor
    origin: Origin
    token_types_S: torch.Tensor | None = None
    types_name: str = "mm_token_type_ids"
    media: dict[str, MediaTensors] = field(default_factory=dict)
    processed: dict[str, Joinable] = field(default_factory=dict)
    media_end: int = 0
    segments: tuple[int, ...] = ()
    answers: tuple[int, ...] = ()
    prompt: int = 0
    desirable: tuple[bool, ...] = ()
    parts: tuple[SamplePart, ...] = ()
    latent_images: tuple[torch.Tensor, ...] = ()

    @property
    def where(self) -> str:
        """File and place, for messages to people."""
        return str(self.origin)

    @property
    def tokens(self) -> int:
        """Length [tokens]."""
        return self.input_ids_S.shape[0]

    @property
    def patches(self) -> int:
        """Vision patches of images and videos, before merging [patches]."""
        return self.lengths.patches

    @property
    def size(self) -> Size:
        """Tokens and patches that the sample takes of a pack."""
        return Size(self.tokens, self.patches)

    @property
    def num_supervised(self) -> int:
        """Targets that the loss counts: supervised tokens, except a first one, which nothing predicts."""
        return int((self.labels_S[1:] != IGNORED).sum())

    @property
    def num_bytes(self) -> int:
        """Memory held [bytes]."""
        values = [getattr(self, part.name) for part in fields(self)]
        values += [joinable.tensor_X for joinable in self.processed.values()]
        values += [tensor for media in self.media.values() for tensor in media]
        values += self.latent_images
        return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))

    @property
    def lengths(self) -> SampleLengths:
        """The sizes that `Encoder.measure` gives of the same sample."""
        targets = (self.labels_S[1:] != IGNORED).nonzero()
        return SampleLengths(
            tokens=self.tokens,
            supervised=len(targets),
            first_target=int(targets[0]) + 1 if len(targets) else 0,
            media_end=self.media_end,
            targets=target_runs((self.labels_S != IGNORED).numpy()),
            media={name: _listed(media.sizes) for name, media in self.media.items()},
            segments=self.segments,
            parts=tuple(part.numbers for part in self.parts),
            key=self.origin.key if self.parts else 0,
        )

    def truncated(self, tokens: int) -> "EncodedSample | None":
        """The sample cut to its first tokens, or None if that would cut its media or leave nothing to learn."""
        if tokens < self.media_end:
            return None
        cut = self.slice(0, tokens)
        return cut if cut.num_supervised else None

    def slice(self, start: int, stop: int) -> "EncodedSample":
        """Tokens start .. stop - 1, with all media; positions of a later piece begin at 0 again."""
        segments = segments_within(self.segments, start, stop)
        positions_RS = self.position_ids_RS[:, start:stop].clone()
        if start:
            lengths = segments or (stop - start,)
            positions_RS = torch.cat([torch.arange(length) for length in lengths]).expand(len(positions_RS), -1)
        return replace(
            self,
            input_ids_S=self.input_ids_S[start:stop].clone(),
            labels_S=self.labels_S[start:stop].clone(),
            position_ids_RS=positions_RS,
            token_types_S=None if self.token_types_S is None else self.token_types_S[start:stop].clone(),
            segments=segments,
        )


def joined_views(views: Sequence[EncodedSample]) -> EncodedSample:
    """The views of a chat one after the other, as one sample; of a single view itself."""
    if len(views) == 1:
        return views[0]
    # Lengths follow the rule by which packs are planned, so that a plan's and a pack's agree.
    lengths = SampleLengths.joined([view.lengths for view in views])
    for view in views[1:]:
        view.labels_S[0] = IGNORED  # the view before must not predict this view's first token
    return replace(
        views[0],
        input_ids_S=torch.cat([view.input_ids_S for view in views]),
        labels_S=torch.cat([view.labels_S for view in views]),
        position_ids_RS=torch.cat([view.position_ids_RS for view in views], dim=1),
        token_types_S=_end_to_end([view.token_types_S for view in views]),
        media=joined_media([view.media for view in views]),
        processed=joined_tensors([view.processed for view in views]),
        media_end=lengths.media_end,
        segments=lengths.segments,
    )


def joined_answers(chats: Sequence[EncodedSample]) -> EncodedSample:
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


def with_prompt_once(answers: Sequence[EncodedSample], prompt: int) -> EncodedSample:
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


def _listed(sizes: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tuple(size) if isinstance(size, list) else size for size in sizes.tolist())
