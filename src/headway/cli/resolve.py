"""Find the cost model that MODEL names: shipped, a local config or folder, or a name on the Hugging Face Hub."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cli.output import needs_extra
from headway.errors import UnknownModelError

if TYPE_CHECKING:
    from headway.conventions import Architecture
    from headway.count import CostModel


def resolve_cost_model(name: str) -> "CostModel":
    """Load a shipped cost model, or trace one from a config.

    Args:
        name: a shipped name (any case), a config's JSON file, a folder with a config.json, or a Hub id OWNER/MODEL.

    Returns:
        The cost model; for a shipped name, or the Hub id of a shipped model, neither torch nor transformers is loaded.

    Raises:
        UnknownModelError: the name is none of these; the message lists the nearest shipped names.
        TraceError: the model's code does something that the tracer cannot explain.
    """
    from headway.count import load_cost_model
    from headway.count.models import shipped_name

    shipped = shipped_name(name)
    if shipped is not None and (shipped == name.lower() or not Path(name).exists()):
        return load_cost_model(shipped)
    with needs_extra(f"{name!r} is not a shipped model, so its own code must be traced, and that"):
        from headway.tracing import trace

        return trace(resolve_config(name))


def resolve_architecture(name: str, cost_model: "CostModel") -> "Architecture":
    """Read the numbers of the model that a name stands for off its configuration.

    Args:
        name: as `resolve_cost_model` takes it.
        cost_model: what `resolve_cost_model` made of it.

    Returns:
        The architecture; for a shipped name or a local file neither torch nor transformers is loaded.

    Raises:
        UnknownModelError: the configuration is no JSON object, or not that of a transformer.
    """
    from headway.conventions import architecture
    from headway.count.models import presets

    if name.lower() in presets():
        return architecture(presets()[name.lower()], name.lower(), cost_model)
    path = Path(name).expanduser()
    if path.is_dir():
        path /= "config.json"
    if path.exists():
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise UnknownModelError(f"{path} is not JSON: {error}. Give a model's config.json.") from error
    else:
        from headway.models.load import load_config

        config = load_config(name).to_dict()
    return architecture(config, cost_model.name, cost_model)


def resolve_config(name: str) -> Any:
    """Load the transformers configuration that MODEL names.

    Args:
        name: as `resolve_cost_model` takes it.

    Raises:
        UnknownModelError: the name is none of these; the message lists the nearest shipped names.
        HeadwayError: transformers is not installed.
    """
    from headway.count.models import nearest, presets

    path = Path(name).expanduser()
    if name.lower() not in presets() and not path.exists() and not _is_hub_id(name):
        raise UnknownModelError(
            f"{name!r} is neither a shipped model, nor a config's JSON file or a folder with a config.json here, nor a "
            f"Hub id (OWNER/MODEL). {nearest(name)}"
        )
    with needs_extra(f"building the configuration of {name!r}"):
        from headway.models.load import load_config
        from headway.tracing.build import preset_config

        if name.lower() in presets():
            return preset_config(name.lower())
        return load_config(str(path) if path.exists() else name)


def _is_hub_id(name: str) -> bool:
    owner, slash, model = name.partition("/")
    return bool(owner and slash and model) and "/" not in model and not name.startswith((".", "~"))
