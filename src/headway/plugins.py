"""Families of models that transformers does not have: what each brings of its own, found by its model type.

A family is a package below `headway.families`, or a module that an installed distribution names as an entry point of
the group `headway.families`. Its `FAMILY` names its model types, and what stands for it at each seam, a hook:

| hook | what it is |
| --- | --- |
| `register` | makes the classes known to transformers' Auto classes |
| `inputs` | class: from a model the arguments of packs of unlike proportions, to read its cost off |
| `encoder` | from tokenizer, configuration and limits a `headway.data.encode.Encoder` |
| `generator` | class: answers prompts in words, as `headway.answer.generate.AnswerGenerator` |
| `drawer` | class: answers prompts in pictures, as `headway.answer.pictures.Drawer` |
| `read_checkpoint` | from a checkpoint in the layout of the family's own code a model folder; returns a line about it |
| `small_model` | writes the folder of a small model for the demo, without weights |

A family without one of them is served at that seam as any model of transformers is. Nothing of a family is imported
before it is asked for; other rooms know none by name.
"""

import pkgutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Literal

from headway.errors import PluginError

Hook = Literal["register", "inputs", "encoder", "generator", "drawer", "read_checkpoint", "small_model"]
_GROUP = "headway.families"


@dataclass(frozen=True)
class Family:
    """Hooks that one family of models brings.

    Attributes:
        model_types: those of its configurations.
        package: dotted name of the package that its hooks are in.
        hooks: of each hook "module:name" within the package.
        layout: whose code wrote the checkpoints that `read_checkpoint` takes, for help and errors.
        distribution: that brings it, with its version; empty for this package's own.
    """

    model_types: tuple[str, ...]
    package: str
    hooks: Mapping[str, str] = field(default_factory=dict)
    layout: str = ""
    distribution: str = ""

    def hook(self, name: Hook) -> Any | None:
        """Import what stands for the family at a seam; None where it has nothing of its own.

        Raises:
            PluginError: the distribution that brings it is broken.
        """
        if name not in self.hooks:
            return None
        module, _, attribute = self.hooks[name].partition(":")
        with _naming(self.distribution):
            return getattr(import_module(f"{self.package}.{module}"), attribute)


@cache
def families() -> tuple[Family, ...]:
    """All families, those that come with this package first."""
    own = import_module(_GROUP)
    modules = [import_module(f"{_GROUP}.{module.name}") for module in pkgutil.iter_modules(own.__path__)]
    brought = [module.FAMILY for module in modules]
    for entry in entry_points(group=_GROUP):
        distribution = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value
        with _left_out_if_broken(), _naming(distribution):
            brought.append(replace(entry.load().FAMILY, distribution=distribution))
    return tuple(brought)


def family_hook(config: Any, name: Hook) -> Any | None:
    """Import what stands for a model's family at a seam.

    Args:
        config: the model's configuration, or anything else, which belongs to no family.
        name: of the seam.

    Returns:
        None of models that are served as any other.
    """
    model_type = getattr(config, "model_type", None)
    family = next((family for family in families() if model_type in family.model_types), None)
    return None if family is None else family.hook(name)


def families_with(name: Hook) -> list[Family]:
    """List the families that have something of their own at a seam."""
    return [family for family in families() if name in family.hooks]


def hooks_of_all(name: Hook) -> list[Any]:
    """Import what stands at a seam for every family that has something; a broken one is left out with a warning."""
    hooks = []
    for family in families_with(name):
        with _left_out_if_broken():
            hooks.append(family.hook(name))
    return hooks


def register_families() -> None:
    """Make every family's classes known to transformers; doing so again changes nothing."""
    for family in families_with("register"):
        with _left_out_if_broken():
            register = family.hook("register")
            assert register is not None
            with _naming(family.distribution):
                register()


@contextmanager
def _naming(distribution: str) -> Iterator[None]:
    """Turn whatever the code of a distribution raises into an error that names it; of this package's own as it is."""
    try:
        yield
    except Exception as error:
        if not distribution:
            raise
        raise PluginError(
            f"the plug-in {distribution}, which brings a family of models (entry point of {_GROUP}), is broken: "
            f"{type(error).__name__}: {error}. Install it anew, or remove it with `pip uninstall "
            f"{distribution.partition(' ')[0]}`."
        ) from error


@contextmanager
def _left_out_if_broken() -> Iterator[None]:
    try:
        yield
    except PluginError as error:
        warnings.warn(f"{error} Its models are left out.", RuntimeWarning, stacklevel=1)  # told once
