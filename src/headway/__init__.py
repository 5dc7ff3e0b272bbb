"""Headway: train multimodal models on packed data, and know to the FLOP how much of the hardware turned into progress.

The counting core needs numpy only; importing this package loads neither torch nor transformers.

>>> from headway import Workload, load_cost_model
>>> count = load_cost_model("llama-3.1-8b").count(Workload(segments=[8192]))
>>> count.total
421651971833856
"""

from typing import TYPE_CHECKING, Any

from headway.errors import HeadwayError
from headway.exports import exported
from headway.version import __version__

if TYPE_CHECKING:
    from headway.count import CostModel, FlopCount, Generation, Workload, load_cost_model, shipped_models
    from headway.devices import Peak, peak_for
    from headway.meter import Meter, Window
    from headway.meter.profile import profile
    from headway.tracing.trace import trace

_HOMES = {
    "headway.count": ("CostModel", "FlopCount", "Generation", "Workload", "load_cost_model", "shipped_models"),
    "headway.devices": ("Peak", "peak_for"),
    "headway.meter": ("Meter", "Window"),
    "headway.meter.profile": ("profile",),
    "headway.tracing": ("trace",),
}

__all__ = [
    "CostModel",
    "FlopCount",
    "Generation",
    "HeadwayError",
    "Meter",
    "Peak",
    "Window",
    "Workload",
    "__version__",
    "load_cost_model",
    "peak_for",
    "profile",
    "shipped_models",
    "trace",
]


__getattr__ = exported(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)


_notebooks: dict[int, Any] = {}  # by the identity of a shell of IPython


def load_ipython_extension(shell: Any) -> None:
    """Meter what the cells of a notebook train: `%load_ext headway`."""
    from importlib import import_module

    _notebooks[id(shell)] = import_module("headway.integrations.script").NotebookWatch(shell.events)


def unload_ipython_extension(shell: Any) -> None:
    """Meter no further cells."""
    _notebooks.pop(id(shell)).close()
