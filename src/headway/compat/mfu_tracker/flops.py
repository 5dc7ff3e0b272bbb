"""Profiles of models under the module name that mfu-tracker gives them, as in `from mfu_tracker.flops import ...`."""

from headway.compat.mfu_tracker.profiling import FlopProfile, flash_attn_flops, profile_flops, profile_flops_with_hfu
from headway.compat.mfu_tracker.setups import param_bytes

__all__ = ["FlopProfile", "flash_attn_flops", "param_bytes", "profile_flops", "profile_flops_with_hfu"]
