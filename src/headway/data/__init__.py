"""Data: samples read from files of many formats, encoded by the model's own processor, packed, collated and fed.

`sources` read samples, `Encoder` turns them into tensors, `index` measures them, `headway.packing` plans packs over
these lengths alone, and `feed` makes the packs ahead of the training loop and resumes to the exact next one.
Importing this package loads neither torch nor transformers.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.data.collate import Batch, Collator
    from headway.data.encode import Encoder
    from headway.data.encoded import EncodedSample
    from headway.data.samples import (
        AudioPart,
        Chat,
        Document,
        ImagePart,
        Media,
        Message,
        Origin,
        Preference,
        Sample,
        TextPart,
        VideoPart,
    )
    from headway.data.sources import read_samples
    from headway.packing import Budget, Size

_HOMES = {
    "headway.data.collate": ("Batch", "Collator"),
    "headway.data.encode": ("Encoder",),
    "headway.data.encoded": ("EncodedSample",),
    "headway.data.sources": ("read_samples",),
    "headway.packing": ("Budget", "Size"),
}  # modules of public names; samples has all others

__all__ = [
    "AudioPart",
    "Batch",
    "Budget",
    "Chat",
    "Collator",
    "Document",
    "EncodedSample",
    "Encoder",
    "ImagePart",
    "Media",
    "Message",
    "Origin",
    "Preference",
    "Sample",
    "Size",
    "TextPart",
    "VideoPart",
    "read_samples",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use, so that planning over lengths need not load torch."""
    if name not in __all__:
        raise AttributeError(f"module 'headway.data' has no attribute {name!r}; it offers {', '.join(__all__)}")
    from importlib import import_module

    home = next((home for home, names in _HOMES.items() if name in names), "headway.data.samples")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
