"""Which operations activation checkpointing runs a second time: whole blocks, every n-th, or chosen parts of them.

A choice is written as terms joined by commas, each adding operations, or leaving them out again after a `-`:

* `full`: every block, as `torch.utils.checkpoint` with `use_reentrant=False` does it: recomputation stops at the last
  tensor that backward needs, so that a block's closing projection usually is not run again.
* `reentrant`: every block to its end, as `use_reentrant=True`, DeepSpeed and Megatron-LM's full granularity do it.
* `every:N`: every N-th block of each stack, as torchtitan's layer-wise selective checkpointing.
* a pattern of block names (`model.layers.*[02468]`): those blocks.
* a component (`language.attention`, `mlp`) or a pattern of module names (`*.up_proj`): those operations of all blocks,
  each to its end, as Megatron-LM's `recompute_modules`, whose `core_attn` is `attention`.
* `-` before a term: what selective checkpointing saves, such as `full,-attention`.

Source: torch.utils.checkpoint (PyTorch 2.11, early stop); torchtitan/distributed/activation_checkpoint.py (2026-02);
Megatron Core's TransformerConfig.recompute_granularity and recompute_modules (2026-03).
"""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING

from headway.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headway.count.cost_model import Row


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
    if choice == "none":
        return set()
    lives = [any(g.needs & trained for g in row.gradients) for row in rows]
    live_blocks = {row.block for row, live in zip(rows, lives, strict=True) if live and row.block}
    live_parts = {(row.block, row.component) for row, live in zip(rows, lives, strict=True) if live}
    chosen: set[int] = set()
    for term in choice.split(","):
        leaves_out = term.startswith("-")
        hits, to_the_end = _matches(rows, term.removeprefix("-").strip(), name)
        if leaves_out:
            chosen -= hits
        elif to_the_end is None:
            chosen |= {i for i in hits if (rows[i].block, rows[i].component) in live_parts}
        else:
            chosen |= {i for i in hits if rows[i].block in live_blocks and (to_the_end or rows[i].recomputed)}
    return chosen


def _matches(rows: Sequence[Row], term: str, name: str) -> tuple[set[int], bool | None]:
    """Find the rows that a term names, and whether they are blocks run to their end; None if they are no blocks."""
    blocks = list(dict.fromkeys(row.block for row in rows if row.block))
    named: list[str] = []
    if term in ("full", "reentrant"):
        named = blocks
    elif term.startswith("every:") and term.removeprefix("every:").isdigit() and int(term.removeprefix("every:")):
        n, places = int(term.removeprefix("every:")), dict[str, int]()
        for block in blocks:
            stack = block.rpartition(".")[0]
            places[stack] = places.get(stack, 0) + 1
            named += [block] if places[stack] % n == 0 else []
    else:
        named = [block for block in blocks if fnmatch.fnmatchcase(block, term)]
    if named:
        inside = set(named)
        return {i for i, row in enumerate(rows) if row.block in inside}, term == "reentrant"
    hits = {
        i
        for i, row in enumerate(rows)
        if row.block
        and (term in (row.component, row.component.partition(".")[2]) or fnmatch.fnmatchcase(row.module, term))
    }
    if not hits:
        some = ", ".join(blocks[:3]) or "none"
        parts = ", ".join(sorted({row.component for row in rows if row.block})) or "none"
        raise UsageError(
            f"--recompute {term} matches nothing of {name}. Give none, full, reentrant, every:N, a pattern of its "
            f"blocks ({some}, ...) or of modules in them, or a component ({parts})."
        )
    return hits, None
