"""The meter in other people's loops: Hugging Face's Trainer and what builds on it, Megatron-style loops, torchtitan."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.integrations.huggingface import HeadwayCallback
    from headway.integrations.megatron import FlopsAccumulator
    from headway.integrations.torchtitan import with_headway

_HOME = {
    "FlopsAccumulator": "headway.integrations.megatron",
    "HeadwayCallback": "headway.integrations.huggingface",
    "with_headway": "headway.integrations.torchtitan",
}

__all__ = ["FlopsAccumulator", "HeadwayCallback", "with_headway"]


def __getattr__(name: str) -> Any:
    """Import an integration when it is asked for: each needs the library that it joins."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"headway.integrations has no {name!r}; it offers {', '.join(__all__)}")
