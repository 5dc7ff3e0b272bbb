"""Time that an engine takes to write answers: it reads prompts (prefill), then writes a token of each answer a step.

A decode step takes the products of its rows, each as long as its FLOPs or its operands need, whichever is longer, and
the attention of its rows, as long as its FLOPs or the cache that it reads. An answer begins when there is a place for
it and room for its cache, and steps go on until the last answer ends.
"""

import heapq
import math
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.count import CostModel, Workload, drivers
from headway.count.integers import Ints
from headway.count.units import head_features
from headway.errors import PlanError
from headway.predict.collectives import Links, RankGroup, collective_s
from headway.predict.speeds import Cases, Speeds

Floats = NDArray[np.float64]

PREFILL_ROWS = 8192
"""Tokens of prompts that are read together, as vLLM and SGLang cut them on large devices."""

_KNOTS = 1024  # positions at which a mask is asked how many keys a query sees; lines join them
_MOST_STEPS = 50_000_000  # decode steps of an engine: some seconds, and 2 GB


@dataclass(frozen=True, slots=True)
class _Attention:
    """Attention of all layers under one mask."""

    flops: int  # of a pair of a decode step
    prefill_flops: int  # of a pair of prompts
    cache_bytes: float  # of a key with its value, on each device of the engine


@dataclass(frozen=True)
class EngineRun:
    """Answers that one engine wrote.

    Attributes:
        prefill: time of reading prompts [s].
        decode: time of the steps after it [s].
        steps: decode steps.
        rows: answers that were written at a time, on average.
        most_rows: most answers that were written at a time.
        waited_for_cache: whether an answer waited for room for its cache.
        num_bytes: weights and cache that each device of the engine moved [bytes].
        cache_bytes: most cache that a device held [bytes].
        memory_s: time in which these bytes are moved, as expected [s].
        compute_s: time of the FLOPs at the rates of products and attention, as expected [s].
    """

    prefill: Cases
    decode: Cases
    steps: int
    rows: float
    most_rows: int
    waited_for_cache: bool
    num_bytes: float
    cache_bytes: float
    memory_s: float
    compute_s: float

    @property
    def seconds(self) -> Cases:
        """Time of both [s]."""
        return self.prefill + self.decode


class EngineTimes:
    """Predicts the answers of one model on engines of one kind of device.

    Args:
        cost_model: of the model.
        speeds: of a device.
        number_bytes: of a weight, and of a number of the cache [bytes].
        tensor: devices that share an engine's products.
        links: between them; None where they are not known, and their sums are taken to take no time.

    Raises:
        PlanError: the cost model does not say what a cache holds.
        WorkloadError: the model attends in both directions, and writes no answers.
    """

    def __init__(
        self, cost_model: CostModel, speeds: Speeds, number_bytes: int, *, tensor: int = 1, links: Links | None = None
    ) -> None:
        self._speeds, self._number_bytes, self._tensor, self._links = speeds, number_bytes, tensor, links
        # what runs for a token of an answer: not towers, which read pictures before it
        token = Workload([1], past=[1])
        self._products: Counter[tuple[int, int]] = Counter()  # FLOPs for a token by the features of linear modules
        self._head: Counter[tuple[int, int]] = Counter()  # the same of the head, which prompts run once each
        self._loose = self._experts = 0  # FLOPs for a token of other products, and of experts
        flops: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])
        latents = _Latents(cost_model)
        for row in cost_model.rows:
            if row.driver.startswith("pairs:"):
                latent = latents.of(row.module, row.cached)
                cached = row.cached / tensor if latent is None else latent.elements  # a latent is whole on each device
                parts = (row.forward if latent is None else latent.flops, row.forward, cached * number_bytes)
                flops[row.driver] = [a + b for a, b in zip(flops[row.driver], parts, strict=True)]
            elif drivers.parse(row.driver)(token):
                if row.op == "experts":
                    self._experts += row.forward
                elif row.features is None:
                    self._loose += row.forward
                else:
                    (self._head if row.component == "language.head" else self._products)[row.features] += row.forward
        self._attention = {name: _Attention(int(a), int(b), c) for name, (a, b, c) in flops.items()}
        if not any(attention.cache_bytes for attention in self._attention.values()):
            raise PlanError(
                f"the cost model {cost_model.name} does not say what keys and values a token leaves in a cache, so the "
                "time of writing answers cannot be predicted. Name the folder of its config.json, so that it is traced "
                "again."
            )
        # of experts, those that some row of a step chose are read; a row chooses a share of them, evenly
        experts = [p for p in cost_model.parameters if p.active < p.numel and p.component.endswith(".experts")]
        self._expert_sizes = [(p.numel, p.active / p.numel) for p in experts]
        # devices that share products add their parts up behind attention and behind the MLP of each block
        features, blocks = head_features(cost_model), cost_model.block_towers.values()
        self._hidden = 0 if features is None else features[0]
        self._sums = 2 * sum(tower == "language" for tower in blocks)

    def cache_of(self, tokens: int, first: int = 0) -> float:
        """Bytes of cache that a run of tokens needs on each device, beyond those of its first ones.

        A mask that sees fewer keys, such as a window, needs fewer.
        """
        return sum(
            attention.cache_bytes * (_keys_seen(driver, tokens) - (_keys_seen(driver, first) if first else 0))
            for driver, attention in self._attention.items()
        )

    def write(
        self,
        prompt: int,
        answers: Ints,
        *,
        prefills: int,
        max_rows: int,
        room: float = math.inf,
        static: bool = False,
        shared_by: int = 1,
    ) -> EngineRun:
        """Predict the answers of one engine.

        Args:
            prompt: length of each prompt [tokens].
            answers: lengths of the answers in the order in which they begin, shape (N,), each >= 1 [tokens].
            prefills: how often a prompt is read.
            max_rows: most answers at a time.
            room: for cache on each device [bytes].
            static: whether a batch of answers goes on until the longest has ended.
            shared_by: answers that share the cache of their prompt.

        Raises:
            PlanError: there is no room for one answer, or there are too many steps.
        """
        # cache that each answer needs at its end: its own, and its part of the prompt's
        steps = answers - 1
        lengths, places = np.unique(steps, return_inverse=True)
        shared = self.cache_of(prompt) * (1 - 1 / shared_by)
        needs = np.array([self.cache_of(prompt + int(length)) - shared for length in lengths])[places]
        most = float(needs.max(initial=0.0))
        if most > room:
            raise PlanError(f"the cache of an answer needs {most:,.0f} bytes, and there is room for {room:,.0f}.")
        if static:
            size = min(max_rows, len(steps)) if math.isinf(room) or not most else min(max_rows, int(room // most))
            starts, ends = _in_batches(steps, max(1, size))
            waited = size < min(max_rows, len(steps))
        else:
            starts, ends, waited = _as_places_free(steps, needs, max_rows, room)
        num_steps = int(ends.max(initial=0))
        if num_steps > _MOST_STEPS:
            raise PlanError(f"an engine would take {num_steps:,} decode steps; {_MOST_STEPS:,} can be planned.")
        # rows and needs at each step; a batch computes the rows that have ended, too
        rows, needed = np.zeros(num_steps + 1, dtype=np.int64), np.zeros(num_steps + 1)
        runs = ends > starts
        for places_T, sign in ((starts[runs], 1), (ends[runs], -1)):
            np.add.at(rows, places_T, sign)
            np.add.at(needed, places_T, sign * needs[runs])
        rows, needed = rows.cumsum()[:-1], needed.cumsum()[:-1]
        keys = {driver: self._keys_of_steps(driver, prompt, starts, ends) for driver in self._attention}
        return self._timed(prompt, prefills, rows, keys, waited, float(needed.max(initial=0.0)))

    def _keys_of_steps(self, driver: str, prompt: int, starts: Ints, ends: Ints) -> Floats:
        """Keys that all rows of each step see under a mask, shape (steps,)."""
        longest = int((ends - starts).max(initial=0))
        # a step's query stands behind the prompt and what was written before
        positions = np.unique(np.linspace(prompt + 1, prompt + max(longest, 1), _KNOTS).astype(np.int64))
        knots = [_keys_seen(driver, int(position)) for position in positions]
        keys = np.interp(np.arange(prompt + 1, prompt + longest + 1), positions, knots)
        total = np.zeros(int(ends.max(initial=0)))
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            total[start:end] += keys[: end - start]
        return total

    def _timed(
        self, prompt: int, prefills: int, rows: Ints, keys: dict[str, Floats], waited: bool, most_cache: float
    ) -> EngineRun:
        """Time of prompts, and of steps with so many rows that see so many keys."""
        prefill, compute_s, num_bytes = self._prefilled(prompt, prefills)
        # products: once for each number of rows that occurs
        decode = Cases.exact(0.0)
        for number, count in zip(*np.unique(rows, return_counts=True), strict=True):
            seconds, at_rate, weights = self._products_s(int(number), int(number))
            decode += seconds.times(int(count))
            compute_s += at_rate * int(count)
            num_bytes += weights * int(count)
        # attention: each step takes as long as the cache that it reads and writes or its FLOPs, whichever is longer
        reads, flops = np.zeros(len(rows)), np.zeros(len(rows))
        for driver, attention in self._attention.items():
            reads += attention.cache_bytes * (keys[driver] + rows)
            flops += attention.flops / self._tensor * keys[driver]
        pairs = sum(float(of_mask.sum()) for of_mask in keys.values())
        per_query = pairs / (len(keys) * rows.sum()) if rows.sum() else 1.0
        for_flop, for_byte = self._speeds.attention_s(1.0, 0.0, per_query), self._speeds.memory_s(1.0)
        both = zip(for_flop, for_byte, strict=True)
        decode += Cases(*(float(np.maximum(flops * flop_s, reads * byte_s).sum()) for flop_s, byte_s in both))
        compute_s += for_flop.expected * float(flops.sum())
        num_bytes += float(reads.sum())
        return EngineRun(
            prefill,
            decode,
            len(rows),
            float(rows.mean()) if len(rows) else 0.0,
            int(rows.max(initial=0)),
            waited,
            num_bytes,
            most_cache,
            self._speeds.memory_s(num_bytes).expected,
            compute_s,
        )

    def _prefilled(self, prompt: int, prefills: int) -> tuple[Cases, float, float]:
        """Reading of prompts, in chunks: time, time of its FLOPs at their rates [s], and bytes that it moves."""
        tokens = prompt * prefills
        if not tokens:
            return Cases.exact(0.0), 0.0, 0.0
        chunk = min(tokens, PREFILL_ROWS)
        seconds, at_rate, weights = self._products_s(chunk, chunk * prefills / tokens)
        seconds, at_rate = seconds.times(tokens / chunk), at_rate * tokens / chunk
        num_bytes = weights * math.ceil(tokens / chunk)
        for driver, attention in self._attention.items():
            pairs = drivers.parse(driver)(Workload([prompt]))
            flops = attention.prefill_flops * pairs * prefills / self._tensor
            attending = self._speeds.attention_s(flops, 0.0, pairs / prompt)
            cached = 2 * attention.cache_bytes * tokens  # written, and read once
            seconds += Cases(*map(max, attending, self._speeds.memory_s(cached)))
            at_rate, num_bytes = at_rate + attending.expected, num_bytes + cached
        return seconds, at_rate, num_bytes

    def _products_s(self, rows: int, logits: float) -> tuple[Cases, float, float]:
        """Products of a forward on one device: time, time of the FLOPs at their rate [s], and weights read [bytes].

        Args:
            rows: tokens that run.
            logits: of them that run the head.
        """
        speeds, size = self._speeds, self._number_bytes
        seconds, at_rate, weights = Cases.exact(0.0), 0.0, 0.0
        for products, units in ((self._products, float(rows)), (self._head, logits)):
            for (wide, out), per_token in products.items():
                flops = per_token * units / self._tensor
                shape = (max(1, math.ceil(units)), wide, out)
                seconds += speeds.product_s(flops, shape, size)
                at_rate += speeds.product_s(flops, None, size).expected
                weights += per_token / 2 / self._tensor * size  # a weight is a multiplication and an addition
        seconds += (loose := speeds.product_s(self._loose * rows / self._tensor, None, size))
        experts = speeds.product_s(self._experts * rows / self._tensor, None, size)
        at_rate += loose.expected + experts.expected
        # Each row chooses its experts as if at random, so a share of (1 - chosen) ** rows of them is not read.
        chosen_bytes = (
            sum(numel * (1 - (1 - chosen) ** rows) for numel, chosen in self._expert_sizes) * size / self._tensor
        )
        seconds += Cases(*map(max, experts, speeds.memory_s(chosen_bytes)))
        if self._tensor > 1 and self._links is not None:
            group = RankGroup.of(self._tensor, 1, self._links)
            summed = collective_s("all-reduce", rows * self._hidden * size, group, self._links)
            seconds += summed.times(self._sums)
        return seconds, at_rate, weights + chosen_bytes


def _keys_seen(driver: str, position: int) -> int:
    """Keys that the query at a position sees, itself included; the first position is 1."""
    return drivers.parse(driver)(Workload([1], past=[position - 1]) if position > 1 else Workload([1]))


def _as_places_free(steps: Ints, needs: Floats, max_rows: int, room: float) -> tuple[Ints, Ints, bool]:
    """First step of each answer, and the one after its last, where each begins as soon as place and room allow.

    Returns:
        Both, and whether an answer waited for room.
    """
    writing: list[tuple[int, float]] = []  # when each answer that is being written ends, and its room
    starts, now, free, waited = np.zeros_like(steps), 0, room, False
    for row, (length, need) in enumerate(zip(steps.tolist(), needs.tolist(), strict=True)):
        while writing and (len(writing) >= max_rows or need > free):
            waited |= len(writing) < max_rows
            now, returned = heapq.heappop(writing)
            free += returned
        starts[row] = now
        if length:
            heapq.heappush(writing, (now + length, need))
            free -= need
    return starts, starts + steps, waited


def _in_batches(steps: Ints, size: int) -> tuple[Ints, Ints]:
    """First step of each answer, and the one after its batch's last, where batches follow each other."""
    starts, ends, now = np.zeros_like(steps), np.zeros_like(steps), 0
    for first in range(0, len(steps), size):
        batch = slice(first, first + size)
        starts[batch], now = now, now + int(steps[batch].max())
        ends[batch] = now
    return starts, ends


@dataclass(frozen=True, slots=True)
class _Latent:
    """Keys and values of one token in compressed form, which all heads share."""

    elements: int  # of a token
    flops: int  # of a pair


class _Latents:
    """Finds attention whose keys and values are made of a latent, which engines cache in their place.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1: keys and values of all heads are a product of a latent of few
    features; beside it a token has one key with rotary positions for all heads. A query that is multiplied by the key's
    part of that product attends to the latent itself: 2 x heads x (2 latent + rotary) FLOPs a pair.
    """

    def __init__(self, cost_model: CostModel) -> None:
        features = head_features(cost_model)
        self._hidden = 0 if features is None else features[0]
        self._features: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for row in cost_model.rows:
            if row.features is not None:
                self._features[row.module.rpartition(".")[0]].append(row.features)

    def of(self, module: str, cached: int) -> _Latent | None:
        """Latent of an attention whose keys and values have so many elements; None where they are cached as such."""
        products = self._features[module]
        outputs = sorted(out for _, out in products)
        for latent, out in products:
            # The product of keys and values reads a part of what another one made; the rest is the rotary key.
            if latent < self._hidden and latent not in outputs:
                elements = next((size for size in outputs if size > latent), None)
                if elements is None:
                    continue
                heads, left = divmod(cached - out, elements - latent)
                if heads > 0 and left == 0 and out % heads == 0:
                    return _Latent(elements, 2 * heads * (elements + latent))
        return None
