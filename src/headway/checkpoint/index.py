"""Read the index of a checkpoint's tensors, a pickle of PyTorch's, without running a pickle's code.

Unpickling calls whatever a file names, so PyTorch's own reader would run the code of a checkpoint that somebody else
made. Here a pickle may name only the kinds of record that such an index is made of. Each becomes an inert stand-in,
whose contents are checked before the record that PyTorch wants is made of them.
"""

import pickle
import re
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from headway.checkpoint.folder import INDEX
from headway.errors import CheckpointError, foreign
from headway.stores import open_file, place, url_of

_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_RECORDS = {
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    (_FILES, "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
}
_PIECES = re.compile(r"__\d+_\d+\.distcp")  # the only files that an index of ours points into


class SafeReader(FileSystemReader):
    """PyTorch's reader of a checkpoint's tensors, with an index that is not trusted.

    Args:
        folder: of the checkpoint; one that stands for a URL has its tensors there.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder
        if (url := url_of(place(folder))) is not None:
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

            remote = FsspecReader(url)
            self.fs, self.path = remote.fs, remote.path

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Read the index.

        Raises:
            CheckpointError: it is damaged, or holds something else than an index does.
        """
        metadata = read_index(self._folder)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def read_index(folder: Path) -> Metadata:
    """Read the index of a checkpoint's tensors: their shapes and dtypes, and where their pieces lie.

    Raises:
        CheckpointError: it is damaged, or holds something else than an index does.
    """
    refusal = f"the checkpoint {folder} cannot be read: its {INDEX} is no index of tensors"
    with (
        foreign(lambda reason: CheckpointError(f"{refusal}: {reason} Copy it again, or use another checkpoint.")),
        open_file(place(folder / INDEX)) as file,
    ):
        return _metadata(_Reader(file).load())


class _StandIn:
    """Inert stand-in for an object of the pickle: holds its state and runs nothing."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        """Take the record's arguments, which nobody reads."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    """Unpickles stand-ins, tuples and dtypes, and refuses every name that no index holds."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        # Fresh classes for each file: a pickle can set attributes of those that it names.
        self._kinds = {key: type(key[1], (_StandIn,), {}) for key in _RECORDS}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._kinds:
            return self._kinds[module, name]
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError(f"it names an object outside of it, {pid!r}")


def _metadata(pickled: Any) -> Metadata:
    state = _state(pickled, "Metadata")
    tensors = {_text(name): _entry(entry) for name, entry in state["state_dict_metadata"].items()}
    places = {_key(key): _place(place) for key, place in state["storage_data"].items()}
    version = state.get("version")
    return Metadata(tensors, storage_data=places, version=None if version is None else _text(version))


def _entry(entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(entry).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    state = _state(entry, "TensorStorageMetadata")
    dtype = _of_kind(state["properties"], "TensorProperties").state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a dtype is {dtype!r}")
    size = _size(state["size"])
    chunks = []
    for chunk in state["chunks"]:
        inner = _state(chunk, "ChunkStorageMetadata")
        offsets, sizes = _size(inner["offsets"]), _size(inner["sizes"])
        within = [start + length <= side for start, length, side in zip(offsets, sizes, size, strict=True)]
        if not all(within):
            raise ValueError(f"a piece of {list(sizes)} at {list(offsets)} lies outside a tensor of {list(size)}")
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    return TensorStorageMetadata(TensorProperties(dtype), size, chunks)


def _key(key: Any) -> MetadataIndex:
    state = _state(key, "MetadataIndex")
    offset, index = state.get("offset"), state.get("index")
    return MetadataIndex(
        _text(state["fqn"]), None if offset is None else _size(offset), None if index is None else _number(index)
    )


def _place(place: Any) -> Any:
    state = _state(place, "_StorageInfo")
    file = _text(state["relative_path"])
    if not _PIECES.fullmatch(file):
        raise ValueError(f"it points into the file {file!r}")
    if state.get("transform_descriptors"):
        raise ValueError(f"{file} is stored as {state['transform_descriptors']!r}")
    return filesystem._StorageInfo(file, _number(state["offset"]), _number(state["length"]))


def _state(record: Any, kind: str) -> dict[str, Any]:
    state = _of_kind(record, kind).state
    if not isinstance(state, dict):
        raise TypeError(f"a {kind} holds {type(state).__name__}")
    return state


def _of_kind(record: Any, kind: str) -> _StandIn:
    if not isinstance(record, _StandIn) or type(record).__name__ != kind:
        raise TypeError(f"{type(record).__name__} is there in place of {kind}")
    return record


def _size(value: Any) -> torch.Size:
    if not isinstance(value, tuple):
        raise TypeError(f"a size is {type(value).__name__}")
    return torch.Size([_number(side) for side in value])


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("a size or place is no whole number of 0 or more")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"a name is {type(value).__name__}")
    return value
