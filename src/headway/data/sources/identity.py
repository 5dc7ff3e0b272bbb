"""Identity of a dataset's files by their content, so that a run goes on with the data that it began with.

A file is known by its name below the dataset's root, its size, its time of change or the tag that its store gives it,
and where it was hashed by the SHA-256 of its content. A hash decides wherever both sides have one; times decide
otherwise. Media that rows name are not looked at, unless they lie within the files themselves (tar, Parquet, Arrow).
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from headway.cache import cache_root, write_whole
from headway.data.samples import Chat, Media, MediaPart, Preference, Sample
from headway.data.sources.files import File
from headway.data.sources.source import Source
from headway.errors import CheckpointError, DataError
from headway.stores import open_url
from headway.words import Argument

Verify = Literal["size-and-time", "hash", "size"]

UNASKED_BYTES = 2**30  # size of a run's local files up to which they are hashed unasked; so many take seconds
_SHA256 = re.compile("[0-9a-f]{64}")
_HASHING_THREADS = 4
_SPOT_BYTES = 512
_MOST_NAMED = 3  # changed files that an error names


class FileIdentity(NamedTuple):
    """Marks by which a file is known again.

    Attributes:
        name: path below the dataset's root.
        num_bytes: size as stored [bytes]; None where the store does not say.
        changed: time of modification [ns], or a remote store's tag of the content.
        sha256: digest of the content as stored; None where it was not computed.
        lengths: digest of the measured lengths of its rows; None without an index.
    """

    name: str
    num_bytes: int | None
    changed: str
    sha256: str | None = None
    lengths: str | None = None


Identities = dict[str, tuple[FileIdentity, ...]]
"""Files by the name of their source."""


def identify(sources: Sequence[Source]) -> Identities:
    """Look up the identity of every file, without reading it."""
    return {
        source.name: tuple(FileIdentity(file.name, file.size, file.changed) for file in _files([source]))
        for source in sources
    }


def with_hashes(files: Identities, sources: Sequence[Source]) -> Identities:
    """Add hashes to identities. A remote file with a tag of its store is known by the tag.

    Raises:
        DataError: a file cannot be read, or changed while it was.
    """
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        digests = {source.name: threads.map(_sha256, _files([source])) for source in sources}
        return {
            name: tuple(file._replace(sha256=digest) for file, digest in zip(of_source, digests[name], strict=True))
            for name, of_source in files.items()
        }


def _files(sources: Sequence[Source]) -> list[File]:
    return [shard.reader.file for source in sources for shard in source.shards]


def is_small(sources: Sequence[Source]) -> bool:
    """Tell whether all files lie on this machine and are hashed in a few seconds."""
    files = _files(sources)
    return all(file.is_local for file in files) and sum(file.size or 0 for file in files) <= UNASKED_BYTES


def changes(before: Identities, now: Identities, verify: Verify, *, times: bool = True) -> list[str]:
    """Describe the files that are not as they were, in a clause each.

    Args:
        before: of the sources when a checkpoint was written.
        now: of the sources that are open; those of other names are not compared.
        verify: "size-and-time" compares names, sizes, and hashes or else times; "hash" the same, of files whose hashes
            were asked for; "size" names and sizes alone.
        times: whether times are compared: those of other machines' copies may differ.
    """
    clauses = []
    for source in sorted(before.keys() & now.keys()):
        old, new = ({file.name: file for file in files[source]} for files in (before, now))
        clauses += [f"{name} of the source {source} is gone" for name in old if name not in new]
        clauses += [f"{name} of the source {source} is new" for name in new if name not in old]
        common = [name for name in old if name in new]
        if common != [name for name in new if name in old]:
            clauses.append(f"the files of the source {source} come in another order")
        for name in common:
            clause = _change(old[name], new[name], verify, times)
            clauses += [f"{name} of the source {source} {clause}"] if clause else []
    return clauses


def _change(old: FileIdentity, new: FileIdentity, verify: Verify, times: bool) -> str | None:
    if None not in (old.num_bytes, new.num_bytes) and old.num_bytes != new.num_bytes:
        return f"has {new.num_bytes:,} bytes and had {old.num_bytes:,}"
    if old.sha256 and new.sha256 and verify != "size":
        same = old.sha256 == new.sha256
        return None if same else f"has other content (SHA-256 {new.sha256[:12]}..., it was {old.sha256[:12]}...)"
    if old.lengths and new.lengths and old.lengths != new.lengths:
        return "holds rows of other lengths, or in another order"
    if verify != "size" and times and old.changed != new.changed:
        return f"was changed: {_moment(new.changed)}, and before {_moment(old.changed)}, at the same size"
    return None


def changes_since(saved: object, now: Identities, verify: Verify, *, times: bool) -> list[str]:
    """Describe the files that changed since a checkpoint, by the identities in the checkpoint.

    Raises:
        CheckpointError: it holds something else.
    """
    try:
        before = {
            source: tuple(FileIdentity(*file) for file in files)
            for source, files in cast("Mapping[str, Sequence[Sequence[Any]]]", saved).items()
        }
        return changes(before, now, verify, times=times)
    except (TypeError, ValueError, AttributeError, OverflowError, OSError) as error:
        raise CheckpointError(
            f"The saved list of data files is damaged ({error!r}). Resume from another checkpoint."
        ) from error


def refusal(clauses: Sequence[str]) -> str:
    """The text of an error about changed files, with the way out."""
    more = f"; and {len(clauses) - _MOST_NAMED} more" if len(clauses) > _MOST_NAMED else ""
    only_times = all(clause.endswith("at the same size") for clause in clauses)
    copied = (
        f" If they were only copied or touched, load the state with {Argument('verify', 'size')}, which "
        "compares names and sizes alone."
        if only_times
        else ""
    )
    return (
        f"The data are not those that the checkpoint was written with: {'; '.join(clauses[:_MOST_NAMED])}{more}. Put "
        f"them back as they were.{copied} Or start a new run from the checkpoint's weights."
    )


def _moment(changed: str) -> str:
    if not changed.isdecimal():
        return f"tagged {changed}" if changed else "without a time"
    return f"{datetime.fromtimestamp(int(changed) / 1e9, UTC):%Y-%m-%d %H:%M:%S.%f} UTC"


def _sha256(file: File) -> str | None:
    """The digest of a file's content as stored, computed once for each state of a local file."""
    if file.has_tag and not file.is_local:
        return None
    try:
        if not file.is_local:
            with open_url(file.url) as stream:
                return hashlib.file_digest(cast("Any", stream), "sha256").hexdigest()
        file.check(Path(file.url).stat())
        digest = content_sha256(Path(file.url))
        file.check(Path(file.url).stat())
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{file.url} cannot be read to its end to be hashed: {reason}. Copy it again.") from error
    return digest


def content_sha256(path: Path) -> str:
    """The SHA-256 of a local file's content, computed once for each state of it.

    Raises:
        OSError: it cannot be read.
    """
    # Under all that tells a rewrite: ctime changes where mtime was set back.
    path = path.resolve()
    status = path.stat()
    state = (str(path), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    digest_file = cache_root() / "hashes" / hashlib.sha256(repr(state).encode()).hexdigest()[:32]
    with suppress(OSError, ValueError):
        if _SHA256.fullmatch(digest := digest_file.read_text("ascii")):
            return digest
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    with suppress(OSError):  # a cache that cannot be written only costs time
        write_whole(digest_file, lambda target: target.write(digest.encode("ascii")))
    return digest


def content_mark(path: Path, full_bytes: int = 2**24, spots: int = 256) -> str:
    """A digest of a local file: of its content, or for a large file, of its size and of spots spread evenly over it.

    Args:
        path: of the file.
        full_bytes: size of the largest file that is read to its end [bytes].
        spots: of 512 bytes that are read of a larger one.

    Raises:
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    digest = hashlib.blake2b(f"{size}".encode(), digest_size=16)
    with path.open("rb") as file:
        if size <= full_bytes:
            digest.update(file.read())
        else:
            for spot in range(spots):
                file.seek(size * spot // spots)
                digest.update(file.read(_SPOT_BYTES))
    return digest.hexdigest()


def media_of(sample: Sample) -> Iterator[Media]:
    """The images, videos and sounds of a row."""
    chats = sample.chats if isinstance(sample, Preference) else (sample,) if isinstance(sample, Chat) else ()
    return (part.media for chat in chats for part in chat.parts if isinstance(part, MediaPart))


def media_files(sample: Sample) -> Iterator[str]:
    """Paths and addresses of the media that a row names; media within the row have none."""
    for medium in chain.from_iterable(item.frames or (item,) for item in media_of(sample)):
        if medium.path is not None:
            yield medium.path


def file_state(file: str) -> tuple[int, ...]:
    """Inode, size and times of change of content and inode [ns] of a local file; nothing of an address on the web.

    Raises:
        OSError: there is no such file.
    """
    if "://" in file:
        return ()
    status = os.stat(file)  # noqa: PTH116 - fast, for each picture
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
