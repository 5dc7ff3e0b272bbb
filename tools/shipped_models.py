"""Trace every shipped model again and write its cost model: `python -m tools.shipped_models [NAME ...]`.

What autograd saves of each, for memory plans, is written too, into one file for all.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from headway.count import activations, models
from headway.count.models import ledger_folder, presets
from headway.errors import HeadwayError
from headway.tracing import trace
from headway.tracing.activations import saved_of_config
from headway.tracing.build import preset_config

if TYPE_CHECKING:
    from headway.count.cost_model import CostModel


def trace_preset(name: str) -> CostModel:
    """Trace the model that a shipped configuration describes."""
    return trace(preset_config(name), name=name)


def trace_activations(name: str) -> dict[str, list[Any]]:
    """Trace what the model that a shipped configuration describes saves, by precision."""
    return {p: activations.to_lists(saved_of_config(preset_config(name), p)) for p in activations.PRECISIONS}


def main(names: list[str]) -> int:
    """Trace the named models, all when none is named."""
    for name in names or presets():
        start = time.perf_counter()
        try:
            model = trace_preset(name)
            models.save_cost_model(model, ledger_folder(name) / f"{name}.json")
            activations.save_activations(name, trace_activations(name))
        except HeadwayError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        print(f"{name}: {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
