"""Save checkpoints while training goes on: copy to the host, then write, hash, seal and publish in the background.

One checkpoint is in flight at a time. The processes agree after every stage over a group of their own, so that one
whose disk is full fails the checkpoint for all of them, and none waits for another in a collective of the training.
"""

import hashlib
import io
import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as FsspecFiles
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from headway.checkpoint.folder import (
    BEST,
    INDEX,
    MODEL,
    POSITION,
    SKIPPED,
    Checkpoint,
    Entry,
    begin,
    entries,
    is_remote,
    open_checkpoint,
    publish,
    rank_file,
    seal,
    step_folder,
)
from headway.checkpoint.state import HostCopies
from headway.errors import CheckpointError, RankLostError, first_line
from headway.files import write_failure
from headway.models.parallel.ranks import Ranks
from headway.stores import place, send, shown, url_of

T = TypeVar("T")
_WRITES = "checkpoint to "  # begins the names of threads that write one
_SLOWEST_WRITE = timedelta(hours=2)  # until the slowest process has written its part


@dataclass(frozen=True)
class Contents:
    """Contents of a checkpoint, on this process.

    Attributes:
        tensors: `training_tensors`, the live ones.
        random: `random_state` of this process.
        position: the place in the data, of all processes together, and what the run has behind it.
        mesh: how the processes share the work, by axis [processes].
        write_model: writes config and processor to a folder.
    """

    tensors: dict[str, torch.Tensor]
    random: dict[str, Any]
    position: dict[str, Any]
    mesh: dict[str, int]
    write_model: Callable[[Path], None]


def writers(root: Path | None = None) -> list[threading.Thread]:
    """The threads of this process that are writing a checkpoint below a root, or anywhere, as after an interrupt."""
    alive = threading.enumerate()
    if root is None:
        return [thread for thread in alive if thread.name.startswith(_WRITES)]
    return [thread for thread in alive if thread.name == _thread_name(root)]


class StoreWriter(FsspecWriter):
    """PyTorch's writer to a URL, which describes each file as it passes: nothing is read again from the store.

    Args:
        folder: of the checkpoint, behind a URL.
    """

    def __init__(self, folder: Path) -> None:
        url = url_of(folder)
        assert url is not None
        super().__init__(url, sync_files=False)
        self.entries: dict[str, Entry] = {}
        self.fs: Any = _HashingFiles(self.entries)
        self.path = self.fs.init_path(url)


class _HashingFiles(FsspecFiles):
    def __init__(self, entries: dict[str, Entry]) -> None:
        super().__init__()
        self._entries = entries

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            hashed = _HashingStream(stream)
            yield hashed
        self._entries[PurePath(path).name] = Entry(hashed.num_bytes, hashed.sha256.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self._entries[PurePath(new_path).name] = self._entries.pop(PurePath(path).name)


class _HashingStream(io.RawIOBase):
    def __init__(self, stream: Any) -> None:
        self._stream, self.num_bytes, self.sha256 = stream, 0, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        self._stream.write(view)
        self.sha256.update(view)
        self.num_bytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self.num_bytes


class CheckpointSaver:
    """Writes the checkpoints of a run, all processes together. All of them must make one, and call it alike.

    Args:
        root: folder of all checkpoints of the run.
        ranks: the processes.
        keep: newest checkpoints that stay [checkpoints].
        keep_best: whether that of the best evaluation, which the position names, stays besides.
        asynchronous: whether training goes on while the files are written.
        export: what the first process does with each whole checkpoint, in the background too; None for nothing.
        before_manifest: what the first process does before a checkpoint is whole, as to send the records up to it.
    """

    def __init__(
        self,
        root: Path,
        ranks: Ranks,
        *,
        keep: int,
        keep_best: bool = False,
        asynchronous: bool = True,
        export: Callable[[Checkpoint], object] | None = None,
        before_manifest: Callable[[], None] | None = None,
    ) -> None:
        self._before_manifest = before_manifest
        self._root, self._ranks, self._export = root, ranks, export
        self._keep, self._keep_best = keep, keep_best
        self._group = dist.new_group(backend="gloo", timeout=_SLOWEST_WRITE) if ranks.size > 1 else None
        self._asynchronous = asynchronous
        self._copies = HostCopies()  # the checkpoint before is written when the next one is copied
        self._in_flight: futures.Future[Checkpoint] | None = None
        self._writer: threading.Thread | None = None  # thread that writes the checkpoint in flight
        self._last: Checkpoint | None = None

    def save(self, step: int, contents: Contents, *, goes_on: bool = True) -> None:
        """Begin to write the checkpoint of a step; wait for the one before, and for this one if not asynchronous.

        Args:
            step: its number.
            contents: of the checkpoint.
            goes_on: whether training goes on and changes the tensors, which are then copied first.

        Raises:
            CheckpointError: the one before could not be written, or this one.
        """
        self._settle()
        # Said of every save of a lone process; filters belong to the process, so the other thread is not to touch them.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        if self._asynchronous and goes_on:
            contents = replace(contents, tensors=self._copies.take(contents.tensors))
        self._in_flight = futures.Future()
        # A process that has lost the others must be able to end without waiting for what it writes with them.
        arguments = self._in_flight, step, contents
        self._writer = threading.Thread(
            target=self._write_for, args=arguments, name=_thread_name(self._root), daemon=True
        )
        self._writer.start()
        if not self._asynchronous:
            self._settle()

    @property
    def has_failed(self) -> bool:
        """True if the checkpoint in flight could not be written; `wait` says why."""
        done = self._in_flight is not None and self._in_flight.done()
        return done and self._in_flight is not None and self._in_flight.exception() is not None

    def finished(self, *, wait: bool) -> list[Checkpoint]:
        """The checkpoint that was in flight, once, if it has become whole since the last call.

        Args:
            wait: until it is, as where another process has seen it fail.

        Raises:
            CheckpointError: it could not be written, and `wait` is set.
        """
        if self._in_flight is None or not (wait or self._in_flight.done()) or (self.has_failed and not wait):
            return []
        return [self.wait()]

    def wait(self) -> Checkpoint:
        """Wait for the checkpoint in flight, if there is one; the last whole one.

        Raises:
            CheckpointError: it could not be written.
        """
        self._settle()
        assert self._last is not None  # something was saved
        return self._last

    def _settle(self) -> None:
        if self._in_flight is not None:
            in_flight, self._in_flight = self._in_flight, None
            self._join_writer()
            self._last = in_flight.result()

    def _join_writer(self) -> None:
        """Wait for the end of the thread that writes, by which it has freed the checkpoint's tensors.

        A process aborts (-6) if the interpreter ends while another thread frees tensors.
        """
        assert self._writer is not None  # something is in flight
        self._writer.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the checkpoint in flight be finished; an error of its own is told where no other one is on its way.

        Nothing is waited for without the other processes, or when the user interrupts; `writers` are those then left.
        """
        if error is None:
            self._settle()
        elif self._in_flight is not None and isinstance(error, Exception) and not isinstance(error, RankLostError):
            self._join_writer()

    def _write_for(self, waiting: futures.Future[Checkpoint], step: int, contents: Contents) -> None:
        try:
            waiting.set_result(self._write(step, contents))
        except BaseException as error:  # noqa: BLE001 - told to who waits
            waiting.set_exception(error)

    def _write(self, step: int, contents: Contents) -> Checkpoint:
        folder = step_folder(self._root, step)
        temporary = folder.with_name(f".{folder.name}.writing")
        try:
            self._agree(lambda: begin(self._root, step) if self._ranks.is_first else None)
            # files here are flushed when they are hashed
            remote = StoreWriter(place(folder)) if is_remote(folder) else None
            writer = remote or FileSystemWriter(temporary, sync_files=False)
            try:
                save(contents.tensors, storage_writer=writer, process_group=self._group, no_dist=self._group is None)
            except CheckpointException as error:  # on all processes, of which those that failed know why
                self._agree(partial(_raise_any, error.failures.get(self._ranks.rank)))
                raise
            sent = remote.entries if remote is not None else {}
            described = self._agree(lambda: self._write_the_rest(step, temporary, contents, sent))
            facts = {"step": step, "world_size": self._ranks.size, "mesh": contents.mesh}
            files = {name: entry for part in described for name, entry in part.items()}
            best = (contents.position.get(BEST) or {}).get("step") if self._keep_best else None
            self._agree(lambda: self._publish(temporary, folder, facts, files, best))
        except (Exception, CheckpointException) as error:
            reason = _reason(error, temporary)  # asked before there is room again
            if self._ranks.is_first:
                shutil.rmtree(temporary, ignore_errors=True)  # a full disk needs the room
            raise CheckpointError(
                f"cannot write the checkpoint of step {step} to {shown(self._root)}: {reason}. Earlier checkpoints "
                "are untouched. Make room, or give another run.folder."
            ) from error
        checkpoint = open_checkpoint(folder)
        export = self._export
        if export is not None and not contents.position.get(SKIPPED):  # a skipped step leaves the weights as before
            self._agree(lambda: export(checkpoint) if self._ranks.is_first else None)
        return checkpoint

    def _write_the_rest(
        self, step: int, temporary: Path, contents: Contents, sent: dict[str, Entry]
    ) -> dict[str, Entry]:
        """Write the files other than tensors, and describe every file that this process wrote or sent."""
        rank = self._ranks.rank
        temporary.mkdir(parents=True, exist_ok=True)  # on a machine of its own, where the store is all that is shared
        own = temporary / rank_file(rank)
        torch.save(contents.random, own)
        written = [own, *temporary.glob(f"__{rank}_*")]
        if self._ranks.is_first:
            (temporary / POSITION).write_text(json.dumps(contents.position), encoding="utf-8")
            (temporary / MODEL).mkdir()
            contents.write_model(temporary / MODEL)
            written += [temporary / POSITION, *([] if sent else [temporary / INDEX])]
            written += [path for path in (temporary / MODEL).rglob("*") if path.is_file()]
        elif sent:
            send(temporary, place(step_folder(self._root, step)), [own.name])
        return entries(temporary, written) | sent

    def _publish(
        self, temporary: Path, folder: Path, facts: dict[str, Any], files: dict[str, Entry], best: int | None
    ) -> None:
        if self._ranks.is_first:
            if self._before_manifest is not None:
                self._before_manifest()
            seal(temporary, facts, files)
            publish(temporary, folder, self._keep, best)

    def _agree(self, stage: Callable[[], T]) -> list[T]:
        """Do a stage on every process, and go on only if all have done it: what each gave, in order."""
        if self._group is None:
            return [stage()]
        outcome: tuple[T | None, str | None]
        try:
            outcome = stage(), None
        except Exception as error:  # noqa: BLE001 - raised below, on all processes
            outcome = None, _reason(error, self._root)
        outcomes: list[Any] = [None] * self._ranks.size
        dist.all_gather_object(outcomes, outcome, group=self._group)
        for rank, (_, reason) in enumerate(outcomes):
            if reason is not None:
                raise CheckpointError(f"{reason} (rank {rank})")
        return [value for value, _ in outcomes]


def _thread_name(root: Path) -> str:
    return f"{_WRITES}{root.resolve()}"


def _raise_any(failure: tuple[BaseException, Any] | None) -> None:
    if failure is not None:
        raise failure[0]


def _reason(error: BaseException, folder: Path) -> str:
    if isinstance(error, CheckpointError):  # another process may have said so
        return first_line(error)
    return write_failure(error, folder) or first_line(error)
