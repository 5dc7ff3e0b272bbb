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
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Literal

Hook = Literal["register", "inputs", "encoder", "generator", "drawer", "read_checkpoint", "small_model"]
_GROUP = "headway.families"


@dataclass(frozen=True)
class Family:
    """What one family of models brings.

    Attributes:
        model_types: those of its configurations.
        package: dotted name of the package that its hooks are in.
        hooks: of each hook "module:name" within the package.
        layout: whose code wrote the checkpoints that `read_checkpoint` takes, for help and errors.
    """

    model_types: tuple[str, ...]
    package: str
    hooks: Mapping[str, str] = field(default_factory=dict)
    layout: str = ""

    def hook(self, name: Hook) -> Any | None:
        """Import what stands for the family at a seam; None where it has nothing of its own."""
        if name not in self.hooks:
            return None
        module, _, attribute = self.hooks[name].partition(":")
        return getattr(import_module(f"{self.package}.{module}"), attribute)


@cache
def families() -> tuple[Family, ...]:
    """All families, those that come with this package first."""
    own = import_module(_GROUP)
    modules = [import_module(f"{_GROUP}.{module.name}") for module in pkgutil.iter_modules(own.__path__)]
    modules += [entry.load() for entry in entry_points(group=_GROUP)]
    return tuple(module.FAMILY for module in modules)


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


def register_families() -> None:
    """Make every family's classes known to transformers; doing so again changes nothing."""
    for family in families():
        register = family.hook("register")
        if register is not None:
            register()
