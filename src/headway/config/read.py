"""The sections together, read from a YAML file with `--set a.b=c` on top; errors say where and what is allowed."""

import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import Field, PrivateAttr, ValidationError, model_validator

from headway.config.data import DataConfig
from headway.config.mistakes import describe_all, translated
from headway.config.model import ModelConfig, ParallelConfig, SpeedConfig
from headway.config.objective import ObjectiveConfig, ObjectiveSection, with_objectives
from headway.config.optim import OptimConfig
from headway.config.run import CheckpointConfig, EvalConfig, PlanConfig, RunConfig
from headway.config.sections import FREE_ON_RESUME, Section
from headway.errors import ConfigError
from headway.files import SETTINGS_BYTES, read_text
from headway.hub import model_of_run
from headway.plugins import objectives
from headway.words import Argument

EXTENDS = "extends"
_EITHER = {"steps": "epochs", "epochs": "steps", "train": "stages", "stages": "train"}
"""Settings that say one thing in two ways: whoever gives one over a file that has the other, means it instead."""
_SUFFIXES = (".yaml", ".yml", ".json", "")
_BY_INIT = ". To write one for your data: `headway init --model MODEL --data FILE`."


@dataclass(frozen=True)
class Recipe:
    """The file that a configuration was read from; configurations that say the same are equal wherever they are from.

    Attributes:
        path: of the file; "" for none.
        overridden: what it says of each setting that was given another value, as `a.b=JSON`; nothing after the equals
            sign where the file does not name the setting.
        said: all that it says, as plain types.
    """

    path: str = field(default="", compare=False)
    overridden: tuple[str, ...] = field(default=(), compare=False)
    content: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, path: str, content: Mapping[str, Any], changed: Iterable[str]) -> Self:
        """The recipe of a file, with its values for the settings of these names, each once."""
        return cls(path, tuple(f"{name}={_json_at(content, name)}" for name in dict.fromkeys(changed)), content)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, as run.json has them."""
        return {"path": self.path, "overridden": list(self.overridden)}


@with_objectives
class TrainConfig(Section):
    """Settings of a training run; each registered objective adds a section of its own."""

    _recipe: Recipe = PrivateAttr(default_factory=Recipe)

    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    objective: ObjectiveConfig | None = Field(
        default=None, description="Class of yours with a loss of its own, such as examples/distil.py. Null means none"
    )
    parallel: Annotated[ParallelConfig, FREE_ON_RESUME] = ParallelConfig()
    speed: SpeedConfig = SpeedConfig()
    eval: Annotated[EvalConfig, FREE_ON_RESUME] = EvalConfig()
    checkpoint: Annotated[CheckpointConfig, FREE_ON_RESUME] = CheckpointConfig()
    plan: Annotated[PlanConfig, FREE_ON_RESUME] = PlanConfig()
    run: RunConfig

    def of_processor(self) -> dict[str, Any]:
        """Changes to the model's processor, as `headway.data.processor_settings.ProcessorSettings.of` reads."""
        return {"chats": self.model.of_chats(), "sizes": self.data, "tokens": self.model}

    @model_validator(mode="after")
    def _evaluation_has_samples(self) -> Self:
        if self.eval.evaluates and self.data.eval is None:
            raise ValueError("eval.every or eval.at_end is set, but data.eval names no file of held-out samples")
        return self

    @model_validator(mode="after")
    def _best_is_of_several(self) -> Self:
        judged = self.eval
        uses = {
            "eval.stop_after": judged.stop_after is not None,
            "checkpoint.keep_best": bool(self.checkpoint.keep_best),
        }
        in_use = [name for name, is_set in uses.items() if is_set]
        if in_use and judged.every is None:
            raise ValueError(
                f"{' and '.join(in_use)} compare evaluations during the run. Set eval.every, the steps between them"
            )
        return self

    @model_validator(mode="after")
    def _epochs_are_counted_beforehand(self) -> Self:
        epochs = self.optim.epochs
        if epochs is not None and self.data.stream is not None:
            raise ValueError(
                "optim.epochs needs the number of samples, but data.stream does not count them. Set optim.steps, or "
                "leave data.stream out to index the data"
            )
        if epochs not in (None, 1.0) and len(self.data.stages) > 1:
            raise ValueError(
                f"optim.epochs {epochs:g} has no effect on several stages, because each stage sets its own length. "
                "Set optim.epochs to 1 to play all stages once, and set 'epochs' in the stages"
            )
        return self

    @model_validator(mode="after")
    def _gradients_are_summed_over_packs(self) -> Self:
        if self.parallel.reduce == "step" and self.optim.accumulation == 1:
            raise ValueError("parallel.reduce 'step' has no effect with one pack per step. See optim.accumulation")
        return self

    @model_validator(mode="after")
    def _base_is_dequantised_to_bfloat16(self) -> Self:
        if self.model.base is not None and self.run.dtype == "float8":
            raise ValueError(
                f"model.base {self.model.base!r} multiplies in bfloat16, but run.dtype 'float8' asks for float8. "
                "Take one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _has_an_objective(self) -> Self:
        in_use = [plugin.section for plugin in objectives() if getattr(self, plugin.section) is not None]
        in_use += ["objective"] if self.objective is not None else []
        if len(in_use) > 1:
            raise ValueError(f"{' and '.join(in_use)} both set the loss. Take one of them out")
        if self.objective_section is not None:
            self.model._scores = self.objective_section.scores
            self.objective_section.check(self)
        return self

    @model_validator(mode="after")
    def _dropout_takes_effect(self) -> Self:
        lora, name = self.model.lora, self.objective_name
        if self.model.dropout is True and self._compares_forwards:
            raise ValueError(
                f"model.dropout is on, but {name} compares the model with its reference, so both must compute "
                "without dropout. Leave model.dropout out"
            )
        if lora is not None and lora.dropout and not self.drops:
            reason = "model.dropout: off" if self.model.dropout is False else f"{name}, where dropout is off"
            raise ValueError(f"model.lora.dropout {lora.dropout:g} has no effect with {reason}: leave it out")
        return self

    @property
    def objective_name(self) -> str | None:
        """Name of the section that says what is learnt; None of cross-entropy and of a class of a user's own."""
        return next((plugin.section for plugin in objectives() if getattr(self, plugin.section) is not None), None)

    @property
    def objective_section(self) -> ObjectiveSection | None:
        """Section that says what is learnt; None as for `objective_name`."""
        return None if self.objective_name is None else getattr(self, self.objective_name)

    @property
    def _compares_forwards(self) -> bool:
        return self.objective_section is not None and self.objective_section.compares_forwards

    @property
    def drops(self) -> bool:
        """Tell whether dropout is on in training."""
        if self.model.dropout != "auto":
            return self.model.dropout
        return self.objective_section is None or self.objective_section.drops

    @property
    def weighs_losses(self) -> bool:
        """True if the output layer runs twice: once for the losses of a pack, once more with what these weigh."""
        section = self.objective_section
        return section is not None and section.weighs_slots and self.speed.loss_chunk is not None

    @property
    def skips_unlabelled(self) -> bool:
        """True if the output layer runs on labelled tokens alone."""
        return self.speed.loss_chunk is not None and not self.model.scores

    @property
    def recipe(self) -> Recipe:
        """The file that it was read from, and what that says of settings that were given another value."""
        return self._recipe

    def to_dict(self) -> dict[str, Any]:
        """The resolved configuration as plain YAML and JSON types."""
        return self.model_dump(mode="json", by_alias=True)


def load_config(path: Path, overrides: tuple[str, ...] = ()) -> TrainConfig:
    """Read a YAML configuration and lay overrides over it.

    A file may begin with `extends: other.yaml`, a path from its own folder: it then changes and adds to what that file
    says, section by section and setting by setting; a list replaces the whole list.

    Args:
        path: the YAML file.
        overrides: assignments `a.b=value`, the value in YAML; list items by index, as in `data.train.0.epochs=2`.

    Raises:
        ConfigError: no such file, no YAML, an unknown key, a value that is not allowed, or files that extend each
            other in a circle.
        UnknownModelError: `model.path` is the folder of a training run without a model of its newest state.
    """
    raw = _read(path, ())
    content = copy.deepcopy(raw)
    config = with_overrides(raw, overrides, source=str(path))
    names = dict.fromkeys(override.partition("=")[0].strip() for override in overrides)
    changed = [name for name in names if _json_at(content, name) != _json_at(raw, name)]
    # a run's folder may come to hold other models: what is trained and recorded is the one that it holds now
    if (model := model_of_run(Path(config.model.path).expanduser())) is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(model)})})
        changed += ["model.path"] * ("model.path" not in changed)
    config._recipe = Recipe.of(str(path), content, changed)
    return config


def changed_config(
    config: TrainConfig, values: Mapping[str, Any], overrides: tuple[str, ...] = (), source: str = "the configuration"
) -> TrainConfig:
    """A configuration that was made of another; what was changed is told beside the recipe of that one.

    Args:
        config: the other one.
        values: of sections, and of settings by their dotted names, as plain types.
        overrides: as for `load_config`; they lie on top.
        source: what to call it in errors.

    Raises:
        ConfigError: as for `load_config`.
    """
    raw: dict[str, Any] = dict(config) if not overrides else config.to_dict()  # sections as they are: checked already
    for name, value in values.items():
        section, _, key = name.partition(".")
        if key and isinstance(raw[section], Section):
            raw[section] = raw[section].model_dump(mode="json", by_alias=True)
        raw[section] = raw[section] | {key: value} if key else value
    changed = with_overrides(raw, overrides, source=source)
    if config.recipe.path:
        names = [override.partition("=")[0] for override in config.recipe.overridden]
        names += _differing(config.to_dict(), changed.to_dict())
        changed._recipe = Recipe.of(config.recipe.path, config.recipe.content, names)
    return changed


def _differing(before: Any, after: Any, name: str = "") -> list[str]:
    """Names of the settings whose values differ; that of the whole list where lists are not as long."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys: Any = dict.fromkeys([*before, *after])
        pairs = [(key, before.get(key), after.get(key)) for key in keys]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = [(number, *both) for number, both in enumerate(zip(before, after, strict=True))]
    else:
        return [] if before == after else [name]
    return [
        setting
        for key, was, is_now in pairs
        for setting in _differing(was, is_now, f"{name}.{key}" if name else str(key))
    ]


def _json_at(raw: Any, name: str) -> str:
    """The value of a setting as JSON; "" where it is not named."""
    for key in name.split("."):
        try:
            raw = raw[int(key) if isinstance(raw, list) else key]
        except (KeyError, IndexError, TypeError, ValueError):
            return ""
    return json.dumps(raw, default=str)


def _read(path: Path, extending: tuple[Path, ...]) -> dict[str, Any]:
    try:
        text = read_text(path, most=SETTINGS_BYTES)
        if path.resolve() in extending:  # after reading, which tells of links that lead round in a circle
            raise ConfigError(f"{path} extends itself through {len(extending) - 1} other files. Break the circle.")
        raw = load_yaml(text)
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {path}: {error.strerror}. Give the path of a YAML file{_BY_INIT}"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        hint = f" Give a configuration{_BY_INIT}" if path.suffix not in _SUFFIXES else ""
        raise ConfigError(f"{path} is not YAML: {_what_is_wrong(error)}{hint}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {_beyond(error)}.") from error
    if not isinstance(raw, dict):
        sections = ", ".join(TrainConfig.model_fields)
        hint = "." if path.suffix in _SUFFIXES else _BY_INIT
        raise ConfigError(f"{path} holds no configuration. Write a YAML mapping with the sections {sections}{hint}")
    base = raw.pop(EXTENDS, None)
    if base is None:
        return raw
    if not isinstance(base, str):
        raise ConfigError(f"{path}: {EXTENDS} = {base!r} is no path. Name one YAML file, from the folder of this one.")
    return _merged(_read(path.parent / base, (*extending, path.resolve())), raw)


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Lay one mapping over another; mappings inside join, all else replaces."""
    merged = dict(base)
    for key, value in changes.items():
        below = merged.get(key)
        merged[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
        if value is not None and _EITHER.get(key) not in changes:
            merged.pop(_EITHER.get(key, ""), None)
    return merged


def with_overrides(
    raw: dict[str, Any], overrides: tuple[str, ...], *, source: str = "the configuration"
) -> TrainConfig:
    """Lay overrides over a configuration given as plain types, which is changed, and check the result.

    Raises:
        ConfigError: as for `load_config`.
    """
    for override in overrides:
        _assign(raw, override)
    return parse_config(raw, source=source)


def without_effect(overrides: Iterable[str]) -> list[str]:
    """Name the overrides that a later one takes back, a clause each; whoever adds to a command line means the last one.

    >>> without_effect(["optim.lr=1e-3", "optim.clip=1", "optim.lr=1e-4"])
    ['optim.lr=1e-3 has no effect, because optim.lr=1e-4 follows']
    """
    before: dict[str, str] = {}
    clauses = []
    for override in overrides:
        name, _, value = (part.strip() for part in override.partition("="))
        section, dot, key = name.rpartition(".")
        other = f"{section}{dot}{_EITHER[key]}" if key in _EITHER and value != "null" else name
        lost = [done for done in before if done in (name, other) or done.startswith(f"{name}.")]
        for done in lost:
            old_value = before.pop(done)
            if old_value not in ("null", value):
                clauses.append(f"{done}={old_value} has no effect, because {override} follows")
        before[name] = value
    return clauses


def parse_config(raw: dict[str, Any], *, source: str = "the configuration") -> TrainConfig:
    """Check a configuration given as plain types.

    Raises:
        ConfigError: an unknown key or a value that is not allowed; every mistake in one paragraph.
    """
    try:
        return TrainConfig.model_validate(raw)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        mistakes = "; ".join(describe_all(errors, TrainConfig))
        end = "" if mistakes.endswith("?") else "."
        sections = {str(item["loc"][0]) for item in errors if item["loc"]} & TrainConfig.model_fields.keys()
        page = f"headway config {sections.pop()}" if len(sections) == 1 else "headway config"
        raise ConfigError(f"{source}: {mistakes}{end} `{page}` lists what can be set.") from error


def _beyond(error: Exception) -> str:
    """Explain an error of reading YAML that PyYAML does not report as its own."""
    if isinstance(error, RecursionError):
        return "its lists or mappings are nested too deeply"
    return f"a value in it is out of range ({error})"


def _what_is_wrong(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    mark = getattr(error, "problem_mark", None)
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 text ({error.reason} at byte {error.start}). Save the file as UTF-8."
    if mark is None:
        return " ".join(str(error).split())
    place = f"line {mark.line + 1}, column {mark.column + 1}"
    if "'\\t'" in str(error):
        return f"{place} begins with a tab. Indent with spaces."
    return f"{place}: {getattr(error, 'problem', '')}."


def _assign(raw: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(
            Argument("overrides"),
            f" {override!r} is not an assignment. Write section.key=value, such as optim.lr=1e-3.",
            value=override,
        )
    try:
        value = load_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            Argument("overrides"),
            f" {override!r}: the value {text!r} is not YAML ({_what_is_wrong(error).rstrip('.')}). Quote the value "
            "if it is a string.",
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(Argument("overrides"), f" {dotted}: the value cannot be read: {_beyond(error)}.") from error
    # down to the section or list that holds the last key; what is missing on the way is made by `_assigned`
    node: Any = raw
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        # items of a list by index, sections and settings by name
        if isinstance(node, list):
            if not key.isdecimal() or int(key) >= len(node):
                where = ".".join(keys[:depth])
                raise ConfigError(
                    Argument("overrides"), f" {override!r}: {where} has items 0 to {len(node) - 1}, and no {key!r}."
                )
            if last:
                node[int(key)] = value
            else:
                node = node[int(key)]
        elif isinstance(node, dict) and not key.isdecimal():
            node = _assigned(node, key, value, last)
        else:
            where = ".".join(keys[:depth])
            answer = translated(dotted.strip()) or f"to set single settings, give {where} a mapping"
            raise ConfigError(
                Argument("overrides"),
                f" {override!r}: {where} is {node!r}, which has no {key!r} in it. {answer[:1].upper()}{answer[1:]}.",
            )


def _assigned(node: dict[str, Any], key: str, value: Any, last: bool) -> Any:
    """Set a key, or go below it; what says the same in another way goes."""
    if value is not None:
        node.pop(_EITHER.get(key, ""), None)
    node[key] = value if last else {} if node.get(key) is None else node[key]
    return node[key]


_MOST_CHARACTERS = 1_000_000  # PyYAML reads some tens of thousands a second
_MOST_VALUES = 1_000_000


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a mapping that has a key twice; PyYAML itself lets the last one win without a word."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Keys are read before `<<` lays other mappings into this mapping, which may repeat its keys.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                first = lines[key.tag, key.value]
                places = f"line {line}" if first == line else f"lines {first} and {line}"
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} stands twice in one mapping, in {places}, so one of the two "
                    "would have no effect. Join them, or remove one",
                    problem_mark=key.start_mark,
                )
            lines[key.tag, key.value] = line
        return node


def load_yaml(text: str) -> Any:
    """Read a YAML document as plain types.

    Raises:
        yaml.YAMLError: no YAML, or a key that stands twice in one mapping.
        ValueError: it is too long, or holds a number of thousands of digits.

    >>> load_yaml("{a: 1, b: [2]}")
    {'a': 1, 'b': [2]}
    """
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"it has {len(text):,} characters, but at most {_MOST_CHARACTERS:,} are allowed")
    loader = _UniqueKeyLoader(text)  # a SafeLoader
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if (values := _num_values(node, {})) > _MOST_VALUES:
            raise ValueError(f"its aliases make {values:,} values, but at most {_MOST_VALUES:,} are allowed")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _num_values(node: yaml.Node, counts: dict[int, int]) -> int:
    """Count the values below a node, those of an alias as often as it stands."""
    if id(node) not in counts:
        counts[id(node)] = 1  # a node that holds itself finds this count
        if isinstance(node, yaml.CollectionNode):
            below = [part for entry in node.value for part in (entry if isinstance(entry, tuple) else (entry,))]
            counts[id(node)] += sum(_num_values(part, counts) for part in below)
    return counts[id(node)]
