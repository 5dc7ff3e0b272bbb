"""Public names of a package that are imported from their homes on first use, so that the package itself loads fast."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def exported(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Make the `__getattr__` of a package.

    Args:
        package: its name.
        homes: public names, by the module that defines them.

    Returns:
        A function that imports a public name, and raises AttributeError of any other name.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name not in home_of:
            offers = ", ".join(sorted(home_of))
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it offers {offers}")
        value = getattr(import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get
