"""Find the cost model that MODEL names, and the peak that `--device` and `--dtype` name together."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cli.output import needs_extra
from headway.errors import UnknownModelError, UsageError, WorkloadError
from headway.files import SETTINGS_BYTES, read_text
from headway.hub import CONFIG, is_pipeline, model_of_run
from headway.log.working import working
from headway.report.quantity import parse_number

if TYPE_CHECKING:
    from headway.config.model import ModelConfig
    from headway.conventions import Architecture
    from headway.count import CostModel
    from headway.devices import Peak


_PIXELS = re.compile(r"(\d{1,6})[xX](\d{1,6})px")


def resolve_cost_model(name: str) -> "CostModel":
    """Load a shipped cost model, or trace one from a config.

    Args:
        name: a config's JSON file, a folder with a config.json, a shipped name (any case), or a Hub id OWNER/MODEL;
            of several that are meant by it, the first.

    Returns:
        The cost model; for a shipped name, or the Hub id of a shipped model, neither torch nor transformers is loaded.

    Raises:
        UnknownModelError: the name is none of these; the message lists the nearest shipped names.
        TraceError: the model's code does something that the tracer cannot explain.
    """
    from headway.count import load_cost_model
    from headway.count.models import shipped_name

    shipped = shipped_name(name)
    if shipped is not None:
        return load_cost_model(shipped)
    check_name(name)
    with (
        needs_extra(f"{name!r} is not a shipped model, so its own code must be traced, and that"),
        working(f"tracing {name}"),
    ):
        from headway.tracing import trace, trace_config

        if (path := saved_denoiser(name)) is not None:
            from headway.models.denoisers import denoiser_config, denoiser_on_shapes

            return trace(denoiser_on_shapes(denoiser_config(path)))
        return trace_config(resolve_config(name))


def saved_denoiser(name: str) -> Path | None:
    """Find the folder or file that MODEL names if diffusers saved it: a pipeline, or one model; None for any other."""
    path = Path(name).expanduser()
    if is_pipeline(path):
        return path
    file = path / CONFIG if path.is_dir() else path
    if not file.is_file() or file.suffix != ".json":
        return None
    try:
        settings = _raw_config(name)
    except UnknownModelError:  # a damaged file, which the loading of a model refuses
        return None
    is_saved = isinstance(settings, dict) and "_class_name" in settings and "model_type" not in settings
    return path if is_saved else None


def sizes_of_latents(path: Path) -> tuple[str, tuple[int, int] | None]:
    """Read the class of a saved denoiser, and the patches of the latents that its configuration states.

    Returns:
        Name of the class; height and width in patches, None where they are not stated.

    Raises:
        HeadwayError: as `denoiser_config`, or diffusers is not installed.
    """
    with needs_extra(f"reading {path}, a model of diffusers,"):
        from headway.models.denoisers import denoiser_config

        settings = denoiser_config(path)
    latents, patch = _sides(settings.get("sample_size")), _sides(settings.get("patch_size") or 1)
    patches = None if latents is None or patch is None else (latents[0] // patch[0], latents[1] // patch[1])
    return str(settings["_class_name"]), patches


def _sides(value: Any) -> tuple[int, int] | None:
    """Read height and width, which a configuration gives as one number, or behind the frames; None for neither."""
    sides = value[-2:] if isinstance(value, list) else [value, value]
    is_size = len(sides) == 2 and all(isinstance(side, int) and side > 0 for side in sides)
    return (int(sides[0]), int(sides[1])) if is_size else None


def resolve_ledger(settings: "ModelConfig") -> "CostModel":
    """The cost model of a recipe's model, with the rows of its new tokens and before anything is frozen or adapted.

    Args:
        settings: the recipe's section.

    Raises:
        HeadwayError: as `resolve_cost_model`, or a token that cannot be added.
    """
    if not settings.has_own_shape:
        return resolve_cost_model(settings.path)
    with needs_extra("adding tokens to a model"), working(f"tracing {settings.path}"):
        from headway.optim import with_new_rows
        from headway.tracing import trace_config

        return trace_config(with_new_rows(resolve_config(settings.path), settings))


def in_patches(model: str | None, images: str | None) -> str | None:
    """Turn images whose size is given in pixels, 1024x768px (width x height), into grids of the model's patches.

    Sides are rounded to whole tokens, as Qwen's image processors do; a processor's own limits on size are not applied.

    Args:
        model: as `resolve_cost_model` takes it.
        images: what was typed; items in patches stay as they are.

    Raises:
        WorkloadError: the model's configuration does not say how large a patch is.

    Source: transformers 5.17, models/qwen2_vl/image_processing_qwen2_vl.py, smart_resize.
    """
    if model is None or images is None or "px" not in images:
        return images
    vision = _raw_config(model).get("vision_config")
    if not vision:
        raise WorkloadError(
            f"{model} has no vision tower, but --images {images[:80]!r} names pictures. Leave them out, or name a "
            "vision-language model."
        )
    patch, merge = vision.get("patch_size"), vision.get("spatial_merge_size")
    if not isinstance(patch, int) or not isinstance(merge, int):
        raise WorkloadError(
            f"--images {images[:80]!r} is in pixels, but the configuration of {model} does not give the size of a "
            "patch (vision_config: patch_size and spatial_merge_size). Give grids in patches, TxHxW, such as 1x32x48."
        )

    def grid(match: re.Match[str]) -> str:
        width, height = (max(1, round(int(side) / (patch * merge))) * merge for side in match.groups())
        return f"1x{height}x{width}"

    return _PIXELS.sub(grid, images)


def resolve_architecture(name: str, cost_model: "CostModel") -> "Architecture":
    """Read the numbers of the model that a name stands for off its configuration.

    Returns:
        The architecture; for a shipped name or a local file neither torch nor transformers is loaded.

    Raises:
        UnknownModelError: the configuration is no JSON object, or not that of a transformer.
    """
    from headway.conventions import architecture
    from headway.count.models import shipped_name

    return architecture(_raw_config(name), shipped_name(name) or cost_model.name, cost_model)


def _raw_config(name: str) -> Any:
    from headway.count.models import presets, shipped_name

    shipped = shipped_name(name)
    if shipped is not None:
        return presets()[shipped]
    path = Path(name).expanduser()
    if is_pipeline(path):
        from headway.models.denoisers import denoiser_config

        return denoiser_config(path)
    if path.is_dir():
        path /= "config.json"
    if path.exists():
        try:
            return json.loads(read_text(path, most=SETTINGS_BYTES))
        except (ValueError, RecursionError) as error:
            raise UnknownModelError(f"{path} is not JSON: {error}. Give a model's config.json.") from error
    return resolve_config(name).to_dict()


def resolve_config(name: str) -> Any:
    """Load the transformers configuration that MODEL names.

    Raises:
        UnknownModelError: the name is none of these; the message lists the nearest shipped names.
        HeadwayError: transformers is not installed.
    """
    from headway.count.models import shipped_name

    check_name(name)
    path = Path(name).expanduser()
    path = model_of_run(path) or path
    is_known = shipped_name(name) is not None or path.exists()
    with needs_extra(f"building the configuration of {name!r}"):
        if not is_known:
            from headway.hub import located

            located(name)  # without network this is told before torch is imported, which takes seconds
        from headway.models.load import named_config

        return named_config(str(path) if path.exists() else name)


def check_name(name: str) -> None:
    """Refuse a name that nothing can stand for, before a library that would open the model is asked for.

    Raises:
        UnknownModelError: the name is none of those that MODEL takes; the message lists the nearest shipped names.
    """
    from headway.count.models import nearest, shipped_name

    if shipped_name(name) is None and not Path(name).expanduser().exists() and not _is_hub_id(name):
        raise UnknownModelError(
            f"{name!r} is neither a shipped model, nor a config's JSON file or a folder with a config.json here, nor a "
            f"Hub id (OWNER/MODEL). {nearest(name)}"
        )


def _is_hub_id(name: str) -> bool:
    owner, slash, model = name.partition("/")
    return bool(owner and slash and model) and "/" not in model and not name.startswith((".", "~"))


def stated_peak(device: str | None, dtype: str | None) -> "Peak | None":
    """Find the peak of a device in the dtypes of its matrix products; None without a device.

    Args:
        device: as of `--device`.
        dtype: as of `--dtype`: one dtype, or several with their shares of the FLOPs ("fp8:0.7,bf16:0.3").

    Raises:
        UsageError: `--dtype` is no list of dtypes and shares, or cannot take effect.
        UnknownDeviceError: the device, or a dtype on it, is not known.

    >>> round(stated_peak("B200", "fp8:3,bf16:1").flops_per_s / 1e12)  # 4 / (3 / 4500 + 1 / 2250)
    3600
    """
    from headway.devices import named_peak, weighted_peak

    if device is None:
        if dtype is not None:
            raise UsageError(
                f"--dtype {dtype} cannot take effect without --device, because it chooses the peak of the device."
            )
        return None
    if dtype is None:
        return named_peak(device)
    shares = _shares(dtype)
    peak = named_peak(device, next(iter(shares)))
    if peak.source == f"--device {device}":  # a number
        raise UsageError(
            f"--dtype {dtype} cannot take effect, because --device {device} states the rate itself. Leave one of "
            "them out."
        )
    return peak if len(shares) == 1 else weighted_peak(shares, device)


def _shares(text: str) -> dict[str, float]:
    """Read dtypes with their shares of the FLOPs; one alone needs none.

    Raises:
        UsageError: a share is missing or no positive number, or a dtype is named twice.
    """
    items = [item.strip().partition(":") for item in text.split(",")]
    if len(items) == 1 and not items[0][1] and items[0][0]:
        return {items[0][0]: 1.0}
    shares: dict[str, float] = {}
    for name, _, share in items:
        value = parse_number(share)
        if not (name and value is not None and value > 0) or name in shares:
            raise UsageError(
                f"--dtype {text!r}: {':'.join((name, share)).strip(':')!r} is not a dtype with its share of the FLOPs. "
                "Give one dtype, such as fp8, or several with positive shares, such as fp8:0.7,bf16:0.3."
            )
        shares[name] = float(value)
    return shares
