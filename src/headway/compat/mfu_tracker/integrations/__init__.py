"""The callback, under the module name that mfu-tracker gives it: `from mfu_tracker.integrations import MFUCallback`."""

from headway.compat.mfu_tracker.integrations.hf_trainer import MFUCallback

__all__ = ["MFUCallback"]
