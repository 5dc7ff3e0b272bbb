"""The whole interface of the package mfu-tracker 0.3, under its own names.

`from mfu_tracker import track` becomes `from headway.compat.mfu_tracker import track`; `docs/mfu-tracker.md` says where
the numbers differ.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.compat.mfu_tracker.flops import FlopProfile, flash_attn_flops, profile_flops, profile_flops_with_hfu
    from headway.compat.mfu_tracker.gpu_spec import GPUSpec, compute_mbu, compute_mfu, get_gpu_spec
    from headway.compat.mfu_tracker.integrations.hf_trainer import MFUCallback
    from headway.compat.mfu_tracker.ledgers import param_bytes
    from headway.compat.mfu_tracker.optimizer import MFUOptimizerWrapper
    from headway.compat.mfu_tracker.results import UtilizationResult
    from headway.compat.mfu_tracker.tracking import track

_HOME = {
    "FlopProfile": "flops",
    "GPUSpec": "gpu_spec",
    "MFUCallback": "integrations.hf_trainer",
    "MFUOptimizerWrapper": "optimizer",
    "UtilizationResult": "results",
    "compute_mbu": "gpu_spec",
    "compute_mfu": "gpu_spec",
    "flash_attn_flops": "flops",
    "get_gpu_spec": "gpu_spec",
    "param_bytes": "ledgers",
    "profile_flops": "flops",
    "profile_flops_with_hfu": "flops",
    "track": "tracking",
}

__all__ = [
    "FlopProfile",
    "GPUSpec",
    "MFUCallback",
    "MFUOptimizerWrapper",
    "UtilizationResult",
    "compute_mbu",
    "compute_mfu",
    "flash_attn_flops",
    "get_gpu_spec",
    "param_bytes",
    "profile_flops",
    "profile_flops_with_hfu",
    "track",
]


def __getattr__(name: str) -> Any:
    """Import a name from its file on first use: peaks need no torch, and torch no transformers."""
    if name not in _HOME:
        raise AttributeError(f"headway.compat.mfu_tracker has no {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
