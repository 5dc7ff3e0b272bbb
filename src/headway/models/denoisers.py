"""Models of diffusers by their folder: the saved configuration, and the model on shapes alone.

The class is diffusers' own, by the name in the configuration; no code is taken from the folder, and no weight is read.
"""

import inspect
import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from headway.errors import CheckpointError, UnknownModelError, first_line, is_out_of_memory
from headway.files import SETTINGS_BYTES, read_text
from headway.hub import CONFIG, PIPELINE, is_pipeline
from headway.models.foreign import check_config, check_plain_files
from headway.tracing.inputs.denoiser import takes_latents


def denoiser_config(path: Path) -> dict[str, Any]:
    """Read the configuration of the model that a folder or file of diffusers holds.

    Args:
        path: of a config.json, of its folder, or of a pipeline's folder, whose one denoiser is meant.

    Raises:
        UnknownModelError: a pipeline has no denoiser, or several; or diffusers has no class of this name.
        CheckpointError: a file cannot be read, or is not what diffusers writes.
    """
    if is_pipeline(path):
        path = _denoiser_of(path)
    file = path / CONFIG if path.is_dir() else path
    try:
        check_plain_files(file.parent)
        check_config(file)
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"The configuration in {file} cannot be read: {first_line(error)}. Save the model again with "
            "save_pretrained."
        ) from error
    settings = _read(file)
    _class_of(settings.get("_class_name"), file)
    return settings


def denoiser_on_shapes(settings: dict[str, Any]) -> nn.Module:
    """Build the model of a configuration, its weights on the meta device; angles and the like are real.

    Raises:
        CheckpointError: the class refuses the configuration.
    """
    kind = _class_of(settings.get("_class_name"), CONFIG)
    logger = logging.getLogger("diffusers")
    level = logger.level
    logger.setLevel(logging.ERROR)  # diffusers warns of each setting of a newer version
    try:
        with _EmptyOnMeta():
            model: nn.Module = kind.from_config({name: v for name, v in settings.items() if name != "_name_or_path"})
    except Exception as error:  # whatever a class raises on a stranger's settings
        if is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"{kind.__name__} of diffusers cannot be built from its configuration: {first_line(error)}. Save the "
            "model again with save_pretrained, or install the version of diffusers that wrote it "
            f"({settings.get('_diffusers_version', 'not stated')})."
        ) from error
    finally:
        logger.setLevel(level)
    return model


class _EmptyOnMeta(TorchFunctionMode):
    """Gives tensors that wait for their values no data: those of weights; what is computed at once stays real."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make empty tensors on the meta device."""
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _denoiser_of(folder: Path) -> Path:
    models = {
        name: entry[1]
        for name, entry in _read(folder / PIPELINE).items()
        if isinstance(entry, list)
        and len(entry) == 2
        and Path(name).name == name
        and (folder / name / CONFIG).is_file()
    }
    denoisers = [name for name, kind in models.items() if _takes_latents(kind)]
    if len(denoisers) == 1:
        return folder / denoisers[0]
    listing = ", ".join(f"{folder / name} ({kind})" for name, kind in models.items()) or "none"
    reason = "several models that denoise" if denoisers else "no model that denoises latents"
    raise UnknownModelError(f"The pipeline in {folder} has {reason}. Give the folder of one of its models: {listing}.")


def _takes_latents(name: Any) -> bool:
    kind = _model_class(name)
    return kind is not None and takes_latents(inspect.signature(kind.forward).parameters)


def _class_of(name: Any, file: Path | str) -> Any:
    kind = _model_class(name)
    if kind is None:
        raise UnknownModelError(
            f"{file} names the class {str(name)[:80]!r}, which this version of diffusers does not have as a model. "
            "Install a newer version, or trace the model yourself: headway.trace(model, inputs=...)."
        )
    return kind


def _model_class(name: Any) -> Any:
    """Look up one of diffusers' own classes of models; None where it has none of this name."""
    import diffusers

    kind = getattr(diffusers, name, None) if isinstance(name, str) and name in dir(diffusers) else None
    return kind if inspect.isclass(kind) and issubclass(kind, diffusers.ModelMixin) else None


def _read(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(read_text(file, most=SETTINGS_BYTES))
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {first_line(error)}. Save the model again with save_pretrained."
        ) from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{file} is no JSON object. Save the model again with save_pretrained.")
    return settings
