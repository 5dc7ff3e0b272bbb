"""Samples and packs as a person looks at them: tokens with the loss mask, media with their sizes, what was left out.

Everything is taken from what training uses: the encoder's tensors, the length index, the plan of the packs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice, takewhile
from typing import Any

import numpy as np

from headway.count.modalities import MODALITIES
from headway.data.encode import Encoder
from headway.data.encoded import EncodedSample
from headway.data.media.images import Picture
from headway.data.samples import Chat, Media, Preference, Prompt, Sample, SampleLengths
from headway.errors import DataError
from headway.models.losses import IGNORED
from headway.packing.budget import Budget
from headway.packing.items import Items, OverlongCounts
from headway.packing.plan import Plan

_SHORTEST_RUN = 4  # shortest run of one token that is shown once with its number


@dataclass(frozen=True, slots=True)
class TokenRun:
    """A token, or a run of the same one, as of an image's placeholders.

    Attributes:
        text: the words of one of them.
        token: its id.
        count: how many there are in a row [tokens].
        is_learnt: whether the loss counts them.
    """

    text: str
    token: int
    count: int
    is_learnt: bool


@dataclass(frozen=True, slots=True)
class ShownMedia:
    """An image, video or sound of a sample.

    Attributes:
        kind: as `headway.count.modalities` names one item: "image", "video" or "audio".
        media: the file or its bytes.
        size: (width, height) of an image in its file [pixels]; None of others.
        grid: (t, h, w) as the model reads it [patches]; None where the model has none.
        frames: of a sound [feature frames]; None of others.
    """

    kind: str
    media: Media
    size: tuple[int, int] | None = None
    grid: tuple[int, int, int] | None = None
    frames: int | None = None

    @property
    def patches(self) -> int | None:
        """Vision patches, before merging [patches]."""
        return None if self.grid is None else self.grid[0] * self.grid[1] * self.grid[2]


@dataclass(frozen=True, slots=True)
class ShownSample:
    """A sample as the model is shown it.

    Attributes:
        where: file and place.
        pieces: its tokens, in order.
        media: its images, videos and sounds, in that order.
        lengths: as the length index has them.
        used: (first token, one past the last) of each item that a plan makes of it; one whole item without a plan, and
            none where the sample is left out.
        desirable: whether its answer is graded as a good one; None without a grade.
    """

    where: str
    pieces: tuple[TokenRun, ...]
    media: tuple[ShownMedia, ...]
    lengths: SampleLengths
    used: tuple[tuple[int, int], ...]
    desirable: bool | None = None


@dataclass(frozen=True, slots=True)
class ShownPreference:
    """A preference as the model is shown each of its answers.

    Attributes:
        where: file and place.
        answers: each behind the prompt, the best first.
        lengths: of all of them, as the length index has them.
        used: as of a sample.
    """

    where: str
    answers: tuple[ShownSample, ...]
    lengths: SampleLengths
    used: tuple[tuple[int, int], ...]

    @property
    def num_shared(self) -> int:
        """Number of pieces that all answers begin with, which are not learnt: those of the prompt."""
        together = zip(*(answer.pieces for answer in self.answers), strict=False)
        return sum(1 for _ in takewhile(lambda same: len({*same}) == 1 and not same[0].is_learnt, together))

    @property
    def media(self) -> tuple[ShownMedia, ...]:
        """The media of the prompt, where all answers were shown the same; else none."""
        first = self.answers[0].media
        return first if all(answer.media == first for answer in self.answers) else ()


ShownRow = ShownSample | ShownPreference
"""A row of a dataset as the model is shown it."""


@dataclass(frozen=True, slots=True)
class PackedItem:
    """A sample, or a piece of one, in a pack.

    Attributes:
        source: name of its dataset.
        row: place in the dataset, from 0.
        start: first token that is used.
        stop: one past the last token that is used.
    """

    source: str
    row: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """Length [tokens]."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ShownPack:
    """A pack of a plan.

    Attributes:
        step: optimizer step that it belongs to, from 1.
        items: what it holds, in order.
        patches: vision patches of all of them [patches].
        flops: useful FLOPs of training on it; tokens where the plan knows no cost model.
    """

    step: int
    items: tuple[PackedItem, ...]
    patches: int
    flops: float

    @property
    def tokens(self) -> int:
        """Tokens of all items [tokens]."""
        return sum(item.tokens for item in self.items)


@dataclass(frozen=True)
class DataView:
    """Samples and packs that `headway look` shows.

    Attributes:
        model: whose tokenizer and processor encoded.
        samples: some of their samples, or why one cannot be used.
        bad: rows that cannot be used, as far as all rows were measured.
        packs: the first packs; empty without a packing length.
        budget: of a pack; None without a packing length.
        counts: what became of each dataset's rows; empty without a packing length.
    """

    model: str
    samples: Sequence[ShownRow | DataError]
    bad: Sequence[DataError]
    packs: Sequence[ShownPack]
    budget: Budget | None
    counts: Mapping[str, OverlongCounts]


def show_row(sample: Sample, encoder: Encoder, used: Sequence[tuple[int, int]] | None = None) -> ShownRow:
    """Encode a row as for training, and describe what came of it; arguments and errors as of `show_sample`."""
    if not isinstance(sample, Preference):
        return show_sample(sample, encoder, used)
    answers = tuple(show_sample(chat, encoder) for chat in sample.chats)
    lengths = encoder.measure(sample)
    lengths = lengths.with_prompt_once() if encoder.shares_prompts else lengths
    return ShownPreference(sample.where, answers, lengths, ((0, lengths.tokens),) if used is None else tuple(used))


def show_sample(sample: Prompt, encoder: Encoder, used: Sequence[tuple[int, int]] | None = None) -> ShownSample:
    """Encode a sample as for training, and describe what came of it.

    Args:
        sample: a chat or document.
        encoder: of the model.
        used: what a plan uses of it; all of it if None.

    Raises:
        DataError: it cannot be used; the message names file and place.
    """
    encoded = encoder.encode(sample)
    items = ((0, encoded.tokens),) if used is None else tuple(used)
    media = tuple(_media(sample, encoded)) if isinstance(sample, Chat) else ()
    desirable = sample.desirable if isinstance(sample, Chat) else None
    pieces = tuple(_pieces(encoded, encoder.tokenizer))
    return ShownSample(sample.where, pieces, media, encoded.lengths, items, desirable)


def used_of(items: Items, source: int, row: int) -> list[tuple[int, int]]:
    """(first token, one past the last) of each item that was made of a row.

    Args:
        items: of the plan.
        source: number of the row's source among `items.names`.
        row: place in the source, from 0.
    """
    numbers = np.arange(items.offsets[source], items.offsets[source + 1])
    origins = replace(items, varying=()).locate(numbers)  # places in the whole sample, before condition dropout
    matches = origins.row == row
    return list(zip(origins.start[matches].tolist(), origins.stop[matches].tolist(), strict=True))


def why_not_whole(sample: ShownRow, budget: Budget) -> str | None:
    """Say why a plan drops or cuts a sample; None where it uses all of it."""
    tokens, patches = sample.lengths.tokens, sample.lengths.patches
    over = [f"{tokens:,} tokens are more than a pack's {budget.tokens:,}"] if tokens > budget.tokens else []
    if budget.patches is not None and patches > budget.patches:
        over.append(f"{patches:,} patches are more than a pack's {budget.patches:,}")
    reason = " and ".join(over)
    if not sample.used:
        return f"dropped: {reason}" if reason else "left out"
    start, stop = sample.used[0]
    if len(sample.used) > 1 or start:  # the model learns nothing of pieces before the first used piece
        used = ", ".join(f"{first:,} to {last:,}" for first, last in sample.used)
        return f"split into {len(sample.used)} piece{'s' * (len(sample.used) > 1)}, tokens {used}: {reason}"
    return None if stop - start == tokens else f"cut after token {stop:,}: {reason}"


def show_packs(plan: Plan, count: int) -> list[ShownPack]:
    """The first packs of a plan, in the order in which they are trained on.

    Args:
        plan: of any strategy.
        count: packs at most; of the last step all are shown [packs].
    """
    packs: list[ShownPack] = []
    for number, (step, _) in enumerate(plan.steps(), start=1):
        for items, flops in zip(step.packs, step.costs.tolist(), strict=True):
            origins = plan.items.locate(items)
            columns = (origins.source, origins.row, origins.start, origins.stop)
            members = tuple(
                PackedItem(plan.items.names[source], row, start, stop)
                for source, row, start, stop in zip(*(column.tolist() for column in columns), strict=True)
            )
            packs.append(ShownPack(number, members, int(plan.items.sizes_of(items).patches.sum()), flops))
        if len(packs) >= count:
            break
    return packs


def _pieces(encoded: EncodedSample, tokenizer: Any) -> Iterator[TokenRun]:
    ids: list[int] = encoded.input_ids_S.tolist()
    learnt = (encoded.labels_S != IGNORED).tolist()
    learnt[0] = False  # nothing predicts the first token
    texts = _words(ids, tokenizer)
    place = 0
    for (token, is_learnt), group in groupby(zip(ids, learnt, strict=True)):
        count = len(list(group))
        if count >= _SHORTEST_RUN:
            yield TokenRun(texts[place], token, count, is_learnt)
        else:
            yield from (TokenRun(texts[place + i], token, 1, is_learnt) for i in range(count))
        place += count


def _words(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """The text of each token, with the space before it, which some tokenizers only write behind another token."""
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    single_texts = {token: tokenizer.decode([token], **options) for token in set(ids)}
    words = [single_texts[ids[0]]] if ids else []
    pairs: dict[tuple[int, int], str] = {}
    for before, token in zip(ids, islice(ids, 1, None), strict=False):
        if (before, token) not in pairs:
            both = tokenizer.decode([before, token], **options)
            follows = both.startswith(single_texts[before])
            pairs[before, token] = both[len(single_texts[before]) :] if follows else single_texts[token]
        words.append(pairs[before, token])
    return words


def _media(sample: Chat, encoded: EncodedSample) -> Iterator[ShownMedia]:
    sizes_by_kind = encoded.lengths.media
    for name, row in MODALITIES.items():
        items = sample.media(row.kind)
        # a picture in several tiles has a size for each, of which none is its own
        sizes = sizes_by_kind.get(name, ())
        own_sizes = sizes if len(sizes) == len(items) else (None,) * len(items)
        for media, size in zip(items, own_sizes, strict=True):
            pixels = None
            if row.kind == "image":
                with Picture(media, sample.where) as picture:
                    pixels = (picture.size[1], picture.size[0])
            if row.shape == "grids":
                yield ShownMedia(row.kind, media, pixels, size)
            else:
                yield ShownMedia(row.kind, media, frames=size)
