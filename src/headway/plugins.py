"""Plug-ins, found by their registration: families of models that transformers lacks, and objectives of training.

A family is a module that an installed distribution names as an entry point of the group `headway.families`. Its
`FAMILY` names its model types, and what stands for it at each seam, a hook:

| hook | what it is |
| --- | --- |
| `register` | makes the classes known to transformers' Auto classes |
| `inputs` | class: from a model the arguments of packs of unlike proportions, to read its cost off |
| `settings` | class below `headway.config.sections.Section`: what `model.family` of a run may say |
| `encoder` | makes the `headway.data.encode.Encoder`, which lays out its own packs, from tokenizer and configuration |
| `generator` | class: answers prompts in words, as `headway.answer.generate.AnswerGenerator` |
| `objective` | class: a `headway.train.objective.Objective`, by which a model of the family learns |
| `losses` | from what computes the losses of tokens, and settings, a `headway.models.head.ModelWithLoss` |
| `vision_tower` | from a model the tower that runs on a pack of every process or of none |
| `small_config` | from a configuration that was scaled down the same with the parts that the family alone has |
| `small_chat` | from the messages of a made-up chat and its row those that the family trains on |
| `ledgers` | folder with what counting needs of models that ship with it, as `headway.count.models` has |
| `conventions` | tuple of `headway.conventions.Convention` |
| `tool_peaks` | tables of the peaks that tools divide by, as in `headway/conventions/tool_peaks.toml` |
| `formulas` | by tool and model type a formula that the tool's own table has of the family |
| `commands` | functions by the names of their commands |
| `demos` | by its name a `headway.cli.demo.Demo` |
| `sections` | from a run's folder sections of its page |

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
| `suggested` | a `headway.predict.suggest.SuggestedObjective` for samples that it suits, or None |

Nothing of a plug-in is imported before it is asked for, but an objective's settings; no room knows one by name.
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

Hook = Literal[
    "register", "inputs", "settings", "encoder", "generator", "losses", "vision_tower", "small_config", "small_chat",
    "ledgers", "conventions", "tool_peaks", "formulas", "commands", "demos", "sections", "objective",
]  # fmt: skip
ObjectiveHook = Literal[
    "section", "objective", "rows", "judge", "prepare_encoder", "forwards", "small_rows", "suggested"
]
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
    """

    model_types: tuple[str, ...]


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
    """All families that installed distributions bring."""
    return _registered(_GROUP, "FAMILY")


@cache
def objectives() -> tuple[ObjectivePlugin, ...]:
    """All objectives that have a section of the configuration, those that come with this package first."""
    return (*_own(_OBJECTIVES, "OBJECTIVE"), *_registered(_OBJECTIVES, "OBJECTIVE"))


def objective_of(section: str | None) -> ObjectivePlugin | None:
    """The objective that a section of the configuration asks for; None without one."""
    return next((plugin for plugin in objectives() if plugin.section == section), None)


def _own(group: str, name: str) -> tuple[Any, ...]:
    folder = import_module(group)
    modules = [import_module(f"{group}.{module.name}") for module in pkgutil.iter_modules(folder.__path__)]
    return tuple(getattr(module, name) for module in modules)


def _registered(group: str, name: str) -> tuple[Any, ...]:
    brought = []
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


def lays_out_packs(config: Any) -> bool:
    """Tell whether a model's family encodes samples and lays out packs itself, which then nothing else cuts or tries.

    Args:
        config: the model's configuration.
    """
    return family_hook(config, "encoder") is not None


def where_to_find(model_type: str) -> str:
    """Say how to install what may bring a kind of model that nothing here knows: by custom it has the family's name."""
    return (
        f"If a plug-in brings this type, install the plug-in. Its usual name is headway-{model_type} (`pip install "
        f"./plugins/headway-{model_type}` where Headway's repository has it)."
    )


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
            f"{type(error).__name__}: {error}. Install the plug-in again, or remove it with `pip uninstall "
            f"{distribution.partition(' ')[0]}`."
        ) from error


@contextmanager
def _left_out_if_broken() -> Iterator[None]:
    try:
        yield
    except PluginError as error:
        warnings.warn(f"{error} Headway goes on without the plug-in.", RuntimeWarning, stacklevel=1)  # told once
