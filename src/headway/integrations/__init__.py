"""The meter in other people's loops: Hugging Face's Trainer and what builds on it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.integrations.huggingface import HeadwayCallback

__all__ = ["HeadwayCallback"]


def __getattr__(name: str) -> Any:
    """Import an integration when it is asked for: each needs the library that it joins."""
    if name == "HeadwayCallback":
        from headway.integrations.huggingface import HeadwayCallback

        return HeadwayCallback
    raise AttributeError(f"headway.integrations has no {name!r}; it offers {', '.join(__all__)}")
