"""Models by name: a folder here, a copy in the Hugging Face Hub's cache, or the Hub itself if it can be reached.

Asked before torch and transformers are imported, which takes seconds, and before transformers asks the Hub, which it
does over and over where there is no network.
"""

import os
import socket
import threading
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from headway.errors import UnknownModelError

CONFIG = "config.json"
PIPELINE = "model_index.json"
"""In the folder of a pipeline of diffusers: its components, by name."""
EXPORTS = "export"
"""The folder of a training run that holds its models."""
_CONNECT_S = 1.5  # for one connection to the Hub, the look-up of its address included [s]


def is_model_here(name: str | Path) -> bool:
    """Tell whether a name is that of a file, or of a folder with a config.json, on this machine."""
    path = Path(name).expanduser()
    return path.is_file() or (path / CONFIG).is_file()


def is_pipeline(path: Path) -> bool:
    """Tell whether a path is the folder of a pipeline that diffusers saved."""
    return (path / PIPELINE).is_file()


def located(name: str | Path) -> str:
    """Find a model's files.

    Args:
        name: a folder, a file, or a model's name on the Hub.

    Returns:
        The path itself; of a training run's folder its newest model; the name of a model if the Hub can be reached; or
        the folder of its copy in the Hub's cache.

    Raises:
        UnknownModelError: no such path, and no name on the Hub, or one that neither the cache nor the network has; or
            the folder of a training run whose newest state is no model.
    """
    text = str(name)
    if (model := model_of_run(Path(text).expanduser())) is not None:
        return str(model)
    if Path(text).expanduser().exists():
        return str(Path(text).expanduser()) if text.startswith("~") else text
    parts = text.split("/")
    if text.startswith((".", "/", "~")) or len(parts) > 2 or not all(parts):
        raise UnknownModelError(
            f"There is no model folder or config.json at {text!r}. Check the path, or give a name on the Hugging Face "
            "Hub such as Qwen/Qwen3-VL-2B-Instruct."
        )
    obstacle = obstacle_to_hub()
    if obstacle is None:
        return text
    copy = cached_folder(text)
    if copy is None:
        raise UnknownModelError(
            f"The model {text!r} is no folder on this machine, is not in the Hub's cache ({_cache()}), and could not "
            f"be fetched from the Hugging Face Hub: {obstacle}. Check the name (OWNER/NAME on the Hub). Or download "
            f"the model on a machine with a network, with `hf download {text}`, and give the folder."
        )
    return str(copy)


def model_of_run(folder: Path) -> Path | None:
    """The newest model that a training run made; None for a folder that is no run's.

    Raises:
        UnknownModelError: it has none, adapters alone, or was trained on since.
    """
    if not (folder / EXPORTS).is_dir() or (folder / CONFIG).exists():
        return None
    exports, checkpoints = _steps_of(folder / EXPORTS), _steps_of(folder / "checkpoints")
    models = [export for export in exports if (export / CONFIG).is_file()]
    if models and (not checkpoints or _step(checkpoints[-1]) <= _step(models[-1])):
        return models[-1]
    if models:
        advice = (
            f"The run went on to {checkpoints[-1].name} after its newest model folder, {models[-1]}. Give that "
            f"folder. Or write the newest state with `headway export {folder} MODEL`, and give the folder MODEL."
        )
    elif exports:
        advice = (
            f"{exports[-1]} holds adapters alone. Merge the adapters into the weights with `headway export {folder} "
            "MODEL --merge-lora`, and give the folder MODEL."
        )
    else:
        advice = (
            f"The run has no model folder yet. `headway export {folder} MODEL` writes its last checkpoint to the "
            "folder MODEL."
        )
    raise UnknownModelError(f"{folder} is a training run and no model. {advice}")


def _steps_of(folder: Path) -> list[Path]:
    """Folders such as step-000500, the newest last."""
    return sorted((path for path in folder.glob("step-*") if path.name[5:].isdecimal()), key=_step)


def _step(folder: Path) -> int:
    return int(folder.name[5:])


def cached_folder(name: str) -> Path | None:
    """The newest copy of a Hub model in the Hub's cache; None without one."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        copy = try_to_load_from_cache(name, CONFIG)
    except HFValidationError:  # no name that the Hub could have
        return None
    return Path(copy).parent if isinstance(copy, str) else None


@cache
def obstacle_to_hub() -> str | None:
    """Reason why the Hub cannot be asked; None if a connection to it, or to the proxy before it, could be opened."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    hub = urlsplit(endpoint())
    from urllib.request import getproxies, proxy_bypass  # loads HTTP and TLS, which counting needs none of

    proxy = None if proxy_bypass(hub.hostname or "") else getproxies().get(hub.scheme, getproxies().get("all"))
    server = hub if proxy is None else urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    port = server.port or (443 if server.scheme == "https" else 80)
    reasons: list[str] = []

    def connect() -> None:
        try:
            socket.create_connection((server.hostname or "", port), timeout=_CONNECT_S).close()
        except OSError as error:
            reasons.append(error.strerror or str(error))
        else:
            reasons.append("")

    attempt = threading.Thread(target=connect, daemon=True)  # looking up a name has no time limit of its own
    attempt.start()
    attempt.join(_CONNECT_S)
    reason = reasons[0] if reasons else f"no answer within {_CONNECT_S:g} s"
    return f"{server.hostname} cannot be reached ({reason})" if reason else None


def endpoint() -> str:
    """Address of the Hub; HF_ENDPOINT names another."""
    from huggingface_hub import constants

    return constants.ENDPOINT


def _cache() -> str:
    from huggingface_hub import constants

    home, folder = str(Path.home()), os.fspath(constants.HF_HUB_CACHE)
    return folder.replace(home, "~", 1) if folder.startswith(home) else folder
