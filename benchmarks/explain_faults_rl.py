"""Cases of `explain_faults.py --of rl`: six faults of reinforcement learning's loops, and three healthy runs.

Each loop answers prompts with transformers' `generate`, scores them, runs a reference and learns, on a Qwen3 of some
4 million parameters. How long answers get is forced, so that a fault and its mended loop differ in the fault alone.
"""

import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, Qwen3ForCausalLM
from transformers.cache_utils import DynamicCache

import headway
from explain_faults_loops import PEAK, Times, busy, own_s, small_model
from headway import Generation

BYTES_PER_S = 10e9  # of one thread, assumed
NUM_HEALTHY, NUM_STEPS, NUM_WARM = 5, 9, 2
END = 0  # the token that ends an answer
GROUP = 4  # answers to a prompt


@dataclass(frozen=True)
class RLCase:
    """A planted fault, or a healthy run; the same fields as those of `explain_faults_cases.Case`."""

    fault: str
    names: frozenset[str]
    make: Callable[[bool], Any]
    run: Callable[[Any, Path], Times]
    num_ranks: int = 1


RL_CASES: dict[str, RLCase] = {}


def case(fault: str, *names: str) -> Callable[[Any], Any]:
    """Add a function to the cases, under its name."""

    def add(make: Callable[[bool], Any]) -> Callable[[bool], Any]:
        RL_CASES[make.__name__] = RLCase(fault, frozenset(names), make, run_rl)
        return make

    return add


class EndAt(LogitsProcessor):
    """Ends each answer at its length, and none before."""

    def __init__(self, prompt: int, lengths: Sequence[int]) -> None:
        self.prompt, self.lengths = prompt, torch.tensor(lengths)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Allow the token that ends an answer in its last place alone."""
        scores[:, END] = float("-inf")
        is_last = input_ids.shape[1] - self.prompt >= self.lengths - 1
        scores[is_last] = float("-inf")
        scores[is_last, END] = 0.0
        return scores


def policy_model() -> Qwen3ForCausalLM:
    """Draw the model that learns, or one that stays as it is."""
    return small_model(
        hidden_size=256, intermediate_size=768, num_hidden_layers=4, head_dim=64, num_key_value_heads=2, use_cache=True,
    )  # fmt: skip


@torch.no_grad()
def answer(model: Qwen3ForCausalLM, prompts: torch.Tensor, lengths: Sequence[int], *, shares: bool) -> torch.Tensor:
    """Sample answers of given lengths to prompts of one length.

    Args:
        model: that answers.
        prompts: ids, shape (answers, tokens), those of a group in a row.
        lengths: of the answers [tokens].
        shares: read the prompt of a group once, and repeat its cache.
    """
    options: dict[str, Any] = {}
    if shares:
        cache = DynamicCache(config=model.config)
        first = prompts[::GROUP, :-1]
        model(first, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.batch_repeat_interleave(GROUP)
        options["past_key_values"] = cache
    return model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=max(lengths), do_sample=True,
        eos_token_id=END, pad_token_id=END,
        logits_processor=LogitsProcessorList([EndAt(prompts.shape[1], lengths)]), **options,
    )  # fmt: skip


def serve(channel: Connection, lengths: Sequence[int]) -> None:
    """Answer prompts in a process of its own, as a server's engine does, until there are no more."""
    torch.set_num_threads(1)
    model = policy_model()
    while (prompts := channel.recv()) is not None:
        begin = own_s()
        ids = answer(model, prompts, lengths, shares=False)
        channel.send((ids, own_s() - begin))


@dataclass
class RLLoop:
    """A loop of rollout, reward, reference and update.

    Attributes:
        prompt: length of the prompts [tokens].
        lengths: of the answers to all prompts of a step [tokens].
        batch: answers that are decoded together; all if None.
        shares: whether the prompt of a group is read once.
        updates: on each rollout.
        reference_each_update: whether the reference runs for each of them.
        reward_s: time of the reward on the host [s].
        server: whether another process answers.
        overlaps: whether it answers the next prompts during the update.
    """

    prompt: int = 32
    lengths: Sequence[int] = (24,) * 16
    batch: int | None = None
    shares: bool = True
    updates: int = 1
    reference_each_update: bool = False
    reward_s: float = 0.0
    server: bool = False
    overlaps: bool = False
    policy: Qwen3ForCausalLM = field(default_factory=policy_model)
    reference: Qwen3ForCausalLM = field(default_factory=policy_model)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=1e-5, fused=True)
        self.of_reference = headway.trace(self.reference)
        self.channel: Connection | None = None
        self.asked = False

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Run the server, where there is one."""
        if not self.server:
            yield
            return
        here, there = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(there, self.lengths))
        process.start()
        self.channel = here
        try:
            yield
            if self.asked:
                here.recv()
                self.asked = False
            here.send(None)
        finally:
            process.join(30)

    def prompts(self) -> torch.Tensor:
        """Draw the prompts of a step, each as often as it has answers."""
        return torch.randint(1, 1000, (len(self.lengths) // GROUP, self.prompt)).repeat_interleave(GROUP, dim=0)

    def rollout(self, meter: headway.Meter) -> list[torch.Tensor]:
        """Answer prompts here or on the server, and count it."""
        lengths, prompts = self.lengths, self.prompts()
        work = Generation(
            [self.prompt] * (len(lengths) // GROUP), lengths, group=GROUP, batch_size=self.batch or len(lengths),
            prefix="computed once" if self.shares else "own",
        )  # fmt: skip
        if self.channel is not None:
            with meter.phase("rollout", forward_only=True, num_devices=1, memory_bytes_per_s=BYTES_PER_S) as phase:
                if not self.asked:
                    self.channel.send(prompts)
                ids, phase.busy_s = self.channel.recv()
                if self.overlaps:
                    self.channel.send(prompts)
                self.asked = self.overlaps
                meter.count(work)
            return [ids]
        with meter.phase("rollout", forward_only=True):
            meter.count(work)
            size = self.batch or len(lengths)
            return [
                answer(self.policy, prompts[at : at + size], lengths[at : at + size], shares=self.shares)
                for at in range(0, len(lengths), size)
            ]

    def batches(self, answers: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Lay answers of one length together, so that nothing is padded."""
        rows = [row for ids in answers for row in ids]
        by_length: dict[int, list[torch.Tensor]] = {}
        for row, length in zip(rows, self.lengths, strict=True):
            by_length.setdefault(length, []).append(row[: self.prompt + length])
        return [{"input_ids": torch.stack(alike)} for alike in by_length.values()]

    def score(self, meter: headway.Meter, batches: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Run the reference over answers."""
        with meter.phase("reference", forward_only=True), torch.no_grad():
            for batch in batches:
                meter.count(batch, cost_model=self.of_reference)
            return [self.logp(self.reference, batch) for batch in batches]

    def logp(self, model: Qwen3ForCausalLM, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Log-probabilities of the answers' tokens."""
        ids = batch["input_ids"]
        logits = model(input_ids=ids, use_cache=False).logits[:, self.prompt - 1 : -1]
        return logits.log_softmax(-1).gather(-1, ids[:, self.prompt :, None])[..., 0]

    def step(self, meter: headway.Meter) -> None:
        """Take one step of the loop."""
        batches = self.batches(self.rollout(meter))
        with meter.phase("reward"):
            busy(self.reward_s)
            rewards = [(batch["input_ids"] < 500).float().mean(1) for batch in batches]
        anchors: list[torch.Tensor] = []
        for _ in range(self.updates):
            if not anchors or self.reference_each_update:
                anchors = self.score(meter, batches)
            with meter.phase("update"):
                for batch, reward, anchor in zip(batches, rewards, anchors, strict=True):
                    meter.count(batch)
                    logp = self.logp(self.policy, batch)
                    drift = (logp - anchor).detach()
                    ((0.01 * drift - (reward - reward.mean())[:, None]) * logp).mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
        meter.step()


def run_rl(make: Callable[[bool], RLLoop], folder: Path) -> Times:
    """Run a loop without its fault and with it, both metered, and keep the records of the one with it.

    Returns:
        Time of a healthy step and of a faulty one [s].
    """
    healthy, times = make(False), []
    # Before and behind the faulty steps, since other processes on the machine come and go.
    times += _step_times(healthy, NUM_HEALTHY, [])
    faulty_s = statistics.median(_step_times(make(True), NUM_STEPS, [f"jsonl:{folder}/metrics.jsonl"]))
    times += _step_times(healthy, NUM_HEALTHY, [])
    return statistics.median(times), faulty_s


def _step_times(loop: RLLoop, num_steps: int, log_to: list[str]) -> list[float]:
    """Run a loop under a meter; the times of its warm steps [s]."""
    ends = []
    with loop.serving(), headway.Meter(
        loop.policy, others=[loop.of_reference], optimizer=loop.optimizer, peak=PEAK,
        memory_bytes_per_s=BYTES_PER_S, log_every=1, log_to=log_to,
    ) as meter:  # fmt: skip
        for _ in range(num_steps):
            loop.step(meter)
            ends.append(own_s())
    return [end - begin for begin, end in pairwise(ends)][NUM_WARM - 1 :]


@case("one answer of 160 tokens among 15 of 24", "longest-answer")
def one_long_answer(is_faulty: bool) -> RLLoop:
    """Wait for one answer; mended: as many tokens in answers of one length."""
    return RLLoop(lengths=(*(24,) * 15, 160) if is_faulty else (*(32,) * 8, *(33,) * 8))


@case("16 answers decoded in 4 batches", "small-decode-batches")
def small_batches(is_faulty: bool) -> RLLoop:
    """Decode one group after the other; mended: all of them at once."""
    return RLLoop(batch=GROUP if is_faulty else None)


@case("a reward of 0.5 s on the host", "host-phase")
def host_reward(is_faulty: bool) -> RLLoop:
    """Compute rewards in Python while nothing else goes on."""
    return RLLoop(reward_s=0.5 * is_faulty)


@case("a frozen reference run for each of 4 updates", "repeated-scoring")
def repeated_reference(is_faulty: bool) -> RLLoop:
    """Score the same answers before each update; mended: once for each rollout."""
    return RLLoop(updates=4, reference_each_update=is_faulty)


@case("prompts of 384 tokens read once per answer", "repeated-prefill")
def prompt_per_answer(is_faulty: bool) -> RLLoop:
    """Read the prompt of each group four times; mended: once, and its cache repeated."""
    return RLLoop(prompt=384, lengths=(8,) * 8, shares=not is_faulty)


@case("rollout and update wait for each other", "no-overlap")
def turns(is_faulty: bool) -> RLLoop:
    """Ask the server when the update has ended; mended: before it, with weights one step old."""
    return RLLoop(server=True, overlaps=not is_faulty, shares=False)


@case("healthy: one batch, one reference, a shared prompt")
def healthy_rollout(_is_faulty: bool) -> RLLoop:
    """Nothing is planted."""
    return RLLoop()


@case("healthy: answers of 20 to 30 tokens, two updates")
def healthy_lengths(_is_faulty: bool) -> RLLoop:
    """Lengths vary a little, and each rollout is learned from twice."""
    return RLLoop(lengths=(20, 22, 24, 24, 26, 26, 28, 30) * 2, updates=2)


@case("healthy: a server that answers during the update")
def healthy_server(_is_faulty: bool) -> RLLoop:
    """The rollout of the next step overlaps with the update, which takes longer."""
    return RLLoop(server=True, overlaps=True, shares=False, updates=2)
