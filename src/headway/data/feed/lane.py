"""A lane: one of the fixed partitions of a stream, read in order, shuffled in a buffer and packed online.

A stream is cut into lanes (logical shards) whose number does not depend on ranks or workers. The packs of a lane follow
from its number, the data and the settings alone; ranks only share the lanes among them.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from typing import Any, NamedTuple

from headway.count import CostModel, Workload
from headway.count.splits import branched
from headway.data.bad_rows import sample_error
from headway.data.feed.make import DroppedSample, FinishedPack, PackMaker, Piece, SkippedSample
from headway.data.pack_times import charged_to
from headway.data.samples import Sample, SampleError, SampleLengths, unusable
from headway.data.sources import Source
from headway.errors import CheckpointError, ConfigError, DataError
from headway.packing.budget import Budget, Size, over_budget, segments_within
from headway.packing.items import Overlong, Policies
from headway.packing.online import OnlinePacker
from headway.packing.order import Stage, StageSource, key_of, shuffled
from headway.packing.parts import workload_of
from headway.packing.pieces import split_sample
from headway.packing.strategies import Strategy

_MOST_DROPPED_IN_A_ROW = 100_000  # samples; no corpus has so many empty ones on end


@dataclass(frozen=True)
class Streaming:
    """Settings of a stream, the same for all of its lanes.

    Attributes:
        maker: encodes and collates; the stages name its sources.
        stages: the curriculum, as for a plan.
        budget: limits of a pack.
        strategy: strategy of the online packer.
        overlong: policy for samples that exceed a pack, of all sources or by name of each.
        lanes: number of lanes.
        shuffle: samples that wait to be drawn at random, in each lane; 1 keeps the order of the files [samples].
        open_packs: packs that are open at a time, in each lane [packs].
        seed: seed of the order of shards and of the draws.
        cost_model: the trained model's costs, which "balanced" makes equal; None balances tokens.
        skips_unlabelled: as `Items.build` takes it.

    Raises:
        ConfigError: a number below 1, or a stage that does not fit a stream.
    """

    maker: PackMaker
    stages: tuple[Stage, ...]
    budget: Budget
    strategy: Strategy = "balanced"
    overlong: Policies = "error"
    lanes: int = 16
    shuffle: int = 128
    open_packs: int = 8
    seed: int = 0
    cost_model: CostModel | None = None
    skips_unlabelled: bool = False

    def __post_init__(self) -> None:
        if min(self.lanes, self.shuffle, self.open_packs) < 1:
            raise ConfigError(
                f"The stream got lanes={self.lanes}, shuffle={self.shuffle}, open_packs={self.open_packs}; each must "
                "be at least 1."
            )
        for stage in self.stages:
            for source in stage.sources:
                if source.epochs is not None and source.epochs != int(source.epochs):
                    raise ConfigError(
                        f"The source {source.name!r} plays {source.epochs} epochs, but a stream is read in whole ones. "
                        "Give a whole number, or use an index."
                    )

    def overlong_of(self, source: str) -> Overlong:
        """The policy for samples of a source that exceed a pack."""
        return self.overlong if isinstance(self.overlong, str) else self.overlong[source]

    def cost_of(self, lengths: SampleLengths, start: int, stop: int) -> float:
        """Useful FLOPs of training on tokens start .. stop - 1 of a sample, with all of its media."""
        tokens = stop - start
        if self.cost_model is None:
            return float(tokens)
        if lengths.parts and tokens == lengths.tokens:
            workload = workload_of(lengths.parts)
        else:
            workload = Workload(
                segments_within(lengths.segments, start, stop) or [tokens],
                splits=[branched(lengths.prompt, lengths.branches)] if lengths.branches else (),
                **lengths.media,
            )
        cost = float(self.cost_model.count(workload).total)
        if not self.skips_unlabelled:
            return cost
        targets = sum(max(0, min(stop, end) - max(start + 1, begin)) for begin, end in lengths.targets)
        return cost - self.cost_model.head_flops * (tokens - targets)


class ReadPosition(NamedTuple):
    """Place at which a lane found a sample, and can find it again.

    Attributes:
        stage: number of the stage in the curriculum.
        entry: number of the source among the stage's sources.
        epoch: number of the pass over that source in that stage.
        shard: place in the epoch's order of the lane's shards.
        row: row of the shard.
        seen: samples of this lane that the epoch had before.
    """

    stage: int
    entry: int
    epoch: int = 0
    shard: int = 0
    row: int = 0
    num_read: int = 0


class LaneSource:
    """A lane's part of one source in one stage.

    Every lane has shards of its own; lanes beyond the number of shards share one, row by row.

    Args:
        source: the dataset.
        entry: how often it is read, and how much of it.
        start: position of its first row: the stage, and the entry's number in it.
        lane: number of the lane.
        lanes: how many lanes there are.
        key: seed of the order of shards; None keeps it.
    """

    def __init__(
        self, source: Source, entry: StageSource, start: ReadPosition, *, lane: int, lanes: int, key: int | None
    ) -> None:
        self.start = start
        self._epochs, self._key = entry.epochs, key
        self._name, self._lane, self._lanes = entry.name, lane, lanes
        shards, num_shards = source.shards, len(source.shards)
        self._shards = shards[lane % num_shards :: lanes]
        self._first, self._stride = lane // num_shards, len(range(lane % num_shards, lanes, num_shards))
        self._limit = None if entry.limit is None else len(range(lane, entry.limit, lanes))
        # Sources alternate by weight; without weights by how much there is to read, so that they end about together.
        self.weight = entry.weight or sum(shard.reader.file.size or 1 for shard in shards) * (entry.epochs or 1)

    def rows(self, start: ReadPosition) -> Iterator[tuple[ReadPosition, ReadPosition, Sample | SampleError]]:
        """Samples from a position on, each with its own position and the next; endlessly where epochs are not given.

        Raises:
            ConfigError: the source is to be read endlessly and has no sample for this lane.
        """
        stage, entry, epoch, shard, row, num_read = start
        while (self._epochs is None or epoch < self._epochs) and self._shards:
            # Files in an order of the epoch's own, where they are shuffled.
            order: Sequence[int] = range(len(self._shards))
            if self._key is not None:
                order = shuffled(len(order), key_of(self._key, epoch)).tolist()
            for at in range(shard, len(order)):
                for number, sample in self._shards[order[at]].rows(row):
                    # Shifted by a lane in each round, so that no lane gets all the blank rows of a corpus that has
                    # one after each paragraph.
                    if (number + number // self._stride) % self._stride != self._first:
                        continue
                    if self._limit is not None and num_read >= self._limit:
                        break
                    here = ReadPosition(stage, entry, epoch, at, number, num_read)
                    num_read += 1
                    yield here, here._replace(row=number + 1, num_read=num_read), sample
                row = 0
            if num_read == 0:
                if self._epochs is not None:
                    return
                raise ConfigError(
                    f"The source {self._name!r} has no sample for lane {self._lane} of {self._lanes}, so it would be "
                    "read less often than asked for. Set data.stream.lanes to no more than the samples of the smallest "
                    "source (or its limit), give epochs, or use an index."
                )
            epoch, shard, num_read = epoch + 1, 0, 0


class BufferedSample(NamedTuple):
    """A sample, or a part of one, that was read and is not handed out yet.

    Attributes:
        position: where it was read.
        start: the part's first token in the sample [tokens].
        stop: one past its last; 0 where the sample has not been measured yet [tokens].
        patches: vision patches of the part [patches].
        cost: useful FLOPs of training on it.
        sample: the sample itself.
        is_first: whether the part is the first of the sample that is trained on.
    """

    position: ReadPosition
    start: int
    stop: int
    patches: int
    cost: float
    sample: Sample
    is_first: bool = True

    @property
    def size(self) -> Size:
        """Tokens and patches that it takes of a pack."""
        return Size(self.stop - self.start, self.patches)

    @property
    def key(self) -> list[Any]:
        """Position and cut, as plain JSON values; enough to read it again."""
        return [list(self.position), self.start, self.stop, self.patches, self.cost, self.is_first]


class LanePack(NamedTuple):
    """A pack of a lane.

    Attributes:
        pack: the pack; once the lane has ended one of padding, with the samples left out since the last.
        has_ended: whether the lane has ended.
        state: state of the lane after this pack, as plain JSON values.
    """

    pack: FinishedPack
    has_ended: bool
    state: dict[str, Any]


class Lane:
    """One lane, from its beginning or from a state on.

    Args:
        streaming: settings of the stream.
        number: number of the lane, from 0.
        state: a saved state; None for the beginning.
    """

    def __init__(self, streaming: Streaming, number: int, state: dict[str, Any] | None = None) -> None:
        self._streaming, self._number = streaming, number
        self.turn = 0  # packs handed out
        self.has_ended = False
        self._draws = 0
        self._buffer: list[BufferedSample] = []
        self._packer: OnlinePacker[BufferedSample] = OnlinePacker(
            streaming.budget, streaming.strategy, packs=streaming.open_packs, seed=key_of(streaming.seed, number)
        )
        self._ready: deque[list[BufferedSample]] = deque()  # packs to be handed out next
        self._skipped: list[SkippedSample] = []
        self._dropped: list[DroppedSample] = []
        self._dropped_in_a_row = 0
        self._begin_stage(0)
        if state is not None:
            self._restore(state)

    def next_pack(self) -> LanePack:
        """Read on until a pack is complete, and make it.

        Raises:
            DataError: a sample cannot be used and is not to be skipped, or exceeds a pack under the policy "error".
        """
        members = self._next_members()
        self.has_ended = members is None
        self.turn += not self.has_ended
        pieces = [(self._piece(member), partial(_sample, member)) for member in members or []]
        pack = self._streaming.maker.make(pieces)
        pack = pack._replace(skipped=(*self._skipped, *pack.skipped), dropped=tuple(self._dropped))
        self._skipped, self._dropped = [], []
        return LanePack(pack, self.has_ended, self.state())

    def state(self) -> dict[str, Any]:
        """The lane's state, as plain JSON values: positions and buffered samples' keys."""
        return {
            "turn": self.turn,
            "draws": self._draws,
            "stage": self._stage,
            "drawn": list(self._drawn),
            "places": [None if position is None else list(position) for position in self._positions],
            "buffer": [sample.key for sample in self._buffer],
            "packing": [sample.key for sample in self._packer.waiting],
            "ready": [[sample.key for sample in members] for members in self._ready],
        }

    def _restore(self, state: dict[str, Any]) -> None:
        self.turn, self._draws = state["turn"], state["draws"]
        self._begin_stage(state["stage"], state["drawn"], state["places"])
        samples = self._read_again([*state["buffer"], *state["packing"], *chain.from_iterable(state["ready"])])

        def buffered(key: list[Any]) -> BufferedSample:
            position, (start, stop, patches, cost, is_first) = ReadPosition(*key[0]), key[1:]
            return BufferedSample(position, start, stop, patches, cost, samples[position], is_first)

        self._buffer = [buffered(key) for key in state["buffer"]]
        self._ready.extend([buffered(key) for key in keys] for keys in state["ready"])
        for key in state["packing"]:
            self._pack(buffered(key))

    def _read_again(self, keys: list[list[Any]]) -> dict[ReadPosition, Sample]:
        """Read again the samples that were buffered when the state was saved, from the first of each source on."""
        needed = sorted({ReadPosition(*key[0]) for key in keys})
        samples: dict[ReadPosition, Sample] = {}
        for (stage, entry), group in groupby(needed, key=lambda position: position[:2]):
            positions = list(group)
            for here, _, sample in self._lane_source(stage, entry).rows(positions[0]):
                if here in positions and not isinstance(sample, SampleError):
                    samples[here] = sample
                if here >= positions[-1]:
                    break
        missing = [position for position in needed if position not in samples]
        if missing:
            raise CheckpointError(
                f"The stream no longer holds {len(missing)} of the samples that its saved state names. Resume with the "
                "data as they were, or start a new run from the checkpoint's weights."
            )
        return samples

    def _next_members(self) -> list[BufferedSample] | None:
        while not self._ready:
            drawn = self._draw()
            if drawn is not None:
                self._measure(drawn)
            elif remainder := self._packer.flush():
                self._ready.extend(remainder)
            else:
                return None
        return self._ready.popleft()

    def _pack(self, buffered: BufferedSample) -> None:
        self._dropped_in_a_row = 0
        self._ready.extend(self._packer.add(buffered, buffered.size, buffered.cost))

    def _draw(self) -> BufferedSample | None:
        """Fill the buffer and take one of its samples, chosen by the seed, the lane and the number of draws."""
        while len(self._buffer) < self._streaming.shuffle and (sample := self._read()) is not None:
            self._buffer.append(sample)
        if not self._buffer:
            return None
        chosen = key_of(self._streaming.seed, self._number, self._draws) % len(self._buffer)
        self._draws += 1
        self._buffer[chosen], self._buffer[-1] = self._buffer[-1], self._buffer[chosen]
        return self._buffer.pop()

    def _read(self) -> BufferedSample | None:
        """The next sample of the source that is furthest behind its weight; None once all stages have ended."""
        while True:
            alive = [number for number, position in enumerate(self._positions) if position is not None]
            if not alive or (self._most is not None and sum(self._drawn) >= self._most):
                if self._stage + 1 == len(self._streaming.stages):
                    return None
                self._begin_stage(self._stage + 1)
                continue
            number = min(alive, key=lambda at: ((self._drawn[at] + 1) / self._lane_sources[at].weight, at))
            with charged_to("read"):
                here, self._positions[number], sample = next(self._rows[number], (None, None, None))
            if here is None or sample is None:
                continue
            self._drawn[number] += 1
            if not isinstance(sample, SampleError):
                return BufferedSample(here, 0, 0, 0, 0.0, sample)
            self._skip(sample)

    def _measure(self, buffered: BufferedSample) -> None:
        """Measure a sample and hand it to the packer; one that exceeds a pack by the policy for those."""
        streaming, budget = self._streaming, self._streaming.budget
        try:
            # Lengths without decoding media; a sample that cannot be read is skipped, an empty one dropped.
            encoder = streaming.maker.encoder
            full_lengths = encoder.measure(buffered.sample)
            if encoder.shares_prompts:
                full_lengths = full_lengths.with_prompt_once()
        except DataError as error:
            self._skip(sample_error(error, buffered.sample.origin))
            return
        dropout, origin = streaming.maker.dropout, buffered.sample.origin
        if not full_lengths.tokens:
            self._drop(buffered, 0)
            return
        # A pack takes what condition dropout leaves of the sample in this epoch.
        lengths = encoder.lengths_without_conditions(full_lengths, origin, dropout, buffered.position.epoch)
        # Media cannot be cut: their patches must fit, and a cut comes behind them and the first token to learn.
        most, fits = budget.tokens, budget.holds(Size(1, full_lengths.patches))
        overlong = streaming.overlong_of(origin.source)
        if budget.holds(full_lengths.size):  # full lengths decide, because a plan knows samples before their epochs
            spans = [(0, lengths.tokens, True)]
        elif overlong == "error":
            raise DataError(over_budget(f"{buffered.sample.where}: the sample", full_lengths.size, budget))
        elif overlong == "truncate" and fits and lengths.media_end <= most and lengths.first_target < most:
            spans = [(0, most, True)]
        elif overlong == "split" and fits and lengths.media_end == 0:
            spans = split_sample(lengths.tokens, lengths.targets, most)
            unused = lengths.tokens - sum(stop - start for start, stop, _ in spans)
            if spans and unused:
                self._dropped.append(DroppedSample(origin.source, unused, samples=0))
        else:
            spans = []
        if not spans:
            self._drop(buffered, lengths.tokens)
        # Each piece goes to the packer with its own cost.
        for start, stop, is_first in spans:
            cost, patches = streaming.cost_of(lengths, start, stop), lengths.patches
            self._pack(buffered._replace(start=start, stop=stop, patches=patches, cost=cost, is_first=is_first))

    def _drop(self, buffered: BufferedSample, tokens: int) -> None:
        """Leave a sample out, unless a lane that may never end holds nothing else."""
        self._dropped_in_a_row += 1
        if self._dropped_in_a_row > _MOST_DROPPED_IN_A_ROW:
            raise unusable(
                buffered.sample,
                f"this and the {_MOST_DROPPED_IN_A_ROW:,} samples before it are empty or "
                f"exceed a pack of {self._streaming.budget.tokens:,} tokens, so no step can be made. Look at the data "
                "with `headway look`.",
            )
        self._dropped.append(DroppedSample(buffered.sample.origin.source, tokens))

    def _skip(self, error: SampleError) -> None:
        if not self._streaming.maker.skips:
            raise error
        self._skipped.append(SkippedSample(error, 0))

    def _piece(self, buffered: BufferedSample) -> Piece:
        position = buffered.position
        source = self._source(position.stage, position.entry)
        return Piece(source, position.row, buffered.start, buffered.stop, position.epoch, buffered.is_first)

    def _begin_stage(self, stage: int, drawn: Sequence[int] = (), positions: Sequence[Any] = ()) -> None:
        num_sources = len(self._streaming.stages[stage].sources)
        self._stage = stage
        self._lane_sources = [self._lane_source(stage, entry) for entry in range(num_sources)]
        self._drawn = list(drawn) or [0] * num_sources
        self._positions: list[ReadPosition | None] = [
            None if position is None else ReadPosition(*position)
            for position in positions or [source.start for source in self._lane_sources]
        ]
        self._rows = [
            iter(()) if position is None else source.rows(position)
            for source, position in zip(self._lane_sources, self._positions, strict=True)
        ]
        samples = self._streaming.stages[stage].samples
        self._most = None if samples is None else len(range(self._number, samples, self._streaming.lanes))

    def _source(self, stage: int, entry: int) -> int:
        names = [source.name for source in self._streaming.maker.sources]
        return names.index(self._streaming.stages[stage].sources[entry].name)

    def _lane_source(self, stage: int, entry: int) -> LaneSource:
        streaming, source = self._streaming, self._source(stage, entry)
        return LaneSource(
            streaming.maker.sources[source],
            streaming.stages[stage].sources[entry],
            ReadPosition(stage, entry),
            lane=self._number,
            lanes=streaming.lanes,
            key=key_of(streaming.seed, source, stage, self._number) if streaming.shuffle > 1 else None,
        )


def _sample(buffered: BufferedSample) -> Sample:
    return buffered.sample
