"""The meter in other people's loops: plain ones, Hugging Face's Trainer and its kin, Megatron's, torchtitan."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.integrations.hf_trainer import MFUCallback
    from headway.integrations.huggingface import HeadwayCallback
    from headway.integrations.megatron import FlopsAccumulator
    from headway.integrations.optimizer import MFUOptimizerWrapper
    from headway.integrations.torchtitan import with_headway
    from headway.integrations.tracking import track

_HOME = {
    "FlopsAccumulator": "headway.integrations.megatron",
    "HeadwayCallback": "headway.integrations.huggingface",
    "MFUCallback": "headway.integrations.hf_trainer",
    "MFUOptimizerWrapper": "headway.integrations.optimizer",
    "track": "headway.integrations.tracking",
    "with_headway": "headway.integrations.torchtitan",
}

__all__ = ["FlopsAccumulator", "HeadwayCallback", "MFUCallback", "MFUOptimizerWrapper", "track", "with_headway"]


def __getattr__(name: str) -> Any:
    """Import an integration when it is asked for: each needs the library that it joins."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"headway.integrations has no {name!r}; it offers {', '.join(__all__)}")
