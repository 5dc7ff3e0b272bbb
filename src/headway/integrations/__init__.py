"""The meter in other people's loops: Hugging Face's Trainer and TRL's, Accelerate, Lightning."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.integrations.accelerate import AccelerateMeter
    from headway.integrations.huggingface import HeadwayCallback
    from headway.integrations.lightning import HeadwayMonitor

__all__ = ["AccelerateMeter", "HeadwayCallback", "HeadwayMonitor"]

_HOMES = {"AccelerateMeter": "accelerate", "HeadwayCallback": "huggingface", "HeadwayMonitor": "lightning"}


def __getattr__(name: str) -> Any:
    """Import an integration when it is asked for: each needs the library that it joins."""
    if name not in _HOMES:
        raise AttributeError(f"headway.integrations has no {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(f"headway.integrations.{_HOMES[name]}"), name)
