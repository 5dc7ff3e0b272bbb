"""Flat files of encoded samples: a block is written whole or not at all, and read by a place and a length.

A block has a head of `HEAD` words, entries one behind the other, and a table with a row for each entry: key of the
data file, row in it, end of the entry in the block [bytes]. An entry has the CRC-32 of what follows, the length of its
facts [bytes], the facts as JSON without those that are empty, and the tensors that these list. All lie at multiples of
a word, 8 bytes. Nothing in a block is ever run: it holds numbers, names and the bytes of tensors of known types.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple, cast
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from headway.cache import write_whole
from headway.data.encoded import EncodedSample
from headway.data.media.joining import Joinable, Joining
from headway.data.media.tensors import MediaTensors
from headway.data.samples import Origin
from headway.packing.parts import KINDS, Kind, SamplePart

VERSION = 2  # version of the layout; raised when files of an earlier one cannot be read

_MAGIC = int.from_bytes(b"headwayB", "big")
_WORD = 8  # bytes
_HEAD = 4  # words: magic, version, entries, CRC-32 of the table
_HEAD_OF_ENTRY = Struct("=qq")  # CRC-32, and the length of the facts
_ROW = 3  # words of a row of the table
_MOST_ENTRIES = 2**22
_NUMBERS, _LISTS = ("media_end", "prompt"), ("segments", "answers", "desirable")
_TYPES = "uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 bool"
_DTYPES = {name: np.dtype("int16" if name == "bfloat16" else name) for name in _TYPES.split()}  # numpy has no bfloat16

FileState = tuple[str, tuple[int, ...]]
"""A file that a sample was made of: its path, and its state by `headway.data.sources.identity.file_state`."""


class StoredSample(NamedTuple):
    """A sample as it lies in a block.

    Attributes:
        sample: the sample.
        files: what it was made of, beside its row.
        encoding_s: time that encoding it took [s].
    """

    sample: EncodedSample
    files: tuple[FileState, ...]
    encoding_s: float


class BlockTable(NamedTuple):
    """The table of a block.

    Attributes:
        keys: key of the data file of each entry, shape (N,).
        rows: row in that file, shape (N,).
        bounds: start of each entry in the block, and the end of the last one [bytes], shape (N + 1,).
    """

    keys: NDArray[np.int64]
    rows: NDArray[np.int64]
    bounds: NDArray[np.int64]


def entry_of(sample: EncodedSample, files: Sequence[FileState], encoding_s: float) -> bytes | None:
    """Lay a sample out as an entry; None if it holds anything that an entry has no place for."""
    types, media, processed = sample.token_types_S, sample.media, sample.processed
    tensors = [sample.input_ids_S, sample.labels_S, sample.position_ids_RS, *([] if types is None else [types])]
    tensors += [tensor for kind in media.values() for tensor in kind if tensor is not None]
    tensors += [*(joinable.tensor_X for joinable in processed.values()), *sample.latent_images]
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    is_plain = all(type(tensor) is torch.Tensor for tensor in tensors) and _DTYPES.keys() >= {*dtypes}
    if type(sample) is not EncodedSample or not is_plain:
        return None
    facts = {
        **{name: getattr(sample, name) for name in (*_NUMBERS, *_LISTS, "types_name")},
        "place": sample.origin.place,
        "parts": [astuple(part) for part in sample.parts],
        "has_types": types is not None,
        "media": {name: kind.features is not None for name, kind in media.items()},
        "processed": {name: joinable.rule for name, joinable in processed.items()},
        "tensors": [[dtype, *tensor.shape] for dtype, tensor in zip(dtypes, tensors, strict=True)],
        "files": files,
        "encoding_s": encoding_s,
    }
    # Empty facts are left out, because reading them takes time.
    written = json.dumps({name: fact for name, fact in facts.items() if fact}, separators=(",", ":"))
    head = _padded(written.encode(), b" ")
    body = [_padded(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) for tensor in tensors]
    content = b"".join([np.int64(len(head)).tobytes(), head, *body])
    return np.int64(crc32(content)).tobytes() + content


def _padded(content: bytes, by: bytes = b"\0") -> bytes:
    return content + by * (-len(content) % _WORD)


def read_entry(content: NDArray[np.uint8], source: str, file: str, row: int) -> StoredSample | None:
    """Read an entry; None if it is damaged.

    Args:
        content: its bytes, which the sample's tensors go on using.
        source: name of the sample's source.
        file: path or URL of its data file.
        row: its row there.
    """
    try:
        return _read_entry(content, source, file, row)
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError, StopIteration):
        return None  # facts that nobody here has written


def _read_entry(content: NDArray[np.uint8], source: str, file: str, row: int) -> StoredSample | None:
    checksum, num_bytes = _HEAD_OF_ENTRY.unpack_from(content.data)
    if crc32(content.data[_WORD:]) != checksum or num_bytes < 0:
        return None
    at = _HEAD_OF_ENTRY.size + num_bytes
    facts = json.loads(str(content.data[_HEAD_OF_ENTRY.size : at], "utf-8"))
    # Tensors: each is a view of the content, and numpy refuses one that ends behind it.
    tensors = []
    for name, *shape in facts["tensors"]:
        array = np.ndarray(shape, _DTYPES[name], content, at)
        tensor = torch.from_numpy(array)
        tensors.append(tensor.view(torch.bfloat16) if name == "bfloat16" else tensor)
        at += array.nbytes + -array.nbytes % _WORD
    files = tuple((path, tuple(state)) for path, state in facts.get("files", ()))
    parts = [SamplePart(cast("Kind", KINDS[KINDS.index(kind)]), *sizes) for kind, *sizes in facts.get("parts", ())]
    counts: dict[str, Any] = {name: facts[name] for name in _NUMBERS if name in facts}
    lists: dict[str, Any] = {name: tuple(facts[name]) for name in _LISTS if name in facts}
    groups = (counts.values(), *lists.values(), *(astuple(part)[1:] for part in parts), *(state for _, state in files))
    if not all(isinstance(number, int) for group in groups for number in group):
        return None
    remaining = iter(tensors)
    sample = EncodedSample(
        input_ids_S=next(remaining),
        labels_S=next(remaining),
        position_ids_RS=next(remaining),
        origin=Origin(source, file, row, facts.get("place", "")),
        token_types_S=next(remaining) if facts.get("has_types") else None,
        types_name=facts.get("types_name", ""),
        media={
            name: MediaTensors(next(remaining), next(remaining) if has_features else None)
            for name, has_features in facts.get("media", {}).items()
        },
        processed={
            name: Joinable(next(remaining), Joining(*rule)) for name, rule in facts.get("processed", {}).items()
        },
        parts=tuple(parts),
        latent_images=tuple(remaining),
        **counts,
        **lists,
    )
    return StoredSample(sample, files, facts.get("encoding_s", 0.0))


def write_block(path: Path, entries: Iterable[tuple[int, int, bytes]]) -> None:
    """Write a block; a reader sees all of it or none.

    Args:
        path: of the block.
        entries: key of the data file, row in it, and the entry, of each.

    Raises:
        OSError: the block cannot be written.
    """
    keys, rows, contents = zip(*entries, strict=True)
    ends = _HEAD * _WORD + np.cumsum([len(content) for content in contents])
    table = np.stack([np.array(keys, np.int64), np.array(rows, np.int64), ends], axis=1).tobytes()
    head = np.array([_MAGIC, VERSION, len(contents), crc32(table)], dtype=np.int64).tobytes()
    write_whole(path, lambda file: file.writelines([head, *contents, table]))


def read_block(path: Path) -> BlockTable | None:
    """Read a block's table; None if the file is no whole block of this layout.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        head = np.frombuffer(file.read(_HEAD * _WORD).ljust(_HEAD * _WORD, b"\0"), dtype=np.int64)
        magic, version, count, checksum = head.tolist()
        start = size - count * _ROW * _WORD
        if (magic, version) != (_MAGIC, VERSION) or not 0 < count <= _MOST_ENTRIES or start < _HEAD * _WORD:
            return None
        file.seek(start)
        table = file.read(count * _ROW * _WORD)
    if crc32(table) != checksum:
        return None
    keys, rows, ends = np.frombuffer(table, dtype=np.int64).reshape(count, _ROW).T.copy()
    bounds = np.concatenate([[_HEAD * _WORD], ends])
    lengths = np.diff(bounds)
    if bounds[-1] != start or lengths.min() < _HEAD_OF_ENTRY.size or (lengths % _WORD).any():
        return None
    return BlockTable(keys, rows, bounds)
