"""Flat files of encoded samples: a block is written whole or not at all, and read by a place and a length.

A block has a head of `HEAD` words, entries one behind the other, and a table with a row for each entry: key of the
data file, row in it, end of the entry in the block [bytes]. An entry has a head of four words (CRC-32 of what follows,
time that encoding took [us], numbers, bytes of names), the numbers, the names, and the tensors. All lie at multiples of
a word, 8 bytes. Nothing in a block is ever run: it holds numbers, names and the bytes of tensors of known types.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path
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

VERSION = 1  # version of the layout; raised when files of an earlier one cannot be read

_MAGIC = int.from_bytes(b"headwayB", "big")
_WORD = 8  # bytes
_HEAD = 4  # words: magic, version, entries, CRC-32 of the table
_ENTRY_HEAD = 4  # words
_COUNTS = 11  # numbers that come first: media_end, prompt, and how many there are of whatever follows
_ROW = 3  # words of a row of the table
_MOST_ENTRIES = 2**22
_STATE = 4  # numbers of a file's state
_SHARED = -1  # axis of a tensor that all samples share

# Types of tensors by their numbers in an entry, with the numpy type of their bytes.
_DTYPES: tuple[tuple[torch.dtype, Any], ...] = (
    (torch.uint8, np.uint8), (torch.int8, np.int8), (torch.int16, np.int16), (torch.int32, np.int32),
    (torch.int64, np.int64), (torch.float16, np.float16), (torch.bfloat16, np.int16), (torch.float32, np.float32),
    (torch.float64, np.float64), (torch.bool, np.bool_),
)  # fmt: skip
_NUMBER_OF_DTYPE = {dtype: number for number, (dtype, _) in enumerate(_DTYPES)}

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
    names = [sample.origin.place, sample.types_name, *media, *processed, *(file[0] for file in files)]
    is_plain = type(sample) is EncodedSample and all(
        type(tensor) is torch.Tensor and tensor.dtype in _NUMBER_OF_DTYPE for tensor in tensors
    )
    if not is_plain or any("\0" in name for name in names):
        return None
    lists = [sample.segments, sample.answers, sample.desirable]
    counts = [len(sample.parts), len(files), types is not None, len(media), len(processed), len(sample.latent_images)]
    numbers = [sample.media_end, sample.prompt, *map(len, lists), *counts, *chain.from_iterable(lists)]
    for part in sample.parts:
        numbers += [KINDS.index(part.kind), part.tokens, part.supervised, part.rows, part.columns, part.skipped]
    for file in files:
        numbers += file[1]
    numbers += [kind.features is not None for kind in media.values()]
    for rule in (joinable.rule for joinable in processed.values()):
        fill = 0 if rule.fill is None else int(np.float64(rule.fill).view(np.int64))
        numbers += [_SHARED if rule.axis is None else rule.axis, rule.fill is not None, fill]
    for tensor in tensors:
        numbers += [_NUMBER_OF_DTYPE[tensor.dtype], tensor.dim(), *tensor.shape]
    words = "\0".join(names).encode("utf-8", "surrogatepass")
    body = [np.array(numbers, dtype=np.int64).tobytes(), _padded(words)]
    body += [_padded(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) for tensor in tensors]
    content = np.array([round(1e6 * encoding_s), len(numbers), len(words)], dtype=np.int64).tobytes() + b"".join(body)
    return np.int64(crc32(content)).tobytes() + content


def _padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % _WORD)


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
    except (ValueError, TypeError, IndexError, OverflowError, StopIteration):  # numbers that nobody here has written
        return None


def _read_entry(content: NDArray[np.uint8], source: str, file: str, row: int) -> StoredSample | None:
    words = content.view(np.int64)
    checksum, encoding_us, num_numbers, num_bytes = words[:_ENTRY_HEAD].tolist()
    if crc32(content[_WORD:].data) != checksum or num_numbers < _COUNTS or num_bytes < 0:
        return None
    at = _WORD * (_ENTRY_HEAD + num_numbers)
    numbers = words[_ENTRY_HEAD : _ENTRY_HEAD + num_numbers].tolist()
    place, types_name, *names = str(content[at : at + num_bytes].data, "utf-8", "surrogatepass").split("\0")
    at += num_bytes + -num_bytes % _WORD
    # Numbers and names, in the order in which they were written; no list is longer than the numbers that there are.
    if not 0 <= min(numbers[2:_COUNTS]) <= max(numbers[2:_COUNTS]) <= num_numbers:
        return None
    media_end, prompt, *lengths, num_parts, num_files = numbers[:7]
    has_types, num_media, num_processed, num_latents = numbers[7:_COUNTS]
    bounds = [*accumulate((*lengths, 6 * num_parts, _STATE * num_files, num_media, 3 * num_processed), initial=_COUNTS)]
    segments, answers, desirable, part_numbers, states, have_features, rules = (
        numbers[start:stop] for start, stop in pairwise(bounds)
    )
    parts = [SamplePart(cast("Kind", KINDS[kind]), *sizes) for kind, *sizes in _groups(part_numbers, 6)]
    paths = names[num_media + num_processed :]
    files = tuple((path, tuple(state)) for path, state in zip(paths, _groups(states, _STATE), strict=False))
    # Tensors: each is a view of the content, and numpy refuses one that ends behind it.
    start, tensors = bounds[-1], list[torch.Tensor]()
    for _ in range(3 + has_types + num_media + sum(have_features) + num_processed + num_latents):
        dtype, stored = _DTYPES[numbers[start]]
        stop = start + 2 + numbers[start + 1]
        array = np.ndarray(numbers[start + 2 : stop], stored, content, at)
        tensor = torch.from_numpy(array)
        tensors.append(tensor if dtype is not torch.bfloat16 else tensor.view(dtype))
        at += array.nbytes + -array.nbytes % _WORD
        start = stop
    remaining = iter(tensors)
    sample = EncodedSample(
        input_ids_S=next(remaining),
        labels_S=next(remaining),
        position_ids_RS=next(remaining),
        origin=Origin(source, file, row, place),
        token_types_S=next(remaining) if has_types else None,
        types_name=types_name,
        media={
            name: MediaTensors(next(remaining), next(remaining) if has_features else None)
            for name, has_features in zip(names, have_features, strict=False)
        },
        processed={
            name: Joinable(next(remaining), _rule(*rule))
            for name, rule in zip(names[num_media:], _groups(rules, 3), strict=False)
        },
        media_end=media_end,
        segments=tuple(segments),
        answers=tuple(answers),
        prompt=prompt,
        desirable=tuple(map(bool, desirable)),
        parts=tuple(parts),
        latent_images=tuple(remaining),
    )
    return StoredSample(sample, files, 1e-6 * encoding_us)


def _groups(numbers: list[int], size: int) -> list[list[int]]:
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def _rule(axis: int, has_fill: int, fill: int) -> Joining:
    return Joining(None if axis == _SHARED else axis, float(np.int64(fill).view(np.float64)) if has_fill else None)


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
    if bounds[-1] != start or lengths.min() < (_ENTRY_HEAD + _COUNTS) * _WORD or (lengths % _WORD).any():
        return None
    return BlockTable(keys, rows, bounds)
