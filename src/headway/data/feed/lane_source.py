"""A lane's part of one source: which rows of which shards it reads, epoch after epoch."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headway.data.samples import Sample, SampleError
from headway.data.sources import Source
from headway.errors import ConfigError
from headway.packing.order import StageSource, key_of, shuffled


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
