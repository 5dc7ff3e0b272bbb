"""Length indices made before, found without the model's libraries, because their import takes seconds.

An index is kept under a key of the source and of the encoder's fingerprint, which only the tokenizer and processor
themselves can tell. So beside the indices lies, under a digest of everything that an encoder is made from, the
fingerprint that it had: the files' bytes, the libraries' versions, Headway's own code. Whatever changes, changes the
digest, and then the encoder is opened as the first time.
"""

import hashlib
import importlib.util
from contextlib import suppress
from http.client import HTTPException
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np

from headway.cache import cache_root, write_whole
from headway.data.bad_rows import BadSamples, SampleCounts
from headway.data.index.length_index import LengthIndex
from headway.data.index.table import LAYOUT
from headway.data.sources import Source, schemas
from headway.errors import HeadwayError
from headway.hub import CONFIG, cached_folder, endpoint, located
from headway.version import code_digest, library_versions

INDEX_FILE = "index.parquet"

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_READ_BYTES = 2**28  # most bytes of a file that are read; a larger file holds no settings, and is told by size and time
_MOST_FILES = 2000  # most files of a model folder
_HUB_S = 2.0  # for the Hub to say which commit is the newest [s]


def folder_of(source: Source, encoder_fingerprint: str, cache: Path | None = None) -> Path:
    """Name the folder of an index, whether it exists or not.

    Args:
        source: the rows.
        encoder_fingerprint: `Encoder.fingerprint()` of the encoder that measures them.
        cache: folder of all indices; `index` in Headway's cache if None.
    """
    parts = [str(LAYOUT), str(schemas.VERSION), source.fingerprint(), encoder_fingerprint]
    return _home(cache) / hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def stored_index(source: Source, encoder_fingerprint: str, cache: Path | None = None) -> LengthIndex | None:
    """The finished index of a source; None if it was not made yet."""
    file = folder_of(source, encoder_fingerprint, cache) / INDEX_FILE
    return LengthIndex.load(file, source=source.name) if file.exists() else None


def count_rows(index: LengthIndex, name: str, policy: BadSamples, counts: SampleCounts) -> None:
    """Add an index's rows to the counts of all sources, and treat bad rows by the policy.

    Raises:
        DataError: rows that cannot be used, by the policy.
    """
    counts.count(name, "read", len(index), int(index.tokens.sum(dtype=np.int64)))
    if empty := int(index.empty.sum()):
        counts.count(name, "dropped", empty)
    for error in index.bad.values():
        policy.handle(error, counts)


class KnownEncoder:
    """Files that an encoder was made from, and its last fingerprint, if they are still the same.

    Args:
        model: the model folder or Hub id.
        settings: the encoder's other arguments.
        cache: folder of all indices; `index` in Headway's cache if None.
    """

    def __init__(self, model: str, settings: dict[str, Any], cache: Path | None = None) -> None:
        self._model, self._settings, self._cache = model, settings, cache
        self._digest = _digest(model, settings)

    @property
    def fingerprint(self) -> str | None:
        """`Encoder.fingerprint()` as it was; None if it is not known and the encoder must be opened."""
        if self._digest is None:
            return None
        try:
            return self._file(self._digest).read_text("ascii")
        except (OSError, ValueError):
            return None

    def remember(self, fingerprint: str) -> None:
        """Keep the fingerprint of the encoder that has been opened, unless its files changed meanwhile."""
        if self._digest is not None and self._digest == _digest(self._model, self._settings):
            with suppress(OSError):  # a cache that cannot be written only costs time
                write_whole(self._file(self._digest), lambda file: file.write(fingerprint.encode("ascii")))

    def _file(self, digest: str) -> Path:
        return _home(self._cache) / "encoders" / digest


def _home(cache: Path | None) -> Path:
    return cache if cache is not None else cache_root() / "index"


def _digest(model: str, settings: dict[str, Any]) -> str | None:
    """Digest of all that an encoder is made from; None where that cannot be told without opening it."""
    folder = _folder(model)
    if folder is None or (folder / "adapter_config.json").exists():  # an adapter's base model lies elsewhere
        return None
    # Versions and settings of what tokenises and measures.
    parts = [repr(sorted(settings.items())), repr(library_versions()), code_digest("data", "models")]
    digest = hashlib.sha256("\n".join(parts).encode())
    spec = importlib.util.find_spec("transformers")  # for those who change it without a new version; by size and time
    if spec is not None and spec.origin:
        status = Path(spec.origin).stat()
        digest.update(f"{spec.origin} {status.st_size} {status.st_mtime_ns}\n".encode())
    # The model's folder without its weights: small files by content, large ones by their time.
    try:
        files = list(islice(folder.rglob("*"), _MOST_FILES + 1))
        if len(files) > _MOST_FILES:
            return None
        for file in sorted(files):
            if file.is_file() and file.suffix not in _WEIGHTS:
                status = file.stat()
                digest.update(f"{file.relative_to(folder)} {status.st_size}\n".encode())
                large = status.st_size > _READ_BYTES
                digest.update(str(status.st_mtime_ns).encode() if large else file.read_bytes())
    except OSError:  # the folder is being written, or not ours to read
        return None
    return digest.hexdigest()


def _folder(model: str) -> Path | None:
    """The folder whose files make the encoder; None for a Hub model whose copy here may not be the newest."""
    try:
        path = Path(located(model))
    except HeadwayError:
        return None
    if path.exists():
        return path if path.is_dir() else path.parent
    copy = cached_folder(model)
    return copy if copy is not None and copy.name == _newest_commit(model) else None


def _newest_commit(model: str) -> str | None:
    """The commit that the Hub would give now; None if it does not say so at once."""
    from huggingface_hub import get_token

    token = get_token()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    request = Request(f"{endpoint()}/{model}/resolve/main/{CONFIG}", method="HEAD", headers=headers)
    try:
        with urlopen(request, timeout=_HUB_S) as answer:
            commit: str | None = answer.headers["x-repo-commit"]
    except (OSError, HTTPException):  # whatever it was, the encoder is opened and says it
        return None
    return commit
