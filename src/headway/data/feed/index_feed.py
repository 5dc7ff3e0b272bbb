"""Feeding from an index: every rank computes the same plan and makes its own packs of it."""

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.data.bad_rows import BadSamples
from headway.data.collate import Batch
from headway.data.feed.feed import Feed, Share, estimated_bytes
from headway.data.feed.make import FinishedPack, PackMaker, Piece
from headway.data.pool import Job, Pool
from headway.data.sources import Source
from headway.data.sources.identity import Identities, Verify
from headway.packing.bins import pack as fit
from headway.packing.budget import Size
from headway.packing.items import Items, OverlongCounts
from headway.packing.plan import Plan
from headway.packing.steps import deal


class IndexedFeed(Feed):
    """Makes the packs of a plan.

    Args:
        plan: steps of all ranks.
        maker: loads, encodes and collates; its sources are the plan's, in the same order.
        share: which packs are made here, and how.
        bad: policy for samples that cannot be used.
        planned: counts of each source from making the plan's items, for the report.
        files: as for `Feed`.

    Raises:
        DataError: while iterating, as `Feed`.
    """

    def __init__(
        self,
        plan: Plan,
        maker: PackMaker,
        share: Share,
        bad: BadSamples,
        *,
        planned: Mapping[str, OverlongCounts] | None = None,
        files: Identities | None = None,
    ) -> None:
        counts = {name: count.to_dict() for name, count in (planned or {}).items()}
        splits = {name for name, count in counts.items() if count["split"]}
        super().__init__(maker, plan.budget, share, bad, maker, splits=splits, keyed=False, planned=counts, files=files)
        self.plan = plan
        self._place: dict[str, Any] | None = None
        self._reached = 0
        self._items_key = plan.items.fingerprint()
        self.files = _with_lengths(self.files, maker.sources, plan.items)

    @property
    def epochs(self) -> float | None:
        """Epochs of the data by the end of the last step handed out."""
        return self.plan.order.epochs_at(self._reached)

    @property
    def warnings(self) -> tuple[str, ...]:
        """A sentence on epochs that are mixed; none where windows of packs end with them."""
        mixed = (
            "an epoch has too few steps to give all ranks equal work, so packs are made of several epochs at once. If "
            "the record says epoch 1.00, some samples have played twice and others not yet"
        )
        return () if self.plan.ends_epochs else (mixed,)

    def steps_left(self, most: int | None) -> int | None:
        """Steps until the data end, counted up to `most`; None if they never do."""
        return None if self.plan.order.length is None else self.plan.count_steps(self._place, most)

    def load_state_dict(self, state: dict[str, Any], verify: Verify = "size-and-time") -> None:
        """Go to a saved, merged state; the data may play on for longer than they would have then."""
        settings, length = state.get("settings"), self.plan.order.length
        if isinstance(settings, dict) and isinstance(settings.get("order"), dict):
            order = dict(settings["order"])
            before = order.get("length")
            if length is None or (isinstance(before, int) and before <= length):
                state = {**state, "settings": {**settings, "order": {**order, "length": length}}}
        super().load_state_dict(state, verify)

    def once(self, wanted: Sequence[NDArray[np.bool_]]) -> Iterator[Batch]:
        """Make packs of some rows, each of them once, beside the steps of the plan.

        Every rank gets as many packs, empty ones in the last round where there are none left.

        Args:
            wanted: of each source, which rows, shape (rows,); those that the plan leaves out are left out here too.
        """
        share, items = self.share, self.plan.items
        ids = np.arange(len(items))
        at = items.locate(ids)
        ids = ids[[bool(wanted[source][row]) for source, row in zip(at.source, at.row, strict=True)]]
        sizes = items.sizes_of(ids)
        lengths = zip(sizes.tokens.tolist(), sizes.patches.tolist(), strict=True)
        packs = fit([Size(tokens, patches) for tokens, patches in lengths], self.plan.budget)
        # Packs of one round cost about the same, so that ranks wait little for each other.
        packs.sort(key=lambda members: -float(sizes.costs[members].sum()))
        packs += [[]] * (-len(packs) % share.ranks)

        def jobs() -> Iterator[Job[list[Piece]]]:
            for members in packs[share.rank :: share.ranks]:
                size = estimated_bytes(int(sizes.tokens[members].sum()), int(sizes.patches[members].sum()))
                yield Job(self._pieces(ids[members]), size)

        yield from self._made(jobs(), replace(self._maker, rule=self._maker.rule.without_companions()))

    def planned(self, steps: int) -> Iterator[Batch]:
        """Make this rank's packs of the first steps of the plan, beside those that are handed out.

        Args:
            steps: how many, or as many as there are.
        """
        share, items = self.share, self.plan.items

        def jobs() -> Iterator[Job[list[Piece]]]:
            for step, _ in islice(self.plan.steps(None), steps):
                for number in deal(step.costs, share.ranks, share.accumulation)[share.rank]:
                    sizes = items.sizes_of(step.packs[number])
                    size = estimated_bytes(int(sizes.tokens.sum()), int(sizes.patches.sum()))
                    yield Job(self._pieces(step.packs[number]), size)

        yield from self._made(jobs(), self._maker)

    def _made(self, jobs: Iterator[Job[list[Piece]]], maker: PackMaker) -> Iterator[Batch]:
        share = self.share
        pool: Pool[list[Piece], FinishedPack] = Pool(
            maker, workers=share.workers, prefetch_bytes=share.prefetch_bytes, pin_memory=share.pin_memory
        )
        try:
            for finished in pool.run(jobs):
                yield finished.batch
        finally:
            pool.close()

    def _pieces(self, ids: NDArray[np.int64]) -> list[Piece]:
        located = self.plan.items.locate(ids)
        return [Piece(*columns) for columns in zip(*(part.tolist() for part in located), strict=True)]

    def _finished_steps(self) -> Iterator[list[FinishedPack]]:
        # Packs of each step under way, the place after it, and the items trained on by then.
        pending: deque[tuple[int, dict[str, Any], int]] = deque()
        packs = self._pool.run(self._jobs(pending))
        for first in packs:
            num_packs, place, reached = pending[0]
            finished = [first, *(next(packs) for _ in range(num_packs - 1))]
            pending.popleft()
            for pack in finished:
                self._hand_out(pack)
            self._place, self._reached = place, reached
            yield finished

    def _jobs(self, pending: "deque[tuple[int, dict[str, Any], int]]") -> Iterator[Job[list[Piece]]]:
        share, items = self.share, self.plan.items
        for step, place in islice(self.plan.steps(self._place), self.needed):
            mine = deal(step.costs, share.ranks, share.accumulation)[share.rank]
            pending.append((len(mine), place, step.reached))
            for number in mine:
                ids = step.packs[number]
                sizes = items.sizes_of(ids)
                size = estimated_bytes(int(sizes.tokens.sum()), int(sizes.patches.sum()))
                yield Job(self._pieces(ids), size)

    def _settings(self) -> dict[str, Any]:
        order = self.plan.order
        ordered = {"seed": order.seed, "length": order.length}
        return {**self.plan.settings(), "items": self._items_key, "order": ordered}

    def _position(self) -> dict[str, Any]:
        return {"plan": self._place}

    def _merged_positions(self, positions: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return dict(positions[0])  # every rank follows the same plan

    def _go_to(self, position: dict[str, Any]) -> None:
        self._place = position["plan"]


def _with_lengths(files: Identities, sources: Sequence[Source], items: Items) -> Identities:
    """Add to each file a digest of its rows' lengths, so that one whose rows were changed can be named."""
    described = {}
    for number, source in enumerate(sources):
        first, last = items.offsets[number : number + 2]
        rows = np.arange(last - first) if items.rows is None else items.rows[first:last]
        bounds = first + np.searchsorted(rows, source.starts)
        digests = []
        for start, (begin, end) in zip(source.starts, pairwise(bounds), strict=False):
            digest = hashlib.blake2b(digest_size=8)
            for column in (
                items.tokens[begin:end],
                items.patches[begin:end],
                rows[begin - first : end - first] - start,
            ):
                digest.update(np.ascontiguousarray(column).data)
            digests.append(digest.hexdigest())
        described[source.name] = tuple(
            file._replace(lengths=digest) for file, digest in zip(files[source.name], digests, strict=True)
        )
    return described
