"""Data: samples read from files of many formats, encoded by the model's own processor, packed, collated and fed.

`sources` read samples, `Encoder` turns them into tensors, `index` measures them, `headway.packing` plans packs over
these lengths alone, and `feed` makes the packs ahead of the training loop and resumes to the exact next one.
Importing this package loads neither torch nor transformers.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.data.collate import Batch, Collator
    from headway.data.encode import EncodedSample, Encoder
    from headway.data.samples import (
        AudioPart,
        Chat,
        Document,
        ImagePart,
        Media,
        Message,
        Origin,
        Sample,
        TextPart,
        VideoPart,
    )
    from headway.data.sources import read_samples
    from headway.packing import Budget, Size

_HOME = {
    "AudioPart": "headway.data.samples",
    "Batch": "headway.data.collate",
    "Budget": "headway.packing",
    "Chat": "headway.data.samples",
    "Collator": "headway.data.collate",
    "Document": "headway.data.samples",
    "EncodedSample": "headway.data.encode",
    "Encoder": "headway.data.encode",
    "ImagePart": "headway.data.samples",
    "Media": "headway.data.samples",
    "Message": "headway.data.samples",
    "Origin": "headway.data.samples",
    "Sample": "headway.data.samples",
    "Size": "headway.packing",
    "TextPart": "headway.data.samples",
    "VideoPart": "headway.data.samples",
    "read_samples": "headway.data.sources",
}

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
    "Sample",
    "Size",
    "TextPart",
    "VideoPart",
    "read_samples",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use, so that planning over lengths need not load torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'headway.data' has no attribute {name!r}; it offers {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
