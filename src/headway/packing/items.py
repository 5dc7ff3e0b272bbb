"""Items of a plan: the samples of all sources, numbered through, over-long ones dropped, truncated or split."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headway.count import CostModel
from headway.errors import ConfigError, DataError
from headway.packing.budget import Budget, Size, over_budget, segment_costs, segments_within
from headway.packing.parts import Dropout, PartCosts, PartTable
from headway.packing.pieces import TargetRuns, Targets, split, targets_within

Overlong = Literal["error", "drop", "truncate", "split"]
"""Policy for a sample that is longer than a pack: an error, or it is left out, cut, or cut in pieces."""

OVERLONG: tuple[Overlong, ...] = ("error", "drop", "truncate", "split")
Policies = Overlong | Mapping[str, Overlong]
"""One policy for all sources, or the policy of each by its name."""

Numbers = NDArray[Any]


class Lengths(Protocol):
    """Lengths of the rows of a source, such as a length index has."""

    @property
    def tokens(self) -> Numbers:
        """Length of each row [tokens], shape (N,)."""

    @property
    def first_target(self) -> Numbers:
        """Place of the first target [tokens], shape (N,)."""

    @property
    def targets(self) -> Targets:
        """Runs of each row's targets."""

    @property
    def media_end(self) -> Numbers:
        """One past the last placeholder of an image, video or clip [tokens], shape (N,); 0 without."""

    @property
    def patches(self) -> Numbers:
        """Vision patches [patches], shape (N,)."""

    @property
    def ok(self) -> Numbers:
        """Mask of the rows that can be used, shape (N,)."""

    def segments_of(self, row: int) -> Sequence[int]:
        """Lengths of a row's views, of a chat that has several; nothing for other rows [tokens]."""

    @property
    def empty(self) -> Numbers:
        """Mask of the rows that hold nothing to learn, which is no fault, shape (N,)."""

    def costs(self, cost_model: CostModel) -> Numbers:
        """FLOPs of training on each row, shape (N,)."""


class Origins(NamedTuple):
    """Source, row and tokens of items, one entry each.

    Attributes:
        source: number of the source, in the order of `Items.names`.
        row: row of that source.
        start: first token that is used.
        stop: one past the last token that is used.
        epoch: how often the item has played before.
        is_first: whether it is the first item of its row, with which the row is counted.
    """

    source: Numbers
    row: Numbers
    start: Numbers
    stop: Numbers
    epoch: Numbers
    is_first: Numbers


@dataclass(slots=True)
class OverlongCounts:
    """Numbers of a source's rows that were used, dropped, truncated or split.

    Attributes:
        read: rows looked at.
        bad: rows that cannot be used.
        used: rows that became items, cut ones included.
        dropped: rows left out because they exceed a pack.
        truncated: rows of which only the beginning is used.
        split: rows that became several items.
        items: items.
        tokens: tokens of the items [tokens].
        tokens_dropped: tokens that were left out, of dropped and truncated rows [tokens].
        empty: rows left out because they hold nothing.
    """

    read: int = 0
    bad: int = 0
    used: int = 0
    dropped: int = 0
    truncated: int = 0
    split: int = 0
    items: int = 0
    tokens: int = 0
    tokens_dropped: int = 0
    empty: int = 0

    @classmethod
    def of_all(cls, counts: Iterable["OverlongCounts"]) -> "OverlongCounts":
        """Add up the counts of several sources."""
        return cls(*(sum(numbers) for numbers in zip(*(astuple(own) for own in counts), strict=True)))

    def to_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Items:
    """Samples, or pieces of split ones, numbered from 0 source by source.

    Where conditions are left out at random, an item is drawn with its epoch: its number plus the number of items for
    each time that it has played before.

    Attributes:
        tokens: length of each item [tokens], int32, shape (N,).
        patches: vision patches of each item [patches], int32, shape (N,).
        costs: useful FLOPs of training on each item, float64, shape (N,).
        names: the sources.
        offsets: the first item of each source, and the number of items, shape (sources + 1,).
        rows: row of each item in its source, shape (N,); None where items and rows are the same.
        cut: items that are part of a row, ascending, shape (C,).
        starts: first token of the row that each of those uses, shape (C,).
        varying: what is left of the items of each source whose conditions are left out at random; empty without.
    """

    tokens: Numbers
    patches: Numbers
    costs: Numbers
    names: tuple[str, ...]
    offsets: Numbers
    rows: Numbers | None = None
    cut: Numbers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    starts: Numbers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    varying: tuple["_Varying", ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def sizes(self) -> dict[str, int]:
        """Number of items of each source."""
        return dict(zip(self.names, np.diff(self.offsets).tolist(), strict=True))

    @classmethod
    def of(cls, tokens: Numbers, patches: Numbers | None = None, costs: Numbers | None = None) -> "Items":
        """Items of one nameless source from lengths alone; the cost of an item is its tokens unless given."""
        tokens = np.asarray(tokens, dtype=np.int32)
        none = np.zeros(len(tokens), dtype=np.int32)
        return cls(
            tokens,
            none if patches is None else np.asarray(patches, dtype=np.int32),
            tokens.astype(np.float64) if costs is None else np.asarray(costs, dtype=np.float64),
            ("data",),
            np.array([0, len(tokens)]),
        )

    @classmethod
    def build(
        cls,
        sources: Mapping[str, Lengths],
        budget: Budget,
        overlong: Policies = "error",
        cost_model: CostModel | None = None,
        dropout: Dropout | None = None,
        *,
        skips_unlabelled: bool = False,
    ) -> tuple["Items", dict[str, OverlongCounts]]:
        """Number the samples of all sources, by the policy for samples that exceed a pack.

        Args:
            sources: lengths of each source's rows, by name.
            budget: limits of a pack.
            overlong: "error" stops; "drop" leaves such samples out; "truncate" keeps their beginning, or leaves them
                out if that would cut media, their patches exceed the budget or no target would be left; "split" makes
                several items of those without media, one for each pack's worth of which something is learnt, and leaves
                the others out. One for all sources, or by name for each.
            cost_model: the trained model's costs; None plans by tokens.
            dropout: of conditions, which sources with `parts` and `part_costs`, as a length index's, have.
            skips_unlabelled: whether the model's head leaves out tokens without a label.

        Returns:
            The items, and what became of the samples of each source.

        Raises:
            DataError: a sample exceeds a pack under the policy "error"; the message names source and row.
            ConfigError: an unknown policy.
        """
        policies = dict.fromkeys(sources, overlong) if isinstance(overlong, str) else overlong
        for policy in policies.values():
            if policy not in OVERLONG:
                raise ConfigError(f"Unknown policy for over-long samples {policy!r}. Allowed: {', '.join(OVERLONG)}.")
        # Each source by its own policy, then one table; `offsets` says where a source begins in it.
        parts = [_items_of(name, lengths, budget, policies[name], cost_model) for name, lengths in sources.items()]
        offsets = np.cumsum([0, *(len(part.tokens) for part in parts)])
        counts = {name: part.counts for name, part in zip(sources, parts, strict=True)}
        # Rows are listed only where some were left out or split: else an item is its row.
        same = all(part.rows is None for part in parts)
        rows = [np.arange(len(part.tokens)) if part.rows is None else part.rows for part in parts if not same]
        items = cls(
            _joined([part.tokens for part in parts], np.int32),
            _joined([part.patches for part in parts], np.int32),
            _joined([part.costs for part in parts], np.float64),
            tuple(sources),
            offsets,
            None if same else _joined(rows, np.int64),
            _joined([part.cut + first for part, first in zip(parts, offsets, strict=False)], np.int64),
            _joined([part.starts for part in parts], np.int64),
            tuple(
                _Varying(name, int(first), len(part.tokens), part.rows, lengths, dropout, cost_model)
                for (name, lengths), part, first in zip(sources.items(), parts, offsets, strict=False)
                if dropout is not None
            ),
        )
        if skips_unlabelled and cost_model is not None and cost_model.head_flops:
            unlabelled = items.unlabelled(list(sources.values()))
            np.subtract(items.costs, cost_model.head_flops * unlabelled, out=items.costs)
        return items, counts

    def unlabelled(self, sources: Sequence[Lengths]) -> Numbers:
        """Tokens of each item without a label, shape (N,).

        Args:
            sources: lengths of each source's rows, in the order of `names`.
        """
        numbers = self.tokens.astype(np.int64)
        origins = self.locate(np.arange(len(self)))
        for number, lengths in enumerate(sources):
            own = slice(self.offsets[number], self.offsets[number + 1])
            places = origins.row[own], origins.start[own], origins.stop[own]
            numbers[own] -= targets_within(lengths.targets, lengths.tokens, *places)
        return numbers

    def locate(self, items: Numbers) -> Origins:
        """Look up source, row and tokens of items."""
        drawn, (epoch, items) = items, np.divmod(items, len(self))
        source = np.searchsorted(self.offsets, items, side="right") - 1
        row = items - self.offsets[source] if self.rows is None else self.rows[items]
        start = np.zeros(len(items), dtype=np.int64)
        if len(self.cut):
            at = np.minimum(np.searchsorted(self.cut, items), len(self.cut) - 1)
            start = np.where(self.cut[at] == items, self.starts[at], 0)
        is_first = start == 0
        if self.rows is not None:
            is_first |= (items == self.offsets[source]) | (self.rows[items - 1] != row)
        return Origins(source, row, start, start + self.sizes_of(drawn).tokens, epoch, is_first)

    def sizes_of(self, items: Numbers) -> "Sizes":
        """Look up the lengths and costs of items, as drawn: without the conditions that are left out in their epoch."""
        epoch, item = np.divmod(items, len(self)) if self.varying else (items, items)
        sizes = Sizes(self.tokens[item].astype(np.int64), self.patches[item].astype(np.int64), self.costs[item])
        for varying in self.varying:
            varying.write(item, epoch, sizes)
        return sizes

    def fingerprint(self) -> str:
        """Digest that changes when any item does."""
        digest = hashlib.blake2b(repr(self.names).encode(), digest_size=16)
        for column in (self.tokens, self.patches, self.costs, self.offsets, self.rows, self.cut, self.starts):
            if column is not None:
                digest.update(np.ascontiguousarray(column).data)
        for varying in self.varying:
            digest.update(repr(varying.dropout).encode())
        return digest.hexdigest()


class Sizes(NamedTuple):
    """Sizes of items, one entry each.

    Attributes:
        tokens: length [tokens].
        patches: vision patches [patches].
        costs: useful FLOPs of training on it, or its tokens where those are planned by.
    """

    tokens: Numbers
    patches: Numbers
    costs: Numbers


class _Varying:
    """The items of a source with condition dropout, whose lengths and costs depend on the epoch."""

    def __init__(
        self,
        source: str,
        first: int,
        count: int,
        rows: Numbers | None,
        lengths: Any,
        dropout: Dropout,
        cost_model: CostModel | None,
    ) -> None:
        self.dropout = dropout
        self._source, self._first, self._stop, self._rows = source, first, first + count, rows
        self._parts: PartTable = lengths.parts
        has_conditions = np.bincount(self._parts.sample, self._parts.conditions(), minlength=len(lengths.tokens)) > 0
        self._may_vary = has_conditions if rows is None else has_conditions[rows]
        self._costs = None if cost_model is None else PartCosts.of(cost_model, self._parts.values)

    def write(self, items: Numbers, epochs: Numbers, sizes: Sizes) -> None:
        """Write the sizes of this source's items in their epochs."""
        at = np.flatnonzero((items >= self._first) & (items < self._stop))
        at = at[self._may_vary[items[at] - self._first]]
        own = items[at] - self._first
        rows = own if self._rows is None else self._rows[own]
        parts = self._parts.take(rows)
        is_left = self.dropout.kept(parts, epochs[at], self._source)
        sizes.tokens[at], sizes.patches[at] = parts.sizes(is_left)
        if self._costs is None:
            sizes.costs[at] = sizes.tokens[at]
        else:
            sizes.costs[at] = self._costs.take(self._parts.places(rows)).of_samples(parts, is_left)


class _Part(NamedTuple):
    tokens: Numbers
    patches: Numbers
    costs: Numbers
    rows: Numbers | None
    cut: Numbers
    starts: Numbers
    counts: OverlongCounts


def _items_of(name: str, lengths: Lengths, budget: Budget, overlong: Overlong, cost_model: CostModel | None) -> _Part:
    tokens, patches, ok = np.asarray(lengths.tokens), np.asarray(lengths.patches), np.asarray(lengths.ok)
    costs = tokens.astype(np.float64) if cost_model is None else np.asarray(lengths.costs(cost_model))
    # A row exceeds a pack by its tokens or by its patches.
    too_wide = ok & (patches > budget.patches) if budget.patches is not None else np.zeros(len(tokens), dtype=bool)
    too_long = ok & (tokens > budget.tokens)
    over = too_long | too_wide
    if overlong == "error" and over.any():
        row = int(over.argmax())
        raise DataError(
            over_budget(f"Row {row} (counted from 0) of {name}", Size(int(tokens[row]), int(patches[row])), budget)
        )
    # A beginning must hold all media and some target; pieces are of text alone. Patches cannot be cut.
    cut = over & False
    if overlong == "truncate":
        cut = too_long & ~too_wide & (lengths.media_end <= budget.tokens) & (lengths.first_target < budget.tokens)
    elif overlong == "split":
        cut = too_long & ~too_wide & (lengths.media_end == 0)
    rows, starts = np.flatnonzero(cut), np.zeros(int(cut.sum()), dtype=np.int64)  # rows and starts of the cut items
    if overlong == "split":
        pieces = split(tokens[rows], _targets_of(lengths.targets, cut), budget.tokens)
        rows, starts = rows[pieces.row], pieces.start
        cut = np.bincount(rows, minlength=len(tokens)) > 0
    # Rows that fit become items as they are, cut ones by their pieces; all others are left out.
    keep = (ok & ~over) | cut
    uncut = np.flatnonzero(keep & ~cut)
    counts = OverlongCounts(
        read=len(tokens),
        bad=int((~ok & ~np.asarray(lengths.empty)).sum()),
        empty=int(np.asarray(lengths.empty).sum()),
        used=int(keep.sum()),
        dropped=int((over & ~cut).sum()),
        truncated=int(cut.sum()) if overlong == "truncate" else 0,
        split=int(cut.sum()) if overlong == "split" else 0,
        items=len(uncut) + len(rows),
    )
    none = np.zeros(0, dtype=np.int64)
    # If nothing is cut or left out, item i is row i, and the columns that say so are not needed.
    if keep.all() and not cut.any():
        part = _Part(tokens, patches, costs, None, none, none, counts)
    else:
        # Items stand in the order of their rows, cut ones among the others.
        rows, starts = np.concatenate([uncut, rows]), np.concatenate([np.zeros(len(uncut), np.int64), starts])
        order = np.argsort(rows, kind="stable")
        rows, starts = rows[order], starts[order]
        is_cut = cut[rows]
        length = np.minimum(tokens[rows] - starts, budget.tokens)
        cost = costs[rows]
        at = np.flatnonzero(is_cut)
        # A cut item costs what its row does, with its own text in place of the whole row's.
        if len(at):
            cost[at] += _text_costs(lengths, rows[at], starts[at], length[at], cost_model)
            cost[at] -= _text_costs(lengths, rows[at], 0 * at, tokens[rows[at]], cost_model)
        part = _Part(length, patches[rows], cost, rows, at, starts[at], counts)
    # Tokens of usable rows that no item holds were left out.
    counts.tokens = int(part.tokens.sum(dtype=np.int64))
    counts.tokens_dropped = int(tokens[ok].sum(dtype=np.int64)) - counts.tokens
    return part


def _text_costs(
    lengths: Lengths, rows: Numbers, starts: Numbers, tokens: Numbers, cost_model: CostModel | None
) -> Numbers:
    """FLOPs of pieces of rows without their media, or their tokens; rows of several views have several segments."""
    if cost_model is None:
        return tokens.astype(np.float64)
    costs = segment_costs(cost_model, tokens)
    for number, (row, start, length) in enumerate(zip(rows.tolist(), starts.tolist(), tokens.tolist(), strict=True)):
        if segments := segments_within(lengths.segments_of(row), start, start + length):
            costs[number] = segment_costs(cost_model, np.array(segments)).sum()
    return costs


def _targets_of(targets: Targets, chosen: Numbers) -> TargetRuns:
    """The runs of some rows, with rows numbered anew."""
    runs = chosen[targets.rows]
    return TargetRuns((np.cumsum(chosen) - 1)[targets.rows[runs]], targets.values[runs])


def _joined(parts: list[Numbers], kind: Any) -> Numbers:
    return np.concatenate(parts).astype(kind, copy=False) if parts else np.zeros(0, dtype=kind)
