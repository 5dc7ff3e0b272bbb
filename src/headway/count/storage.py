"""Cost models as JSON: one line per row, parameter sets as ranges."""

import json
from pathlib import Path
from typing import Any

from headway.count.cost_model import CostModel
from headway.count.rows import ALWAYS, Gradient, Parameter, Row
from headway.errors import CostModelError
from headway.files import read_text

FORMAT = "headway-cost-model"
VERSION = 1


def to_ranges(bits: int) -> str:
    """Write a set of bit positions as ranges; a star for `ALWAYS`.

    >>> to_ranges(0b1011101)
    '0,2-4,6'
    """
    if bits == ALWAYS:
        return "*"
    parts: list[str] = []
    position = 0
    while bits:
        gap = (bits & -bits).bit_length() - 1
        bits >>= gap
        run = (~bits & (bits + 1)).bit_length() - 1
        start = position + gap
        parts.append(str(start) if run == 1 else f"{start}-{start + run - 1}")
        bits >>= run
        position = start + run
    return ",".join(parts)


def from_ranges(text: str) -> int:
    """Read the text that `to_ranges` wrote.

    >>> bin(from_ranges("0,2-4,6"))
    '0b1011101'
    """
    if text == "*":
        return ALWAYS
    bits = 0
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        bits |= ((1 << (high - low + 1)) - 1) << low
    return bits


def to_dict(model: CostModel) -> dict[str, Any]:
    """Turn a cost model into plain lists and strings."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": model.name,
        "source": model.source,
        "unknown": list(model.unknown),
        "parameters": [[p.name, p.numel, p.active, p.component, p.trainable] for p in model.parameters],
        "rows": [
            [
                r.module,
                r.op,
                r.component,
                r.driver,
                r.forward,
                [[g.phase, g.flops, to_ranges(g.needs)] for g in r.gradients],
                r.block,
                r.recomputed,
                list(r.features) if r.features else None,
                *([r.cached] if r.cached else []),
            ]
            for r in model.rows
        ],
    }


def from_dict(data: Any, where: str) -> CostModel:
    """Build a cost model from the dictionary that `to_dict` made.

    Raises:
        CostModelError: it is no cost model, of another version, or damaged.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CostModelError(f"{where} is not a Headway cost model: it should be an object with format {FORMAT!r}.")
    if data.get("version") != VERSION:
        raise CostModelError(
            f"{where} is a cost model of version {data.get('version')}, this Headway reads version {VERSION}: "
            "trace the model again."
        )
    try:
        ranges: dict[str, int] = {}
        rows = []
        for module, op, component, driver, forward, gradients, block, recomputed, features, *cached in data["rows"]:
            grads = []
            for phase, flops, needs in gradients:
                if needs not in ranges:
                    ranges[needs] = from_ranges(needs)
                grads.append(Gradient(phase, flops, ranges[needs]))
            size = tuple(features) if features else None
            rows.append(Row(module, op, component, driver, forward, tuple(grads), block, recomputed, size, *cached))
        parameters = tuple(Parameter(*p) for p in data["parameters"])
        return CostModel(data["name"], tuple(rows), parameters, dict(data["source"]), tuple(data["unknown"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CostModelError(f"{where} is a damaged cost model ({error}): trace the model again.") from error


def save_cost_model(model: CostModel, path: Path) -> None:
    """Write a cost model to a JSON file, one row or parameter a line, so that changes read well in a diff."""
    data = to_dict(model)
    lines = []
    for key, value in data.items():
        if key in ("parameters", "rows"):
            body = ",\n  ".join(json.dumps(item, separators=(",", ":")) for item in value)
            lines.append(f' "{key}": [\n  {body}\n ]' if value else f' "{key}": []')
        else:
            lines.append(f' "{key}": {json.dumps(value)}')
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def load(path: Path) -> CostModel:
    """Read a cost model from a JSON file.

    Raises:
        CostModelError: the file is missing, not JSON, or no cost model.
    """
    try:
        data = json.loads(read_text(path))
    except OSError as error:
        raise CostModelError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:  # text that is none, or lists nested too deeply
        raise CostModelError(f"{path} is not JSON: {error}.") from error
    return from_dict(data, str(path))
