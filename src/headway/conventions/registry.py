"""The conventions by name: the rows of `conventions.toml`, and those of installed families."""

import difflib
import re
import tomllib
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from headway.conventions.architecture import Architecture
from headway.conventions.convention import Convention, Parts, Step
from headway.errors import UnknownConventionError
from headway.plugins import hooks_of_all
from headway.words import Argument

_FILE = Path(__file__).with_name("conventions.toml")


def _rule(place: str) -> Callable[[Architecture, Step], Parts]:
    """Give the rule of a row, whose file is imported at the first bill."""
    file, _, name = place.partition(".")

    def price(model: Architecture, step: Step) -> Parts:
        rule: Callable[[Architecture, Step], Parts] = getattr(import_module(f"headway.conventions.{file}"), name)
        return rule(model, step)

    return price


def _read(row: dict[str, Any]) -> Convention:
    releases = tuple(row.get("releases", ()))
    return Convention(**{"tool": "", **row, "price": _rule(row["price"]), "releases": releases})


@cache
def _by_name() -> dict[str, Convention]:
    """All conventions by name: those of the file, then those of installed families."""
    own = map(_read, tomllib.loads(_FILE.read_text("utf-8"))["convention"])
    rules = (*own, *(rule for rules in hooks_of_all("conventions") for rule in rules))
    return {rule.name: rule for rule in rules}


def conventions(model_type: str | None = None) -> tuple[Convention, ...]:
    """List the conventions, ours first.

    Args:
        model_type: leaves out those of tools that train one other type of model; None leaves out none.
    """
    return tuple(rule for rule in _by_name().values() if model_type is None or rule.only in ("", model_type))


def get_convention(name: str) -> Convention:
    """Find a convention by name, with or without its version or a release of its tool: "useful/1", "trl/1.16.0".

    Raises:
        UnknownConventionError: no convention has this name, or not in this version; the message names the nearest.

    >>> get_convention("useful/1").name
    'useful'
    >>> get_convention("torchtitan/0.3.0").name
    'torchtitan-2026-06'
    """
    base, slash, version = name.lower().partition("/")
    rules = _by_name()
    convention = rules.get(base)
    releases = {release: rule for rule in rules.values() if _tool_of(rule) == base for release in rule.releases}
    if version in releases:
        return releases[version]
    if convention is None:
        close = difflib.get_close_matches(base, rules, n=2, cutoff=0.5)
        hint = f"Did you mean {' or '.join(close)}? " if close else ""
        raise UnknownConventionError(
            Argument("convention"),
            f" {name!r} is not known. {hint}Known are {', '.join(rules)}. docs/conventions.md says what each counts.",
            value=name,
            choices=tuple(rules),
        )
    if slash and version != convention.version:
        known_releases = "".join(f" Of its tool's releases {release} is known." for release in releases)
        raise UnknownConventionError(
            Argument("convention"),
            f" {name!r}: {convention.name} is kept in version {convention.version} only.{known_releases} Give "
            f"{convention.name!r} or '{convention.name}/{[*releases, convention.version][0]}'.",
            value=name,
            choices=[convention.version, *releases],
        )
    return convention


def _tool_of(rule: Convention) -> str:
    """Name of a rule's tool, without the date of the rule.

    >>> _tool_of(get_convention("megatron-bridge-2026-05"))
    'megatron-bridge'
    """
    return re.sub(r"-20\d\d(-.*)?$", "", rule.name)
