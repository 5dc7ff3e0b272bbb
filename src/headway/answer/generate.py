"""Answers by transformers' own generation, with a cache: for a model that one process holds whole.

During training answers are made pack by pack instead (`answers.py`), by whatever runs a step: sharded weights included.
Prompts are written here as there, by the model's chat template.

Tensor letters: B prompts of a batch, S tokens, P of the longest prompt.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from headway.answer.model_folder import OpenedModel, make_encoder
from headway.data.chat import ChatTemplate
from headway.data.collate import Collator
from headway.data.media.images import Picture
from headway.data.samples import Chat, Document, Message, Prompt, TextPart, unusable
from headway.errors import ConfigError
from headway.models.rotary import reads_rows
from headway.plugins import family_hook

_OF_PACKS = ("position_ids", "pack_cu_seqlens", "pack_max_seqlen", "pack_segments", "use_cache")


@dataclass(frozen=True)
class Decoding:
    """Settings by which tokens are chosen.

    Attributes:
        max_new_tokens: an answer that has not ended by then is cut [tokens].
        temperature: divides the logits before a token is drawn; 0 takes the most likely token every time.
        top_p: only the most likely tokens that together have this probability are drawn from, a fraction; None for all.
        top_k: only so many of the most likely tokens are drawn from; None for all.
        seed: of the draws.

    Raises:
        ConfigError: a value that cannot take effect.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ConfigError(
                f"The temperature is {self.temperature:g}, but must be 0 or more. With 0 Headway always takes the "
                "most likely token."
            )
        if self.temperature == 0 and (self.top_p is not None or self.top_k is not None):
            raise ConfigError(
                "top-p and top-k have no effect at temperature 0, which always takes the most likely token. Give a "
                "temperature such as 0.7."
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(
                f"top-p is {self.top_p:g}, but must be above 0 and at most 1. It is a share of the probability."
            )


@dataclass(frozen=True)
class Completion:
    """Answer of a model to a prompt.

    Attributes:
        text: its words, special tokens left out.
        prompt_tokens: length of the prompt [tokens].
        tokens: length of the answer, its closing token included [tokens].
        is_whole: whether the model ended the answer itself.
    """

    text: str
    prompt_tokens: int
    tokens: int
    is_whole: bool


class Generator:
    """Answers chats and continues documents.

    Args:
        opened: a model with the attention of generation.
        device: where it lives.

    Attributes:
        tokenizer: the model's.
        has_template: whether the model has a chat template; without one it can only continue documents.
    """

    def __init__(self, opened: OpenedModel, device: torch.device) -> None:
        self._opened, self._device = opened, device
        self._processor: Any = opened.processor
        self._is_plain = isinstance(opened.processor, PreTrainedTokenizerBase)
        self.tokenizer: Any = getattr(opened.processor, "tokenizer", opened.processor)
        self._template = ChatTemplate(opened.processor, as_parts=not self._is_plain)
        self.has_template = bool(self._template.sources)
        self._ends = self._closing_tokens()

    def answer(
        self, prompts: Sequence[Prompt], decoding: Decoding, *, batch: int = 1, streamer: Any = None
    ) -> Iterator[Completion]:
        """Answer prompts, in order.

        Args:
            prompts: chats, of which everything is shown to the model, and documents, which it continues.
            decoding: how tokens are chosen.
            batch: prompts that are answered together [prompts].
            streamer: told the tokens as they come, as transformers' `TextStreamer` is; for one prompt at a time.

        Raises:
            ConfigError: chats for a model without a chat template, or media for a model of text.
            DataError: media that cannot be read, or that the model does not take.
        """
        torch.manual_seed(decoding.seed)
        for (media, _), group in groupby(prompts, lambda prompt: (_media_of(prompt), isinstance(prompt, Document))):
            is_encoded = bool(media - {"image"})  # features of audio and video do not lie in rows
            one_by_one = is_encoded or reads_rows(self._opened.model)
            waiting, size = list(group), 1 if one_by_one else batch
            for together in (waiting[start : start + size] for start in range(0, len(waiting), size)):
                inputs = self._encoded(together[0]) if is_encoded else self._processed(together)
                yield from self._generated(inputs, decoding, streamer)

    @torch.no_grad()
    def _generated(self, inputs: dict[str, Any], decoding: Decoding, streamer: Any) -> list[Completion]:
        ids_BP = inputs["input_ids"]
        mask_BP = inputs.get("attention_mask", torch.ones_like(ids_BP))
        model: Any = self._opened.model
        moved = {name: self._moved(value) for name, value in inputs.items()}
        settings: Any = GenerationConfig  # transformers leaves the class untyped
        config = settings(
            max_new_tokens=decoding.max_new_tokens,
            do_sample=decoding.temperature > 0,
            eos_token_id=sorted(self._ends) or None,
            pad_token_id=self._padding(),
            **_sampled(decoding),
        )
        ids_BS = model.generate(**moved, generation_config=config, streamer=streamer).cpu()
        completions = []
        for answer, mask in zip(ids_BS[:, ids_BP.shape[1] :].tolist(), mask_BP, strict=True):
            ends = [place for place, token in enumerate(answer) if token in self._ends]
            tokens = answer[: ends[0] + 1] if ends else answer
            text = self.tokenizer.decode(tokens, skip_special_tokens=True).strip()
            completions.append(Completion(text, int(mask.sum()), len(tokens), bool(ends)))
        return completions

    def _processed(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Inputs by the model's own processor, prompts filled up on their left to the length of the longest."""
        texts = [self._text(prompt) for prompt in prompts]
        chats = [prompt for prompt in prompts if isinstance(prompt, Chat)]
        begun = all(text.startswith(self.tokenizer.bos_token or "\0") for text in texts)
        options: dict[str, Any] = {
            "return_tensors": "pt",
            # A text-only chat template writes special tokens itself, and no text has its beginning twice.
            "add_special_tokens": not begun and not (self._is_plain and chats),
        }
        self.tokenizer.padding_side = "left"
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.convert_ids_to_tokens(self._padding())
        if len(texts) > 1:
            options["padding"] = True
        pictures = [self._pictures(chat) for chat in chats]
        if any(pictures):
            if not hasattr(self._processor, "image_processor"):
                raise unusable(prompts[0], f"the model {self._opened.location.path} reads text alone, no images.")
            options["images"] = pictures
        inputs: dict[str, Any] = dict(self._processor(text=texts, **options))
        return inputs

    def _encoded(self, chat: Prompt) -> dict[str, Any]:
        encoder = make_encoder(self._opened.processor, self._opened.model)
        answered = with_answer(chat)
        assert isinstance(answered, Chat)
        encoded = encoder.encode_prompt(answered)
        inputs = Collator(pixel_scale=encoder.pixel_scale)([encoded]).model_inputs()
        return {name: value for name, value in inputs.items() if name not in _OF_PACKS}

    def _text(self, prompt: Prompt) -> str:
        if isinstance(prompt, Chat):
            return self._template.prompt(prompt)
        text = prompt.content if isinstance(prompt.content, str) else self.tokenizer.decode(prompt.content)
        return str(text)

    def _pictures(self, chat: Chat) -> list[Any]:
        with ExitStack() as stack:
            opened = [stack.enter_context(Picture(media, chat.where)) for media in chat.images]
            return [picture.decode() for picture in opened]

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        dtype = self._opened.model.dtype if value.is_floating_point() else value.dtype
        return value.to(self._device, dtype)

    def _padding(self) -> int:
        ids = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, *sorted(self._ends), 0)
        return next(int(token) for token in ids if token is not None)

    def _closing_tokens(self) -> set[int]:
        settings: Any = self._opened.model.generation_config  # None where the model has none
        own_ends = None if settings is None else settings.eos_token_id
        ends = {self.tokenizer.eos_token_id, *(own_ends if isinstance(own_ends, list) else [own_ends])}
        return {int(token) for token in ends if token is not None} | self._template.stop_ids()


def with_answer(prompt: Prompt) -> Prompt:
    """Give a chat a last answer, which `encode_prompt` cuts off again; a document stays as it is."""
    if not isinstance(prompt, Chat):
        return prompt
    return replace(prompt, messages=(*prompt.messages, Message("assistant", (TextPart("."),))))


def question_of(chat: Chat) -> tuple[Chat, str | None]:
    """A chat up to its last answer, and the words of that; None where its last turn is no answer.

    Raises:
        DataError: the chat is nothing but an answer.
    """
    if chat.messages[-1].role != "assistant":
        return chat, None
    gold = None if chat.desirable is False else chat.answer  # an answer that was graded as a bad one is none to reach
    if len(chat.messages) == 1:
        raise unusable(chat, "the chat begins with its only answer, so there is no prompt to answer.")
    return replace(chat, messages=chat.messages[:-1]), gold


def _media_of(prompt: Prompt) -> frozenset[str]:
    if isinstance(prompt, Document):
        return frozenset()
    return frozenset(prompt.kinds)


def _sampled(decoding: Decoding) -> dict[str, Any]:
    if decoding.temperature == 0:
        return {}
    return {"temperature": decoding.temperature, "top_p": decoding.top_p or 1.0, "top_k": decoding.top_k or 0}


class AnswerGenerator(Protocol):
    """Interface of generators of answers in words: `Generator`, or a family's own.

    Attributes:
        tokenizer: the model's.
        has_template: whether chats are laid out as the model knows them.
    """

    tokenizer: Any
    has_template: bool

    def answer(
        self, prompts: Sequence[Prompt], decoding: Decoding, *, batch: int = 1, streamer: Any = None
    ) -> Iterator[Completion]:
        """Answer prompts, in order; see `Generator.answer`."""


def generator_of(opened: OpenedModel, device: torch.device) -> AnswerGenerator:
    """Make the generator of answers: the model family's own, or `Generator`."""
    make: Any = family_hook(opened.model.config, "generator") or Generator
    generator: AnswerGenerator = make(opened, device)
    return generator
