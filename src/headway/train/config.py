"""The configuration of a training run: a YAML file, typed, plus `--set a.b=c` on top.

Relative paths start from the working directory, as on any command line. Unknown keys are refused, and so is a setting
that could not take effect.
"""

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from headway.errors import ConfigError
from headway.train.data_config import DataConfig, Positive, Section, as_written, changed

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class ModelConfig(Section):
    """Which model, and which part of it learns."""

    path: str = Field(description="Folder, Hub id or config.json of a transformers causal or image-text model")
    random_init: bool = Field(default=False, description="Start from random weights drawn with run.seed")
    freeze: tuple[str, ...] = Field(
        default=(),
        description="What does not learn: components of the ledger ('vision', 'language.mlp') or globs over parameter "
        "names ('model.language_model.layers.0.*'); each must match something",
    )


class OptimConfig(Section):
    """AdamW, its schedule and the size of an optimizer step."""

    steps: Positive = Field(description="Optimizer steps of the whole run [steps]")
    lr: float = Field(gt=0.0, description="Peak learning rate")
    betas: tuple[Fraction, Fraction] = Field(
        default=(0.9, 0.95), description="AdamW's decay rates of its moments, below 1"
    )
    eps: float = Field(default=1e-8, gt=0.0, description="AdamW's epsilon")
    weight_decay: float = Field(default=0.1, ge=0.0, description="Decay of matrices; norms and biases have none")
    warmup_steps: int = Field(default=0, ge=0, description="Linear rise of the learning rate [steps]")
    schedule: Literal["cosine", "constant"] = Field(
        default="cosine", description="The learning rate's course after warm-up"
    )
    min_lr_ratio: Fraction = Field(default=0.1, description="Last learning rate of the cosine as a fraction of lr")
    clip: float | None = Field(default=1.0, gt=0.0, description="Largest global gradient norm; null for no clipping")
    accumulation: Positive = Field(default=1, description="Packs per optimizer step and rank [packs]")

    @field_validator("betas")
    @classmethod
    def _betas_below_one(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if max(betas) >= 1.0:
            raise ValueError("both must be below 1")
        return betas

    @model_validator(mode="after")
    def _everything_takes_effect(self) -> Self:
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} leaves nothing of the {self.steps} steps")
        if self.schedule == "constant" and "min_lr_ratio" in changed(self):
            raise ValueError("min_lr_ratio has no effect with schedule 'constant'; remove it or use 'cosine'")
        return self


class EvalConfig(Section):
    """Exact match of greedy answers on held-out samples."""

    every: Positive | None = Field(default=None, description="Steps between evaluations; null for none [steps]")
    at_end: bool = Field(default=False, description="Evaluate once more after the last step")
    max_samples: Positive | None = Field(default=None, description="Only the first so many [samples]")


class CheckpointConfig(Section):
    """When the whole state is saved, and how much of it stays on disk."""

    every: Positive | None = Field(
        default=None, description="Optimizer steps between checkpoints; the end of the run always has one [steps]"
    )
    keep: Positive = Field(default=2, description="Newest checkpoints that stay; older ones are deleted [checkpoints]")


class RunConfig(Section):
    """Where the run happens and what it leaves behind."""

    folder: Path = Field(description="Run folder: config, versions, metrics.jsonl and checkpoints")
    seed: int = Field(default=0, ge=0, description="Seed of weights and of everything random besides the data order")
    device: str = Field(default="auto", description="'cpu', 'cuda', 'cuda:1', or 'auto' for CUDA where there is one")
    dtype: Literal["auto", "float32", "bfloat16-autocast", "bfloat16-params"] = Field(
        default="auto",
        description="float32; bfloat16-autocast (fp32 weights) or bfloat16-params, both on CUDA only; "
        "auto is bfloat16-autocast on CUDA and float32 on CPU",
    )
    threads: Positive | None = Field(default=None, description="CPU threads of PyTorch; null for its choice [threads]")
    log_every: Positive = Field(default=1, description="Steps between printed lines; metrics.jsonl has all [steps]")


class TrainConfig(Section):
    """Everything that a training run can be told."""

    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunConfig

    @model_validator(mode="after")
    def _evaluation_has_samples(self) -> Self:
        evaluates = self.eval.every is not None or self.eval.at_end
        if evaluates and self.data.eval is None:
            raise ValueError("eval.every or eval.at_end is set, but data.eval names no file of held-out samples")
        if self.data.eval is not None and not evaluates:
            raise ValueError("data.eval is given, but neither eval.every nor eval.at_end uses it")
        if self.eval.every is not None and self.eval.every > self.optim.steps:
            raise ValueError(f"eval.every {self.eval.every} is never reached in {self.optim.steps} steps")
        if self.checkpoint.every is not None and self.checkpoint.every > self.optim.steps:
            raise ValueError(f"checkpoint.every {self.checkpoint.every} is never reached in {self.optim.steps} steps")
        return self

    def as_dict(self) -> dict[str, Any]:
        """The resolved configuration as plain YAML and JSON types."""
        return as_written(self)


def load_config(path: Path, overrides: tuple[str, ...] = ()) -> TrainConfig:
    """Read a YAML configuration and lay overrides over it.

    Args:
        path: the YAML file.
        overrides: assignments `a.b=value`, the value in YAML; list items by index, as in `data.train.0.epochs=2`.

    Raises:
        ConfigError: no such file, no YAML, an unknown key, or a value that is not allowed.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {path}: {error.strerror}. Give the path of a YAML file."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        sections = ", ".join(TrainConfig.model_fields)
        raise ConfigError(f"{path} holds no configuration; it must be a YAML mapping with the sections {sections}.")
    for override in overrides:
        _assign(raw, override)
    return parse_config(raw, source=str(path))


def parse_config(raw: dict[str, Any], *, source: str = "the configuration") -> TrainConfig:
    """Check a configuration given as plain types.

    Args:
        raw: sections as nested dictionaries.
        source: where it came from, for the message.

    Raises:
        ConfigError: an unknown key or a value that is not allowed; every mistake in one paragraph.
    """
    try:
        return TrainConfig.model_validate(raw)
    except ValidationError as error:
        mistakes = "; ".join(_describe(dict(item)) for item in error.errors(include_url=False))
        end = "" if mistakes.endswith("?") else "."
        raise ConfigError(f"{source}: {mistakes}{end} `headway train --help` says how settings are given.") from error


def _assign(raw: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {override!r} is no assignment; write section.key=value, such as optim.lr=1e-3.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r}: the value {text!r} is not YAML; quote it if it is a string.") from error
    node: Any = raw
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(node, list):
            if not key.isdecimal() or int(key) >= len(node):
                where = ".".join(keys[:depth])
                raise ConfigError(f"--set {override!r}: {where} has items 0 to {len(node) - 1}, and no {key!r}.")
            if last:
                node[int(key)] = value
            else:
                node = node[int(key)]
        elif isinstance(node, dict):
            if last:
                node[key] = value
            else:
                node = node.setdefault(key, {})
        else:
            where = ".".join(keys[:depth])
            raise ConfigError(f"--set {override!r}: {where} is the value {node!r}, which has no {key!r} in it.")


def _describe(error: dict[str, Any]) -> str:
    """One pydantic error as a clause: where, what was given, what is allowed."""
    location = tuple(error["loc"])
    name = ".".join(str(part) for part in location)
    if error["type"] == "extra_forbidden":
        allowed = _keys_at(location[:-1])
        close = difflib.get_close_matches(str(location[-1]), allowed, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else "allowed here: " + ", ".join(allowed)
        return f"unknown key {name!r}, {hint}".rstrip(".")
    if error["type"] == "missing":
        return f"{name!r} is required" + _meaning(location)
    message = error["msg"].removeprefix("Value error, ")
    if isinstance(error.get("input"), dict | list):
        return f"{name}: {message}" if name else message
    return f"{name} = {error.get('input')!r}: {message[:1].lower()}{message[1:]}" + _meaning(location)


def _field(location: tuple[int | str, ...]) -> Any:
    """The annotation found at a location of the configuration; list items by index."""
    annotation: Any = TrainConfig
    info = None
    for part in location:
        if isinstance(part, int):
            annotation = annotation.__args__[0]
            continue
        section = _section(annotation)
        if section is None or part not in (fields := _fields(section)):
            break
        info = fields[part]
        annotation = info.annotation
    return annotation, info


def _section(annotation: Any) -> Any:
    """The section that an annotation names, itself or as one of several choices."""
    choices = (annotation, *getattr(annotation, "__args__", ()))
    return next((kind for kind in choices if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _fields(section: type[BaseModel]) -> dict[str, Any]:
    """A section's settings under the names of the file."""
    return {info.alias or name: info for name, info in section.model_fields.items()}


def _keys_at(location: tuple[int | str, ...]) -> list[str]:
    annotation, _ = _field(location)
    section = _section(annotation)
    return [] if section is None else list(_fields(section))


def _meaning(location: tuple[int | str, ...]) -> str:
    _, info = _field(location)
    return f" ({info.description})" if info is not None and info.description else ""
