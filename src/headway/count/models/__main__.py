"""Trace every shipped model again and write its cost model: `python -m headway.count.models [NAME ...]`."""

from __future__ import annotations

import sys
import time

from headway.count import storage
from headway.count.cost_model import CostModel
from headway.count.models import FOLDER, presets
from headway.count.tracing import trace
from headway.errors import HeadwayError


def trace_preset(name: str) -> CostModel:
    """Trace the model that a shipped configuration describes."""
    from transformers import AutoConfig

    settings = dict(presets()[name])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    return trace(config, name=name)


def main(names: list[str]) -> int:
    """Trace the named models, all when none is named."""
    for name in names or presets():
        start = time.perf_counter()
        try:
            model = trace_preset(name)
        except HeadwayError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        storage.save(model, FOLDER / f"{name}.json")
        seconds = time.perf_counter() - start
        print(f"{name:20} {model.params.total / 1e9:8.2f} B parameters {len(model.rows):5} rows {seconds:6.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
