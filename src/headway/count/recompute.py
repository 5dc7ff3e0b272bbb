"""The operations that activation checkpointing runs a second time: whole blocks, every n-th, or chosen parts of them.

A choice is written as terms joined by commas, each adding operations, or leaving them out again after a `-`:

* `full`: every block, as `torch.utils.checkpoint` with `use_reentrant=False` does it: recomputation stops at the last
  tensor that backward needs, so that a block's closing projection usually is not run again.
* `reentrant`: every block to its end, as `use_reentrant=True`, DeepSpeed and Megatron-LM's full granularity do it.
* `every:N`: every N-th block of each stack, as torchtitan's layer-wise selective checkpointing.
* `vision:full`, `language:every:2`: those blocks of one tower alone; `towers` has the names.
* a pattern of block names (`model.layers.*[02468]`): those blocks.
* a component (`language.attention`, `mlp`) or a pattern of module names (`*.up_proj`): those operations of all blocks,
  each to its end, as Megatron-LM's `recompute_modules`, whose `core_attn` is `attention`.
* `language.head`: the output layer, which is in no block, where losses are weighed once all are known.
* `-` before a term: what selective checkpointing saves, such as `full,-attention`; LoRA's adapters run again behind
  `-projections` and `-mlp`.

This file alone reads such a choice. The ledger takes every one of them; training recomputes blocks and keeps results of
`KINDS` beside them (`recomputed_blocks`).

Source: torch.utils.checkpoint (PyTorch 2.11, early stop); torchtitan/distributed/activation_checkpoint.py (2026-02);
Megatron Core's TransformerConfig.recompute_granularity and recompute_modules (2026-03).
"""

import fnmatch
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from headway.count.adapters import is_adapter
from headway.count.modalities import media_towers
from headway.count.rows import Row
from headway.errors import UsageError
from headway.words import Argument

"""Towers whose blocks can be chosen apart, as components begin."""

_NO_TOWERS: Mapping[str, str] = MappingProxyType({})
ATTENTION = "attention"
PRODUCTS = ("projections", "mlp")
KINDS = (ATTENTION, *PRODUCTS)
"""Components whose results training can keep beside a recomputed block: of attention's kernels, of linear layers."""

HEAD = "language.head"
"""Component of the output layer."""

_OF_KINDS = " and ".join(f",-{kind}" for kind in KINDS)
_OF_PRODUCTS = ",".join(f"-{kind}" for kind in PRODUCTS)
_MAX_DIGITS = 9  # most digits of a number of blocks


@dataclass(frozen=True, slots=True)
class Term:
    """One term of a choice."""

    text: str  # text of the term, without the `-`
    leaves_out: bool  # whether it takes operations away again
    every: int  # N of `every:N`; 1 of `full` and `reentrant`; 0 of a name or pattern
    tower: str = ""  # tower whose blocks the term chooses; "" for all

    @property
    def to_the_end(self) -> bool:
        """True if it runs blocks to their ends."""
        return self.text.removeprefix(f"{self.tower}:") == "reentrant"

    def blocks(self, names: Sequence[str], towers: Mapping[str, str]) -> list[str]:
        """Find the blocks that it names whole, among the names of all, with the towers that these are in."""
        if not self.every:
            return [name for name in names if fnmatch.fnmatchcase(name, self.text)]
        places, blocks = Counter[str](), []
        for name in names:
            if self.tower and towers.get(name) != self.tower:
                continue
            stack = name.rpartition(".")[0]
            places[stack] += 1
            blocks += [name] if places[stack] % self.every == 0 else []
        return blocks


def parse_recompute(choice: str) -> tuple[Term, ...]:
    """Read a choice; `none` has no terms.

    >>> parse_recompute("vision:every:2")
    (Term(text='vision:every:2', leaves_out=False, every=2, tower='vision'),)
    >>> parse_recompute("full,-attention")[1]
    Term(text='attention', leaves_out=True, every=0, tower='')
    """
    return () if choice == "none" else tuple(_term(text.strip()) for text in choice.split(","))


def _term(text: str) -> Term:
    name = text.removeprefix("-").strip()
    tower, _, of_tower = name.partition(":")
    blocks = of_tower if tower in towers() else name
    number = blocks.removeprefix("every:") if blocks.startswith("every:") else ""
    counts = number.isdecimal() and len(number) <= _MAX_DIGITS  # a longer number is a name that no block has
    every = int(number) if counts else int(blocks in ("full", "reentrant"))
    return Term(name, text.startswith("-"), every, tower if every and tower in towers() else "")


def with_head(choice: str) -> str:
    """Add the output layer to a choice of recomputed blocks.

    >>> with_head("full,-attention"), with_head("none")
    ('full,-attention,language.head', 'language.head')
    """
    return HEAD if choice == "none" else f"{choice},{HEAD}"


def towers() -> tuple[str, ...]:
    """Return the names of towers that a choice may name: language, vision, audio."""
    return ("language", *media_towers())


def towers_of_blocks(rows: Sequence[Row]) -> dict[str, str]:
    """Find the tower that each block is in, by the components of its rows."""
    return {row.block: row.component.partition(".")[0] for row in rows if row.block}


def is_for_training(choice: str) -> bool:
    """Say whether a choice names blocks by their places or towers alone and leaves out none but `KINDS`.

    >>> is_for_training("full,-attention,-mlp"), is_for_training("vision:every:2"), is_for_training("attention")
    (True, True, False)
    """
    return all(
        term.text in KINDS if term.leaves_out else term.every and not term.to_the_end
        for term in parse_recompute(choice)
    ) and not choice.startswith("-")


def recomputed_blocks(
    choice: str, names: Sequence[str], towers: Mapping[str, str] = _NO_TOWERS
) -> dict[str, frozenset[str]]:
    """Say which blocks are recomputed, and which results are kept beside each, so that they are not computed again.

    Args:
        choice: blocks, by place, tower or name, and `-` with one of `KINDS`, which holds for the blocks before it.
        names: of all blocks, in order.
        towers: that they are in, as `CostModel.block_towers`; needed by a choice that names one.

    Returns:
        By the name of each recomputed block, in order: the kinds that are kept of it.

    Raises:
        UsageError: a term names no block, or something that training does not recompute by itself.

    >>> recomputed_blocks("full,-mlp", ["layers.0"])
    {'layers.0': frozenset({'mlp'})}
    """
    chosen: dict[str, frozenset[str]] = {}
    for term in parse_recompute(choice):
        blocks = term.blocks(names, towers)
        if term.leaves_out and term.text in KINDS:
            chosen = {name: kinds | {term.text} for name, kinds in chosen.items()}
        elif term.tower and not any(towers.get(name) == term.tower for name in names):
            raise _no_tower(choice, term, towers)
        elif term.leaves_out or term.to_the_end or not blocks:
            longest = max(Counter(name.rpartition(".")[0] for name in names).values(), default=0)
            raise UsageError(
                f"recompute {choice!r}: {term.text!r} chooses none of the model's {len(names)} blocks. The longest "
                f"tower has {longest}. Give none, full, every:N, one of these for a tower (vision:full) or names of "
                f"blocks. Add {_OF_KINDS} to keep the results of these parts."
            )
        else:
            chosen |= dict.fromkeys(blocks, frozenset())
    return {name: chosen[name] for name in names if name in chosen}


def as_choice(blocks: Mapping[str, Collection[str]]) -> str:
    """Write the result of `recomputed_blocks` as a choice; of any two blocks one keeps all that the other does.

    >>> as_choice({"layers.0": {"attention"}, "layers.1": {}, "layers.2": {"attention", "mlp"}})
    'layers.2,-mlp,layers.0,-attention,layers.1'
    """
    groups: dict[frozenset[str], list[str]] = {}
    for name, kinds in blocks.items():
        groups.setdefault(frozenset(kinds), []).append(name)
    terms: list[str] = []
    by_most = sorted(groups, key=len, reverse=True)
    for kinds, fewer in pairwise([*by_most, frozenset[str]()]):
        assert fewer <= kinds
        terms += [*groups[kinds], *(f"-{kind}" for kind in KINDS if kind in kinds - fewer)]
    return ",".join(terms) or "none"


def choice_in_words(choice: str, towers: Mapping[str, str]) -> str:
    """Say how many blocks of each tower a choice recomputes, and of how many each kind is kept.

    Args:
        choice: as for `recomputed_blocks`.
        towers: of all blocks, as `CostModel.block_towers`.

    >>> choice_in_words("a.0,-mlp,a.1,-attention", {"a.0": "language", "a.1": "language", "a.2": "language"})
    'recomputes 2 of 3 language blocks (attention kept in 2, mlp in 1)'
    """
    chosen = recomputed_blocks(choice, list(towers), towers)
    parts = []
    for tower in dict.fromkeys(towers.values()):
        blocks = [chosen[name] for name in chosen if towers[name] == tower]
        counts = {kind: sum(kind in kinds for kinds in blocks) for kind in KINDS}
        words = ", ".join(f"{kind} in {count}" for kind, count in counts.items() if count)
        words = f" ({words.replace(' in', ' kept in', 1)})" if words else ""
        parts += [f"{len(blocks)} of {list(towers.values()).count(tower)} {tower} blocks{words}"] if blocks else []
    return f"recomputes {', '.join(parts) or 'nothing'}"


def rows_by_block(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Put a cost model's rows under the blocks that hold them."""
    by_block: dict[str, list[Row]] = {}
    for row in rows:
        by_block.setdefault(row.block, []).append(row)
    return by_block


def kept_layers(blocks: Mapping[str, Collection[str]], rows: Sequence[Row]) -> dict[str, list[Row]]:
    """List the linear layers whose results are kept beside each recomputed block.

    A layer is told by the sizes of its weight when it runs, so others of the same sizes are kept with it.

    Args:
        blocks: as `recomputed_blocks` gives them.
        rows: of the cost model.

    Raises:
        UsageError: no block has a kind that is to be kept, or a product of it is no linear layer or cannot be told from
            one that is to run again.
    """
    by_block = rows_by_block(rows)
    layers = {name: _kept_of_block(by_block.get(name, []), kinds) for name, kinds in blocks.items()}
    for kind in PRODUCTS:
        keeping = [name for name, kinds in blocks.items() if kind in kinds]
        if keeping and not any(result_kind(row) == kind for name in keeping for row in layers[name]):
            raise UsageError(f"recompute: the blocks have no linear layers of {kind} to keep. Leave out ',-{kind}'.")
    return layers


def can_keep(rows: Sequence[Row], blocks: Collection[str], kinds: Collection[str]) -> bool:
    """Say whether kinds can be kept together of some blocks."""
    try:
        kept_layers(dict.fromkeys(blocks, kinds), rows)
    except UsageError:
        return False
    return True


def _kept_of_block(rows: Sequence[Row], kinds: Collection[str]) -> list[Row]:
    wanted = [row for row in rows if row.recomputed and result_kind(row) in PRODUCTS and result_kind(row) in kinds]
    for row in wanted:
        if row.features is None:
            raise UsageError(
                f"recompute: the result of {row.module} cannot be kept, because it is no linear layer. Leave out "
                f"',-{result_kind(row)}'."
            )
    sizes = {row.features for row in wanted}
    alike = [row for row in rows if row.features in sizes]
    for row in alike:
        if row.recomputed and row not in wanted:
            raise UsageError(
                f"recompute: {row.module} is to be recomputed, but its weight has the sizes {row.features} of a "
                f"layer whose results are kept. Keep both kinds or neither: {_OF_PRODUCTS}."
            )
    return alike


def result_kind(row: Row) -> str:
    """Name what a choice leaves out to keep the row's result; "" for adapters, which are small and always run again."""
    return "" if is_adapter(row.module) else row.component.partition(".")[2]


def run_again(rows: Sequence[Row], trained: int, choice: str, name: str) -> set[int]:
    """Find the rows whose forward runs a second time.

    Args:
        rows: of a cost model.
        trained: bit i set when parameter i is trained; what no gradient passes through is not run again.
        choice: see the module.
        name: of the model, for the error.

    Returns:
        Positions in `rows`.

    Raises:
        UsageError: a term matches nothing.
    """
    terms = parse_recompute(choice)
    if not terms:
        return set()
    lives = [any(g.runs(trained) for g in row.gradients) for row in rows]
    live_blocks = {row.block for row, live in zip(rows, lives, strict=True) if live and row.block}
    live_parts = {(row.block, row.component) for row, live in zip(rows, lives, strict=True) if live}
    chosen: set[int] = set()
    for term in terms:
        hits, are_blocks = _matches(rows, term, name)
        if term.leaves_out:
            chosen -= {i for i in hits if term.text not in PRODUCTS or not is_adapter(rows[i].module)}
        elif are_blocks:
            chosen |= {i for i in hits if rows[i].block in live_blocks and (term.to_the_end or rows[i].recomputed)}
        else:
            chosen |= {i for i in hits if (rows[i].block, rows[i].component) in live_parts}
    return chosen


def _matches(rows: Sequence[Row], term: Term, name: str) -> tuple[set[int], bool]:
    towers = towers_of_blocks(rows)
    blocks = list(towers)
    chosen = set(term.blocks(blocks, towers))
    if term.tower and term.tower not in towers.values():
        raise _no_tower(term.text, term, towers)
    if chosen:
        return {i for i, row in enumerate(rows) if row.block in chosen}, True
    hits = {
        i
        for i, row in enumerate(rows)
        if (term.text == HEAD == row.component)
        or (
            row.block
            and (
                term.text in (row.component, row.component.partition(".")[2])
                or fnmatch.fnmatchcase(row.module, term.text)
            )
        )
    }
    if not hits:
        some = ", ".join(blocks[:3]) or "none"
        parts = ", ".join(sorted({row.component for row in rows if row.block})) or "none"
        raise UsageError(
            Argument("recompute", term.text[:80]),
            f" matches nothing of {name}. Give none, full, reentrant, every:N, one of these for a tower (vision:full), "
            f"a pattern of its blocks ({some}, ...) or of modules in them, or a component ({parts}).",
        )
    return hits, False


def _no_tower(choice: str, term: Term, towers: Mapping[str, str]) -> UsageError:
    has = " and ".join(dict.fromkeys(towers.values())) or "no tower"
    return UsageError(
        f"recompute {choice!r}: the model has no {term.tower} tower whose blocks can be recomputed. Its towers are "
        f"{has}."
    )
