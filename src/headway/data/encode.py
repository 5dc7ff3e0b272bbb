"""From a chat to what a model reads: token ids, labels, positions and vision patches, by the model's own processor.

Tensor letters: S tokens of one sample, R rows of positions (1, or 3 for M-RoPE), P patches, D values per patch,
M images.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any

import torch
from PIL import Image as Pillow
from PIL import ImageOps
from transformers import PreTrainedTokenizerBase

from headway.data.chat import ChatTemplate, Span
from headway.data.plan.budget import Size
from headway.data.samples import Chat, Media
from headway.errors import ConfigError, DataError
from headway.models.load import Processor, RopeIndex

IGNORED = -100  # the label that PyTorch's cross entropy leaves out


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """One chat as tensors on the CPU.

    Attributes:
        input_ids_S: token ids, placeholders of images expanded.
        labels_S: the token's own id where it is supervised, else -100; not shifted.
        position_ids_RS: positions; one row, or three for M-RoPE.
        pixels_PD: vision patches of all images, end to end; None without images.
        grids_M3: (t, h, w) of each image [patches].
        token_types_S: 0 for text and 1 for image placeholders; None for models without images.
        where: file and line the chat came from.
    """

    input_ids_S: torch.Tensor
    labels_S: torch.Tensor
    position_ids_RS: torch.Tensor
    pixels_PD: torch.Tensor | None
    grids_M3: torch.Tensor
    token_types_S: torch.Tensor | None
    where: str
    video_pixels_PD: torch.Tensor | None = None
    video_grids_M3: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 3, dtype=torch.long))
    audio_features_AMF: torch.Tensor | None = None
    audio_lengths_A: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))

    @property
    def tokens(self) -> int:
        """Length [tokens]."""
        return self.input_ids_S.shape[0]

    @property
    def patches(self) -> int:
        """Vision patches, before merging [patches]."""
        return 0 if self.pixels_PD is None else self.pixels_PD.shape[0]

    @property
    def size(self) -> Size:
        """What the sample takes of a pack."""
        return Size(self.tokens, self.patches)

    @property
    def num_supervised(self) -> int:
        """Targets that the loss counts: supervised tokens, except a first one, which nothing predicts."""
        return int((self.labels_S[1:] != IGNORED).sum())

    @property
    def num_bytes(self) -> int:
        """Memory held [bytes]."""
        held = (
            self.input_ids_S,
            self.labels_S,
            self.position_ids_RS,
            self.pixels_PD,
            self.grids_M3,
            self.token_types_S,
        )
        return sum(t.numel() * t.element_size() for t in held if t is not None)

    def truncated(self, tokens: int) -> "EncodedSample | None":
        """The sample cut to its first tokens, or None if that would cut an image or leave nothing to learn."""
        if self.token_types_S is not None and bool(self.token_types_S[tokens:].any()):
            return None
        types = None if self.token_types_S is None else self.token_types_S[:tokens].clone()
        ids, labels, places = self.input_ids_S[:tokens], self.labels_S[:tokens], self.position_ids_RS[:, :tokens]
        cut = EncodedSample(
            ids.clone(), labels.clone(), places.clone(), self.pixels_PD, self.grids_M3, types, self.where
        )
        return cut if cut.num_supervised else None


class Encoder:
    """Encodes chats for one model.

    Args:
        processor: the model's processor, or its tokenizer if it reads text alone.
        rope_index: the model's own rule for M-RoPE positions (`headway.models.rope_index(model)`); None where positions
            are plain indices.

    Raises:
        ConfigError: the processor has no chat template.
    """

    def __init__(self, processor: Processor, rope_index: RopeIndex | None = None) -> None:
        self.processor: Any = processor
        self.rope_index = rope_index
        self.sees_images = not isinstance(processor, PreTrainedTokenizerBase) and hasattr(processor, "image_processor")
        self.tokenizer: Any = getattr(processor, "tokenizer", processor)
        self.template = ChatTemplate(processor, self.sees_images)

    def encode(self, sample: Chat) -> EncodedSample:
        """Encode a chat for training: every assistant turn is supervised, its closing token included.

        Raises:
            DataError: no assistant turn, a damaged image, images for a text-only model, or a chat template that renders
                earlier turns differently once later ones follow; the message names file and line.
        """
        if not any(message.role == "assistant" for message in sample.messages):
            raise DataError(
                f"{sample.where}: the chat has no assistant turn, so there is nothing to learn from it. Add the answer "
                'as a message with the role "assistant", or delete the line.'
            )
        text, spans = self.template.with_answers(sample)
        encoded = self._tensors(text, spans, sample, sample.images)
        if encoded.num_supervised == 0:
            raise DataError(
                f"{sample.where}: the assistant's turns are empty after the chat template, so there is nothing to "
                "learn. Write an answer, or delete the line."
            )
        return encoded

    def encode_prompt(self, sample: Chat) -> EncodedSample:
        """Encode a chat up to its last assistant turn, opened for the model to answer; for evaluation.

        Raises:
            DataError: as `encode`.
        """
        turns = [i for i, message in enumerate(sample.messages) if message.role == "assistant"]
        messages = sample.messages[: turns[-1]] if turns else sample.messages
        if not messages:
            raise DataError(f"{sample.where}: the chat begins with its only answer, so there is no prompt to answer.")
        images = replace(sample, messages=messages).images
        return self._tensors(self.template.prompt(messages, sample), [], sample, images)

    def _tensors(self, text: str, spans: list[Span], sample: Chat, pictures: Sequence[Media]) -> EncodedSample:
        if pictures and not self.sees_images:
            raise DataError(
                f"{sample.where}: the chat holds {len(pictures)} images, but the model reads text alone. Choose an "
                "image-text model, or a dataset without images."
            )
        out = self._process(text, [open_image(picture, sample.where) for picture in pictures], sample)
        ids = torch.tensor(_row(out["input_ids"]), dtype=torch.long)
        replaced = (out.get("text_replacement_offsets") or [[]])[0]
        starts = torch.tensor([start for start, _ in _row(out["offset_mapping"])])
        supervised = torch.zeros_like(ids, dtype=torch.bool)
        for first, last in spans:
            supervised |= (starts >= _moved(first, replaced)) & (starts < _moved(last, replaced))
        labels = torch.where(supervised, ids, IGNORED)
        grids, pixels, types = torch.zeros(0, 3, dtype=torch.long), None, None
        if self.sees_images:
            types = torch.tensor(self._token_types(out, ids), dtype=torch.int32)
            if not pictures and bool(types.any()):
                raise DataError(
                    f"{sample.where}: the chat's text holds the model's image placeholder but the chat has no image. "
                    "Remove the placeholder from the text; images are parts of their own."
                )
        if pictures:
            if "image_grid_thw" not in out:
                raise ConfigError(
                    f"The processor {type(self.processor).__name__} gives no patch grids (image_grid_thw) for its "
                    "images; Headway packs images of models that do, such as Qwen2-VL, Qwen2.5-VL and Qwen3-VL."
                )
            grids = torch.as_tensor(out["image_grid_thw"]).long()
            pixels = torch.as_tensor(out["pixel_values"]).float()
        return EncodedSample(ids, labels, self._positions(ids, types, grids), pixels, grids, types, sample.where)

    def _process(self, text: str, images: list[Pillow.Image], sample: Chat) -> Any:
        options: dict[str, Any] = {"return_offsets_mapping": True}
        starts_right = self.tokenizer.bos_token is not None and text.startswith(self.tokenizer.bos_token)
        if starts_right or not self.sees_images:
            options["add_special_tokens"] = False  # the template wrote them
        if not self.sees_images:
            return {key: [value] for key, value in self.tokenizer(text, **options).items()}
        try:
            return self.processor(text=[text], images=images or None, return_text_replacement_offsets=True, **options)
        except ValueError as error:  # an image too narrow to resize, or placeholder words inside the text
            raise DataError(f"{sample.where}: the model's processor refuses the sample: {error}") from error

    def _token_types(self, out: Any, ids: torch.Tensor) -> list[int]:
        if "mm_token_type_ids" in out:
            return list(_row(out["mm_token_type_ids"]))
        return [int(token == self.processor.image_token_id) for token in ids.tolist()]

    def _positions(self, ids: torch.Tensor, types: torch.Tensor | None, grids: torch.Tensor) -> torch.Tensor:
        plain = torch.arange(ids.shape[0])[None]
        if self.rope_index is None:
            return plain
        if not len(grids):
            return plain.repeat(3, 1)  # M-RoPE of text alone: the three rows agree
        assert types is not None
        positions, _ = self.rope_index(input_ids=ids[None], mm_token_type_ids=types[None], image_grid_thw=grids)
        return positions[:, 0].cpu()


def open_image(media: Media, where: str) -> Pillow.Image:
    """Read a whole picture as RGB, turned upright by its EXIF tag.

    Raises:
        DataError: the file is missing, cut short or no picture; the message names the sample.
    """
    encoded = b""
    try:
        encoded = media.read()
        with Pillow.open(BytesIO(encoded)) as opened:
            opened.load()
            return ImageOps.exif_transpose(opened).convert("RGB")
    except (OSError, SyntaxError, ValueError, Pillow.DecompressionBombError) as error:
        kept = "missing" if isinstance(error, FileNotFoundError) else f"{len(encoded)} bytes"
        raise DataError(
            f"{where}: the image {media} ({kept}) cannot be read: {error}. It may be cut short or of an unknown "
            "format; copy it again, convert it to PNG or JPEG, or delete the line."
        ) from error


def _row(values: Any) -> Any:
    """The only row of a batch of one."""
    return values[0].tolist() if isinstance(values, torch.Tensor) else values[0]


def _moved(place: int, replaced: Sequence[Any]) -> int:
    """A character's place after the processor expanded the placeholders before it."""
    shift = 0
    for change in replaced:
        if change["span"][1] <= place:
            shift = change["new_span"][1] - change["span"][1]
    return place + shift
