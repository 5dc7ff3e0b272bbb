"""Make a Hugging Face folder of a checkpoint, layer by layer: no more of the model is in memory than one weight file.

The model is built without weights, for its names and for transformers' own rules of how its files name and cut the
tensors (some models join on loading what their files keep apart, the experts of a layer above all).
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from headway.checkpoint.card import write_card
from headway.checkpoint.folder import (
    MODEL,
    Checkpoint,
    best_checkpoint,
    latest_checkpoint,
    open_checkpoint,
    step_folders,
)
from headway.checkpoint.restore import check_architecture, hands_out_average, read_tensors, saved_tensors
from headway.checkpoint.spelling import respell_config
from headway.checkpoint.state import AVERAGE, OPTIMIZER, WEIGHTS
from headway.errors import UsageError
from headway.files import new_folder
from headway.hub import CONFIG
from headway.log.run_files import CHECKPOINTS, MANIFEST, run_copy
from headway.models.load import load_model
from headway.models.lora import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapters_alone,
    add_saved_adapters,
    base_name,
    with_merged_adapters,
)
from headway.models.quantised import ByteLayout, hold, layouts_by_size
from headway.stores import exists, place, remove, shown
from headway.words import Argument

MAX_FILE_BYTES = 5 * 10**9
WHOLE, ADAPTERS = "model", Path(ADAPTER_WEIGHTS).stem
_LAYER = re.compile(r"(.*?\.\d+)\.")  # name up to its first number: model.layers.7


@dataclass(frozen=True)
class Exports:
    """The model folders of a run.

    Attributes:
        root: where they are, one for each step.
        when: "never", at the "end", or with "every" checkpoint.
        keep: newest folders that stay.
        dtype: of the weights; None for that of training.
        merge_adapters: whether adapters, if there are any, are added into the weights, or exported alone.
    """

    root: Path
    when: Literal["never", "end", "every"]
    keep: int
    dtype: torch.dtype | None = None
    merge_adapters: bool = False

    def folder(self, checkpoint: Checkpoint) -> Path | None:
        """Model folder of a checkpoint; None if there is to be none."""
        return None if self.when == "never" else self.root / checkpoint.folder.name

    def make(self, checkpoint: Checkpoint) -> Path | None:
        """Export a checkpoint and delete the oldest folders beyond `keep`; one that is there already stays.

        Returns:
            The folder, if it was not there.
        """
        folder = self.folder(checkpoint)
        is_missing = folder is not None and not exists(place(folder))
        if folder is not None and is_missing:
            merge = self.merge_adapters and holds_adapters(checkpoint)
            export(checkpoint, folder, dtype=self.dtype, merge_adapters=merge)
        for old in step_folders(place(self.root))[: -self.keep]:
            remove(old)
        return folder if is_missing else None


def export(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    average: bool | None = None,
    merge_adapters: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> bool:
    """Write a folder that `from_pretrained` opens, whole or not at all; of a model with adapters, one that peft opens.

    Args:
        checkpoint: of any layout, checked or not; what is read of it is compared with the model's shapes.
        folder: must not exist.
        dtype: of the floating-point weights; None for that of what learns, or for bfloat16 where adapters are added
            into weights of 4 or 8 bits, which are dequantised for it.
        average: whether the weights' moving average is exported in their place; None if evaluations judge it.
        merge_adapters: whether adapters are added into the weights and all of the model is written, not they alone.
        max_file_bytes: largest weight file; a single larger tensor has a file of its own [bytes].

    Returns:
        Whether the moving average was exported.

    Raises:
        UsageError: the folder exists, there is no moving average, or there are no adapters to merge.
        CheckpointError: the checkpoint cannot be read or holds a link, or the disk refuses.
    """
    if exists(place(folder)):
        raise UsageError(f"{shown(folder)} exists already. Give another folder, or delete this one first.")
    checkpoint.refuse_links()
    saved = saved_tensors(checkpoint.folder)
    average = hands_out_average(checkpoint, saved, average)
    # the model on no device: its code says which weights there are and how transformers names them
    plain = load_model(checkpoint.model_folder, random_init=True, device="meta")
    model = plain
    if adapts := holds_adapters(checkpoint):
        model = load_model(checkpoint.model_folder, random_init=True, device="meta")
        add_saved_adapters(model, checkpoint.model_folder)
    elif merge_adapters:
        raise UsageError(
            f"the checkpoint {checkpoint.folder} holds no adapters to merge. Leave ",
            Argument("merge_adapters"),
            " out.",
        )
    leaves_base = adapts and not merge_adapters
    hold(model, layouts := _layouts(model, saved))
    check_architecture(checkpoint, {name: tensor.shape for name, tensor in saved.items()}, model)
    with new_folder(folder, last=ADAPTER_CONFIG if leaves_base else CONFIG) as temporary:
        kind = dtype or (torch.bfloat16 if layouts and not leaves_base else _dtype_of_learning(saved))
        # without a dtype buffers keep their own; frozen weights may have been held in fewer bits
        names = None if dtype is not None else {base_name(name) for name, _ in model.named_parameters()}
        files = _WeightFiles(temporary, max_file_bytes, ADAPTERS if leaves_base else WHOLE)
        _write_described(checkpoint, temporary, plain, kind, adapters=leaves_base)
        # layer by layer, so that no more than a layer is in memory
        for part in _parts(checkpoint, saved, model, average=average):
            # under the names of transformers: all weights, the adapters added into them, or the adapters alone
            if leaves_base:
                files.add(_cast(adapters_alone(part), kind, None))
                continue
            weights = with_merged_adapters(model, _in_float32(part, layouts)) if adapts else part
            files.add(revert_weight_conversion(plain, _cast(weights, kind, names)))
        files.close()
        write_card(checkpoint, temporary, adapters=leaves_base)
    return average


def holds_adapters(checkpoint: Checkpoint) -> bool:
    """Tell whether a checkpoint is of a model with adapters."""
    return (checkpoint.model_folder / ADAPTER_CONFIG).is_file()


def find_checkpoint_in(path: Path, *, best: bool = False) -> Checkpoint:
    """The checkpoint that a path names, or the newest of the run that it names, every file checked.

    Args:
        path: of a run or a checkpoint.
        best: of a run, the one after its best evaluation.

    Raises:
        CheckpointError: it is damaged.
        UsageError: there is none.
    """
    path = run_copy(path)
    if best:
        checkpoint = _best_of(path)
        checkpoint.check()
        return checkpoint
    if (path / MANIFEST).is_file() or path.name.startswith("step-"):
        checkpoint = open_checkpoint(path)
    elif (newest := latest_checkpoint(path / CHECKPOINTS)) is not None:
        checkpoint = newest
    else:
        raise UsageError(f"{path} holds no checkpoint. Give a run folder, or one of the folders in its checkpoints/.")
    checkpoint.check()
    return checkpoint


def _best_of(run: Path) -> Checkpoint:
    if not (run / CHECKPOINTS).is_dir():
        raise UsageError(Argument("best", True), f" takes a run folder, but {run} holds no {CHECKPOINTS}/.")
    checkpoint = best_checkpoint(run / CHECKPOINTS)
    if checkpoint is None:
        raise UsageError(
            Argument("best", True),
            f" finds no checkpoint of the best evaluation in {run}. Headway keeps this checkpoint only if the run "
            "sets checkpoint.keep_best and has evaluated. Leave the option out to take the newest checkpoint.",
        )
    return checkpoint


def _parts(
    checkpoint: Checkpoint, saved: dict[str, torch.Tensor], model: PreTrainedModel, *, average: bool
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights under the model's names: one part for each layer, and one for each tensor outside of layers."""
    left_out = model._keys_to_ignore_on_save or ()
    groups: dict[str, list[str]] = {}
    for name in (name.removeprefix(WEIGHTS) for name in saved if name.startswith(WEIGHTS)):
        if name not in left_out:
            layer = _LAYER.match(name)
            groups.setdefault(layer[1] if layer else base_name(name), []).append(name)
    for names in groups.values():
        sources = {
            name: AVERAGE + name if average and AVERAGE + name in saved else WEIGHTS + name for name in sorted(names)
        }
        tensors = {source: torch.empty_like(saved[source], device="cpu") for source in sources.values()}
        read_tensors(checkpoint.folder, tensors)
        yield {name: tensors[source].to(saved[WEIGHTS + name].dtype) for name, source in sources.items()}


def _layouts(model: PreTrainedModel, saved: Mapping[str, torch.Tensor]) -> dict[str, ByteLayout]:
    """Form in which a checkpoint holds weights of 4 or 8 bits; their sizes tell."""
    stored = {name: saved[WEIGHTS + name] for name, _ in model.named_parameters() if WEIGHTS + name in saved}
    return layouts_by_size(
        {
            name: (tensor.shape, model.get_parameter(name).shape)
            for name, tensor in stored.items()
            if not tensor.is_floating_point()
        }
    )


def _in_float32(part: Mapping[str, torch.Tensor], layouts: Mapping[str, ByteLayout]) -> dict[str, torch.Tensor]:
    return {
        name: layouts[name].dequantise(tensor, torch.float32) if name in layouts else _float32(tensor)
        for name, tensor in part.items()
    }


def _float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _dtype_of_learning(saved: Mapping[str, torch.Tensor]) -> torch.dtype:
    """Dtype of the weights that an optimizer updates; of the first weight before its first step."""
    floats = {name: tensor.dtype for name, tensor in saved.items() if tensor.is_floating_point()}
    learning = (name.removeprefix(OPTIMIZER).rpartition(".")[0] for name in floats if name.startswith(OPTIMIZER))
    first = next((WEIGHTS + name for name in learning if WEIGHTS + name in floats), None)
    return floats[first] if first else next(kind for name, kind in floats.items() if name.startswith(WEIGHTS))


def _cast(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, names: set[str] | None) -> dict[str, torch.Tensor]:
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() and (names is None or name in names) else tensor
        for name, tensor in tensors.items()
    }


def _write_described(
    checkpoint: Checkpoint, folder: Path, model: PreTrainedModel, dtype: torch.dtype, *, adapters: bool
) -> None:
    """Write config, generation config and processor; the config names the class and dtype of the weights beside it."""
    left_out = {"config.json"} if adapters else {"config.json", ADAPTER_CONFIG}
    for name in (name.removeprefix(f"{MODEL}/") for name in checkpoint.files if name.startswith(f"{MODEL}/")):
        if name not in left_out:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint.model_folder / name, folder / name)
    if not adapters:
        model.config.architectures = [type(model).__name__]
        model.config.dtype = dtype
        model.config.save_pretrained(folder)
        respell_config(folder / CONFIG, checkpoint.model_folder / CONFIG, type(model.config))


class _WeightFiles:
    def __init__(self, folder: Path, max_bytes: int, stem: str) -> None:
        self._folder, self._max_bytes, self._stem = folder, max_bytes, stem
        self._open: dict[str, torch.Tensor] = {}
        self._open_bytes, self._total_bytes, self._total_numel = 0, 0, 0
        self._names: list[list[str]] = []

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take tensors in, and write a file whenever one is full."""
        for name, tensor in tensors.items():
            if self._open and self._open_bytes + tensor.nbytes > self._max_bytes:
                self._write()
            self._open[name] = tensor.clone(memory_format=torch.contiguous_format)  # the rest of its layer can be freed
            self._open_bytes += tensor.nbytes
            self._total_numel += tensor.numel()

    def close(self) -> None:
        """Write the last file, and rename all to `model-00001-of-0000N`."""
        self._write()
        if len(self._names) == 1:
            self._path(1).rename(self._folder / f"{self._stem}.safetensors")
            return
        where: dict[str, str] = {}
        for number, names in enumerate(self._names, start=1):
            file = f"{self._stem}-{number:05d}-of-{len(self._names):05d}.safetensors"
            self._path(number).rename(self._folder / file)
            where |= dict.fromkeys(names, file)
        totals = {"total_parameters": self._total_numel, "total_size": self._total_bytes}
        index: dict[str, Any] = {"metadata": totals, "weight_map": where}
        path = self._folder / f"{self._stem}.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def _write(self) -> None:
        self._names.append(list(self._open))
        save_file(self._open, self._path(len(self._names)), metadata={"format": "pt"})
        self._total_bytes += self._open_bytes
        self._open, self._open_bytes = {}, 0

    def _path(self, number: int) -> Path:
        return self._folder / f".{number}.safetensors"
