"""Greedy answers to held-out prompts, recorded as text beside the gold answers.

The prompts are packed and run as in training, once for every token of the longest answer, each answer a token longer
every time. There is no cache: whatever runs a pack (sharded weights, adapters, M-RoPE of images and videos) runs this,
by the same kernels, and every process runs equally often. It costs the prompts' tokens once per new token, so it is for
a handful of samples.
"""

import base64
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from headway.data import Batch, Budget, Encoder, Sample
from headway.data.collate import Collator
from headway.data.encoded import EncodedSample
from headway.data.media.images import Picture
from headway.data.samples import Chat, ImagePart, Part, TextPart
from headway.errors import ConfigError
from headway.models.losses import IGNORED
from headway.models.parallel.ranks import Ranks
from headway.packing.bins import pack
from headway.packing.budget import Size
from headway.report import printable
from headway.words import Argument

_SHOWN = 200  # characters of an answer that trackers get
_PICTURED, _PICTURE_SIDE = 12, 96  # answers that a report shows, and their pictures' longer side [pixels]


@dataclass(frozen=True)
class Answer:
    """An answer to one held-out sample.

    Attributes:
        where: file and place of the sample.
        prompt: what it was asked, as the data have it: no words of the chat template, media as "[image]".
        gold: the answer in the data.
        answer: the model's.
        is_exact: whether they agree, closing token included.
        picture: the first picture of the prompt, small, as JPEG in base64; "" where there is none, or it was given
            with an earlier answer to the same sample.
    """

    where: str
    prompt: str
    gold: str
    answer: str
    is_exact: bool
    picture: str = ""

    def to_dict(self, step: int) -> dict[str, Any]:
        """Flatten into JSON-ready values."""
        words = {"where": self.where, "prompt": self.prompt, "gold": self.gold, "answer": self.answer}
        picture = {"picture": self.picture} if self.picture else {}
        return {"kind": "sample", "step": step, **words, "exact": self.is_exact, **picture}


def answers_record(step: int, answers: Sequence[Answer]) -> dict[str, Any]:
    """Record of some answers for metrics.jsonl and trackers: how many are exact, and the answers, cut short."""
    return {
        "kind": "answers",
        "step": step,
        "samples": len(answers),
        "exact": sum(answer.is_exact for answer in answers),
        "answers": [f"{answer.answer[:_SHOWN]} (gold: {answer.gold[:_SHOWN]})" for answer in answers],
    }


def answer_line(answer: Answer, *, longest: int = 60) -> str:
    """An answer on one line for people, beside the gold one where they differ.

    Args:
        answer: to a held-out sample.
        longest: prompts and answers are cut to so many characters.

    >>> answer_line(Answer("a.jsonl, line 1", "What is this?", "a cat", "a dog", False))
    'What is this? -> a dog (gold: a cat)'
    """
    prompt, answered, gold = (_on_one_line(text, longest) for text in (answer.prompt, answer.answer, answer.gold))
    return f"{prompt} -> {answered} ({'exact' if answer.is_exact else f'gold: {gold}'})"


def _on_one_line(text: str, longest: int) -> str:
    words = printable(" ".join(text.split()))
    return words if len(words) <= longest else f"{words[: longest - 3]}..."


class GenerationEval:
    """Held-out chats to be answered, encoded once.

    Args:
        samples: chats; of each the last assistant turn is the gold answer. Documents are left out.
        encoder: turns samples into tokens and patches.
        budget: of a pack.
        collator: lays them into packs as in training.
        ranks: the processes, which all give every answer together.
        group: those of them that compute each pack together; None where each pack is one process's.
        count: the first so many chats are answered, all if there are fewer [samples].
        max_new_tokens: an answer that has not closed by then is cut [tokens].

    Raises:
        ConfigError: there is no chat, or a prompt with its answer does not fit into a pack.
        DataError: a sample cannot be used.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        encoder: Encoder,
        budget: Budget,
        collator: Collator,
        ranks: Ranks,
        group: dist.ProcessGroup | None = None,
        *,
        count: int,
        max_new_tokens: int,
    ) -> None:
        chats = [sample for sample in samples if isinstance(sample, Chat) and not _is_drawn(sample)][:count]
        if not chats:
            raise ConfigError(
                f"{Argument('eval.generate')} is set, but {Argument('data.eval')} holds no chat to answer in words. "
                "Take it out."
            )
        self._tokenizer = encoder.tokenizer
        self._prompts = [encoder.encode_prompt(chat) for chat in chats]
        self._questions = [_question(chat) for chat in chats]
        self._gold = [_last_answer(encoder.encode(chat)) for chat in chats]
        self._pictures = [_small_picture(chat, encoder.max_image_pixels) for chat in chats[:_PICTURED]]
        sizes = [Size(prompt.tokens + max_new_tokens, prompt.patches) for prompt in self._prompts]
        for chat, size in zip(chats, sizes, strict=True):
            if not budget.holds(size):
                raise ConfigError(
                    f"{Argument('eval.generate')}: {chat.where} and an answer of {max_new_tokens} tokens "
                    f"({Argument('eval.max_new_tokens')}) need "
                    f"{size.tokens} tokens and {size.patches} patches, more than a pack holds. Lower "
                    f"{Argument('eval.max_new_tokens')}, or raise {Argument('data.tokens_per_pack')}."
                )
        self._packs = pack(sizes, budget)
        self._collator = collator
        self._ranks, self._group = ranks, group
        self._max_new_tokens = max_new_tokens

    @torch.no_grad()
    def answer(
        self,
        model: torch.nn.Module,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> list[Answer]:
        """Answer every prompt by greedy decoding.

        Args:
            model: put into evaluation mode for the time being.
            device: where it lives.
            autocast: context of the forward pass.
        """
        was_training = model.training
        model.eval()
        answers: dict[int, list[int]] = {}
        for indices in self._packs:
            answers |= self._continued(indices, model, device, autocast)
        model.train(was_training)
        pictures, self._pictures = self._pictures, []  # a picture is recorded once, so the list is emptied
        pictures += [""] * (len(self._prompts) - len(pictures))
        return [
            Answer(
                prompt.where,
                self._questions[i],
                self._words(gold),
                self._words(answers[i]),
                answers[i] == gold,
                pictures[i],
            )
            for i, (prompt, gold) in enumerate(zip(self._prompts, self._gold, strict=True))
        ]

    def _continued(
        self,
        indices: Sequence[int],
        model: torch.nn.Module,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> dict[int, list[int]]:
        texts = {i: self._prompts[i] for i in indices}
        new: dict[int, list[int]] = {i: [] for i in indices}
        going = list(indices)
        end, most = self._tokenizer.eos_token_id, self._max_new_tokens
        while any(self._ranks.gather_all(bool(going))):
            batch = self._collator([texts[i] for i in indices]).noised(seed=0, step=0).dealt(self._group).to(device)
            with autocast():
                next_tokens = self._next(model, batch, len(indices))
            for i, token in zip(indices, next_tokens, strict=True):
                if i in going:
                    new[i].append(token)
                    texts[i] = _longer(texts[i], token)
            going = [i for i in going if new[i][-1] not in (self._gold[i][-1], end) and len(new[i]) < most]
        return new

    def _next(self, model: torch.nn.Module, batch: Batch, num_texts: int) -> list[int]:
        """Most likely next token of each text of a pack; logits are computed at the ends of texts only."""
        ends_N = batch.cu_seqlens_N[1 : num_texts + 1].long() - 1
        held_L = torch.arange(batch.slots, device=ends_N.device)[batch.local_slots(self._group)]
        is_mine_N = torch.isin(ends_N, held_L)
        mine_M = torch.searchsorted(held_L, ends_N[is_mine_N])
        logits_MV = model(**batch.model_inputs(), logits_to_keep=mine_M).logits.flatten(0, -2)
        if len(logits_MV) != len(mine_M):  # a model that returns all of them, whatever it is asked for
            logits_MV = logits_MV[mine_M]
        tokens_N = torch.zeros_like(ends_N)
        tokens_N[is_mine_N] = logits_MV.argmax(-1)
        if self._group is not None:
            dist.all_reduce(tokens_N, group=self._group)
        tokens: list[int] = tokens_N.tolist()
        return tokens

    def _words(self, ids: list[int]) -> str:
        words: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return words.strip()


def _small_picture(chat: Chat, max_pixels: int) -> str:
    if not chat.images:
        return ""
    with Picture(chat.images[0], chat.where, max_pixels) as picture:
        small = picture.decode()
    small.thumbnail((_PICTURE_SIDE, _PICTURE_SIDE))
    file = BytesIO()
    small.save(file, "JPEG", quality=80)
    return base64.b64encode(file.getvalue()).decode()


def _is_drawn(chat: Chat) -> bool:
    last = chat.messages[chat.answers[-1]] if chat.answers else None
    return last is not None and bool(last.parts) and all(isinstance(part, ImagePart) for part in last.parts)


def _question(chat: Chat) -> str:
    """Write down what a chat asks before its last answer: a question as it stands, several turns with their roles."""
    messages = chat.messages[: chat.answers[-1]] if chat.answers else chat.messages
    turns = [(message.role, " ".join(map(_shown, message.parts))) for message in messages]
    if len(turns) == 1:
        return turns[0][1]
    return "\n".join(f"{role}: {words}" for role, words in turns)


def _shown(part: Part) -> str:
    return part.text if isinstance(part, TextPart) else f"[{type(part).__name__.removesuffix('Part').lower()}]"


def _last_answer(sample: EncodedSample) -> list[int]:
    is_target_S = sample.labels_S != IGNORED
    ends = is_target_S.nonzero()[-1].item() + 1
    before = (~is_target_S[: int(ends)]).nonzero()
    start = int(before[-1]) + 1 if len(before) else 0
    tokens: list[int] = sample.labels_S[start : int(ends)].tolist()
    return tokens


def _longer(sample: EncodedSample, token: int) -> EncodedSample:
    position = int(sample.position_ids_RS.max()) + 1
    types, parts = sample.token_types_S, sample.parts
    return replace(
        sample,
        parts=(*parts[:-1], replace(parts[-1], tokens=parts[-1].tokens + 1)) if parts else (),
        input_ids_S=pad(sample.input_ids_S, (0, 1), value=token),
        labels_S=pad(sample.labels_S, (0, 1), value=IGNORED),
        position_ids_RS=pad(sample.position_ids_RS, (0, 1), value=position),
        token_types_S=None if types is None else pad(types, (0, 1), value=0),
    )
