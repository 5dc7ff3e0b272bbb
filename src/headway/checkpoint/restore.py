"""Bring a model, an optimizer and random generators back to a checkpoint, on any number of processes."""

import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from headway.checkpoint.folder import Checkpoint, open_checkpoint, set_aside, step_folders, with_way_out
from headway.checkpoint.index import SafeReader, read_index
from headway.checkpoint.state import (
    AVERAGE,
    OPTIMIZER,
    WEIGHTS,
    Average,
    make_optimizer_state,
    model_tensors,
    training_tensors,
)
from headway.errors import CheckpointError, UsageError
from headway.models.parallel.ranks import Ranks
from headway.optim import Optimizer

T = TypeVar("T")


def find_checkpoint(root: Path, ranks: Ranks) -> Checkpoint | None:
    """The newest checkpoint of a run, the same on all processes, with every file checked by one of them.

    Args:
        root: folder of all checkpoints of the run.
        ranks: the processes; the first one looks.

    Returns:
        None where there is none.

    Raises:
        CheckpointError: the newest is damaged; the message names the newest good one. The same on all processes.
    """
    folders = ranks.by_first(lambda: step_folders(root))
    if not folders:
        return None
    try:
        return _checked(folders[-1], ranks)
    except CheckpointError as damage:
        raise with_way_out(damage, folders[-1]) from damage


def newest_sound(root: Path, ranks: Ranks) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """The newest checkpoint of a run that is sound, the same on all processes; newer ones are set aside.

    A folder that is set aside is named `damaged-step-...`: no later checkpoint is deleted in its favour, and somebody
    may look at it.

    Args:
        root: folder of all checkpoints of the run.
        ranks: the processes.

    Returns:
        The checkpoint, None where there is none at all, and the fault of each that was set aside.

    Raises:
        CheckpointError: none is sound; the same on all processes.
    """
    folders = ranks.by_first(lambda: step_folders(root))
    faults: list[CheckpointError] = []
    for folder in reversed(folders):
        try:
            checkpoint = _checked(folder, ranks)
        except CheckpointError as damage:
            faults.append(damage)
            continue
        if ranks.is_first:
            set_aside(folders[len(folders) - len(faults) :])
        return checkpoint, tuple(map(str, faults))
    if faults:
        raise with_way_out(faults[0], folders[-1]) from faults[0]
    return None, ()


def _checked(folder: Path, ranks: Ranks) -> Checkpoint:
    """Open a checkpoint and compare its files with the manifest, each on one process; any damage is raised on all."""
    checkpoint = ranks.by_first(lambda: open_checkpoint(folder))
    for damage in ranks.gather_all(_outcome(lambda: checkpoint.check(ranks.rank, ranks.size))):
        if damage is not None:
            raise damage
    return checkpoint


def _outcome(look: Callable[[], T]) -> T | CheckpointError:
    """Call a function; its result, or its error for the other processes to raise as well."""
    try:
        return look()
    except CheckpointError as error:
        return error


def restore(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    average: Average | None = None,
) -> None:
    """Read a checkpoint into a model and its optimizer, each process its own slices.

    Args:
        checkpoint: found by `find_checkpoint`.
        model: of the same architecture, spread over any number of processes.
        optimizer: of this model.
        average: of the weights.

    Raises:
        CheckpointError: the checkpoint is of another architecture.
    """
    saved = saved_tensors(checkpoint.folder)
    check_architecture(checkpoint, {name: tensor.shape for name, tensor in saved.items()}, model)
    if optimizer is not None:
        parameters = [name.removeprefix(OPTIMIZER).rpartition(".")[0] for name in saved if name.startswith(OPTIMIZER)]
        make_optimizer_state(model, optimizer, set(parameters))
    read_tensors(checkpoint.folder, training_tensors(model, optimizer, average))
    if isinstance(optimizer, Optimizer):
        optimizer.updates = checkpoint.step  # left-out ones among them, which no parameter's own count has


def read_model(checkpoint: Checkpoint, model: nn.Module, *, average: bool | None = None) -> bool:
    """Read the weights that a checkpoint hands out into a model.

    Args:
        checkpoint: of any layout.
        model: of the same architecture.
        average: as `hands_out_average` takes it.

    Returns:
        Whether they are the moving average.

    Raises:
        CheckpointError: the checkpoint is of another architecture.
        UsageError: there is no moving average.
    """
    saved = saved_tensors(checkpoint.folder)
    check_architecture(checkpoint, {name: tensor.shape for name, tensor in saved.items()}, model)
    average = hands_out_average(checkpoint, saved, average)
    read_tensors(
        checkpoint.folder,
        {
            AVERAGE + name if average and AVERAGE + name in saved else WEIGHTS + name: tensor
            for name, tensor in model_tensors(model)
        },
    )
    return average


def hands_out_average(checkpoint: Checkpoint, saved: Collection[str], asked_for: bool | None) -> bool:
    """Choose between the last weights of a checkpoint and their moving average, which evaluations judge if it is there.

    Whatever reads a run's model asks this: exports, chats, evaluations.

    Args:
        checkpoint: for messages to people.
        saved: names of its tensors.
        asked_for: whether to read the average; None for what evaluations judge.

    Raises:
        UsageError: the average is asked for, and there is none.
    """
    is_there = any(name.startswith(AVERAGE) for name in saved)
    if asked_for and not is_there:
        raise UsageError(
            f"the checkpoint {checkpoint.folder} holds no moving average of the weights. Train with optim.ema, or "
            "use the weights themselves."
        )
    return is_there if asked_for is None else asked_for


def check_architecture(checkpoint: Checkpoint, saved: Mapping[str, torch.Size], model: nn.Module) -> None:
    """Check that a checkpoint has the tensors of a model, by name and whole shape.

    Raises:
        CheckpointError: it has others; the message names the first that differ.
    """
    ours = {WEIGHTS + name: tensor.shape for name, tensor in model_tensors(model)}
    theirs = {name: shape for name, shape in saved.items() if name.startswith(WEIGHTS)}
    if theirs == ours:
        return
    differing = [
        f"{name.removeprefix(WEIGHTS)} is {_shape(theirs.get(name))} in the checkpoint and "
        f"{_shape(ours.get(name))} in this model"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    raise CheckpointError(
        f"the checkpoint {checkpoint.folder} holds another model: {'; '.join(differing[:3])}"
        f"{f'; and {len(differing) - 3} more' if len(differing) > 3 else ''}. "
        "Put model.path and its settings back as they were, or start a new run in another run.folder."
    )


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor in a checkpoint by name, with its whole shape and dtype and without its numbers (on "meta").

    Raises:
        CheckpointError: its index of tensors is none.
    """
    listed = read_index(folder).state_dict_metadata
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in listed.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_tensors(folder: Path, targets: dict[str, torch.Tensor]) -> None:
    """Read tensors by name, in place, each process its own slices.

    Every process finds what it needs in the index by itself, so nothing is exchanged.

    Raises:
        CheckpointError: one is missing or of another shape.
    """
    state: dict[str, Any] = dict(targets)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    try:
        load(state, storage_reader=SafeReader(folder), no_dist=True)
    except CheckpointException as error:
        _, (inner, _) = sorted(error.failures.items())[0]
        if isinstance(inner, CheckpointError):
            raise inner from error
        raise CheckpointError(
            f"the checkpoint {folder} cannot be read: {inner}. The checkpoint lacks optimizer states that this "
            "configuration needs. Set optim back, or start a new run from the exported weights."
        ) from inner


def _shape(shape: torch.Size | None) -> str:
    return "absent" if shape is None else str(list(shape))
