"""The meter in other people's loops: Hugging Face's and TRL's trainers, Accelerate, Lightning, torchtitan, Megatron."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.integrations.accelerate import AccelerateMeter
    from headway.integrations.hf_trainer import MFUCallback
    from headway.integrations.huggingface import HeadwayCallback
    from headway.integrations.lightning import HeadwayMonitor
    from headway.integrations.megatron import FlopsAccumulator
    from headway.integrations.optimizer import MFUOptimizerWrapper
    from headway.integrations.torchtitan import with_headway
    from headway.integrations.tracking import track

_HOME = {
    "AccelerateMeter": "headway.integrations.accelerate",
    "FlopsAccumulator": "headway.integrations.megatron",
    "HeadwayCallback": "headway.integrations.huggingface",
    "HeadwayMonitor": "headway.integrations.lightning",
    "MFUCallback": "headway.integrations.hf_trainer",
    "MFUOptimizerWrapper": "headway.integrations.optimizer",
    "track": "headway.integrations.tracking",
    "with_headway": "headway.integrations.torchtitan",
}

__all__ = [
    "AccelerateMeter",
    "FlopsAccumulator",
    "HeadwayCallback",
    "HeadwayMonitor",
    "MFUCallback",
    "MFUOptimizerWrapper",
    "track",
    "with_headway",
]


def __getattr__(name: str) -> Any:
    """Import an integration when it is asked for: each needs the library that it joins."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"headway.integrations has no {name!r}; it offers {', '.join(__all__)}")
