"""A trained model by its path, ready to be talked to or judged: an export, adapters, a checkpoint or a run folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel

from headway.checkpoint import Checkpoint
from headway.checkpoint.export import find_checkpoint_in, holds_adapters
from headway.checkpoint.folder import step_folders
from headway.checkpoint.restore import read_model
from headway.config.sections import Section
from headway.data.chat_settings import ChatSettings
from headway.data.encode import Encoder
from headway.data.encoders import family_encoder, settings_of_strangers
from headway.data.media.images import MAX_IMAGE_PIXELS
from headway.data.media.placeholders import MAX_CHARACTERS
from headway.errors import CheckpointError, ConfigError
from headway.log.run_files import CHECKPOINTS, CONFIG, EXPORTS, MANIFEST, run_copy
from headway.models.attention import use_attention
from headway.models.load import Processor, load_model, load_processor, rope_index
from headway.models.lora import (
    ADAPTER_CONFIG,
    adapts_scorer,
    add_saved_adapters,
    initialise_adapters,
    read_adapters,
    without_adapters,
)
from headway.models.materialise import allocate
from headway.models.scores import is_scorer
from headway.models.trial import try_packs
from headway.models.vision import patch_size_of
from headway.plugins import lays_out_packs
from headway.stores import fetch, place
from headway.words import Argument

Kind = Literal["model", "adapters", "checkpoint"]


@dataclass(frozen=True)
class ModelLocation:
    """Place of a model, and the form in which it is there.

    Attributes:
        path: folder, or a name on the Hub.
        kind: a "model" that from_pretrained opens, "adapters" for one, or a "checkpoint" of a run.
        base: the model that adapters belong to, a folder or a name on the Hub; None for the other kinds.
        run: folder of the run that it came from; None where no run was named.
        average: of a checkpoint, whether the moving average of the weights is read; None if evaluations judge it.
    """

    path: str
    kind: Kind
    base: str | None = None
    run: Path | None = None
    average: bool | None = None


@dataclass(frozen=True)
class OpenedModel:
    """A model with its weights, and the processor that makes its inputs.

    Attributes:
        location: where it was.
        model: in evaluation mode.
        processor: its processor, or the tokenizer of a text-only model.
        is_average: whether its weights are a checkpoint's moving average.
    """

    location: ModelLocation
    model: PreTrainedModel
    processor: Processor
    is_average: bool = False


def find_model(name: str, base: str | None = None, *, best: bool = False, average: bool | None = None) -> ModelLocation:
    """Find the model behind a path or name, without reading weights.

    Args:
        name: a model folder, a folder of adapters, a checkpoint, a run folder, for its newest export or checkpoint, or
            a model's name on the Hugging Face Hub.
        base: the model that adapters belong to, where it is elsewhere than their folder says.
        best: of a run folder, the checkpoint after its best evaluation, or the export of that one.
        average: whether the moving average of the weights is asked for, or the weights themselves, which a checkpoint
            has both; None for what evaluations judge, which exports hold.

    Raises:
        UsageError: a run folder with neither, or one that has kept no best checkpoint.
        ConfigError: a base without adapters that it could belong to, or a choice of weights where there is none.
        CheckpointError: adapters whose base is not there.
    """
    path = run_copy(Path(name))
    run = path if (path / CONFIG).is_file() and not (path / MANIFEST).is_file() else None
    if best:
        path = find_checkpoint_in(path, best=True).folder
        if average is None and run is not None and (run / EXPORTS / path.name).is_dir():
            path = run / EXPORTS / path.name
    elif run is not None:
        path = _newest_of(run) if average is None else find_checkpoint_in(run).folder
    if not (path / MANIFEST).is_file():  # a manifest's weights are read where they are
        path = fetch(place(path), here=path)
    if (path / MANIFEST).is_file():
        location = ModelLocation(str(path), "checkpoint", run=run, average=average)
    elif average is not None:
        raise ConfigError(
            Argument("ema", True),
            f" chooses between the weights of a checkpoint and their average, but {name} is no run and no "
            "checkpoint. Leave the option out.",
        )
    elif (path / ADAPTER_CONFIG).is_file():
        return ModelLocation(str(path), "adapters", base or _base_of(path), run)
    else:
        location = ModelLocation(str(path) if path.exists() else name, "model", run=run)
    if base is not None:
        raise ConfigError(
            Argument("base", base), f" has no effect: {location.path} is a whole {location.kind}. Leave it out."
        )
    return location


def _newest_of(run: Path) -> Path:
    exports, checkpoints = step_folders(run / EXPORTS), step_folders(run / CHECKPOINTS)
    if exports and (not checkpoints or int(exports[-1].name[5:]) >= int(checkpoints[-1].name[5:])):
        return exports[-1]
    return find_checkpoint_in(run).folder


def _base_of(folder: Path) -> str:
    path = folder / ADAPTER_CONFIG
    try:
        base = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Export the adapters again.") from error
    if not isinstance(base, str) or not base:
        raise CheckpointError(
            f"{path} does not name the model that the adapters belong to. Give the model with ",
            Argument("base", example="MODEL"),
            ".",
        )
    if not Path(base).exists() and (Path(base).is_absolute() or base.startswith(".") or base.count("/") > 1):
        raise CheckpointError(
            f"The adapters in {folder} belong to the model {base}, which is no longer there. Put the model back, or "
            "give its folder with ",
            Argument("base", example="MODEL"),
            ".",
        )
    return base


def open_model(
    location: ModelLocation,
    *,
    dtype: torch.dtype,
    device: torch.device,
    for_generation: bool,
    chats: ChatSettings | None = None,
) -> OpenedModel:
    """Read a model's weights.

    Args:
        location: from `find_model`.
        dtype: the parameters' floating-point type.
        device: where the model will compute.
        for_generation: with the attention that transformers' generation is made for, else with that for packs.
        chats: how chats become text; as the model's folder says when None.

    Raises:
        UnknownModelError: nothing of that name, on this machine or on the Hub.
        CheckpointError: files that are damaged, incomplete or of another model.
    """
    folder: str | Path = location.path
    is_average = False
    if location.kind == "checkpoint":
        checkpoint = find_checkpoint_in(Path(location.path))
        folder = checkpoint.model_folder
        model, is_average = _of_checkpoint(checkpoint, device, dtype, location.average)
    elif location.kind == "adapters":
        assert location.base is not None
        scores = adapts_scorer(Path(location.path))
        model = load_model(location.base, dtype=dtype, device=device, scores=scores)
        add_saved_adapters(model, Path(location.path))
        initialise_adapters(model, 0, device)
        read_adapters(model, Path(location.path))
        folder = location.path if any(Path(location.path).glob("tokenizer*")) else location.base
    else:
        model = load_model(location.path, dtype=dtype, device=device)
    if for_generation and is_scorer(model.config):
        raise ConfigError(
            f"{location.path} is a reward model, which scores answers but writes none. Compare its scores of pairs "
            "with headway evaluate, or give a model that writes."
        )
    # generation needs no attention over packs, unless the model's family lays out packs for it too
    if for_generation and not lays_out_packs(model.config):
        parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        use_attention(model, "sdpa" if all(part._supports_sdpa for part in parts) else "eager")
    if not for_generation:
        try_packs(model)
    model.train(False)
    processor = load_processor(folder)
    if chats is not None:
        chats.write_into(processor)
    return OpenedModel(location, model, processor, is_average)


def _of_checkpoint(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, average: bool | None
) -> tuple[PreTrainedModel, bool]:
    model = load_model(checkpoint.model_folder, dtype=dtype, random_init=True, device="meta")
    if holds_adapters(checkpoint):
        add_saved_adapters(model, checkpoint.model_folder)
    with without_adapters(model):
        allocate(model, device)
    initialise_adapters(model, 0, device)
    return model, read_model(checkpoint, model, average=average)


def make_encoder(
    processor: Processor,
    model: PreTrainedModel,
    *,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
    max_characters: int = MAX_CHARACTERS,
    family: Section | None = None,
) -> Encoder:
    """The encoder of a model's samples, in training and whenever the model is judged.

    Args:
        processor: the model's processor or tokenizer.
        model: with or without weights.
        max_image_pixels: largest image [pixels].
        max_characters: longest text of a sample [characters].
        family: settings of the model's own family in training; None for none.
    """
    limits = {"max_image_pixels": max_image_pixels, "max_characters": max_characters}
    own = family_encoder(processor, model.config, family, **limits)
    if own is not None:
        return own
    with settings_of_strangers(processor):
        return Encoder(
            processor,
            rope_index(model),
            num_embeddings=model.get_input_embeddings().get_parameter("weight").shape[0],
            max_image_pixels=max_image_pixels,
            max_characters=max_characters,
            patch_size=patch_size_of(model.config),
        )
