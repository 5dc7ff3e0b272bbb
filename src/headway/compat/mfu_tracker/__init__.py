"""The calls on mfu-tracker's page, under their names, over Headway's meter, peaks and tracing.

`from mfu_tracker import track` becomes `from headway.compat.mfu_tracker import track`; `docs/mfu-tracker.md` says where
the numbers differ.
"""

from headway.compat.mfu_tracker.flops import flash_attn_flops, param_bytes, profile_flops
from headway.compat.mfu_tracker.gpu import GPUSpec, get_gpu_spec
from headway.compat.mfu_tracker.optim import MFUOptimizerWrapper
from headway.compat.mfu_tracker.tracker import UtilizationResult, track

__all__ = [
    "GPUSpec",
    "MFUOptimizerWrapper",
    "UtilizationResult",
    "flash_attn_flops",
    "get_gpu_spec",
    "param_bytes",
    "profile_flops",
    "track",
]
