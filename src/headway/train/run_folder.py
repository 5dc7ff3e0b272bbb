"""The folder of a run: who may write to it, and whether a run there can go on with the settings given."""

import os
import shutil
import socket
import threading
import warnings
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import yaml

from headway.cache import write_whole
from headway.checkpoint.folder import clear_unfinished, is_remote
from headway.checkpoint.saver import writers
from headway.config import TrainConfig, parse_config
from headway.config.tree import walk
from headway.errors import ConfigError, StoreError
from headway.log.jsonl import lock
from headway.log.run_files import CHECKPOINTS, CONFIG, EXPORTS, METRICS, run_copy
from headway.log.sink import flatten
from headway.models.parallel.ranks import Ranks
from headway.stores import Mirror, place, shown
from headway.words import Argument

if TYPE_CHECKING:
    from io import FileIO

LOCK, SMOKE = ".lock", ".smoke"


def has_run(folder: Path) -> bool:
    """True if a folder holds a run that began: a run that failed before its first step left nothing worth keeping."""
    return (folder / METRICS).exists()


def refuse_existing_run(folder: Path) -> None:
    """Refuse to start a run where there is one.

    Raises:
        ConfigError: the folder holds a run.
    """
    if has_run(folder):
        raise ConfigError(
            f"the run folder {shown(folder)} already holds a run. Continue it with {Argument('resume', True)}, start "
            f"another one elsewhere with {Argument('run.folder', example='FOLDER')}, or delete the folder."
        )


def from_weights_of(folder: Path) -> str:
    """Settings by which another run begins with the weights of a folder's run, as part of a sentence."""
    exports = sorted((folder / EXPORTS).glob("step-*"))
    model = exports[-1] if exports else "MODEL"
    hint = "" if exports else f", a folder that `headway export {shown(folder)} MODEL` makes"
    return (
        f"from its weights, with {Argument('run.folder', example='FOLDER')} "
        f"{Argument('model.random_init', example='false')} {Argument('model.path', example=str(model))}{hint}"
    )


class RunFolder:
    """A run's folder, which one process owns from before its first write until after its last, or ends however it may.

    A checkpoint that an interrupted run has left in flight is still written, and the folder stays owned until it is.

    Args:
        path: of the folder, which need not be there.
        is_smoke: whether it is that of a smoke run, which takes the place of an earlier one.
    """

    def __init__(self, path: Path, *, is_smoke: bool = False) -> None:
        self.path, self._is_smoke = path, is_smoke
        self.mirror = Mirror(path, (CHECKPOINTS, EXPORTS)) if is_remote(path) else None
        self._lock: FileIO | None = None

    def open(self, config: TrainConfig, *, resume: bool | None) -> bool:
        """Take the folder: make that of a new run, or find that of an interrupted one.

        Args:
            config: of the run.
            resume: whether the folder holds a run that goes on; None to look.

        Returns:
            Whether it does.

        Raises:
            ConfigError: the folder holds a run and `resume` is off, or none and it is on, or another process owns it,
                or the configuration has changed since, or the folder cannot be written.
        """
        if self.mirror is None:
            self._check(resume)  # before there is a folder with nothing but a lock
        try:
            return self._open(config, resume)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"the run folder {shown(self.path)} cannot be written: {error.strerror or error}. Make room, or give "
                f"another with {Argument('run.folder', example='FOLDER')}."
            ) from error
        except ConfigError:
            self.close()
            raise

    def open_together(self, config: TrainConfig, ranks: Ranks, *, resume: bool | None) -> bool:
        """Take the folder by the first process, as `open` does; behind a URL each machine has a spool of its own."""
        resumes = ranks.by_first(lambda: self.open(config, resume=resume))
        if not ranks.is_first and os.environ.get("LOCAL_RANK") == "0":
            self.follow()
        return resumes

    def close(self) -> None:
        """Let go of the folder, as soon as nothing of this run writes there."""
        owned, self._lock = self._lock, None
        if owned is not None and (left := writers(self.path / CHECKPOINTS)):
            threading.Thread(target=_let_go_after, args=(left, owned), name=left[0].name, daemon=True).start()
        elif owned is not None:
            owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self.mirror is not None:
                self.mirror.close()
        except StoreError as error:
            if kind is None:
                raise
            warnings.warn(f"The last records of the run wait in {self.path}: {error}", RuntimeWarning, stacklevel=1)
        finally:
            self.close()

    def follow(self) -> None:
        """Bring the spool of a run behind a URL to what the store has, and begin to send what changes in it.

        Raises:
            StoreError: the store cannot be read.
        """
        if self.mirror is not None:
            run_copy(place(self.path), here=self.path)
            self.mirror.start()

    def _open(self, config: TrainConfig, resume: bool | None) -> bool:
        self.path.mkdir(parents=True, exist_ok=True)
        self._take()
        self.follow()
        self._check(resume)  # another process may have begun and ended a run since
        if self._is_smoke:
            self._clear()
        for part in (CHECKPOINTS, EXPORTS):
            clear_unfinished(self.path / part)
        goes_on = has_run(self.path)
        if goes_on:
            _check_unchanged(config, self.path)
        (self.path / CHECKPOINTS).mkdir(exist_ok=True)
        settings = config.to_dict()
        settings["run"]["folder"] = shown(config.run.folder)
        content = yaml.safe_dump(settings, sort_keys=False).encode()
        write_whole(self.path / CONFIG, lambda file: file.write(content))
        return goes_on

    def _clear(self) -> None:
        """Leave nothing of an earlier smoke run, and mark the folder as one that the next may clear."""
        for left in self.path.iterdir() if (self.path / SMOKE).exists() else ():
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            elif left.name != LOCK:
                left.unlink()
        (self.path / SMOKE).touch()

    def _check(self, resume: bool | None) -> None:
        if self._is_smoke and (self.path / SMOKE).exists():
            return
        if resume is False:
            refuse_existing_run(self.path)
        elif resume and not has_run(self.path):
            raise ConfigError(
                f"there is no run to resume in {shown(self.path)}. Start a run without {Argument('resume', True)}, "
                "or give the run.folder of the run."
            )

    def _take(self) -> None:
        for left in writers(self.path / CHECKPOINTS):  # writers of a run of this process that was interrupted
            left.join()
        self._lock = (self.path / LOCK).open("ab+", buffering=0)
        try:
            lock(self._lock, self.path)
        except BlockingIOError as error:
            self._lock.seek(0)
            owner = self._lock.read(200).decode(errors="replace").strip()
            self.close()
            raise ConfigError(
                f"the run folder {shown(self.path)} belongs to a process that is still running"
                f"{f' ({owner})' if owner else ''}. Nothing was changed there. Wait until it has ended, or end it, "
                f"or give another folder with {Argument('run.folder', example='FOLDER')}."
            ) from error
        with suppress(OSError):  # errors alone name the owner; a full disk is met by the next write
            self._lock.truncate(0)
            self._lock.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())


def _let_go_after(left: list[threading.Thread], owned: "FileIO") -> None:
    for thread in left:
        thread.join()
    owned.close()


def _check_unchanged(config: TrainConfig, folder: Path) -> None:
    """Check that a run goes on with the settings that it began with, as far as they decide its losses."""
    path = folder / CONFIG
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise _unknown_settings(path) from error
    if not isinstance(raw, dict):  # a file may have been cut short by a full disk
        raise _unknown_settings(path)
    before, now = settings_by_name(parse_config(raw, source=str(path))), settings_by_name(config)
    free = [setting.name for setting in walk(TrainConfig) if setting.is_free]
    changes = [
        f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name) and not is_among(name, free)
    ]
    if changes:
        raise ConfigError(
            f"the run in {shown(folder)} began with other settings: {'; '.join(changes)}. A resumed run must repeat "
            f"an uninterrupted run exactly. Set these settings back, or start another run {from_weights_of(folder)}."
        )
    _check_goes_further(before, now)


def _check_goes_further(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Check that the data play at least as long as planned: packs under way hold samples of all of them."""
    planned, wanted = before.get("optim.epochs"), now.get("optim.epochs")
    if wanted is not None and (planned is None or wanted < planned):
        instead = f"{planned:g} epochs or more" if planned is not None else f"optim.steps {before.get('optim.steps')}"
        raise ConfigError(
            f"the run began with {instead} and cannot go on with optim.epochs {wanted:g}, because samples beyond "
            "these epochs may lie in packs that are planned already. Stop the run by optim.steps instead, or start "
            "another run."
        )


def _unknown_settings(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is missing or damaged, so the settings that the run began with are not known. Weights and records "
        f"are unharmed. If your settings are the same, copy them with `cp CONFIG {path}` and resume again."
    )


def is_among(name: str, settings: Collection[str]) -> bool:
    """Tell whether a setting, or the section that it is in, is among others."""
    return any(name == other or name.startswith(other + ".") for other in settings)


def settings_by_name(config: TrainConfig) -> dict[str, Any]:
    """Every setting of a configuration by its dotted name."""
    return {name.replace("/", "."): value for name, value in flatten({"step": 0, **config.to_dict()}).items()}
