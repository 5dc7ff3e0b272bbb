"""The order of samples and the packs they fill, from any place in the data on; the same place gives the same packs."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Literal, NamedTuple

import numpy as np

from headway.data.collate import Batch, Collator
from headway.data.encode import EncodedSample, Encoder
from headway.data.pack import Budget, Packer, PackReport, Strategy, over_budget
from headway.data.plan.budget import Size
from headway.data.samples import Chat, Origin
from headway.errors import DataError

Overlong = Literal["error", "drop", "truncate"]
OVERLONG: tuple[Overlong, ...] = ("error", "drop", "truncate")


class Stage(NamedTuple):
    """A part of a curriculum.

    Attributes:
        samples: what it plays, shuffled anew in every epoch.
        epochs: how often; None for endlessly.
    """

    samples: Sequence[Chat]
    epochs: int | None


class Producer:
    """Makes packs from a place in the data; knows nothing of threads."""

    def __init__(
        self,
        stages: list[Stage],
        encoder: Encoder,
        budget: Budget,
        strategy: Strategy,
        overlong: Overlong,
        open_packs: int,
        seed: int,
        shuffle: bool,
        cache_bytes: int,
    ) -> None:
        self.stages, self.encoder, self.budget, self.strategy = stages, encoder, budget, strategy
        self.overlong, self.open_packs, self.seed, self.shuffle = overlong, open_packs, seed, shuffle
        self.cache = SampleCache(cache_bytes)
        Packer(budget, strategy)  # an unknown strategy should fail now, not in the thread

    def settings(self) -> dict[str, Any]:
        """What decides the packs' contents and order, as plain JSON values."""
        return {
            "stages": [[len(stage.samples), stage.epochs] for stage in self.stages],
            "seed": self.seed,
            "shuffle": self.shuffle,
            "budget": asdict(self.budget),
            "strategy": self.strategy,
            "overlong": self.overlong,
            "open_packs": self.open_packs,
        }

    def initial_state(self) -> dict[str, Any]:
        """The place before the first sample."""
        return {"stage": 0, "epoch": 0, "cursor": 0, "open": [], "report": PackReport().to_dict()}

    def play(self, state: dict[str, Any]) -> Iterator[tuple[Batch, dict[str, Any]]]:
        """Yield packs from a state on, each with the state that follows it."""
        packer, report = Packer(self.budget, self.strategy), PackReport(**state["report"])
        contents: dict[int, list[tuple[int, int]]] = {}  # open pack -> (stage, index) of its samples
        loaded: dict[int, list[EncodedSample]] = {}
        for members in state["open"]:
            encoded = [self._admit(self.stages[stage].samples[index])[0] for stage, index in members]
            kept = [sample for sample in encoded if sample is not None]
            number = packer.open(Size(sum(s.tokens for s in kept), sum(s.patches for s in kept)))
            contents[number], loaded[number] = [(stage, index) for stage, index in members], kept

        def hand_out(number: int) -> Batch:
            packer.close(number)
            del contents[number]
            batch = Collator(pixel_scale=self.encoder.pixel_scale)(loaded.pop(number))
            report.packs += 1
            report.tokens += batch.tokens
            report.capacity += self.budget.tokens
            return batch

        def state_at(stage: int, epoch: int, cursor: int) -> dict[str, Any]:
            opened = [[list(member) for member in members] for members in contents.values()]
            return {"stage": stage, "epoch": epoch, "cursor": cursor, "open": opened, "report": report.to_dict()}

        idle = 0  # samples dropped since the last one used
        for stage, epoch, cursor, index in self._order(state):
            sample, was_cut = self._admit(self.stages[stage].samples[index])
            report.read += 1
            batch = None
            if sample is None:
                report.dropped += 1
                idle += 1
                if idle >= len(self.stages[stage].samples):
                    raise DataError(
                        f"The last {idle} samples all exceed a pack's budget of {self.budget.tokens} tokens and "
                        f"{self.budget.patches} patches, so there is nothing to train on. Raise the budget or shrink "
                        "the images."
                    )
            else:
                idle = 0
                report.used += 1
                report.truncated += was_cut
                if packer.find(sample.size) is None and len(contents) == self.open_packs:
                    fullest = min(packer.open_packs.items(), key=lambda item: (item[1].tokens, item[0]))[0]
                    batch = hand_out(fullest)
                number = packer.place(sample.size)
                contents.setdefault(number, []).append((stage, index))
                loaded.setdefault(number, []).append(sample)
            if batch is not None:
                yield batch, state_at(stage, epoch, cursor + 1)
        for number in list(contents):
            batch = hand_out(number)
            yield batch, state_at(len(self.stages), 0, 0)

    def _order(self, state: dict[str, Any]) -> Iterator[tuple[int, int, int, int]]:
        """(stage, epoch, cursor, index) of every sample from a state on."""
        epoch, cursor = state["epoch"], state["cursor"]
        for stage in range(state["stage"], len(self.stages)):
            samples, epochs = self.stages[stage]
            while epochs is None or epoch < epochs:
                order = np.arange(len(samples))
                if self.shuffle:
                    order = np.random.default_rng([self.seed, stage, epoch]).permutation(len(samples))
                for place in range(cursor, len(samples)):
                    yield stage, epoch, place, int(order[place])
                epoch, cursor = epoch + 1, 0
            epoch, cursor = 0, 0

    def _admit(self, sample: Chat) -> tuple[EncodedSample | None, bool]:
        """Encode a sample and apply the policy: the sample or None if it is dropped, and whether it was cut."""
        encoded = self.cache.get(sample)
        if encoded is None:
            encoded = self.encoder.encode(sample)
            self.cache.put(sample, encoded)
        if self.budget.holds(encoded.size):
            return encoded, False
        if self.overlong == "error":
            raise DataError(over_budget(sample.where + ": the sample", encoded.size, self.budget))
        if self.overlong == "drop" or not self.budget.holds(Size(1, encoded.patches)):
            return None, False
        cut = encoded.truncated(self.budget.tokens)
        return cut, cut is not None


class SampleCache:
    """Encoded samples up to a number of bytes.

    Nothing is evicted: each epoch needs each sample once, in a new order, so one resident set is as good as another.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.free_bytes = limit_bytes
        self.kept: dict[Origin, EncodedSample] = {}

    def get(self, sample: Chat) -> EncodedSample | None:
        """The encoded sample, if it was kept."""
        return self.kept.get(sample.origin)

    def put(self, sample: Chat, encoded: EncodedSample) -> None:
        """Keep an encoded sample, if there is room."""
        if encoded.num_bytes <= self.free_bytes:
            self.free_bytes -= encoded.num_bytes
            self.kept[sample.origin] = encoded
