"""A cache of encoded samples beside the length indices, which the processes of one or many runs fill and read at once.

Samples of one encoding lie in a folder named after all that they depend on but their rows: tokenizer, processor,
settings, versions, code. There each process writes blocks of its own (`headway.data.sample_block`), whole or not at
all. An entry is known by its data file and row, and is right as long as the media that it was made of are unchanged.

A run may write as long as all blocks together stay within a size. For room, blocks that were used longest ago go first,
but none that were used since the run began.
"""

import hashlib
import os
import platform
import shutil
import threading
import time
import uuid
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from multiprocessing import parent_process, util
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from headway.cache import cache_root
from headway.data.encoded import EncodedSample
from headway.data.sample_block import VERSION, BlockTable, FileState, entry_of, read_block, read_entry, write_block
from headway.data.samples import Sample
from headway.data.sources.identity import file_state, media_files, media_of
from headway.data.sources.schemas import VERSION as SCHEMAS_VERSION
from headway.data.sources.source import Source
from headway.report import format_bytes

FREE_SHARE = 10
"""Without a size of its own the cache may take one part in so many of the disk's free space."""

_BLOCK_BYTES = 2**24  # size at which a block is written, and about the most that a killed process loses
_FIRST_S, _GROWTH = 0.5, 8  # a smaller block is written once its first sample has waited so long, or a part of the time
_OPEN_BLOCKS = 64  # files kept open, per process; well below the usual limit of 1024
_ABANDONED_S = 3600.0  # age at which a block that was not finished is taken for one of a killed process
_TRIAL_S = 2.0  # reading for so long tells whether it is faster than encoding
_FINE_NS, _COARSE_NS = 50_000_000, 2_000_000_000  # a file that changed within it may change again unseen, by clock
_NAME = "*.samples"


class CacheCounts(NamedTuple):
    """Numbers of samples that a cache had and had not.

    Attributes:
        hits: samples read from it [samples].
        misses: samples that were encoded [samples].
        trouble: the reason for which nothing more is written; empty without.
    """

    hits: int = 0
    misses: int = 0
    trouble: str = ""

    def plus(self, other: "CacheCounts") -> "CacheCounts":
        """The counts of both."""
        return CacheCounts(self.hits + other.hits, self.misses + other.misses, self.trouble or other.trouble)


def samples_root() -> Path:
    """Name the folder of all encoded samples."""
    return cache_root() / "samples"


def folder_of(*parts: object) -> Path:
    """Name the folder of samples of one encoding.

    Args:
        *parts: whatever decides what a row is encoded to, beside the row and this machine's kind of processor.
    """
    machine = (platform.machine(), torch.backends.cpu.get_cpu_capability())  # values may differ in their last bits
    key = "\n".join(map(repr, (VERSION, SCHEMAS_VERSION, machine, *parts)))
    return samples_root() / hashlib.sha256(key.encode()).hexdigest()[:24]


class SampleCache:
    """Reads and writes the encoded samples of some sources; every process that is handed one opens it anew.

    Args:
        sources: the datasets.
        folder: of samples of their encoding.
        most_bytes: size of all encoded samples of this machine; None for a tenth of the disk's free space [bytes].
        with_text: whether samples without media are kept too, which are encoded in about the time that reading takes.
    """

    def __init__(
        self, sources: Sequence[Source], folder: Path, most_bytes: int | None = None, *, with_text: bool = False
    ) -> None:
        self.folder = folder
        self._sources, self._most_bytes, self._with_text = tuple(sources), most_bytes, with_text
        self._opened_ns, self._lock = time.time_ns(), threading.RLock()
        self._num_read = self._num_encoded = 0
        self._trouble = ""
        self._read_s = self._saved_s = 0.0
        # Rows of all data files, one file behind the other; a file of two sources has one place.
        self._first_rows: list[list[int | None]] = []
        self._keys: dict[int, tuple[int, int]] = {}
        rows = 0
        for source in self._sources:
            firsts: list[int | None] = []
            for shard, start, stop in zip(source.shards, source.starts, source.starts[1:], strict=False):
                if not (shard.reader.file.is_local or shard.reader.file.has_tag):
                    firsts.append(None)  # nobody tells when it changes
                    continue
                digest = blake2b(shard.description.encode("utf-8", "surrogatepass"), digest_size=8).digest()
                key = int.from_bytes(digest, "big", signed=True)
                if key not in self._keys:
                    self._keys[key] = rows, stop - start
                    rows += stop - start
                firsts.append(self._keys[key][0])
            self._first_rows.append(firsts)
        self._key_of_row = sorted((first, key) for key, (first, _) in self._keys.items())
        # Place of each row's entry: number of its block times 2**32, and its number there; -1 for nowhere.
        self._places = np.full(rows, -1, dtype=np.int64)
        self._blocks: list[tuple[Path, BlockTable]] = []
        self._known: set[str] = set()
        self._listed_ns = -1
        self._files: OrderedDict[int, int] = OrderedDict()  # descriptors by the blocks' numbers
        # Entries that wait to be written, and kinds of media that were encoded alike twice.
        self._waiting: list[tuple[int, int, bytes]] = []
        self._waiting_since = 0.0
        self._writes, self._reads = True, True
        self._at_exit: util.Finalize | None = None  # flushes in a worker process
        self._same_twice: set[tuple[str, ...]] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(SampleCache, with_text=self._with_text), (self._sources, self.folder, self._most_bytes)

    def __del__(self) -> None:
        for descriptor in getattr(self, "_files", {}).values():
            os.close(descriptor)

    def read(self, source: int, row: int) -> EncodedSample | None:
        """Read an encoded sample; None if it is not there or its media have changed.

        Args:
            source: number of its source.
            row: its place in the source.
        """
        place = self._place(source, row)
        if place is None or not self._reads:
            return None
        start_s = time.perf_counter()
        with self._lock:
            where = self._places.item(place)
            if where < 0:
                return None
            content = self._content(*divmod(where, 2**32))
        shard, inner = self._sources[source].locate(row)
        entry = None if content is None else read_entry(content, self._sources[source].name, shard.name, inner)
        if entry is None or not all(map(_is_unchanged, entry.files)):
            self._places[place] = -1
            return None
        # Reading may be dearer than encoding, as from a disk behind a slow network.
        self._num_read += 1
        self._read_s += time.perf_counter() - start_s
        self._saved_s += entry.encoding_s
        self._reads = self._read_s < max(_TRIAL_S, self._saved_s)
        if not self._reads:
            self._stop(f"reading samples from {self.folder} takes longer than encoding them")
        return entry.sample

    def encoded(
        self, source: int, row: int, sample: Sample, encode: Callable[[Sample], EncodedSample]
    ) -> EncodedSample:
        """Encode a sample, which is written with others later.

        Args:
            source: number of its source.
            row: its place in the source.
            sample: the row.
            encode: encodes it.

        Raises:
            DataError: the sample cannot be encoded.
        """
        place = self._place(source, row)
        states = None if place is None or not self._writes else _states_of(sample)
        start_s = time.perf_counter()
        encoded = encode(sample)
        encoding_s = time.perf_counter() - start_s
        self._num_encoded += 1
        kinds = (*encoded.media, *encoded.processed, *(["latents"] if encoded.latent_images else ()))
        if states is None or place is None or not (kinds or self._with_text) or states != _states_of(sample):
            return encoded
        content = entry_of(encoded, states, encoding_s)
        if content is None:
            return encoded
        # A processor that draws at random, such as one that crops, gives another sample each time.
        if kinds not in self._same_twice:
            self._same_twice.add(kinds)
            if entry_of(encode(sample), states, encoding_s) != content:
                self._stop("the model's processor gives other values each time that it encodes the same sample")
                return encoded
        first, key = self._key_of_row[bisect_right(self._key_of_row, place, key=lambda entry: entry[0]) - 1]
        with self._lock:
            if not self._waiting:
                self._waiting_since = time.monotonic()
                if parent_process() is not None and self._at_exit is None:  # a trainer closes its feeds
                    self._at_exit = util.Finalize(None, self.flush, exitpriority=10)
            self._waiting.append((key, place - first, content))
        return encoded

    def tend(self) -> None:
        """Write what has waited for long enough, and look for what other processes have written."""
        with self._lock:
            waiting_bytes = sum(len(content) for _, _, content in self._waiting)
            now_s, age_s = time.monotonic(), (time.time_ns() - self._opened_ns) / 1e9
            if waiting_bytes >= _BLOCK_BYTES or now_s - self._waiting_since > max(_FIRST_S, age_s / _GROWTH):
                self.flush()
            with suppress(OSError):  # there is no folder yet
                changed_ns = self.folder.stat().st_mtime_ns
                if changed_ns != self._listed_ns:
                    self._listed_ns = changed_ns
                    self._look()

    def flush(self) -> None:
        """Write what waits."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            if not waiting or not self._writes:
                return
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                if not self._has_room(sum(len(content) for _, _, content in waiting)):
                    self._writes = False  # the size says so, which is no trouble
                    return
                write_block(self.folder / f"{time.time_ns():016x}-{uuid.uuid4().hex[:16]}.samples", waiting)
            except OSError as error:
                reason = error.strerror or error
                self._stop(f"encoded samples cannot be written to {self.folder} ({reason}), so they are encoded anew")

    def take_counts(self) -> CacheCounts:
        """Return what was done since the last call."""
        counts = CacheCounts(self._num_read, self._num_encoded, self._trouble)
        self._num_read = self._num_encoded = 0
        return counts

    @property
    def num_bytes(self) -> int:
        """Size of the samples of this encoding [bytes]."""
        return sum(size for _, size, _ in _blocks_below(self.folder.parent, self.folder.name))

    def describe(self, counts: CacheCounts) -> str:
        """A sentence on what the cache did, by the counts of all processes of a run; empty if there was nothing."""
        num_bytes = self.num_bytes
        if not (counts.hits or counts.trouble or num_bytes):
            return ""
        return (
            f"encoded samples: {counts.hits:,} of {counts.hits + counts.misses:,} read from the cache, which holds "
            f"{format_bytes(num_bytes)} of them in {self.folder}{counts.trouble and f'; {counts.trouble}'}"
        )

    def _stop(self, trouble: str) -> None:
        self._writes, self._trouble = False, trouble

    def _place(self, source: int, row: int) -> int | None:
        starts = self._sources[source].starts
        number = bisect_right(starts, row) - 1
        first = self._first_rows[source][number] if 0 <= number < len(starts) - 1 else None
        return None if first is None else first + row - starts[number]

    def _content(self, number: int, entry: int) -> NDArray[np.uint8] | None:
        """The bytes of an entry, read into memory of their own: a file of another machine may go at any time."""
        path, block = self._blocks[number]
        start, stop = block.bounds[entry : entry + 2].tolist()
        try:
            if number not in self._files:
                self._files[number] = os.open(path, os.O_RDONLY)
                if len(self._files) > _OPEN_BLOCKS:
                    os.close(self._files.popitem(last=False)[1])
            self._files.move_to_end(number)
            content = np.empty(stop - start, dtype=np.uint8)
            return content if os.preadv(self._files[number], [content.data], start) == len(content) else None
        except OSError:
            return None

    def _look(self) -> None:
        """Take in the blocks that are new in the folder, in the order in which they were written."""
        keys = np.array(sorted(self._keys), dtype=np.int64)
        if not len(keys):
            return
        firsts, lengths = np.array([self._keys[key] for key in keys.tolist()], dtype=np.int64).T
        for path in sorted(path for path in self.folder.glob(_NAME) if path.name not in self._known):
            self._known.add(path.name)
            try:
                block = read_block(path)
            except OSError:
                continue
            if block is None:
                continue
            file = np.minimum(np.searchsorted(keys, block.keys), len(keys) - 1)
            ours = (keys[file] == block.keys) & (block.rows >= 0) & (block.rows < lengths[file])
            if not ours.any():
                continue
            entries = np.flatnonzero(ours)
            self._places[firsts[file[entries]] + block.rows[entries]] = len(self._blocks) * 2**32 + entries
            self._blocks.append((path, block))
            with suppress(OSError):  # marks its use, for those who need room
                os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))

    def _has_room(self, num_bytes: int) -> bool:
        """Tell whether so many bytes more may be written, if need be in place of blocks not used in this run."""
        blocks = sorted(_blocks_below(samples_root()), key=lambda block: block[2])
        used = sum(size for _, size, _ in blocks)
        most = self._most_bytes
        if most is None:
            most = (shutil.disk_usage(self.folder).free + used) // FREE_SHARE
        for path, size, used_ns in blocks:
            if used + num_bytes <= most or used_ns >= self._opened_ns:
                break
            with suppress(OSError):
                path.unlink()
                used -= size
        return used + num_bytes <= most


def _blocks_below(root: Path, folder: str = "*") -> Iterator[tuple[Path, int, int]]:
    """Blocks with their sizes and when they were last used [ns]; what killed processes left is removed."""
    for path in root.glob(f"{folder}/*"):
        with suppress(OSError):
            status = path.stat()
            if path.name.startswith(".") and time.time() - status.st_mtime > _ABANDONED_S:
                path.unlink()
            else:
                yield path, status.st_size, status.st_atime_ns


def _states_of(sample: Sample) -> tuple[FileState, ...] | None:
    """States of the files that a sample names, by which a change is seen; None where it may go unseen."""
    files = dict.fromkeys(media_files(sample))
    for frame in (item.frames[0] for item in media_of(sample) if item.frames):
        if frame.path is not None and "://" not in frame.path:  # a folder of frames, to which one may be added
            files[str(Path(frame.path).parent)] = None
    try:
        states = tuple((file, file_state(file)) for file in files)
    except (OSError, ValueError):  # told by who decodes it
        return None
    now_ns = time.time_ns()
    for _, state in states:
        # A clock of whole seconds does not tell a file from one that is written over it in the same second.
        if not state or now_ns - state[-1] < (_FINE_NS if state[-1] % 1_000_000_000 else _COARSE_NS):
            return None
    return states


def _is_unchanged(file: FileState) -> bool:
    try:
        path, state = file
        return state == file_state(path)
    except (OSError, ValueError):
        return False
