"""Data: chats with images read from JSONL, encoded by the model's own processor, packed, collated and streamed.

`read_samples` -> `Encoder.encode` -> `pack` under a `Budget` -> `collate`; `PackLoader` does all of it in order, ahead
of the training loop, and resumes to the exact next batch.
"""

from headway.data.collate import Batch, collate
from headway.data.encode import EncodedSample, Encoder
from headway.data.loader import PackLoader
from headway.data.pack import Budget, PackReport, pack
from headway.data.producer import Stage
from headway.data.rooms import Size
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
    read_samples,
)

__all__ = [
    "AudioPart",
    "Batch",
    "Budget",
    "Chat",
    "Document",
    "EncodedSample",
    "Encoder",
    "ImagePart",
    "Media",
    "Message",
    "Origin",
    "PackLoader",
    "PackReport",
    "Sample",
    "Size",
    "Stage",
    "TextPart",
    "VideoPart",
    "collate",
    "pack",
    "read_samples",
]
