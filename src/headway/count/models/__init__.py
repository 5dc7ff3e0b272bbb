"""Cost models as JSON, one line per row, parameter sets as ranges; those that ship, and their configurations.

A family of models that is installed beside the package brings a folder of the same files.

`tools/shipped_models.py` traces them again (torch and transformers needed); a test does so and compares.
"""

import difflib
import json
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from headway.count.cost_model import CostModel
from headway.count.rows import ALWAYS, Gradient, Parameter, Row
from headway.errors import CostModelError, UnknownModelError
from headway.files import read_text
from headway.hub import is_model_here
from headway.plugins import hooks_of_all, where_to_find

FORMAT = "headway-cost-model"
VERSION = 1
FOLDER = Path(str(resources.files(__name__)))


@cache
def hub_names() -> dict[str, str]:
    """The shipped model that each name on the Hub stands for: models of one name here differ there in their weights."""
    names: dict[str, str] = {}
    for folder in _folders():
        names |= json.loads((folder / "hub.json").read_text(encoding="utf-8"))
    return names


@cache
def _folders() -> tuple[Path, ...]:
    return (FOLDER, *hooks_of_all("ledgers"))


@cache
def ledger_folder(name: str) -> Path:
    """The folder that holds the ledger of a shipped model."""
    return next(folder for folder in _folders() if name in _presets_in(folder))


@cache
def _presets_in(folder: Path) -> dict[str, dict[str, Any]]:
    data: dict[str, dict[str, Any]] = json.loads((folder / "presets.json").read_text(encoding="utf-8"))
    return data


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Read the shipped configurations, by model name; each in the form of a `config.json`."""
    return {name: preset for folder in _folders() for name, preset in _presets_in(folder).items()}


def shipped_models() -> list[str]:
    """Name the models whose cost model ships with the package."""
    return sorted(presets())


def shipped_name(name: str) -> str | None:
    """Find the shipped model that a name stands for: its own, in any case, or one on the Hub; None if none does.

    A model on this machine has the word: where a folder `gpt2` with a config.json, or a file of that name, lies in the
    current folder, `gpt2` is what lies there, for counting and planning as for training.

    >>> shipped_name("Qwen/Qwen2.5-7B-Instruct")
    'qwen2.5-7b'
    """
    if is_model_here(name):
        return None
    if name.lower() in presets():
        return name.lower()
    return hub_names().get(name)


def nearest(name: str) -> str:
    """Say which shipped names come closest to an unknown one, and which plug-in may bring one of another family."""
    close = difflib.get_close_matches(name.lower(), shipped_models(), n=3, cutoff=0.4)
    hint = f"Did you mean {' or '.join(close)}?" if close else "`headway models` lists the shipped models."
    first = re.match("[a-z]+", name.lower())
    if first is None or any(shipped.startswith(first[0]) for shipped in shipped_models()):
        return hint
    return f"{hint} {where_to_find(first[0])}"


def load_cost_model(name: str) -> CostModel:
    """Load a shipped cost model; needs neither torch nor transformers.

    Raises:
        UnknownModelError: no model of this name ships; the message names the nearest ones.

    >>> load_cost_model("gpt2").params.total
    124439808
    """
    if name not in presets():
        raise UnknownModelError(f"no cost model named {name!r} ships with Headway. {nearest(name)}")
    return load(ledger_folder(name) / f"{name}.json")


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
            f"{where} is a cost model of version {data.get('version')}, but this Headway reads version {VERSION}. "
            "Trace the model again."
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
        raise CostModelError(f"{where} is a damaged cost model ({error}). Trace the model again.") from error


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
