"""Text with one placeholder per image, video or sound -> tokens, as the model's own processor expands them.

Tensor letters: S tokens of one sample.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unicodedata import is_normalized

import numpy as np
from numpy.typing import NDArray
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase
from transformers.tokenization_utils_base import TruncationStrategy
from transformers.utils.generic import PaddingStrategy

from headway.count.modalities import in_chats
from headway.data.chat import Span
from headway.data.media.processor_images import ProcessedImages, prompt_word
from headway.errors import DataError, foreign
from headway.words import Argument

MAX_CHARACTERS = 5_000_000
"""Default bound on a text [characters]: tokenizers take up to 400 bytes of memory for each, 2 GB for so many."""

KINDS = tuple(in_chats())
"""Kinds of placeholders; a token of the n-th has type n, counted from 1, as in transformers' `mm_token_type_ids`."""


@dataclass(frozen=True, slots=True)
class SampleTokens:
    """One sample's tokens.

    Attributes:
        ids_S: token ids, placeholders expanded.
        supervised_S: whether the loss learns the token.
        types_S: 0 for text, 1 for images, 2 for videos, 3 for sounds.
        media_S: whether the token stands for an image, video or sound, or in what is written around them.
    """

    ids_S: NDArray[np.int64]
    supervised_S: NDArray[np.bool_]
    types_S: NDArray[np.int32]
    media_S: NDArray[np.bool_]

    @property
    def media_end(self) -> int:
        """One past the last token of an image, video or sound; 0 without any [tokens]."""
        places = np.flatnonzero(self.media_S)
        return int(places[-1]) + 1 if len(places) else 0


_SHOWN_TOKENS = 3  # most missing tokens that an error shows
_IDS_ALONE = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
_SPACE = "Ġ"  # the letter by which byte-level tokenizers write a space
_KEEPS_BYTES = ("Split", "Digits", "ByteLevel")  # parts of a tokenizer that add nothing to a text before its merges


@dataclass(frozen=True, slots=True)
class _ByteLevel:
    """Byte-level tokenizer: its tokens hold each byte of a text once, and their lengths tell the place of each token.

    It then need not note the words and places of tokens, which takes a third of its time.

    Attributes:
        tokenizer: of transformers.
        composes: whether it reads a text in Unicode's normal form C.
        lengths_V: length of each token [bytes].
        spaces_V: white space at the beginning of each token that its place leaves out [bytes].
    """

    tokenizer: Any
    composes: bool
    lengths_V: NDArray[np.int64]
    spaces_V: NDArray[np.int64]

    @classmethod
    def of(cls, tokenizer: Any) -> "_ByteLevel | None":
        """Read off a tokenizer that it is one; None where it is not."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or not isinstance(backend.model, BPE):
            return None
        composes, splits = _parts(backend.normalizer, "normalizers"), _parts(backend.pre_tokenizer, "pretokenizers")
        levels = [split for split in splits if split["type"] == "ByteLevel"]
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        if (
            any(part["type"] != "NFC" for part in composes)
            or any(split["type"] not in _KEEPS_BYTES for split in splits)
            or [level["add_prefix_space"] for level in levels] != [False]
            or backend.model.continuing_subword_prefix
            or backend.model.end_of_word_suffix
            or not vocabulary.keys() >= {*ByteLevel.alphabet()}  # a byte without a token would be left out
        ):
            return None
        lengths_V, spaces_V = np.zeros((2, 1 + max(vocabulary.values())), np.int64)
        for word, number in vocabulary.items():  # a letter for each byte
            lengths_V[number], spaces_V[number] = len(word), len(_spaces(word))
        for number, token in tokenizer.added_tokens_decoder.items():  # these stand in a text as they are
            lengths_V[number], spaces_V[number] = len(token.content.encode()), len(_spaces(token.content).encode())
        trims = any(part.get("trim_offsets") for part in _parts(backend.post_processor, "processors"))
        return cls(tokenizer, bool(composes), lengths_V, spaces_V * trims)

    def placed(self, text: str) -> tuple[list[int], NDArray[np.int64]] | None:
        """Ids of a text, and the character at which each token begins; None where a token's length is not its own."""
        if self.composes and not is_normalized("NFC", text):
            return None
        # Settings of the call before, as transformers itself undoes them.
        backend, splits_special = self.tokenizer.backend_tokenizer, self.tokenizer.split_special_tokens
        self.tokenizer.set_truncation_and_padding(
            PaddingStrategy.DO_NOT_PAD, TruncationStrategy.DO_NOT_TRUNCATE, 0, 0, None, None
        )
        if backend.encode_special_tokens != splits_special:
            backend.encode_special_tokens = splits_special
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        ids_S, content = np.array(ids, np.int64), text.encode()
        lengths_S = self.lengths_V[ids_S]
        starts_S = np.cumsum(lengths_S) - lengths_S
        if lengths_S.sum() != len(content):  # an added token has taken white space beside it
            return None
        starts_S += self.spaces_V[ids_S]
        starts_S[:1] = 0
        if not text.isascii():
            # A token that begins within a character has the place of that character.
            begins = (np.frombuffer(content, np.uint8) & 0xC0) != 0x80
            starts_S = np.append(np.cumsum(begins) - 1, len(text))[starts_S]
        return ids, starts_S


def _parts(step: Any, key: str) -> list[dict[str, Any]]:
    """The parts of a step of a tokenizer, none of a step that it does not have.

    Args:
        step: of the `tokenizers` library.
        key: name of a sequence's parts.
    """
    parts = [] if step is None else [json.loads(step.__getstate__())]
    while any(key in part for part in parts):
        parts = [inner for part in parts for inner in part.get(key, [part])]
    return parts


def _spaces(word: str) -> str:
    """White space with which a token begins; byte-level ones write a space as another letter."""
    return word[: len(word) - len(word.lstrip().lstrip(_SPACE).lstrip())]


class Tokeniser:
    """Tokenises text for one model.

    A placeholder that a processor writes 700 times over is tokenised once and repeated as ids: special tokens are cut
    out before the text between them is looked at, so the result is the same and costs no more than the text alone.

    Args:
        processor: the model's processor or tokenizer.
        num_embeddings: rows of the model's embedding, which no id may reach; None where that is not known [tokens].
        max_characters: longer texts are refused before they are tokenised [characters].
        processed: how the model reads images, where these are as its processor gives them.

    Attributes:
        missing_rows: tokens of the tokenizer that the model has no embedding for, as they were added to it [tokens].
    """

    def __init__(
        self,
        processor: Any,
        num_embeddings: int | None = None,
        max_characters: int = MAX_CHARACTERS,
        processed: ProcessedImages | None = None,
    ) -> None:
        self.tokenizer: Any = getattr(processor, "tokenizer", processor)
        plain = isinstance(processor, PreTrainedTokenizerBase)
        vocabulary_size = 1 + max(self.tokenizer.get_vocab().values(), default=-1)
        self._num_ids = vocabulary_size if num_embeddings is None else min(vocabulary_size, num_embeddings)
        self.missing_rows = vocabulary_size - self._num_ids
        self._max_characters = max_characters
        # A text-only chat template writes special tokens itself.
        self._adds_special = not plain and self.tokenizer.num_special_tokens_to_add() > 0
        self._byte_level = _ByteLevel.of(self.tokenizer)
        words = {kind: None if plain else prompt_word(processor, kind) for kind in KINDS}
        self.words: dict[str, str] = {kind: word for kind, word in words.items() if word is not None}
        self._ids = {kind: self.tokenizer.convert_tokens_to_ids(word) for kind, word in self.words.items()}
        special = self.tokenizer.added_tokens_decoder
        self._special_words = {kind: word for kind, word in self.words.items() if self._ids[kind] in special}
        self._pattern = re.compile("|".join(f"(?P<{k}>{re.escape(w)})" for k, w in self.words.items()) or r"(?!)")
        self._written_only: list[str] = []  # special tokens that only a processor writes
        self._types = {token: 1 + KINDS.index(kind) for kind, token in self._ids.items()}
        self._marks_all = processed is not None
        if processed is not None:
            self._written_only = [token for token in processed.repeated if token not in self.words.values()]
            self._special_words |= {token: token for token in self._written_only}
            self._ids |= {token: self.tokenizer.convert_tokens_to_ids(token) for token in self._written_only}
            self._types.pop(self._ids.get("image", -1), None)
            self._types |= dict.fromkeys(processed.placeholder_ids, 1)
        self._runs = re.compile("|".join(f"(?:{re.escape(word)})+" for word in self._special_words.values()) or r"(?!)")

    def chat(self, text: str, spans: Sequence[Span], written: Mapping[str, Sequence[str]], where: str) -> SampleTokens:
        """Tokenise a rendered chat.

        Args:
            text: the chat as its template renders it.
            spans: parts of the text that the assistant wrote [characters].
            written: for each kind, what the processor writes in place of each of its placeholders.
            where: the sample's place, for messages.

        Raises:
            DataError: the text holds other placeholders than the chat has media, is too long, or has tokens that
                the model does not know.
        """
        expanded, ends, shifts, counts, inside = self._expand(text, written, where)
        adds = self._adds_special and not text.startswith(self.tokenizer.bos_token or "\0")
        with self._reading(expanded, where):
            tokens, starts = self._placed(expanded, adds)
        supervised = np.zeros(len(starts), np.bool_)
        for span in spans:
            first, last = (place + shifts[bisect_right(ends, place)] for place in span)
            supervised |= (starts >= first) & (starts < last)
        ids = self._checked_ids(tokens, where)
        media = np.zeros(len(starts), np.bool_)
        for first, last in inside if self._marks_all else ():
            media |= (starts >= first) & (starts < last)
        return self._repeated(ids, supervised, media, counts)

    def document(self, content: str | Sequence[int], where: str) -> SampleTokens:
        """Tokenise running text, every token of it supervised.

        The tokenizer's own beginning and end are kept, once if the text has them already, as a chat template writes
        them; its end-of-text token closes the document. Ids are taken as they are.

        Raises:
            DataError: the document holds placeholders of images, videos or sounds, is too long, or has ids that the
                model does not know.
        """
        if isinstance(content, str):
            with self._reading(content, where):
                out = self.tokenizer(content, **_IDS_ALONE, return_special_tokens_mask=True)
            ids = _framed_once(self._checked_ids(out["input_ids"], where), out["special_tokens_mask"])
            end = self.tokenizer.eos_token_id
            if end is not None and (not len(ids) or ids[-1] != end):
                ids = np.append(ids, end)
        else:
            ids = self._checked_ids(content, where)
        tokens = self._repeated(ids, np.ones(len(ids), np.bool_), np.zeros(len(ids), np.bool_), None)
        if np.isin(tokens.ids_S, [*self._types, *self._ids.values()]).any():
            raise DataError(
                "the document holds the model's placeholder of an image, video or sound but has none. Remove "
                "it from the text.",
                where=where,
            )
        return tokens

    def _checked_ids(self, ids: Sequence[int], where: str) -> NDArray[np.int64]:
        """Ids as an array, each of which the model has an embedding for."""
        for token in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token < self._num_ids:
                shown = token if abs(token) < 2**63 else "of more than 64 bits"
                if self._num_ids <= token < self._num_ids + self.missing_rows:
                    raise DataError(f"it holds the token id {token}. {self.added_tokens()}", where=where)
                raise DataError(
                    f"it holds the token id {shown}, but the ids of this model run from 0 to "
                    f"{self._num_ids - 1}. The ids are another tokenizer's, or damaged.",
                    where=where,
                )
        return np.asarray(ids, np.int64)

    @property
    def missing_tokens(self) -> list[str]:
        """The tokens that were added to the tokenizer and not to the model, in the order of their ids."""
        ids = range(self._num_ids, self._num_ids + self.missing_rows)
        names: list[str] = self.tokenizer.convert_ids_to_tokens(list(ids))
        return names

    def added_tokens(self) -> str:
        """Say which tokens were added to the tokenizer and not to the model, and how the model gets them."""
        vocabulary_size, names = self._num_ids + self.missing_rows, self.missing_tokens[:_SHOWN_TOKENS]
        shown = ", ".join(repr(name) for name in names) + (", ..." if self.missing_rows > len(names) else "")
        ids = f"id {vocabulary_size - 1}" if self.missing_rows == 1 else f"ids {self._num_ids} to {vocabulary_size - 1}"
        return (
            f"The tokenizer has tokens that were added to it and not to the model: {shown}, {ids}, while the model's "
            f"embedding has {self._num_ids} rows. List them in model.new_tokens, or model.new_special_tokens where the "
            "tokenizer calls them special, and training adds rows; `headway init` writes the list."
        )

    @contextmanager
    def _reading(self, text: str, where: str) -> Iterator[None]:
        """Let the tokenizer read a text."""
        if len(text) > self._max_characters:
            raise DataError(
                f"its text has {len(text):,} characters, more than the limit of {self._max_characters:,}: tokenising "
                f"takes up to 400 bytes of memory for each. Split the text, or raise {Argument('max_characters')}.",
                where=where,
            )
        with foreign(partial(_refusal, where)):
            yield

    def _placed(self, text: str, adds_special: bool) -> tuple[list[int], NDArray[np.int64]]:
        """Ids of a text, and the character at which each token begins."""
        if not adds_special and self._byte_level is not None and (placed := self._byte_level.placed(text)):
            return placed
        out = self.tokenizer(text, **_IDS_ALONE, add_special_tokens=adds_special)
        offsets = out[0].offsets  # read in place: `return_offsets_mapping` copies the list
        return out["input_ids"], np.fromiter((start for start, _ in offsets), np.int64, len(offsets))

    def _expand(
        self, text: str, written: Mapping[str, Sequence[str]], where: str
    ) -> tuple[str, list[int], list[int], list[int], list[Span]]:
        """The text with one placeholder per run, how often each is repeated, and what stands in place of placeholders.

        Between them: where placeholders ended in `text`, and how far what follows each end has moved.
        """
        # Tokens that only the processor writes must not come from the text: they would count as a picture's.
        for word in self._written_only:
            if word in text:
                raise DataError(
                    f"the chat's text holds {word!r}, which only the model's processor writes, in place of an "
                    "image. Remove it from the text.",
                    where=where,
                )
        for kind, word in self.words.items():
            num_in_text, num_media = text.count(word), len(written.get(kind, ()))
            if num_in_text != num_media:
                raise DataError(
                    f"the chat's text holds the model's {kind} placeholder {word!r} {num_in_text} times, but "
                    f"the chat has {num_media} {kind} parts. Remove the placeholder from the text; media are parts of "
                    "their own, and the chat template must write one placeholder for each.",
                    where=where,
                )
        if not any(written.get(kind) for kind in self.words):  # a search for nothing still reads the whole text
            return text, [], [0], [], []
        # The text with each placeholder replaced by the processor's words, its runs cut to one token each.
        pieces, ends, shifts, counts, inside, last = [], [], [0], [], [], 0
        waiting = {kind: iter(written.get(kind, ())) for kind in self.words}
        for match in self._pattern.finditer(text):
            replacement = next(waiting[match.lastgroup or ""])
            short = self._runs.sub(lambda run: self._first(run.group()), replacement)
            # Repeats of each run's token, put back as ids once the short text is tokenised.
            counts += [len(run.group()) // len(self._first(run.group())) for run in self._runs.finditer(replacement)]
            pieces += [text[last : match.start()], short]
            last = match.end()
            ends.append(last)
            # Characters of the new text that stand for media, so that no answer learns them.
            inside.append((match.start() + shifts[-1], match.start() + shifts[-1] + len(short)))
            shifts.append(shifts[-1] + len(short) - len(match.group()))
        return "".join([*pieces, text[last:]]), ends, shifts, counts, inside

    def _first(self, run: str) -> str:
        return next(word for word in self._special_words.values() if run.startswith(word))

    def _repeated(
        self,
        ids: NDArray[np.int64],
        supervised: NDArray[np.bool_],
        media: NDArray[np.bool_],
        counts: Sequence[int] | None,
    ) -> SampleTokens:
        types = np.zeros(len(ids), np.int32)
        for token, number in self._types.items():
            types[ids == token] = number
        media |= types != 0
        supervised &= ~media  # an image inside an answer is shown, not predicted
        if not counts:
            return SampleTokens(ids, supervised, types, media)
        repeats = np.ones(len(ids), np.int64)
        repeats[np.isin(ids, [self._ids[kind] for kind in self._special_words])] = counts
        return SampleTokens(
            np.repeat(ids, repeats),
            np.repeat(supervised, repeats),
            np.repeat(types, repeats),
            np.repeat(media, repeats),
        )


def _framed_once(ids: NDArray[np.int64], added: Sequence[int]) -> NDArray[np.int64]:
    """Ids of a text, without what the tokenizer adds at its beginning or end where the text has the same there.

    Args:
        ids: of the text, with what is added.
        added: 1 for each id that the tokenizer added.
    """
    length = len(ids)
    before = next((place for place, is_added in enumerate(added) if not is_added), length)
    after = next((place for place, is_added in enumerate(reversed(added)) if not is_added), length)
    if before + after > length // 2:  # the text itself is shorter than what is added
        return ids
    first = before if (ids[:before] == ids[before : 2 * before]).all() else 0
    last = after if (ids[length - after :] == ids[length - 2 * after : length - after]).all() else 0
    return ids[first : length - last]


def _refusal(where: str, reason: str) -> DataError:
    return DataError(
        f"the model's tokenizer refuses this text: {reason} Check the text, and the tokenizer.json.", where=where
    )
