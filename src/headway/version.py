"""The version of this package, and how more of it is installed."""

__version__ = "0.1.0"
"""Version of the installed package, as `headway --version` prints it."""


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
