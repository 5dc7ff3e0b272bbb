"""Headway: train multimodal models on packed data, and know to the FLOP how much of the hardware turned into progress.

The counting core needs numpy only; importing this package loads neither torch nor transformers.

>>> from headway import Workload, load_cost_model
>>> count = load_cost_model("llama-3.1-8b").count(Workload(segments=[8192]))
>>> count.total
421651971833856
"""

from typing import TYPE_CHECKING, Any

from headway.errors import HeadwayError

if TYPE_CHECKING:
    from headway.count import CostModel, FlopCount, Workload, load_cost_model, shipped_models, trace
    from headway.devices import Peak, peak_for
    from headway.integrations.gpu_spec import GPUSpec, compute_mbu, compute_mfu, get_gpu_spec
    from headway.integrations.hf_trainer import MFUCallback
    from headway.integrations.optimizer import MFUOptimizerWrapper
    from headway.integrations.profiling import (
        FlopProfile,
        flash_attn_flops,
        profile_flops,
        profile_flops_with_hfu,
    )
    from headway.integrations.results import UtilizationResult
    from headway.integrations.setups import param_bytes
    from headway.integrations.tracking import track
    from headway.meter import Meter, Window

__version__ = "0.1.0"

_HOME = {
    "CostModel": "headway.count",
    "FlopCount": "headway.count",
    "Workload": "headway.count",
    "load_cost_model": "headway.count",
    "shipped_models": "headway.count",
    "trace": "headway.count",
    "Peak": "headway.devices",
    "peak_for": "headway.devices",
    "FlopProfile": "headway.integrations.profiling",
    "GPUSpec": "headway.integrations.gpu_spec",
    "MFUCallback": "headway.integrations.hf_trainer",
    "MFUOptimizerWrapper": "headway.integrations.optimizer",
    "UtilizationResult": "headway.integrations.results",
    "compute_mbu": "headway.integrations.gpu_spec",
    "compute_mfu": "headway.integrations.gpu_spec",
    "flash_attn_flops": "headway.integrations.profiling",
    "get_gpu_spec": "headway.integrations.gpu_spec",
    "param_bytes": "headway.integrations.setups",
    "profile_flops": "headway.integrations.profiling",
    "profile_flops_with_hfu": "headway.integrations.profiling",
    "track": "headway.integrations.tracking",
    "Meter": "headway.meter",
    "Window": "headway.meter",
}

__all__ = [
    "CostModel",
    "FlopCount",
    "FlopProfile",
    "GPUSpec",
    "HeadwayError",
    "MFUCallback",
    "MFUOptimizerWrapper",
    "Meter",
    "Peak",
    "UtilizationResult",
    "Window",
    "Workload",
    "__version__",
    "compute_mbu",
    "compute_mfu",
    "flash_attn_flops",
    "get_gpu_spec",
    "load_cost_model",
    "param_bytes",
    "peak_for",
    "profile_flops",
    "profile_flops_with_hfu",
    "shipped_models",
    "trace",
    "track",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use, so that `headway --version` need not load numpy."""
    if name not in _HOME:
        raise AttributeError(f"module 'headway' has no attribute {name!r}; it offers {', '.join(sorted(__all__))}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
