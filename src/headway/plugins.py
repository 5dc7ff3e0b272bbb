"""Plug-ins, found by their registration: families of models that transformers lacks, and objectives of training.

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
| `objective` | class: a `headway.train.objective.Objective`, by which a model of the family learns |

A family without one of them is served at that seam as any model of transformers is.

An objective that is not the core's own is a package below `headway.objectives`, or the module of an entry point of that
group. Its `OBJECTIVE` names the section of the configuration that asks for it, and its hooks:

| hook | what it is |
| --- | --- |
| `section` | class: the section's settings, a `headway.config.objective.ObjectiveSection` |
| `objective` | class: a `headway.train.objective.Objective` |
| `rows` | from the section a `headway.data.feed.make.RowRule`: how rows become samples |
| `judge` | from held-out samples and what is known of their model a `headway.answer.judging.Judge`, or None |
| `prepare_encoder` | has the run's encoder lay out packs as the objective needs them; returns lines about it |
| `forwards` | from configuration and ledger the forward of a model that does not learn, for plans |
| `small_rows` | makes rows that it learns from of the chats of a small run's file |

Nothing of a plug-in is imported before it is asked for, but an objective's settings; other rooms know none by name.
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

Hook = Literal["register", "inputs", "encoder", "generator", "drawer", "read_checkpoint", "small_model", "objective"]
ObjectiveHook = Literal["section", "objective", "rows", "judge", "prepare_encoder", "forwards", "small_rows"]
_GROUP, _OBJECTIVES = "headway.families", "headway.objectives"


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """Hooks that one package brings to seams.

    Attributes:
        package: dotted name of the package that its hooks are in.
        hooks: of each hook "module:name" within the package.
        distribution: that brings it, with its version; empty for this package's own.
    """

    package: str
    hooks: Mapping[str, str] = field(default_factory=dict)
    distribution: str = ""

    def hook(self, name: Hook | ObjectiveHook) -> Any | None:
        """Import what stands for the package at a seam; None where it has nothing of its own.

        Raises:
            PluginError: the distribution that brings it is broken.
        """
        if name not in self.hooks:
            return None
        module, _, attribute = self.hooks[name].partition(":")
        with _naming(self.distribution):
            return getattr(import_module(f"{self.package}.{module}"), attribute)


@dataclass(frozen=True, kw_only=True)
class Family(Plugin):
    """Hooks that one family of models brings.

    Attributes:
        model_types: those of its configurations.
        layout: whose code wrote the checkpoints that `read_checkpoint` takes, for help and errors.
    """

    model_types: tuple[str, ...]
    layout: str = ""


@dataclass(frozen=True, kw_only=True)
class ObjectivePlugin(Plugin):
    """Hooks that one objective of training brings.

    Attributes:
        section: of the configuration, by which a run asks for it.
        title: of that section, for its documentation.
    """

    section: str
    title: str


@cache
def families() -> tuple[Family, ...]:
    """All families, those that come with this package first."""
    return _registered(_GROUP, "FAMILY")


@cache
def objectives() -> tuple[ObjectivePlugin, ...]:
    """All objectives that have a section of the configuration, those that come with this package first."""
    return _registered(_OBJECTIVES, "OBJECTIVE")


def objective_of(section: str | None) -> ObjectivePlugin | None:
    """The objective that a section of the configuration asks for; None without one."""
    return next((plugin for plugin in objectives() if plugin.section == section), None)


def _registered(group: str, name: str) -> tuple[Any, ...]:
    own = import_module(group)
    modules = [import_module(f"{group}.{module.name}") for module in pkgutil.iter_modules(own.__path__)]
    brought = [getattr(module, name) for module in modules]
    for entry in entry_points(group=group):
        distribution = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value
        with _left_out_if_broken(), _naming(distribution):
            brought.append(replace(getattr(entry.load(), name), distribution=distribution))
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
            f"the plug-in {distribution} (entry point of {_GROUP} or {_OBJECTIVES}) is broken: "
            f"{type(error).__name__}: {error}. Install it anew, or remove it with `pip uninstall "
            f"{distribution.partition(' ')[0]}`."
        ) from error


@contextmanager
def _left_out_if_broken() -> Iterator[None]:
    try:
        yield
    except PluginError as error:
        warnings.warn(f"{error} What it brings is left out.", RuntimeWarning, stacklevel=1)  # told once
