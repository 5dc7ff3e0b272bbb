"""Which settings of a run differ from its recipe's file or the defaults, and what the run was made with."""

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from headway.cli.report_section import ReportSection
from headway.config import TrainConfig
from headway.config.tree import ITEM, Setting, walk
from headway.log.jsonl import as_object
from headway.report.secrets import HIDDEN

_LONGEST = 120  # of a value [characters]
_UNSAID = "not set"


def changed_settings(config: str, facts: str) -> list[ReportSection]:
    """The settings that differ from the recipe's file or from the default; none where the texts are no run's.

    Args:
        config: config.yaml, without secrets.
        facts: run.json, without secrets; empty where there is none.
    """
    try:
        resolved, run = yaml.safe_load(config), json.loads(facts or "{}")
    except (yaml.YAMLError, ValueError, RecursionError):
        return []
    recipe = run.get("recipe") if isinstance(run, Mapping) else None
    path, overridden = "", dict[str, str]()
    if isinstance(recipe, Mapping) and isinstance(recipe.get("overridden"), list):
        path = str(recipe.get("path") or "")
        said = (str(one).partition("=") for one in recipe["overridden"])
        overridden = {name: value or _UNSAID for name, _, value in said}
    known = {setting.name: setting for setting in walk(TrainConfig)}
    changed, others = [], []
    for name, value, default in _leaves(resolved, known):
        is_other = _differs(value, default)
        above = next((key for key in overridden if name == key or name.startswith(f"{key}.")), None)
        if above is not None and (name == above or is_other):  # a file may name a section by one word, as data.eval
            changed.append([name, _cut(_json(value)), _cut(overridden[above]), _cut(default)])
        elif above is None and is_other:
            others.append([name, _cut(_json(value)), "the same" if path else "", _cut(default)])
    rows = changed + others
    headings = ["setting", "this run", "the recipe's file", "default"]
    if not path:
        headings, rows = [*headings[:2], headings[3]], [[*row[:2], row[3]] for row in rows]
    says = f"The recipe is {path}: {len(overridden)} settings were given another value than it says." if path else ""
    return [ReportSection("Settings that are not the defaults", headings, rows, says)] if rows else []


def provenance(facts: str) -> list[ReportSection]:
    """Command, host, device and versions of a run; nothing where the text is no run's.

    Args:
        facts: run.json, without secrets; empty where there is none.
    """
    run = as_object(facts.encode()) or {}
    command, device, software = run.get("command"), run.get("device"), run.get("software")
    found = {
        "command": shlex.join(map(str, command)) if isinstance(command, list) else command,
        "host": run.get("host"),
        "device": device.get("name") if isinstance(device, Mapping) else None,
        "precision": run.get("precision"),
        **(software if isinstance(software, Mapping) else {}),
    }
    rows = [[name.replace("_", " "), str(value)] for name, value in found.items() if value is not None]
    return [ReportSection("Made with", ["what", "value"], rows)] if rows else []


def _leaves(node: Any, known: Mapping[str, Setting], name: str = "") -> Iterator[tuple[str, Any, str]]:
    """Name, value and default of each setting that holds no others; "required" where there is no default."""
    children = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        path = f"{name}.{key}" if name else str(key)
        setting = known.get(".".join(ITEM if part.isdecimal() else part for part in path.split(".")))
        is_item = isinstance(node, list) and isinstance(child, Mapping)
        if setting is not None and (setting.section is None or child is None):
            yield path, child, "required" if setting.default is None else setting.default
        elif setting is not None or is_item:
            yield from _leaves(child, known, path)


def _differs(value: Any, default: str) -> bool:
    if value == HIDDEN:  # nobody can tell
        return False
    try:
        return bool(value != yaml.safe_load(default)) and _json(value) != default  # YAML reads 1e-08 as text
    except yaml.YAMLError:
        return _json(value) != default


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
