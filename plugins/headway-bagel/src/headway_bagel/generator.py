"""Answers in words of models that draw: prompts laid out as in training, in one pack, then a token of each at a time.

Keys and values of every token are kept, so that a new token costs its own pass and attention over what is before it.

Tensor letters: N prompts of a pack, G of them whose answers go on, K tokens in the cache, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from headway.answer.generate import Completion, Decoding, with_answer
from headway.answer.model_folder import OpenedModel
from headway.data.samples import Prompt
from headway_bagel.encoding import DrawingEncoder


class PackedGenerator:
    """Answers chats and continues documents; used as `Generator` is.

    Args:
        opened: a model that draws.
        device: where it lives.

    Attributes:
        tokenizer: the model's.
        has_template: always, since the encoder writes the tokens around texts and images.
    """

    has_template = True

    def __init__(self, opened: OpenedModel, device: torch.device) -> None:
        self._model: Any = opened.model
        config: Any = opened.model.config
        self._device = device
        self._encoder = DrawingEncoder(opened.processor, config)
        self._collator = self._encoder.own_collator()
        self.tokenizer: Any = self._encoder.tokenizer
        self._ends = {self._encoder.text_ids("")[-1], self.tokenizer.eos_token_id}

    def answer(
        self, prompts: Sequence[Prompt], decoding: Decoding, *, batch: int = 1, streamer: Any = None
    ) -> Iterator[Completion]:
        """Answer prompts, in order; arguments as `Generator.answer`.

        Raises:
            DataError: media that cannot be read, or that the model does not take.
        """
        drawn = torch.Generator(self._device).manual_seed(decoding.seed)
        for start in range(0, len(prompts), batch):
            yield from self._generated(prompts[start : start + batch], decoding, drawn, streamer)

    @torch.no_grad()
    def _generated(
        self, prompts: Sequence[Prompt], decoding: Decoding, drawn: torch.Generator, streamer: Any
    ) -> list[Completion]:
        # all prompts in one pack; its keys and values stay in the cache, with the prompt that each belongs to
        encoded = [self._encoder.encode_prompt(with_answer(prompt)) for prompt in prompts]
        batch = self._collator(encoded).noised(seed=0, step=0).to(self._device)
        lasts_N = batch.cu_seqlens_N[1:].long() - 1
        positions_N = batch.position_ids_R1T[0, 0, lasts_N]
        cache = DynamicCache()
        logits_GV = self._model(
            **{name: self._cast(value) for name, value in batch.model_inputs().items()},
            logits_to_keep=lasts_N,
            past_key_values=cache,
        ).logits
        owner_K = torch.repeat_interleave(torch.arange(len(prompts), device=self._device), batch.cu_seqlens_N.diff())
        answers: list[list[int]] = [[] for _ in prompts]
        going = list(range(len(prompts)))
        if streamer is not None:
            streamer.put(encoded[0].input_ids_S)
        for number in range(1, decoding.max_new_tokens + 1):
            tokens = _chosen(logits_GV, decoding, drawn)
            # each prompt that goes on gets its next token
            for prompt, token in zip(going, tokens.tolist(), strict=True):
                answers[prompt].append(token)
            if streamer is not None:
                streamer.put(tokens.cpu())
            # prompts whose answer has ended leave the batch; the others' last tokens are the next pack
            goes_on = [answers[prompt][-1] not in self._ends for prompt in going]
            going = [prompt for prompt, on in zip(going, goes_on, strict=True) if on]
            if not going or number == decoding.max_new_tokens:
                break
            # a pack of one token for each of them, which sees its own prompt and answer alone
            going_G = torch.tensor(going, device=self._device)
            rows_G = torch.arange(len(going), device=self._device)
            owner_K = torch.cat([owner_K, going_G])
            logits_GV = self._model(
                input_ids=tokens[torch.tensor(goes_on, device=self._device)][None],
                position_ids=(positions_N[going_G] + number)[None],
                attention_mask=(going_G[:, None] == owner_K)[None, None],
                understood_slots=rows_G,
                supervised_rows=rows_G,
                past_key_values=cache,
            ).logits
        if streamer is not None:
            streamer.end()
        return [
            Completion(self._words(tokens), sample.tokens, len(tokens), tokens[-1] in self._ends)
            for sample, tokens in zip(encoded, answers, strict=True)
        ]

    def _words(self, ids: list[int]) -> str:
        words: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return words.strip()

    def _cast(self, value: Any) -> Any:
        """Images and latents in the type of the weights."""
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self._model.dtype) if is_float else value


def _chosen(logits_GV: torch.Tensor, decoding: Decoding, drawn: torch.Generator) -> torch.Tensor:
    """The next token of each answer, shape (G,)."""
    if decoding.temperature == 0:
        return logits_GV.argmax(-1)
    warpers: Any = LogitsProcessorList([TemperatureLogitsWarper(decoding.temperature)])
    if decoding.top_k is not None:
        warpers.append(TopKLogitsWarper(decoding.top_k))
    if decoding.top_p is not None:
        warpers.append(TopPLogitsWarper(decoding.top_p))
    probabilities_GV = warpers(None, logits_GV.float()).softmax(-1)
    return torch.multinomial(probabilities_GV, 1, generator=drawn)[:, 0]
