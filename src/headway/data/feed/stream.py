"""Feeding without an index: lanes of a stream, shared among ranks and worker processes."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from headway.data.bad_rows import BadSamples
from headway.data.feed.feed import Feed, Share, estimated_bytes
from headway.data.feed.lane import Lane, LanePack, Streaming
from headway.data.feed.make import FinishedPack
from headway.data.pool import Job
from headway.data.sources.identity import Identities
from headway.errors import ConfigError


class _Turn(NamedTuple):
    """A lane's next pack.

    Attributes:
        lane: number of the lane.
        turn: packs that it has handed out before.
        state: where it stood at that turn or at an earlier one; None for its beginning.
    """

    lane: int
    turn: int
    state: dict[str, Any] | None


@dataclass
class _LaneWork:
    """Runs lanes in a worker process and keeps them between their turns."""

    streaming: Streaming
    lanes: dict[int, Lane] = field(default_factory=dict)

    def __call__(self, task: _Turn) -> tuple[int, LanePack]:
        lane = self.lanes.get(task.lane)
        if lane is None or (lane.turn != task.turn and not lane.has_ended):
            lane = self.lanes[task.lane] = Lane(self.streaming, task.lane, task.state)
        # After a killed process: repeat what that one had handed out.
        while lane.turn < task.turn and not lane.has_ended:
            lane.next_pack()
        return task.lane, lane.next_pack()


class StreamFeed(Feed):
    """Takes packs from lanes in turn: rank r takes from the lanes r, r + ranks, and so on.

    Lanes that have ended are passed over. A rank whose lanes have all ended ends, while others may go on.

    Args:
        streaming: the data and how they are cut into lanes.
        share: which lanes are this rank's, and how their packs are made.
        bad: policy for samples that cannot be used.
        files: as for `Feed`.

    Raises:
        ConfigError: the lanes cannot be shared evenly among the ranks, or a source has bounds on media that the model's
            processor has not.
        DataError: while iterating, as `Feed`.
    """

    def __init__(self, streaming: Streaming, share: Share, bad: BadSamples, *, files: Identities | None = None) -> None:
        if streaming.lanes % share.ranks:
            raise ConfigError(
                f"A stream of {streaming.lanes} lanes cannot be shared by {share.ranks} ranks; set data.stream.lanes "
                "to a multiple of the number of ranks."
            )
        for source in streaming.maker.sources:
            streaming.maker.encoder.reader_of(source.sizes)
        names = [source.name for source in streaming.maker.sources]
        super().__init__(
            streaming.maker,
            streaming.budget,
            share,
            bad,
            _LaneWork(streaming),
            splits={name for name in names if streaming.overlong_of(name) == "split"},
            keyed=True,
            files=files,
        )
        self._streaming = streaming
        self._states: dict[int, dict[str, Any] | None] = dict.fromkeys(range(share.rank, streaming.lanes, share.ranks))
        self._ended: set[int] = set()

    def _finished_steps(self) -> Iterator[list[FinishedPack]]:
        step: list[FinishedPack] = []
        states: dict[int, dict[str, Any]] = {}
        for lane, pack in self._pool.run(self._jobs()):
            states[lane] = pack.state
            if pack.has_ended:
                self._ended.add(lane)
            else:
                step.append(pack.pack)
            self._hand_out(pack.pack)
            if len(step) == self.share.accumulation:
                self._states |= states
                yield step
                step, states = [], {}
            if len(self._ended) == len(self._states):
                break
        self._pool.close()  # turns beyond the lanes' ends may wait there, as many as are prefetched
        self._states |= states
        if step:
            padding = [self._maker([]) for _ in range(self.share.accumulation - len(step))]
            yield step + padding

    def _jobs(self) -> Iterator[Job[_Turn]]:
        """The lanes' turns, each lane once before any comes again."""
        size = estimated_bytes(self._streaming.budget.tokens, self._streaming.budget.patches or 0)
        turns = {lane: (state or {}).get("turn", 0) for lane, state in self._states.items()}
        while len(self._ended) < len(turns):
            lane = min((lane for lane in turns if lane not in self._ended), key=lambda number: (turns[number], number))
            yield Job(_Turn(lane, turns[lane], self._states[lane]), size, key=lane // self.share.ranks)
            turns[lane] += 1

    def _settings(self) -> dict[str, Any]:
        streaming = self._streaming
        return {
            "schemas": [source.schema_fingerprint() for source in streaming.maker.sources],
            "encoder": streaming.maker.encoder.fingerprint(),
            "stages": [asdict(replace(stage, epochs=None)) for stage in streaming.stages],  # stages may play on
            "budget": asdict(streaming.budget),
            **{name: getattr(streaming, name) for name in ("strategy", "overlong", "lanes", "shuffle", "open_packs")},
            "seed": streaming.seed,
            **({} if streaming.maker.dropout is None else {"dropout": asdict(streaming.maker.dropout)}),
        }

    def _position(self) -> dict[str, Any]:
        return {
            "lanes": {str(lane): state for lane, state in self._states.items()},
            "ended": sorted(self._ended),
        }

    def _merged_positions(self, positions: Sequence[dict[str, Any]]) -> dict[str, Any]:
        lanes: dict[str, Any] = {}
        for position in positions:
            lanes |= position["lanes"]
        return {"lanes": lanes, "ended": sorted({lane for position in positions for lane in position["ended"]})}

    def _go_to(self, position: dict[str, Any]) -> None:
        self._states = {lane: position["lanes"][str(lane)] for lane in self._states}
        self._ended = {lane for lane in position["ended"] if lane in self._states}
