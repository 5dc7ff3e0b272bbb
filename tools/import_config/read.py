"""Read a configuration of LMMs-Engine as a recipe of Headway: every key is translated, or named with the reason.

A key has one of four outcomes. It is translated; not needed, since what it asks for is always so here; left to do by
hand, where another file than the recipe says it; or refused, as unknown or as what Headway cannot do, and then nothing
is written unless the key is left out on purpose.

Source: lmms-engine 0.1.4, its configuration classes and trainers; transformers' TrainingArguments, which it extends.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from headway.config.mistakes import translated
from headway.config.read import load_yaml
from headway.errors import ConfigError
from headway.files import SETTINGS_BYTES, read_text
from headway.words import Argument
from tools.import_config.keys import DEFAULTS, RULES
from tools.import_config.outcomes import Context, Outcome

SECTIONS = ("dataset_config", "trainer_args", "model_config")
_UNREADABLE = (OSError, ValueError, RecursionError, yaml.YAMLError)  # ValueError: no text, or 4,300 digits
_METHODS = ("stage", "rlhf_type", "rl")
_PREFERENCES = ("dpo", "ipo", "kto", "orpo", "simpo", "cpo", "rm")
_DATA = ("dataset_config.dataset_path", "dataset_config.datasets")


@dataclass(frozen=True)
class KeyOutcome:
    """One key of the configuration and what became of it."""

    key: str  # dotted
    value: Any  # as given, else the default
    is_set: bool  # whether the file says it
    outcome: Outcome

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        fields = {"key": self.key, "value": self.value, "given": self.is_set, "fate": self.outcome.fate}
        return {**fields, "settings": dict(self.outcome.settings), "reason": self.outcome.reason}


@dataclass(frozen=True)
class ImportedRecipe:
    """A recipe and where it came from."""

    source: str  # name of the configuration's file
    recipe: dict[str, Any]  # sections of settings, as plain types
    keys: tuple[KeyOutcome, ...]  # every key and what became of it
    absent: tuple[str, ...] = ()  # keys that were to be left out, and that the configuration does not have

    def as_yaml(self) -> str:
        """The recipe as a file, with what is left to do above it."""
        lines = [f"# From {self.source}, a configuration of LMMs-Engine."]
        left = [key for key in self.keys if key.outcome.fate in ("by hand", "refused")]
        lines += ["#", "# Not in here, and to be looked after:"] if left else []
        lines += [f"#   {key.key} = {key.value!r}: {key.outcome.reason}" for key in left]
        return "\n".join(lines) + "\n\n" + yaml.safe_dump(self.recipe, sort_keys=False)


def import_config(path: Path, overrides: Mapping[str, Any], *, leave_out: tuple[str, ...] = ()) -> ImportedRecipe:
    """Translate a configuration of LMMs-Engine.

    Args:
        path: its YAML or JSON file.
        overrides: settings of the recipe that the configuration does not have, or that go before it, dotted.
        leave_out: keys that are to be left out although they cannot be translated, dotted. One that the file does not
            have is noted in the result: one command line serves a folder of configurations.

    Raises:
        ConfigError: no such file, another kind of configuration, keys that are refused, or a recipe that lacks what
            every recipe needs; each with all of them named.
    """
    raw = _sections(path)
    # every key that LMMs-Engine has, with its default where the file does not set it
    filled = {name: {**DEFAULTS.get(name, {}), **raw[name]} for name in (*SECTIONS, "")}
    if "optim.steps" in overrides:
        filled["trainer_args"]["max_steps"] = overrides["optim.steps"]
    context = Context(filled, path.parent)
    keys = []
    # each key becomes settings, or is not needed, or is refused
    for section, values in filled.items():
        for name, value in values.items():
            key = f"{section}.{name}".lstrip(".")
            outcome = _outcome(key, value, context)
            if "data.train" in overrides and key in _DATA:
                outcome = Outcome("not needed", "the data are given")
            keys.append(KeyOutcome(key, value, name in raw[section], outcome))
    refused = [row for row in keys if row.outcome.fate == "refused" and row.key not in leave_out]
    if refused:
        reasons = "; ".join(f"{row.key} = {row.value!r} ({row.outcome.reason})" for row in refused)
        count = "1 key" if len(refused) == 1 else f"{len(refused)} keys"
        raise ConfigError(
            f"{path}: {count} cannot be taken over: {reasons}. Change or remove them, or leave them out knowingly with "
            "",
            Argument("leave_out", tuple(row.key for row in refused)),
            ".",
        )
    absent = tuple(key for key in leave_out if key not in {row.key for row in keys})
    # settings in the order of their keys; those from outside of the file come last and win
    settings: dict[str, Any] = {}
    for row in keys:
        settings |= row.outcome.settings
    settings |= overrides
    return ImportedRecipe(path.name, _nested(settings, path), tuple(keys), absent)


def _outcome(key: str, value: Any, context: Context) -> Outcome:
    rule = RULES.get(key)
    if rule is None:
        return Outcome("refused", "no key of LMMs-Engine 0.1.4")
    try:
        return rule(value, context)
    except (ArithmeticError, AttributeError, LookupError, TypeError, *_UNREADABLE) as error:
        reason = " ".join(str(error).split())
        return Outcome("refused", f"it, or what it goes with, has a value of another kind: {reason}")


def _sections(path: Path) -> dict[str, dict[str, Any]]:
    """Read the file; sections that it leaves out are empty, keys outside of sections are in the section ""."""
    try:
        raw = load_yaml(read_text(path, most=SETTINGS_BYTES))  # JSON is YAML
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {path}: {error.strerror}. Give the path of a file."
        ) from error
    except _UNREADABLE as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if isinstance(raw, list) and len(raw) == 1 and isinstance(raw[0], dict) and isinstance(raw[0].get("config"), dict):
        raw = raw[0]["config"]  # its older form: a list of tasks
    if not isinstance(raw, dict) or not any(section in raw for section in SECTIONS):
        raise ConfigError(
            f"{path} is no configuration of LMMs-Engine, which has the sections {', '.join(SECTIONS)}. For one of "
            f"another framework, write a recipe by hand; recipes/ has some to start from.{_on_preferences(raw)}"
        )
    sections = {section: raw.pop(section, None) or {} for section in SECTIONS}
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise ConfigError(f"{path}: {name} is {section!r}, but must be a mapping of keys to values.")
    return {**sections, "": raw}


def _on_preferences(raw: Any) -> str:
    """What becomes of training on preferences, of LLaMA-Factory's, ms-swift's and axolotl's configurations of it."""
    keys = (key for key in _METHODS if isinstance(raw, dict) and raw.get(key) in _PREFERENCES)
    return "".join(f" Its {key}: {raw[key]} has no place in one; {translated(key)}." for key in keys)


def _nested(settings: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Put dotted settings into sections, in the order of a recipe, and see that what is needed is there."""
    needs = {
        "model.path": "model_config.load_from_pretrained_path",
        "data.train": "dataset_config.dataset_path or datasets",
        "optim.steps": "trainer_args.max_steps or num_train_epochs",
    }
    names = settings.keys() | ({"optim.steps"} if "optim.epochs" in settings else set())
    missing = [f"{source} (or give {Argument(key)})" for key, source in needs.items() if key not in names]
    if missing:
        raise ConfigError(f"{path} does not say everything that a run needs; it lacks {'; '.join(missing)}.")
    recipe: dict[str, Any] = {name: {} for name in ("model", "data", "optim", "parallel", "speed", "checkpoint", "run")}
    for key, value in settings.items():
        *sections, name = key.split(".")
        node = recipe
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return {name: section for name, section in recipe.items() if section}
