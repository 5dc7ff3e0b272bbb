"""Samples of models that read and draw images: text, images to read and images to draw, encoded and laid out.

An image in an assistant's turn is drawn, every other one is read. What comes before a drawn image is also given as
clean latents, so that an edit sees the pixels of what it starts from; a drawn image that is followed by more is given
again, clean.

Tensor letters as in `encode`.

Source: data/t2i_dataset.py, vlm_dataset.py and interleave_datasets/ of ByteDance-Seed/Bagel (commit 056b5fd).
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image as Pillow

from headway.data.collate import PADDING_TOKEN, Batch, Collator
from headway.data.encode import Encoder, tokenizer_settings
from headway.data.encoded import EncodedSample
from headway.data.media.images import MAX_IMAGE_PIXELS, Picture, check_limit
from headway.data.media.media_reader import MediaReader
from headway.data.media.placeholders import MAX_CHARACTERS
from headway.data.media.tensors import MediaTensors, joined_media
from headway.data.pack_times import charged_to
from headway.data.samples import (
    NOTHING,
    Chat,
    Document,
    ImagePart,
    Media,
    Origin,
    Prompt,
    Sample,
    SampleLengths,
    TextPart,
    supervised,
    unusable,
)
from headway.errors import ConfigError, DataError
from headway.models.attention.splits import SplitMask
from headway.models.losses import IGNORED
from headway.packing.parts import Dropout, SamplePart
from headway.packing.pieces import target_runs
from headway_bagel.conditions import lengths_without, sample_without
from headway_bagel.configuration import BagelConfig
from headway_bagel.layout import lay_out
from headway_bagel.pack import DrawnPack
from headway_bagel.settings import DrawingConfig
from headway_bagel.vae import patches

_VERSION = 1  # raised when the same settings come to mean other tokens
AROUND = {"text": ("<|im_start|>", "<|im_end|>"), "image": ("<|vision_start|>", "<|vision_end|>")}
"""Tokens before and after each text and each image."""


@dataclass
class _Planned:
    """A sample's parts, the token ids of its text, and the images, in order."""

    parts: list[SamplePart] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    read_images: list[torch.Tensor] = field(default_factory=list)
    latents: list[torch.Tensor] = field(default_factory=list)

    def open_text(self, start: int) -> None:
        """Begin a text that is to be written, with the token before it."""
        self.parts.append(SamplePart("text", 1))
        self.ids.append(start)
        self.labels.append(IGNORED)

    def shorten(self) -> None:
        """Take the token after the last text away, so that it can go on."""
        self.parts[-1] = replace(self.parts[-1], tokens=self.parts[-1].tokens - 1)
        del self.ids[-1], self.labels[-1]


class DrawingEncoder(Encoder):
    """Encodes chats and documents for a model that reads and draws images.

    Args:
        tokenizer: the model's, with the tokens that stand around texts and images.
        config: of the model.
        settings: of training.
        max_image_pixels: larger images are refused, before they are decoded [pixels].
        max_characters: longer texts are refused, before they are tokenised [characters].

    Raises:
        ConfigError: the tokenizer lacks one of these tokens, or the limit cannot take effect.
    """

    def __init__(  # the class has neither a chat template nor a processor
        self,
        tokenizer: Any,
        config: BagelConfig,
        *,
        settings: DrawingConfig | None = None,
        max_image_pixels: int = MAX_IMAGE_PIXELS,
        max_characters: int = MAX_CHARACTERS,
    ) -> None:
        self.processor = self.tokenizer = tokenizer
        self.config, self.settings = config, settings or DrawingConfig()
        self.rope_index = None
        self.max_image_pixels = check_limit(max_image_pixels)
        self.media, self._resized = MediaReader(tokenizer, max_image_pixels), {}
        self.max_characters = max_characters
        vocabulary = tokenizer.get_vocab()
        if lacking := [token for pair in AROUND.values() for token in pair if token not in vocabulary]:
            raise ConfigError(
                f"The tokenizer lacks {', '.join(lacking)}, which stand around texts and images in models of the type "
                "bagel. Add them as special tokens and save the tokenizer again."
            )
        if len(tokenizer) > config.text_config.vocab_size:
            raise ConfigError(
                f"The tokenizer has {len(tokenizer)} tokens and the model's embedding {config.text_config.vocab_size}: "
                "the two are not of one model."
            )
        self._around = {kind: [vocabulary[token] for token in pair] for kind, pair in AROUND.items()}

    @property
    def pixel_scale(self) -> None:
        """Patches are what the model reads."""
        return

    @property
    def around_images(self) -> tuple[int, int]:
        """Ids of the tokens before and after an image."""
        start, end = self._around["image"]
        return start, end

    def text_ids(self, text: str | Sequence[int]) -> list[int]:
        """Token ids of a text, or of one that was tokenised before, between the two tokens around it."""
        start, end = self._around["text"]
        inner = self.tokenizer.encode(text, add_special_tokens=False) if isinstance(text, str) else text
        return [start, *inner, end]

    def encode(self, sample: Sample) -> EncodedSample:
        """Encode a sample for training; see `Encoder.encode`.

        Raises:
            DataError: nothing to learn, a text that is too long, a video, sound or tool call, or a damaged image.
        """
        return self._encoded(sample, self._plan(sample, decodes=True))

    def measure(self, sample: Sample) -> SampleLengths:
        """The sizes of `encode(sample)`, from image headers, without decoding them.

        Raises:
            DataError: as `encode`, except for damage that shows only when images are decoded.
        """
        if isinstance(sample, Document) and sample.is_blank:
            return NOTHING
        planned = self._plan(sample, decodes=False)
        targets = [i for i, label in enumerate(planned.labels) if label != IGNORED]
        grids = tuple((1, part.rows, part.columns) for part in planned.parts if part.kind == "image")
        return SampleLengths(
            tokens=len(planned.ids),
            supervised=len(targets),
            first_target=targets[0] if targets else 0,
            media_end=_media_end(planned),
            targets=target_runs(np.array(planned.labels) != IGNORED),
            media={"images": grids} if grids else {},
            parts=tuple(part.numbers for part in planned.parts),
            key=sample.origin.key,
        )

    def encode_prompt(self, sample: Prompt) -> EncodedSample:
        """Encode a chat up to its last assistant turn, or a document to be continued, opened for words to follow.

        Raises:
            DataError: as `encode`; or the chat begins with its only answer.
        """
        planned = _Planned()
        if isinstance(sample, Document):
            self._text(planned, sample.content, sample.where, learns=False)
            planned.shorten()
        else:
            assert isinstance(sample, Chat)
            turns = sample.answers
            shown = replace(sample, messages=sample.messages[: turns[-1]] if turns else sample.messages)
            if not shown.messages:
                raise unusable(sample, "the chat begins with its only answer, so there is no prompt to answer.")
            pieces = list(_pieces(shown))
            self._pieces(planned, pieces, sample.where, before=_drawn_before(pieces), draws=False)
            planned.open_text(self._around["text"][0])
        return self._encoded(sample, planned)

    def encode_request(self, sample: Chat) -> EncodedSample:
        """Encode a chat that a picture answers: its images as an edit's, which are read and given as latents too.

        Raises:
            DataError: as `encode`.
        """
        planned, pieces = _Planned(), list(_pieces(sample))
        self._pieces(planned, pieces, sample.where, before=len(pieces), draws=False)
        return self._encoded(sample, planned)

    def own_collator(self, **settings: Any) -> "DrawingCollator":
        """Make the collator that lays out parts; settings as `Collator` takes them."""
        return DrawingCollator(config=self.config, shift=self.settings.timestep_shift, **settings)

    def dropout(self, seed: int) -> Dropout | None:
        """Conditions that are left out, as the settings say; see `Encoder.dropout`."""
        return self.settings.dropout(seed)

    def without_conditions(self, sample: EncodedSample, dropout: Dropout | None, epoch: int) -> EncodedSample:
        """See `headway_bagel.conditions.sample_without`."""
        return sample_without(sample, dropout, epoch)

    def lengths_without_conditions(
        self, lengths: SampleLengths, origin: Origin, dropout: Dropout | None, epoch: int
    ) -> SampleLengths:
        """See `headway_bagel.conditions.lengths_without`."""
        return lengths_without(lengths, origin, dropout, epoch)

    def blank_image(self) -> None:
        """Packs without an image get a blank patch that no token takes."""
        return

    def fingerprint(self) -> str:
        """A key that changes with the tokenizer and with the settings of image sizes."""
        config = self.config
        key = {
            "version": _VERSION,
            "transformers": transformers.__version__,
            "tokenizer": tokenizer_settings(self.tokenizer),
            "sides": [config.image_side, config.read_pixels, config.max_latent_size, config.latent_pixels],
            "max_image_pixels": self.max_image_pixels,
            "max_characters": self.max_characters,
        }
        return hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()

    def _plan(self, sample: Sample, *, decodes: bool) -> _Planned:
        planned, sample = _Planned(), supervised(sample)
        if isinstance(sample, Document):
            if not sample.is_blank:
                self._text(planned, sample.content, sample.where, learns=True)
        else:
            pieces = list(_pieces(sample))
            self._pieces(planned, pieces, sample.where, before=_drawn_before(pieces), draws=True, decodes=decodes)
        if not any(label != IGNORED for label in planned.labels) and not any(p.kind == "noised" for p in planned.parts):
            raise unusable(
                sample,
                "there is nothing to learn from the sample: no assistant turn has words or an image. "
                "Add the answer, or delete the line.",
            )
        return planned

    def _pieces(
        self,
        planned: _Planned,
        pieces: Sequence[tuple[TextPart | ImagePart, bool]],
        where: str,
        *,
        before: int,
        draws: bool,
        decodes: bool = True,
    ) -> None:
        """Take a chat's pieces; the images among the first `before` are given as clean latents too."""
        for i, (part, answers) in enumerate(pieces):
            if isinstance(part, TextPart):
                self._text(planned, part.text, where, learns=answers)
                continue
            is_drawn = draws and answers
            if is_drawn:
                self._image(planned, "noised", part.media, where, decodes)
            if not is_drawn or i < len(pieces) - 1:
                if i < before:
                    self._image(planned, "clean", part.media, where, decodes)
                self._image(planned, "image", part.media, where, decodes)

    def _text(self, planned: _Planned, text: str | tuple[int, ...], where: str, *, learns: bool) -> None:
        if isinstance(text, str) and len(text) > self.max_characters:
            raise DataError(
                f"a text has {len(text)} characters, more than the limit of {self.max_characters}. Cut it, or "
                "raise data.max_characters.",
                where=where,
            )
        with charged_to("tokenise"):
            ids = self.text_ids(text)
        planned.parts.append(SamplePart("text", len(ids), len(ids) - 1 if learns else 0))
        planned.ids += ids
        planned.labels += [IGNORED, *ids[1:]] if learns else [IGNORED] * len(ids)

    def _image(self, planned: _Planned, kind: Any, media: Media, where: str, decodes: bool) -> None:
        """Take an image: shrunk until its longest side fits, each side a whole number of patches."""
        config = self.config
        patch, most = config.read_pixels, config.image_side
        if kind != "image":
            patch, most = config.latent_pixels, config.max_latent_size
        with charged_to("decode"), Picture(media, where, self.max_image_pixels) as picture:
            shrunk = min(1.0, most * patch / max(picture.size))
            rows, columns = (max(1, round(side * shrunk / patch)) for side in picture.size)
            if decodes:
                pixels = picture.decode().resize((columns * patch, rows * patch), Pillow.Resampling.BICUBIC)
                image = torch.from_numpy(np.array(pixels)).permute(2, 0, 1).float() / 127.5 - 1.0
                (planned.read_images if kind == "image" else planned.latents).append(image)
        planned.parts.append(SamplePart(kind, rows=rows, columns=columns))
        start, end = self.around_images
        planned.ids += [start, *[PADDING_TOKEN] * (rows * columns), end]
        planned.labels += [IGNORED] * (rows * columns + 2)

    def _encoded(self, sample: Sample, planned: _Planned) -> EncodedSample:
        arguments, workload = lay_out([planned.parts], self.config)
        pixels = [patches(image, self.config.read_pixels) for image in planned.read_images]
        grids_M3 = torch.from_numpy(workload.images.copy())
        return EncodedSample(
            input_ids_S=torch.tensor(planned.ids),
            labels_S=torch.tensor(planned.labels),
            position_ids_RS=arguments["position_ids"],
            origin=sample.origin,
            media={"images": MediaTensors(grids_M3, torch.cat(pixels))} if pixels else {},
            media_end=_media_end(planned),
            parts=tuple(planned.parts),
            latent_images=tuple(planned.latents),
        )


def _pieces(sample: Chat) -> Iterator[tuple[TextPart | ImagePart, bool]]:
    """The parts of a chat, and whether each is an answer to learn."""
    for message in sample.messages:
        if message.tool_calls:
            raise unusable(sample, "a turn calls tools, which models of the type bagel do not. Delete it.")
        for part in message.parts:
            if not isinstance(part, TextPart | ImagePart):
                raise unusable(sample, "models of the type bagel take text and images, no video or sound.")
            yield part, message.role == "assistant" and message.learnt


def _drawn_before(pieces: Sequence[tuple[TextPart | ImagePart, bool]]) -> int:
    """One past the last piece that is drawn; 0 where none is."""
    return max(
        (i + 1 for i, (part, answers) in enumerate(pieces) if answers and isinstance(part, ImagePart)), default=0
    )


def _media_end(planned: _Planned) -> int:
    """One past the last token of an image; a sample that draws is never cut [tokens]."""
    end = place = 0
    for part in planned.parts:
        place += part.length
        end = end if part.kind == "text" else place
    return place if end else 0


@dataclass(frozen=True)
class DrawingCollator(Collator):
    """Lays samples end to end for a model that draws.

    Attributes:
        config: of the model.
        shift: of the flow's times towards noise; the model's own when None.
    """

    config: BagelConfig = field(default_factory=BagelConfig)
    shift: float | None = None

    def __call__(self, samples: Sequence[EncodedSample]) -> Batch:
        """Lay samples end to end, in the order given; no sample gives a pack of padding alone."""
        # padding up to whole buckets is a segment of its own, of which nothing is learnt
        tokens, bucket = sum(sample.tokens for sample in samples), self.bucket_tokens or 1
        slots = -(-tokens // bucket) * bucket or bucket
        arguments, workload = lay_out([sample.parts for sample in samples], self.config, slots)
        filling = torch.full((slots - tokens,), PADDING_TOKEN)
        # a row's label is the token behind it
        labels = [torch.nn.functional.pad(sample.labels_S[1:], (0, 1), value=IGNORED) for sample in samples]
        lengths = [sample.tokens for sample in samples] + ([slots - tokens] if slots > tokens else [])
        # padding counts as the first source's
        source_ids = [self.sources.index(sample.origin.source) if self.sources else 0 for sample in samples]
        positions_1T = arguments.pop("position_ids")
        return Batch(
            input_ids_1T=torch.cat([*(sample.input_ids_S for sample in samples), filling])[None],
            labels_1T=torch.cat([*labels, torch.full_like(filling, IGNORED)])[None],
            position_ids_R1T=positions_1T[None],
            cu_seqlens_N=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
            max_seqlen=max(lengths),
            media=joined_media([sample.media for sample in samples]),
            processed={},
            token_types_1T=None,
            types_name="",
            pixel_scale_2D=None,
            vision={},
            placeholders=None,
            source_ids_N=torch.tensor(source_ids + [0] * (len(lengths) - len(samples))),
            workload=workload,
            supervised=tuple(sample.num_supervised for sample in samples),
            origins=tuple(sample.origin for sample in samples),
            sample_tokens=tuple(sample.tokens for sample in samples),
            family_inputs=self._drawing(samples, arguments, SplitMask.of(workload)),
        )

    def _drawing(self, samples: Sequence[EncodedSample], inputs: dict[str, Any], mask: SplitMask) -> DrawnPack:
        images = [image for sample in samples for image in sample.latent_images]
        if images and self.config.vae_config is not None:
            inputs["latent_pixels"] = images
        elif images:
            inputs["latents"] = torch.cat([patches(image, self.config.latent_patch_size) for image in images])
        grids = tuple(
            (number, part.rows * part.columns, part.kind == "noised")
            for number, sample in enumerate(samples)
            for part in sample.parts
            if part.kind in ("clean", "noised")
        )
        values = self.config.vision_config.num_channels * self.config.read_pixels**2
        shift = self.config.timestep_shift if self.shift is None else self.shift
        return DrawnPack(inputs, mask, grids, self.config.latent_features, values, shift)
