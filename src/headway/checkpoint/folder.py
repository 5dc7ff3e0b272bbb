"""Checkpoints on disk: a folder named after its step, with a manifest of every file in it.

A checkpoint is written to a hidden sibling folder, flushed to disk and renamed, so a folder named `step-...` is whole
or absent. Its `manifest.json`, written last, lists every file with its size and checksum; opening checks them.
"""

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headway import stores
from headway.errors import CheckpointError
from headway.log.run_files import MANIFEST
from headway.stores import place, size_of, url_of

POSITION, MODEL, INDEX = "position.json", "model", ".metadata"
# Keys of position.json besides the place in the data.
SKIPPED, CHAIN, RESUMES = "skipped_in_a_row", "samples_chain", "resumes"
BEST = "best_evaluation"
OBJECTIVE = "objective_digest"  # digest of the file with a user's own objective
_LAST = (MANIFEST, "config.json", "adapter_config.json")  # files sent last: of a checkpoint, a model, adapters
SCHEMA_VERSION = 2
_STEP_FOLDER = re.compile(r"step-(\d{6,18})")
_PIECE_BYTES = 2**20
_SHA256 = re.compile("[0-9a-f]{64}")


class Entry(NamedTuple):
    """A file as it was written: its size [bytes] and checksum."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest has been read.

    Attributes:
        folder: where it is.
        step: optimizer steps taken [steps].
        world_size: processes that wrote it.
        mesh: how they shared the work, by axis [processes].
        files: every file, by its path in the folder.
    """

    folder: Path
    step: int
    world_size: int
    mesh: dict[str, int]
    files: dict[str, Entry]

    @property
    def model_folder(self) -> Path:
        """Config, generation config and processor; no weights."""
        return self.folder / MODEL

    def position(self) -> dict[str, Any]:
        """The place in the data, of all processes together.

        Raises:
            CheckpointError: it cannot be read.
        """
        try:
            position = json.loads((self.folder / POSITION).read_text(encoding="utf-8"))
            if not isinstance(position, dict):
                raise TypeError("no JSON object")
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(f"the checkpoint {self.folder} is damaged: {POSITION} cannot be read.") from error
        return position

    def random_state(self, rank: int) -> dict[str, Any]:
        """State of a process's random generators; another process's where fewer wrote the checkpoint.

        Raises:
            CheckpointError: they cannot be read.
        """
        path = self.folder / rank_file(rank % self.world_size)
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"the checkpoint {self.folder} is damaged: {path.name} cannot be read.") from error
        return state

    def check(self, rank: int = 0, world_size: int = 1) -> None:
        """Check this process's share of the files against the manifest: all processes together check every file.

        Raises:
            CheckpointError: a file is missing, cut short or changed, or there is a link among them.
        """
        if rank == 0:
            self.refuse_links()
        for name, entry in list(self.files.items())[rank::world_size]:
            path = place(self.folder / name)
            size = size_of(path)
            if size is None:
                raise CheckpointError(f"the checkpoint {self.folder} is damaged: {name} is missing.")
            if size != entry.bytes:
                raise CheckpointError(
                    f"the checkpoint {self.folder} is damaged: {name} has {size} of {entry.bytes} bytes."
                )
            if _sha256(path) != entry.sha256:
                raise CheckpointError(f"the checkpoint {self.folder} is damaged: the contents of {name} have changed.")

    def refuse_links(self) -> None:
        """Refuse links, which could lead anywhere.

        Raises:
            CheckpointError: the folder holds one.
        """
        for path in self.folder.rglob("*"):
            if path.is_symlink():
                raise CheckpointError(
                    f"the checkpoint {self.folder} holds a link, {path.relative_to(self.folder)}, but Headway writes "
                    "no links. Replace the link by the file itself."
                )


def step_folder(root: Path, step: int) -> Path:
    """Folder of a step's checkpoint."""
    return root / f"step-{step:06d}"


def is_remote(path: Path) -> bool:
    """Tell whether a folder here stands for one behind a URL, where the large files are."""
    return url_of(place(path)) is not None


def rank_file(rank: int) -> str:
    """Name of the file with a process's random generators."""
    return f"rank-{rank:05d}.pt"


def set_aside(folders: Iterable[Path]) -> None:
    """Rename damaged checkpoints, so that they are none any more."""
    for folder in folders:
        aside = folder.with_name(f"damaged-{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        if is_remote(folder):
            stores.rename(place(folder), place(aside))


def clear_unfinished(root: Path) -> None:
    """Delete folders that a killed process was writing or deleting; only the owner of the run folder may.

    Args:
        root: of the run's checkpoints, or of its exports.
    """
    for unfinished in root.glob(".step-*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    for folder in step_folders(place(root)) if is_remote(root) else ():
        if not any(stores.exists(folder / name) for name in _LAST):
            stores.remove(folder)


def latest_checkpoint(root: Path) -> Checkpoint | None:
    """The newest checkpoint of a run, its manifest read; None where there is none.

    Raises:
        CheckpointError: the newest has no readable manifest; the message names the newest good one.
    """
    folders = step_folders(root)
    if not folders:
        return None
    try:
        return open_checkpoint(folders[-1])
    except CheckpointError as error:
        raise with_way_out(error, folders[-1]) from error


def best_checkpoint(root: Path) -> Checkpoint | None:
    """The checkpoint after the best evaluation of a run, as its newest one names it; None where it was not kept.

    Raises:
        CheckpointError: the newest one or the best one has no readable manifest.
    """
    newest = latest_checkpoint(root)
    best = newest.position().get(BEST) if newest is not None else None
    step = best.get("step") if isinstance(best, dict) else None
    if not isinstance(step, int) or not _is_count(step, 0):
        return None
    folder = step_folder(root, step)
    return open_checkpoint(folder) if folder.is_dir() else None


def with_way_out(error: CheckpointError, damaged: Path) -> CheckpointError:
    """Explain the fault of the newest checkpoint, and name the newest whole one before it."""
    folders = step_folders(damaged.parent)
    for earlier in reversed(folders[: folders.index(damaged)]):
        try:
            open_checkpoint(earlier).check()
        except CheckpointError:
            continue
        return CheckpointError(
            f"{error} The newest complete checkpoint before it is {earlier}. Delete {damaged} to resume from there."
        )
    return CheckpointError(
        f"{error} There is no complete checkpoint before it. Start the run again from the beginning."
    )


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint's manifest; `check` then compares the files with it.

    Raises:
        CheckpointError: no manifest, one that cannot be read or makes no sense, or one of another version.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        # other versions have other keys, so the version comes first
        version = manifest["schema_version"]
        if version != SCHEMA_VERSION:
            raise CheckpointError(
                f"the checkpoint {folder} has version {version}, but this Headway reads version {SCHEMA_VERSION}."
            )
        checkpoint = Checkpoint(
            folder,
            manifest["step"],
            manifest["world_size"],
            dict(manifest["mesh"]),
            {name: Entry(**entry) for name, entry in manifest["files"].items()},
        )
        # well-formed, but of no checkpoint that could be
        nonsense = _nonsense(checkpoint)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"the checkpoint {folder} was written or copied only in part, because it has no {MANIFEST}."
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint {folder} is damaged: its {MANIFEST} cannot be read.") from error
    if nonsense:
        raise CheckpointError(f"the checkpoint {folder} is damaged: its {MANIFEST} {nonsense}.")
    return checkpoint


def _nonsense(checkpoint: Checkpoint) -> str:
    """Name an impossible value in a manifest; the manifest itself has no checksum."""
    step, world_size, files = checkpoint.step, checkpoint.world_size, checkpoint.files
    if not _is_count(step, 0):
        return f"gives the step {step!r}"
    number = _STEP_FOLDER.fullmatch(checkpoint.folder.name)
    if number and int(number[1]) != step:
        return f"gives the step {step}, and the folder's name another"
    if not _is_count(world_size, 1) or not all(_is_count(size, 1) for size in checkpoint.mesh.values()):
        return f"gives {world_size!r} processes as {checkpoint.mesh}"
    for name, entry in files.items():
        if not _is_inside(name) or not _is_count(entry.bytes, 0) or not _SHA256.fullmatch(str(entry.sha256)):
            return f"lists {name!r} with {entry.bytes!r} bytes and the checksum {entry.sha256!r}"
    if world_size > len(files):
        return f"lists {len(files)} files of {world_size} processes"
    missing = [name for name in (INDEX, POSITION, *map(rank_file, range(world_size))) if name not in files]
    return f"does not list {missing[0]}" if missing else ""


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < 2**63  # True is no count


def _is_inside(name: str) -> bool:
    return bool(name) and not {"", ".", ".."} & set(name.split("/")) and "\\" not in name and "\0" not in name


def refuse_half_written(folder: Path) -> None:
    """Refuse a model folder that is a checkpoint of ours, whole or not; other folders pass.

    Raises:
        CheckpointError: the folder is named or made like a checkpoint.
    """
    if not folder.is_dir() or (folder / "config.json").is_file():
        return
    if (folder / MANIFEST).exists() or _STEP_FOLDER.fullmatch(folder.name.removeprefix(".").removesuffix(".writing")):
        open_checkpoint(folder)
        raise CheckpointError(
            f"{folder} is a checkpoint in pieces and no model folder. Write a model folder with `headway export "
            f"{folder} FOLDER`, or continue the run with `headway train --resume`."
        )


def begin(root: Path, step: int) -> Path:
    """Make the hidden folder that a checkpoint is written to, empty."""
    temporary = root / f".{step_folder(root, step).name}.writing"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    if is_remote(root):  # a store has no renaming: the manifest makes it whole
        stores.remove(place(step_folder(root, step)), MANIFEST)
    return temporary


def entries(folder: Path, paths: Iterable[Path]) -> dict[str, Entry]:
    """Flush files to disk, and give their sizes and hashes."""
    entries_by_name = {}
    for path in sorted(paths):
        entries_by_name[path.relative_to(folder).as_posix()] = Entry(path.stat().st_size, _sha256(path))
        sync(path)
    return entries_by_name


def seal(temporary: Path, facts: dict[str, Any], files: dict[str, Entry]) -> None:
    """Write the manifest, last of all."""
    listed = {name: entry._asdict() for name, entry in sorted(files.items())}
    manifest = {"schema_version": SCHEMA_VERSION, **facts, "files": listed}
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    sync(temporary / MANIFEST)
    for folder in {temporary, *((temporary / name).parent for name in files)}:
        sync(folder)


def publish(temporary: Path, folder: Path, keep: int, best: int | None = None) -> None:
    """Give a sealed checkpoint its name, then delete the oldest beyond `keep`.

    The newest one before a row of left-out updates stays too: a run whose model is lost is to leave one to go back to.

    Args:
        temporary: where it was written.
        folder: its name.
        keep: newest ones that stay [checkpoints].
        best: step of another one that stays.
    """
    root = folder.parent
    if is_remote(folder):
        names = [path.relative_to(temporary).as_posix() for path in temporary.rglob("*") if path.is_file()]
        stores.send(temporary, place(folder), names, last=MANIFEST)
    if folder.exists():  # left by a run that was resumed from before it
        _remove_here(folder)
    temporary.rename(folder)
    sync(root)
    folders = step_folders(root)
    sound = next((path for path in reversed(folders) if not _skipped_in_a_row(path)), None)
    spared = (sound, None if best is None else step_folder(root, best))
    for old in folders[:-keep]:
        if old not in spared:
            remove_checkpoint(old)


def _skipped_in_a_row(folder: Path) -> int:
    try:
        return int(open_checkpoint(folder).position().get(SKIPPED, 0))
    except (CheckpointError, OSError, ValueError):
        return 1


def step_folders(root: Path) -> list[Path]:
    """The folders of whole checkpoints, oldest first."""
    folders = [path for path in stores.folders_in(root) if _STEP_FOLDER.fullmatch(path.name)]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step-")))


def remove_checkpoint(folder: Path) -> None:
    """Delete a checkpoint without ever leaving half of it under its own name."""
    if is_remote(folder):
        stores.remove(place(folder), MANIFEST)
    _remove_here(folder)


def _remove_here(folder: Path) -> None:
    doomed = folder.with_name(f".{folder.name}.deleting")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with stores.store_errors(path), stores.open_file(path) as file:
        digest = hashlib.sha256()
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
        return digest.hexdigest()
