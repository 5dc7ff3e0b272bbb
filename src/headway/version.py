"""Versions of this package, of its code as it stands here and of its libraries; and how more of it is installed."""

import hashlib
from functools import cache
from pathlib import Path

__version__ = "0.1.0"
"""Version of the installed package, as `headway --version` prints it."""

_LIBRARIES = (
    "transformers", "tokenizers", "sentencepiece", "tiktoken", "mistral-common", "jinja2", "pillow", "torchvision",
    "numpy", "av", "torch", "triton", "liger-kernel", "flash-attn", "flash-linear-attention", "causal-conv1d",
)  # fmt: skip


def library_versions() -> dict[str, str]:
    """Versions of the libraries that decide what samples are encoded to and what a model computes; "none" without."""
    return {"headway": __version__} | {name: _version(name) for name in _LIBRARIES}


@cache
def code_digest(*rooms: str, package: Path = Path(__file__).parent) -> str:
    """Digest of the content of a package's modules, for those who change them without a new version.

    Args:
        rooms: folders of the package; all of it if none is named.
        package: folder of the package; this one if it is not given.
    """
    digest = hashlib.blake2b(digest_size=16)
    for folder in [package / room for room in rooms] or [package]:
        for file in sorted(folder.rglob("*.py")):
            digest.update(f"{file.relative_to(package)} {file.stat().st_size}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # `headway flops` does without them

    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package from where the package itself came.

    Args:
        extra: such as `train`.

    Source: PEP 610; pip writes the folder that it installed from into direct_url.json.
    """
    import json
    from importlib import metadata
    from pathlib import Path
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        origin = json.loads(metadata.distribution("headway").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        origin = {}
    if "dir_info" not in origin:  # from an index or a wheel: pip takes the installed package and adds the extra
        return f"pip install 'headway[{extra}]'"
    folder = Path(url2pathname(urlsplit(origin["url"]).path))
    place = "." if folder == Path.cwd() else str(folder)
    return f"pip install '{place}[{extra}]'"
