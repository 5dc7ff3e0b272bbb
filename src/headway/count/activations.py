"""Activations that autograd saves of a model's forward, block by block, in bytes per unit of a driver.

`headway.tracing.activations` reads it off a model; what it read of the shipped models ships too, so that memory
is planned without torch.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any

from headway.count import drivers
from headway.count.models import from_ranges, ledger_folder, shipped_models, to_ranges
from headway.count.workload import Workload
from headway.errors import CostModelError

Rows = Mapping[str, Fraction]
"""Bytes per unit, by driver."""

PRECISIONS = ("bfloat16", "bfloat16-autocast", "float32")
"""Precision of forward: bfloat16 throughout, autocast's mixture over float32 weights, or float32."""

_FILE_NAME = "saved_activations.json"  # in each folder of ledgers


@dataclass(frozen=True, slots=True)
class SavedBlock:
    """Bytes that autograd saves of one block."""

    plain: Rows  # by plain operations
    # by a compiled block or fused kernels: what matrix products and attention read, and what they made where an
    # elementwise operation's backward needs it
    fused: Rows
    entry: Rows  # input of the block, all that recomputation keeps of it
    # outputs of attention's kernels and, in float32, the log-sum-exp of each query's scores; attention whose outputs
    # are kept is not recomputed
    attention: Rows
    # operators that the block launches of a pack in "forward" and in "backward", and in "fused forward" and "fused
    # backward" if its elementwise operations are fused; those behind " a segment" and " a token" come for each of these
    launches: Rows = field(default_factory=dict)

    def num_launches(self, phase: str, slots: float, segments: float, *, fused: bool) -> float:
        """Count the operators that a phase launches of a pack of so many slots and segments."""
        key = f"fused {phase}" if fused else phase
        rows = ((key, 1.0), (f"{key} a segment", segments), (f"{key} a token", slots))
        return sum(float(self.launches.get(name, 0)) * times for name, times in rows)


@dataclass(frozen=True)
class SavedActivations:
    """Bytes that autograd saves of a model."""

    blocks: Mapping[str, SavedBlock]  # by the name of the block, in order; "" for what is outside of blocks
    left_out: tuple[str, ...] = ()  # modules whose saved bytes no driver explains; they are missing
    note: str = ""  # a sentence on what is estimated here, for whoever prints what follows from it


class SavedByPrecision(dict[str, SavedActivations]):
    """Bytes that autograd saves of a model, by precision, each read or traced when it is first looked up."""

    def __init__(self, load: Callable[[str], SavedActivations]) -> None:
        super().__init__()
        self._load = load

    def __missing__(self, precision: str) -> SavedActivations:
        self[precision] = self._load(precision)
        return self[precision]


def bytes_of(rows: Rows, workload: Workload) -> int:
    """Multiply bytes per unit with a workload [bytes].

    >>> from headway.count import Workload
    >>> bytes_of({"tokens": Fraction(28676)}, Workload([1000, 48]))
    30052448
    """
    return round(sum(factor * drivers.parse_driver(driver)(workload) for driver, factor in rows.items()))


def to_lists(saved: SavedActivations) -> list[Any]:
    """Turn saved activations into plain lists: blocks of one list that save the same become one entry."""
    entries: dict[tuple[str, str], list[Any]] = {}
    for name, block in saved.blocks.items():
        stack, _, number = name.rpartition(".")
        rows = [{driver: str(factor) for driver, factor in rows.items()} for rows in _parts(block)]
        entry = entries.setdefault((stack, json.dumps(rows)), [stack, 0, *rows])
        entry[1] |= 1 << int(number) if number else 0
    return [[stack, to_ranges(numbers), *rows] for stack, numbers, *rows in entries.values()]


def from_lists(entries: list[Any]) -> SavedActivations:
    """Build saved activations from `to_lists`' lists; blocks stand in the order of their stacks and numbers."""
    stacks: dict[str, dict[int, SavedBlock]] = {}
    for stack, numbers, *parts in entries:
        block = SavedBlock(*({driver: Fraction(factor) for driver, factor in rows.items()} for rows in parts))
        bits = from_ranges(numbers)
        for number in range(bits.bit_length()) if bits else [-1]:
            if number < 0 or bits >> number & 1:
                stacks.setdefault(stack, {})[number] = block
    ordered = ((stack, number, block) for stack, blocks in stacks.items() for number, block in sorted(blocks.items()))
    return SavedActivations({f"{stack}.{number}" if number >= 0 else stack: block for stack, number, block in ordered})


def shipped_activations(name: str, precision: str) -> SavedActivations:
    """Load the saved activations of a shipped model; needs neither torch nor transformers.

    Args:
        name: of a shipped model.
        precision: one of `PRECISIONS`.

    Raises:
        CostModelError: nothing was traced for this model.
    """
    precisions = _shipped().get(name)
    if precisions is None:
        raise CostModelError(f"no saved activations of {name!r} ship with Headway; there are {', '.join(_shipped())}.")
    return from_lists(precisions[precision])


def save_activations(name: str, traced: Mapping[str, list[Any]]) -> None:
    """Write a model's traced activations to its folder's file, one line an entry, so that a diff reads well."""
    file = ledger_folder(name) / _FILE_NAME
    models = {**(json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}), name: traced}
    _shipped.cache_clear()
    parts = [f' "{model}": {_lines(precisions)}' for model, precisions in sorted(models.items())]
    file.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def _lines(precisions: Mapping[str, list[Any]]) -> str:
    parts = [
        f'  "{name}": [\n   ' + ",\n   ".join(map(json.dumps, entries)) + "\n  ]"
        for name, entries in precisions.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n }"


@cache
def _shipped() -> dict[str, dict[str, list[Any]]]:
    files = dict.fromkeys(ledger_folder(name) / _FILE_NAME for name in shipped_models())
    return {name: rows for file in files for name, rows in json.loads(file.read_text(encoding="utf-8")).items()}


def _parts(block: SavedBlock) -> tuple[Rows, ...]:
    return block.plain, block.fused, block.entry, block.attention, block.launches
