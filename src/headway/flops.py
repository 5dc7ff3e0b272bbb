"""Profiles of models under the module name that mfu-tracker gives them: `from headway.flops import profile_flops`."""

from headway.integrations.profiling import (
    FlopProfile,
    flash_attn_flops,
    profile_flops,
    profile_flops_with_hfu,
)
from headway.integrations.setups import param_bytes

__all__ = ["FlopProfile", "flash_attn_flops", "param_bytes", "profile_flops", "profile_flops_with_hfu"]
