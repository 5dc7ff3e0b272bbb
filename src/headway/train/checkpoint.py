"""Checkpoints: the model as an ordinary Hugging Face folder, and beside it all that an exact continuation needs.

A checkpoint is written to a hidden sibling folder, flushed to disk and renamed, so a folder named `step-...` is whole
or absent. Its `manifest.json`, written last, lists every file with its size and checksum; loading checks them.

    checkpoints/step-000400/
        config.json, model.safetensors, tokenizer ...   what `from_pretrained` opens
        training_state.pt                               optimizer, random states, data position, totals
        manifest.json                                   step, files with bytes and sha256
"""

import hashlib
import json
import os
import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway.errors import CheckpointError

MANIFEST = "manifest.json"
STATE = "training_state.pt"
SCHEMA_VERSION = 1
_STEP_FOLDER = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found whole."""

    folder: Path
    step: int

    def state(self) -> dict[str, Any]:
        """Optimizer, random states, data position and totals, on the CPU."""
        state: dict[str, Any] = torch.load(self.folder / STATE, map_location="cpu", weights_only=True)
        return state


def save_checkpoint(
    root: Path,
    step: int,
    *,
    model: Any,
    weights: dict[str, Any] | None = None,
    processor: Any,
    state: dict[str, Any],
    keep: int,
) -> Checkpoint:
    """Write the checkpoint of a step, whole or not at all, then delete the oldest beyond `keep`.

    Args:
        root: folder of all checkpoints of the run.
        step: optimizer steps taken [steps].
        model: saved with its `save_pretrained`.
        weights: its whole parameters by name, where the model holds slices of them.
        processor: processor or tokenizer, saved beside the model.
        state: tensors and plain types, for `Checkpoint.state`.
        keep: newest checkpoints that stay [checkpoints].

    Raises:
        CheckpointError: the disk refuses.
    """
    folder = root / f"step-{step:06d}"
    temporary = root / f".{folder.name}.writing"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        model.save_pretrained(temporary, **({} if weights is None else {"state_dict": weights}))
        processor.save_pretrained(temporary)
        torch.save(state, temporary / STATE)
        _seal(temporary, step)
        if folder.exists():  # left by a run that was resumed from before it
            _remove(folder)
        temporary.rename(folder)
        _sync(root)
        for old in _step_folders(root)[:-keep]:
            _remove(old)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the checkpoint of step {step} to {root}: {error.strerror or error}. "
            "Make room or give another run.folder; earlier checkpoints are untouched."
        ) from error
    return Checkpoint(folder, step)


def latest_checkpoint(root: Path) -> Checkpoint | None:
    """The newest checkpoint of a run, checked; None where there is none. Unfinished writes are cleared away.

    Raises:
        CheckpointError: the newest is damaged; the message names the newest good one.
    """
    for unfinished in root.glob(".step-*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    folders = _step_folders(root)
    if not folders:
        return None
    try:
        return open_checkpoint(folders[-1])
    except CheckpointError as error:
        for earlier in reversed(folders[:-1]):
            try:
                good = open_checkpoint(earlier)
            except CheckpointError:
                continue
            raise CheckpointError(
                f"{error} The newest whole checkpoint before it is {good.folder}; "
                f"delete {folders[-1]} to resume from there."
            ) from error
        raise CheckpointError(f"{error} There is no whole checkpoint before it; start the run anew.") from error


def open_checkpoint(folder: Path) -> Checkpoint:
    """Check that a checkpoint is whole: every file there, with the size and checksum it was written with.

    Raises:
        CheckpointError: the manifest or a file is missing, cut short or changed.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version, step, files = manifest["schema_version"], int(manifest["step"]), dict(manifest["files"])
    except FileNotFoundError as error:
        raise CheckpointError(
            f"the checkpoint {folder} is half written or copied in part: it has no {MANIFEST}."
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the checkpoint {folder} is damaged: its {MANIFEST} cannot be read.") from error
    if version != SCHEMA_VERSION:
        raise CheckpointError(f"the checkpoint {folder} has version {version}; this headway reads {SCHEMA_VERSION}.")
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"the checkpoint {folder} is damaged: {name} is missing.")
        if path.stat().st_size != entry["bytes"]:
            raise CheckpointError(
                f"the checkpoint {folder} is damaged: {name} has {path.stat().st_size} of {entry['bytes']} bytes."
            )
        if _sha256(path) != entry["sha256"]:
            raise CheckpointError(f"the checkpoint {folder} is damaged: the contents of {name} have changed.")
    return Checkpoint(folder, step)


def refuse_half_written(folder: Path) -> None:
    """Refuse a model folder that is a checkpoint of ours and not whole; other folders pass.

    Raises:
        CheckpointError: the folder is named or made like a checkpoint and is not a whole one.
    """
    is_ours = (folder / MANIFEST).exists() or (folder / STATE).exists() or folder.name.startswith((".step-", "step-"))
    if folder.is_dir() and is_ours:
        open_checkpoint(folder)


def random_state() -> dict[str, Any]:
    """The state of every random generator: Python's, NumPy's, PyTorch's (CPU and CUDA); plain types and tensors."""
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002 - the global state is what other libraries draw from
    assert isinstance(numpy_state, dict)
    inner = {
        name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in numpy_state["state"].items()
    }
    return {
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": inner},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Put every random generator back to where `random_state` found it."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    inner = {**state["numpy"]["state"], "key": np.asarray(state["numpy"]["state"]["key"], dtype=np.uint32)}
    np.random.set_state({**state["numpy"], "state": inner})  # noqa: NPY002 - as in random_state
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def _seal(folder: Path, step: int) -> None:
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            files[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
            _sync(path)
    manifest = {"schema_version": SCHEMA_VERSION, "step": step, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    _sync(folder / MANIFEST)
    _sync(folder)


def _step_folders(root: Path) -> list[Path]:
    found = [path for path in root.glob("step-*") if path.is_dir() and _STEP_FOLDER.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _remove(folder: Path) -> None:
    """Delete a checkpoint without ever leaving half of it under its own name."""
    doomed = folder.with_name(f".{folder.name}.deleting")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
