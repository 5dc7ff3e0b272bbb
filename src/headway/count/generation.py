"""Answers that a model writes token by token: it reads the prompts (prefill), then takes one token a step (decode)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from headway.count.integers import Ints, IntsLike, lengths_of
from headway.count.modalities import MODALITIES
from headway.count.workload import Workload
from headway.errors import WorkloadError

Prefix = Literal["own", "computed once", "read once"]
GENERATION_QUANTITIES = (
    "answers",  # answers that have a token
    "prefills",  # batches, of which each reads its prompts in one forward
    "prompt_tokens",  # tokens of prompts, each prompt once
    "prefill_tokens",  # tokens of prompts as often as each is read: once for each of its answers, or once
    "generated_tokens",
    "sequence_tokens",  # tokens of answers with their prompts, all that one forward over them takes
    "decode_steps",  # forwards behind the prefills
    "decode_tokens",  # tokens that decode steps take
    "decode_slots",  # positions that decode steps compute, with rows whose answer had ended
)


@dataclass(frozen=True, eq=False)
class Generation:
    """The work of answering prompts from cached keys and values.

    Prefill reads each prompt whole and runs the head on its last token alone, which gives the first token of the
    answer. Each decode step takes the last token of each answer and gives the next one; the last of all is never read.
    A prompt of p tokens with an answer of a >= 1 so runs p + a - 1 tokens and a logits, with the causal pairs of a
    segment of p + a - 1 tokens.

    Args:
        prompts: lengths of the prompts [tokens], shape (P,), each >= 1, the tokens of their images included.
        answers: lengths of the answers [tokens], shape (P * group,), those of one prompt in a row. The token that ends
            an answer is one of them, padding behind it is not; 0 reads the prompt alone.
        group: answers to each prompt.
        prefix: what the answers to one prompt share: `own`, nothing; `computed once`, the prefill and its cache (vLLM's
            and SGLang's prefix caching); `read once`, also the reading of that cache in each step (cascade attention).
        batch_size: answers that are decoded together until the longest has ended, as transformers' `generate` does;
            None for an engine that fills freed places at once (continuous batching).
        decode_steps: forwards after the prefill, where the engine tells it; else as few as these answers take.
        slots: token positions that were computed, with idle rows, padding and rejected drafts of speculative decoding,
            where the engine tells it; else those of batches of `batch_size`.
        media: what the prompts hold beside text by its names in `Workload` (`images`, `videos`, ...), and `sources`,
            one length for each prompt.

    Raises:
        WorkloadError: a length below its least, other than `group` answers to a prompt, fewer slots than tokens.

    >>> generation = Generation([100, 80], [20, 50])
    >>> generation.prefill, generation.decode
    (Workload(2 segments, 180 tokens, 180 slots, 2 logits), Workload(2 segments, 68 tokens, 68 slots, 180 past tokens))
    >>> generation.num_decode_steps
    49
    """

    prompts: IntsLike
    answers: IntsLike
    group: int = 1
    prefix: Prefix = "own"
    batch_size: int | None = None
    decode_steps: int | None = None
    slots: int | None = None
    media: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.group < 1 or (self.batch_size or 1) < 1 or self.prefix not in get_args(Prefix):
            raise WorkloadError(
                f"group={self.group}, batch_size={self.batch_size}, prefix={self.prefix!r} is not allowed. A prompt "
                "has 1 answer or more, a batch has 1 row or more, and a prefix is one of "
                f"{', '.join(get_args(Prefix))}."
            )
        prompts = lengths_of(self.prompts, "prompts", "a prompt holds at least 1 token")
        answers = lengths_of(self.answers, "answers", "an answer holds 0 tokens or more", least=0)
        if answers.size != self.group * prompts.size:
            raise WorkloadError(
                f"{answers.size} answers to {prompts.size} prompts in groups of {self.group} do not match. Give the "
                "length of each answer, with the answers of one prompt next to each other."
            )
        object.__setattr__(self, "prompts", prompts)
        object.__setattr__(self, "answers", answers)
        if self.slots is not None and self.slots < (tokens := self.prefill.tokens + self.decode.tokens):
            raise WorkloadError(f"{self.slots} slots cannot hold the {tokens} tokens of these answers.")

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts, each prompt once."""
        return int(self.prompts.sum())

    @property
    def generated_tokens(self) -> int:
        """Tokens of the answers."""
        return int(self.answers.sum())

    @cached_property
    def prefill(self) -> Workload:
        """Reading of the prompts, once or once for each answer."""
        times = self.group if self.prefix == "own" else 1
        lengths = np.repeat(self.prompts, times)
        media: dict[str, Any] = {name: self._repeated(name, sizes, times) for name, sizes in self.media.items()}
        return Workload(lengths, logits=len(lengths), packs=self.num_prefills, **media)

    @cached_property
    def samples(self) -> Workload:
        """Prompts with their answers, as scoring and training read them whole; the answers are what is learnt."""
        lengths = np.repeat(self.prompts, self.group) + self.answers
        media: dict[str, Any] = {name: self._repeated(name, sizes, self.group) for name, sizes in self.media.items()}
        return Workload(lengths, **media).with_counts(supervised=self.generated_tokens)

    def _repeated(self, name: str, sizes: IntsLike, times: int) -> Ints:
        array = MODALITIES[name].read(sizes) if name in MODALITIES else np.asarray(sizes)
        return np.repeat(array, times, axis=0)

    @cached_property
    def decode(self) -> Workload:
        """Tokens that decode steps take: of each answer all but the last one, after its prompt."""
        return self._decode(self.answers - 1, np.repeat(self.prompts, self.group))

    def _decode(self, lengths: Ints, past: Ints) -> Workload:
        goes_on = lengths > 0
        sources = np.repeat(np.asarray(self.media.get("sources", ()), dtype=np.int64), self.group)
        return Workload(
            lengths[goes_on],
            past=past[goes_on],
            sources=sources[goes_on] if sources.size else (),
            packs=self.num_decode_steps if goes_on.any() else None,
        )

    @cached_property
    def workload(self) -> Workload:
        """All that it computes, in the slots that it takes."""
        both = self.prefill + self.decode
        if (slots := self._slots) == both.slots:
            return both
        idle = Workload(slots=slots - both.slots, logits=0)
        return both + idle

    @property
    def _slots(self) -> int:
        if self.slots is not None:
            return self.slots
        if not self.batch_size:
            return self.prefill.tokens + self.decode.tokens
        # Prompts are padded to the longest of a batch: one row for each answer, or for each group that shares its own.
        per_row = 1 if self.prefix == "own" else self.group
        padded = sum(-(-rows // per_row) * prompt for rows, prompt, _ in self._batches)
        return max(padded, self.prefill.tokens) + self.decode_slots

    @property
    def decode_slots(self) -> int:
        """Token positions that decode steps computed, with the rows whose answer had ended; no padding of prompts."""
        if self.batch_size:
            return sum(rows * max(answer - 1, 0) for rows, _, answer in self._batches)
        return self.decode.tokens if self.slots is None else self.slots - self.prefill.tokens

    def quantities(self) -> dict[str, int]:
        """Give what adds up over generations and tells how they ran, by the names in `GENERATION_QUANTITIES`."""
        answers = int((self.answers > 0).sum())
        numbers = (
            answers,
            self.num_prefills,
            self.prompt_tokens,
            self.prefill.tokens,
            self.generated_tokens,
            int(np.repeat(self.prompts, self.group).sum()) + self.generated_tokens,
            self.num_decode_steps,
            self.decode.tokens,
            self.decode_slots,
        )
        return dict(zip(GENERATION_QUANTITIES, numbers, strict=True))

    @cached_property
    def _batches(self) -> list[tuple[int, int, int]]:
        """Rows, longest prompt and longest answer of each batch that is decoded together."""
        size, prompts = self.batch_size or self.answers.size or 1, np.repeat(self.prompts, self.group)
        return [
            (len(part), int(prompts[start : start + size].max()), int(part.max()))
            for start in range(0, self.answers.size, size)
            if (part := self.answers[start : start + size]).size
        ]

    @property
    def num_prefills(self) -> int:
        """Forwards that read prompts, at least."""
        return len(self._batches)

    @property
    def num_decode_steps(self) -> int:
        """Forwards after the prefill."""
        if self.decode_steps is not None:
            return self.decode_steps
        return sum(max(answer - 1, 0) for *_, answer in self._batches)

    @cached_property
    def reads(self) -> tuple[tuple[int, Workload], ...]:
        """Workloads whose pairs, each times its sign, are what decode steps read of cached keys and values."""
        if self.prefix != "read once":
            return ((1, self.decode),)
        # each answer reads itself; the longest of a prompt's answers decides how often the prompt is read
        steps = np.maximum(self.answers.reshape(-1, self.group).max(axis=1, initial=0) - 1, 0)
        own = self._decode(self.answers - 1, np.zeros_like(self.answers))
        longest, past = steps[steps > 0], self.prompts[steps > 0]
        return ((1, own), (1, Workload(longest, past=past)), (-1, Workload(longest)))
