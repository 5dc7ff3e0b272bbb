"""Cost models that ship with the package, one JSON file each, and the configurations that they were traced from.

`python -m headway.count.models` traces them again (torch and transformers needed); a test does so and compares.
"""

from __future__ import annotations

import difflib
import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.count.models.hub import HUB_NAMES
from headway.errors import UnknownModelError

if TYPE_CHECKING:
    from headway.count.cost_model import CostModel

FOLDER = Path(str(resources.files(__name__)))


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Read the shipped configurations, by model name; each in the form of a `config.json`."""
    data: dict[str, dict[str, Any]] = json.loads((FOLDER / "presets.json").read_text(encoding="utf-8"))
    return data


def shipped_models() -> list[str]:
    """Name the models whose cost model ships with the package."""
    return sorted(presets())


def shipped_name(name: str) -> str | None:
    """Find the shipped model that a name stands for: its own, in any case, or one on the Hub; None if none does.

    >>> shipped_name("Qwen/Qwen2.5-7B-Instruct")
    'qwen2.5-7b'
    """
    if name.lower() in presets():
        return name.lower()
    return HUB_NAMES.get(name)


def nearest(name: str) -> str:
    """Say which shipped names come closest to an unknown one."""
    close = difflib.get_close_matches(name.lower(), shipped_models(), n=3, cutoff=0.4)
    return f"Did you mean {' or '.join(close)}?" if close else "`headway models` lists them."


def load_cost_model(name: str) -> CostModel:
    """Load a shipped cost model; needs neither torch nor transformers.

    Raises:
        UnknownModelError: no model of this name ships; the message names the nearest ones.

    >>> load_cost_model("gpt2").params.total
    124439808
    """
    from headway.count import storage

    if name not in presets():
        raise UnknownModelError(f"no cost model named {name!r} ships with Headway. {nearest(name)}")
    return storage.load(FOLDER / f"{name}.json")
