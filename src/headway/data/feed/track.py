"""A lane's part of a source: which rows of which shards, and how they are read epoch after epoch."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headway.data.samples import Sample, SampleError
from headway.data.sources import Source
from headway.errors import ConfigError
from headway.packing.order import Play
from headway.packing.permute import key_of, shuffled


class TrackPlace(NamedTuple):
    """Where a sample stands in a lane.

    Attributes:
        stage: of the curriculum.
        play: the source's place in the stage.
        epoch: of that source in that stage.
        shard: place in the epoch's order of the lane's shards.
        row: in the shard.
        seen: how many of the lane's samples the epoch had before it.
    """

    stage: int
    play: int
    epoch: int = 0
    shard: int = 0
    row: int = 0
    seen: int = 0


class Track:
    """A lane's part of one source in one stage.

    Every lane has shards of its own; lanes beyond the number of shards share one, row by row.

    Args:
        source: what is read.
        play: how often, and how much of it.
        stage: number of the stage.
        number: place of the source in the stage.
        lane: number of the lane.
        lanes: how many lanes there are.
        key: of the order of shards; None keeps it.
    """

    def __init__(
        self, source: Source, play: Play, *, stage: int, number: int, lane: int, lanes: int, key: int | None
    ) -> None:
        self.start = TrackPlace(stage, number)
        self._epochs, self._key = play.epochs, key
        self._name, self._lane, self._lanes = play.source, lane, lanes
        shards, num_shards = source.shards, len(source.shards)
        self._shards = shards[lane % num_shards :: lanes]
        self._first, self._stride = lane // num_shards, len(range(lane % num_shards, lanes, num_shards))
        self._limit = None if play.limit is None else len(range(lane, play.limit, lanes))
        # Sources alternate by weight; without weights by how much there is to read, so that they end about together.
        self.weight = play.weight or sum(shard.reader.file.size or 1 for shard in shards) * (play.epochs or 1)

    def rows(self, start: TrackPlace) -> Iterator[tuple[TrackPlace, TrackPlace, Sample | SampleError]]:
        """Samples from a place on, each with its own place and the one after it; endlessly where epochs are not given.

        Raises:
            ConfigError: the source is to play endlessly and has no sample for this lane.
        """
        stage, play, epoch, shard, row, seen = start
        while (self._epochs is None or epoch < self._epochs) and self._shards:
            order: Sequence[int] = range(len(self._shards))
            if self._key is not None:
                order = shuffled(len(order), key_of(self._key, epoch)).tolist()
            for at in range(shard, len(order)):
                for number, sample in self._shards[order[at]].rows(row):
                    if number % self._stride != self._first:
                        continue
                    if self._limit is not None and seen >= self._limit:
                        break
                    here = TrackPlace(stage, play, epoch, at, number, seen)
                    seen += 1
                    yield here, here._replace(row=number + 1, seen=seen), sample
                row = 0
            if seen == 0:
                if self._epochs is not None:
                    return
                raise ConfigError(
                    f"The source {self._name!r} has no sample for lane {self._lane} of {self._lanes}, so it would play "
                    "less often than asked for. Set data.stream.lanes to no more than the samples of the smallest "
                    "source (or its limit), give epochs, or use an index."
                )
            epoch, shard, seen = epoch + 1, 0, 0
