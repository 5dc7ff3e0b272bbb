"""The meter in other people's loops: Hugging Face's and TRL's trainers, Accelerate, Lightning, torchtitan, Megatron.

`TrainerPhases` makes the record of trainers that generate (verl, slime, ...) out of lengths and times.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.integrations.accelerate import AccelerateMeter
    from headway.integrations.huggingface import HeadwayCallback
    from headway.integrations.lightning import HeadwayMonitor
    from headway.integrations.megatron import FlopsAccumulator
    from headway.integrations.rl import TrainerPhases
    from headway.integrations.torchtitan import with_headway

_HOME = {
    "AccelerateMeter": "accelerate",
    "FlopsAccumulator": "megatron",
    "HeadwayCallback": "huggingface",
    "HeadwayMonitor": "lightning",
    "TrainerPhases": "rl",
    "with_headway": "torchtitan",
}

__all__ = ["AccelerateMeter", "FlopsAccumulator", "HeadwayCallback", "HeadwayMonitor", "TrainerPhases", "with_headway"]


def __getattr__(name: str) -> Any:
    """Import an integration when it is asked for: each needs the library that it joins."""
    if name not in _HOME:
        raise AttributeError(f"headway.integrations has no {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
