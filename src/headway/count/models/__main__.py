"""Trace every shipped model again and write its cost model: `python -m headway.count.models [NAME ...]`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from headway.count import storage
from headway.count.models import FOLDER, presets
from headway.count.tracing import trace
from headway.count.tracing.build import preset_config
from headway.errors import HeadwayError

if TYPE_CHECKING:
    from headway.count.cost_model import CostModel


def trace_preset(name: str) -> CostModel:
    """Trace the model that a shipped configuration describes."""
    return trace(preset_config(name), name=name)


def main(names: list[str]) -> int:
    """Trace the named models, all when none is named."""
    for name in names or presets():
        start = time.perf_counter()
        try:
            model = trace_preset(name)
        except HeadwayError:
            return 1
        storage.save(model, FOLDER / f"{name}.json")
        time.perf_counter() - start
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
