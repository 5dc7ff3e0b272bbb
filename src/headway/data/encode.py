"""Samples as tensors, or their lengths alone, by the model's own tokenizer, chat template and processor.

Tensor letters: S tokens of one sample, R rows of positions (1, or 3 for M-RoPE).
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image as Pillow
from transformers import PreTrainedTokenizerBase

from headway.count.modalities import MODALITIES
from headway.data.chat import ChatTemplate, Span, View
from headway.data.chat_settings import TEMPLATE_FILE
from headway.data.encoded import EncodedSample, joined_answers, joined_views, prompt_tokens, with_prompt_once
from headway.data.media.images import MAX_IMAGE_PIXELS, check_limit
from headway.data.media.media_reader import MediaReader, OpenedKind, OpenedMedia, refused
from headway.data.media.placeholders import MAX_CHARACTERS, SampleTokens, Tokeniser
from headway.data.media.processor_images import SMALLEST_TRIED
from headway.data.media.sizes import MediaSizes
from headway.data.pack_times import charged_to
from headway.data.samples import (
    NOTHING,
    Chat,
    Document,
    MediaPart,
    Origin,
    Preference,
    Sample,
    SampleLengths,
    unusable,
)
from headway.errors import foreign
from headway.models.load import Processor, RopeIndex
from headway.models.losses import IGNORED
from headway.models.video import Scale
from headway.packing.parts import Dropout
from headway.packing.pieces import target_runs

_VERSION = 4  # version of encoding; raised when the same settings come to mean other tokens
_BLANK = Document((), Origin("", "", 0, ""))  # document that a blank image comes from


@dataclass(frozen=True, slots=True)
class _Planned:
    """A sample whose media are open, by the reader that opened them, and whose tokens are known."""

    tokens: SampleTokens
    media: OpenedMedia
    reader: MediaReader


@dataclass(frozen=True, slots=True)
class _View:
    """A document, or a chat as far as one of its views shows it."""

    sample: Chat | Document
    shown: View | None = None


class Encoder:
    """Encodes chats and documents for one model; can be pickled.

    Args:
        processor: the model's processor, or its tokenizer if it reads text alone.
        rope_index: the model's own rule for M-RoPE positions (`headway.models.rope_index(model)`); None where positions
            are plain indices.
        num_embeddings: rows of the model's embedding, which no id may reach; None where that is not known [tokens].
        max_image_pixels: larger images are refused, before they are decoded [pixels].
        max_characters: longer texts are refused, before they are tokenised [characters].
        patch_size: side of a patch of the model's vision tower (`headway.models.vision.patch_size_of(config)`), for
            models whose processor does not tell how many patches an image has [pixels].

    Attributes:
        shares_prompts: whether a preference has its prompt before all answers once, for a model that takes branches.

    Raises:
        ConfigError: the limit cannot take effect.
    """

    shares_prompts = False

    def __init__(
        self,
        processor: Processor,
        rope_index: RopeIndex | None = None,
        *,
        num_embeddings: int | None = None,
        max_image_pixels: int = MAX_IMAGE_PIXELS,
        max_characters: int = MAX_CHARACTERS,
        patch_size: int | None = None,
    ) -> None:
        self.processor: Any = processor
        self.rope_index = rope_index
        self.max_image_pixels = check_limit(max_image_pixels)
        self.max_characters = max_characters
        multimodal = not isinstance(processor, PreTrainedTokenizerBase)
        self.media = MediaReader(processor, self.max_image_pixels, patch_size)
        self._resized: dict[MediaSizes, MediaReader] = {}
        self.tokeniser = Tokeniser(processor, num_embeddings, max_characters, self.media.processed)
        self.tokenizer: Any = self.tokeniser.tokenizer
        processed = self.media.processed
        self.template = ChatTemplate(
            processor,
            multimodal,
            processed=processed.prompt if processed is not None and processed.rewrites_prompts else None,
        )

    @property
    def pixel_scale(self) -> Scale | None:
        """(scale_D, shift_D): the model reads bytes * scale + shift; None where patches are what the model reads."""
        return None if self.media.images is None else self.media.images.scale

    def reader_of(self, sizes: MediaSizes) -> MediaReader:
        """The reader of media that are bounded so, where the run's bounds do not hold.

        Raises:
            ConfigError: the model's processor has no such bounds.
        """
        if not sizes:
            return self.media
        if sizes not in self._resized:
            self._resized[sizes] = self.media.resized(sizes)
        return self._resized[sizes]

    def dropout(self, seed: int) -> Dropout | None:  # noqa: ARG002 - of encoders that have conditions
        """Conditions of samples that are left out at random by a seed; None where all samples stay whole."""
        return None

    def without_conditions(self, sample: EncodedSample, dropout: Dropout | None, epoch: int) -> EncodedSample:  # noqa: ARG002
        """Leave conditions out of a sample as they are in an epoch; arguments as `lengths_without_conditions`."""
        return sample

    def lengths_without_conditions(
        self,
        lengths: SampleLengths,
        origin: Origin,  # noqa: ARG002
        dropout: Dropout | None,  # noqa: ARG002
        epoch: int,  # noqa: ARG002
    ) -> SampleLengths:
        """The lengths of a sample after `without_conditions`.

        Args:
            lengths: of the whole sample.
            origin: where it came from.
            dropout: of its conditions, as `dropout` gives it.
            epoch: how often it has played before.
        """
        return lengths

    def encode(self, sample: Sample) -> EncodedSample:
        """Encode a sample for training.

        Of a chat every assistant turn is supervised, the token that ends it and tool calls included, each in the view
        in which the model would have been asked for it (`ChatTemplate.views`); of a document every token; of a
        preference each answer, all of them end to end.

        Raises:
            DataError: nothing to learn, a text that is too long, tokens that the model does not know, damaged media or
                media the model cannot read, or a chat template that leaves something out; the message names file and
                place.
        """
        if isinstance(sample, Preference):
            shared = self._with_prompt_once(sample) if self.shares_prompts else None
            return shared or joined_answers([self.encode(chat) for chat in sample.chats])
        views = []
        for view in self._views(sample):
            with self._planned(view, decodes=True) as planned:
                views.append(self._tensors(view.sample, planned))
        return joined_views(views)

    def _with_prompt_once(self, sample: Preference) -> EncodedSample | None:
        """Encode a preference as its prompt, then all answers; None where its answers cannot share the prompt."""
        answers = [self._views(chat) for chat in sample.chats]
        if any(len(views) > 1 for views in answers):
            return None
        with ExitStack() as stack:
            planned = [
                stack.enter_context(self._planned(view, decodes=number == 0)) for number, (view,) in enumerate(answers)
            ]
            prompt = prompt_tokens(sample, [answer.tokens for answer in planned])
            if not prompt:
                return None
            encoded = [self._tensors(sample, answer, media=number == 0) for number, answer in enumerate(planned)]
        return with_prompt_once(encoded, prompt)

    def measure(self, sample: Sample) -> SampleLengths:
        """The sizes of a sample from media headers, without decoding them, each answer behind its own prompt.

        They are those of `encode(sample)`; where that shares prompts, `with_prompt_once()` of them is.

        Raises:
            DataError: as `encode`, except for damage that shows only when media are decoded.
        """
        if isinstance(sample, Preference):
            answers = [self._measured(chat) for chat in sample.chats]
            lengths = SampleLengths.of_answers([SampleLengths.joined([size for size, _ in views]) for views in answers])
            if any(len(views) > 1 for views in answers):
                return lengths
            return replace(lengths, prompt=prompt_tokens(sample, [tokens for ((_, tokens),) in answers]))
        return SampleLengths.joined([lengths for lengths, _ in self._measured(sample)])

    def _measured(self, sample: Chat | Document) -> list[tuple[SampleLengths, SampleTokens]]:
        views = []
        for view in self._views(sample):
            with self._planned(view, decodes=False) as planned:
                tokens = planned.tokens
                if len(tokens.ids_S) < 2:  # only a document can be so short
                    return [(NOTHING, tokens)]
                targets = np.flatnonzero(tokens.supervised_S[1:]) + 1
                lengths = SampleLengths(
                    tokens=len(tokens.ids_S),
                    supervised=len(targets),
                    first_target=int(targets[0]),
                    media_end=tokens.media_end,
                    targets=target_runs(tokens.supervised_S),
                    media=planned.media.sizes,
                )
            views.append((lengths, tokens))
        return views

    def encode_prompt(self, sample: Chat) -> EncodedSample:
        """Encode a chat up to its last answer, opened for the model to answer; for evaluation.

        Raises:
            DataError: as `encode`.
        """
        messages = sample.messages[: sample.answers[-1]] if sample.answers else sample.messages
        if not messages:
            raise unusable(sample, "the chat begins with its only answer, so there is no prompt to answer.")
        shown = replace(sample, messages=messages)
        with self._opened(shown, self.template.processed_prompt(shown), [], decodes=True) as planned:
            return self._tensors(shown, planned)

    def own_collator(self, **_settings: Any) -> Any | None:
        """Make the collator for what this encoder encodes; None where that is `headway.data.collate.Collator`."""

    def blank_image(self) -> EncodedSample | None:
        """A blank image alone, for packs without one (`Collator.blank`); None where images are patches with grids."""
        if self.media.processed is None:
            return None
        lengths, tensors = self.media.processed.read([Pillow.new("RGB", SMALLEST_TRIED)])
        media = OpenedMedia({"images": OpenedKind(lengths.grids, lengths.written, processed=tensors)})
        tokens = self.tokeniser.chat(self.tokeniser.words["image"], [], media.written, "a blank image")
        return self._tensors(_BLANK, _Planned(tokens, media, self.media))

    def fingerprint(self) -> str:
        """A key that changes when tokenizer, chat template, processor settings or their versions do."""
        settings = {
            name: _settings(part)
            for name in ("image_processor", "video_processor", "feature_extractor")
            if (part := getattr(self.processor, name, None)) is not None  # some leave a part empty
        }
        key = {
            "version": _VERSION,
            "transformers": transformers.__version__,
            "processor": type(self.processor).__name__,
            "settings": settings,
            "template": self.template.sources,
            "tokenizer": tokenizer_settings(self.tokenizer),
            "max_image_pixels": self.max_image_pixels,
            "max_characters": self.max_characters,
        }
        if self.media.processed is not None:
            key["patch_size"] = self.media.processed.patch
            if self.media.processed.rewrites_prompts:
                key["rewrites_prompts"] = True
        if self.tokeniser.missing_rows:  # rows that hold such tokens cannot be used, until the model has them too
            key["missing_rows"] = self.tokeniser.missing_rows
        return hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()

    def _views(self, sample: Chat | Document) -> "list[_View]":
        """The texts that a sample is learnt in: one, but for chats whose template shows earlier turns in other ways."""
        if isinstance(sample, Document):
            return [_View(sample)]
        if not any(message.role == "assistant" for message in sample.messages):
            raise unusable(
                sample,
                "the chat has no assistant turn, so there is nothing to learn from it. Add the answer "
                'as a message with the role "assistant", or delete the line.',
            )
        with charged_to("tokenise"):
            views = self.template.views(sample)
        shown = views[-1].messages if views else 0
        unseen = next(
            (part for turn in sample.messages[shown:] for part in turn.parts if isinstance(part, MediaPart)), None
        )
        if unseen is not None:
            raise unusable(
                sample,
                f"the {unseen.kind} {unseen.media} stands behind the last answer that is learnt, so it would never be "
                "shown to the model. Put it before the answer that is about it, or remove it.",
            )
        return [_View(replace(sample, messages=sample.messages[: view.messages]), view) for view in views]

    @contextmanager
    def _planned(self, view: "_View", decodes: bool) -> Iterator[_Planned]:
        """A view's tokens, its media opened; refused if there is nothing to learn from it, or no end of an answer."""
        sample = view.sample
        # A document learns every token after its first; one without a second has nothing to predict.
        if isinstance(sample, Document):
            with charged_to("tokenise"):
                tokens = self.tokeniser.document(() if sample.is_blank else sample.content, sample.where)
            if decodes and len(tokens.ids_S) < 2:
                raise unusable(sample, "the document is empty or a single token, so there is nothing to learn.")
            yield _Planned(tokens, OpenedMedia(), self.media)
            return
        assert view.shown is not None
        # A chat learns its answers; media are open while its tokens are used.
        with self._opened(sample, view.shown.text, view.shown.spans, decodes) as planned:
            learnt = planned.tokens.ids_S[planned.tokens.supervised_S]
            # The first token of a sample is never predicted, so a label there is none.
            if not planned.tokens.supervised_S[1:].any():
                raise unusable(
                    sample,
                    "the assistant's turns are empty after the chat template, so there is nothing to learn. Write an "
                    "answer, or delete the line.",
                )
            # An answer that is learnt without its end would never stop when generated.
            if int(learnt[-1]) not in self.template.stop_ids():
                last = self.tokenizer.decode([int(learnt[-1])])
                raise unusable(
                    sample,
                    f"the last token that would be learnt, {last!r}, is none that ends an answer, so the model would "
                    "not learn to stop. Give a chat template that ends answers with a special token of the tokenizer "
                    f"({TEMPLATE_FILE}).",
                )
            yield planned

    @contextmanager
    def _opened(self, sample: Chat, text: str, spans: list[Span], decodes: bool) -> Iterator[_Planned]:
        with ExitStack() as stack:
            with charged_to("decode"):
                reader = self.reader_of(sample.sizes)
                media = reader.open(sample, stack, decodes)
            with charged_to("tokenise"):
                tokens = self.tokeniser.chat(text, spans, media.written, sample.where)
            yield _Planned(tokens, media, reader)

    def _tensors(self, sample: Sample, planned: _Planned, *, media: bool = True) -> EncodedSample:
        """A sample as tensors; without its media, which another one has, if that is said."""
        tokens, opened = planned.tokens, planned.media
        ids_S = torch.from_numpy(tokens.ids_S)
        types_S, types_name = torch.from_numpy(tokens.types_S), "mm_token_type_ids"
        positions_RS = self._positions(ids_S, types_S, opened)
        # The processor decides if the model reads token types (1 and up for media), under which name, and if answers
        # have one.
        reads_types = self.media.images is not None
        if self.media.processed is not None:
            reads_types = self.media.processed.types_name is not None
            types_name = self.media.processed.types_name or types_name
            if self.media.processed.types_answers:
                types_S = (torch.from_numpy(tokens.supervised_S).cumsum(0) > 0).int()
        with charged_to("decode"), foreign(partial(refused, sample.where, "its media")):
            tensors = opened.tensors() if media else {}
        return EncodedSample(
            input_ids_S=ids_S,
            labels_S=torch.from_numpy(np.where(tokens.supervised_S, tokens.ids_S, IGNORED)),
            position_ids_RS=positions_RS,
            origin=sample.origin,
            token_types_S=types_S if reads_types else None,
            types_name=types_name,
            media=tensors,
            processed=opened.processed if media else {},
            media_end=tokens.media_end,
        )

    def _positions(self, ids: torch.Tensor, types: torch.Tensor, media: OpenedMedia) -> torch.Tensor:
        plain = torch.arange(ids.shape[0])[None]
        if self.rope_index is None:
            return plain
        if not any(MODALITIES[name].shape == "grids" for name in media.sizes):
            return plain.repeat(3, 1)  # M-RoPE of text and sounds: the three rows agree
        arguments = {name: tensor.tensor_X for name, tensor in media.processed.items()} | media.rope_arguments()
        positions, _ = self.rope_index(input_ids=ids[None], mm_token_type_ids=types[None], **arguments)
        return positions[:, 0].cpu()


def _settings(part: Any) -> Any:
    return {name: value for name, value in part.to_dict().items() if not name.startswith("_")}


def tokenizer_settings(tokenizer: Any) -> list[Any]:
    """Fields by which two tokenizers are the same: class, words and special tokens."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    words = fast.to_str() if fast is not None else sorted(tokenizer.get_vocab().items())
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return [type(tokenizer).__name__, words, special]
