"""Data: samples read from files of many formats, encoded by the model's own processor, packed, collated and fed.

`sources` read samples, `Encoder` turns them into tensors, `index` measures them, `headway.packing` plans packs over
these lengths alone, and `feed` makes the packs ahead of the training loop and resumes to the exact next one.
Importing this package loads neither torch nor transformers.
"""

from typing import TYPE_CHECKING

from headway.exports import exported

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
    "headway.data.samples": (
        "AudioPart", "Chat", "Document", "ImagePart", "Media", "Message", "Origin", "Preference", "Sample", "TextPart",
        "VideoPart",
    ),
    "headway.packing": ("Budget", "Size"),
}  # fmt: skip

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


__getattr__ = exported(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
