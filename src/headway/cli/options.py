"""Options that several commands share, each documented once with its unit."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from headway.cli.output import warn
from headway.errors import UsageError

if TYPE_CHECKING:
    from headway.data.media.sizes import MediaSizes


def spread(
    *,
    only: Collection[str] | None = None,
    without: Collection[str] = (),
    between: Mapping[str, Sequence[str]] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Spread each parameter of a command whose type is a dataclass of options over the command line.

    The command is called with the object; `--help` shows an option for each field, at the parameter's place. A field
    that a table fills (`table_of_options`) has an option for each row, and is a dictionary of those that were typed.

    Args:
        only: fields that are options of this command; all if not given.
        without: fields that are none.
        between: the command's own options that `--help` shows before a field, by the field's name.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
        own = {
            name: parameter.replace(annotation=hints[name])
            for name, parameter in inspect.signature(command).parameters.items()
        }
        moved = {name for names in (between or {}).values() for name in names}
        parameters: list[inspect.Parameter] = []
        for name, parameter in own.items():
            if name in groups:
                for option in _options_of(groups[name]):
                    if option.name not in without and (only is None or option.name in only):
                        parameters += [own[before] for before in (between or {}).get(option.name, ())]
                        parameters.append(option)
            elif name not in moved:
                parameters.append(parameter)

        @functools.wraps(command)
        def called(*arguments: Any, **values: Any) -> None:
            objects = {name: _object_of(group, values) for name, group in groups.items()}
            command(*arguments, **values, **objects)

        # The parser reads the names, types and defaults here, and would look behind the wrapper otherwise.
        del called.__wrapped__
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {option.name: option.annotation for option in parameters}
        return called

    return decorate


_TABLE = "table"


def table_of_options(rows: Callable[[], Mapping[str, Any]]) -> Any:
    """Declare a field of a group of options that has an option for each row of a table.

    Args:
        rows: gives the type of each option, with its help, by name.
    """
    return field(default_factory=dict, metadata={_TABLE: rows})


def _options_of(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    options = []
    for f in fields(group):
        rows = f.metadata[_TABLE]() if _TABLE in f.metadata else None
        if rows is None:
            options.append(inspect.Parameter(f.name, kind, default=f.default, annotation=hints[f.name]))
        else:
            options += [inspect.Parameter(name, kind, default=None, annotation=hint) for name, hint in rows.items()]
    return options


def _object_of(group: Any, values: dict[str, Any]) -> Any:
    """Make a group's object of the values of its options, which are taken out of all values."""
    arguments: dict[str, Any] = {}
    for f in fields(group):
        if _TABLE in f.metadata:
            typed = {name: values.pop(name, None) for name in f.metadata[_TABLE]()}
            arguments[f.name] = {name: value for name, value in typed.items() if value is not None}
        elif f.name in values:
            arguments[f.name] = values.pop(f.name)
    return group(**arguments)


def models_from(incomplete: str) -> list[str]:
    """Shipped models whose names begin so, for a shell."""
    from headway.count import shipped_models

    return [name for name in shipped_models() if name.startswith(incomplete)]


def devices_from(incomplete: str) -> list[str]:
    """Keys and short names of devices that begin so, for a shell."""
    from headway.devices.table import all_devices

    names = {name for device in all_devices() for name in (device.key, *device.aliases)}
    return sorted(name for name in names if name.startswith(incomplete) and " " not in name)


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A shipped name (`headway models` lists them), a config's JSON file or folder, or a Hub id OWNER/MODEL.",
        autocompletion=models_from,
    ),
]

ColumnOption = Annotated[
    list[str] | None,
    typer.Option(
        "--column", metavar="NAME=THEIRS", help="Name of a column in the dataset, such as question=Frage. Repeatable."
    ),
]


def column_names(assignments: list[str] | None) -> dict[str, str]:
    """Read `--column`: the dataset's name of each column, by the name that it has here.

    Raises:
        UsageError: one is not NAME=THEIRS.
    """
    pairs = [assignment.partition("=") for assignment in assignments or []]
    for name, equals, theirs in pairs:
        if not (name and equals and theirs):
            raise UsageError(f"--column {name + equals + theirs!r} is not NAME=THEIRS, such as question=Frage.")
    return {name: theirs for name, _, theirs in pairs}


SeqLenOption = Annotated[
    int | None,
    typer.Option(
        metavar="S",
        min=1,
        help="Row length that a tool is configured with [tokens]. Default: one row of all slots per rank.",
    ),
]

FreezeOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Parameters that are not trained: a component (vision) or a pattern (model.layers.0.*). Repeatable.",
    ),
]

LoraOption = Annotated[
    str | None,
    typer.Option(
        metavar="RANK[:TARGETS]",
        help="Train low-rank adapters of this rank on these linear layers and nothing else, e.g. 16:q_proj,v_proj.",
    ),
]

RecomputeOption = Annotated[
    str,
    typer.Option(
        metavar="none|full|CHOICE",
        help=(
            "Activation checkpointing: parts that run forward twice. Their FLOPs are counted separately, never in the "
            "total. A choice joins reentrant, every:N, patterns of blocks (model.layers.*) and parts (mlp, "
            "-attention), such as full,-attention. See docs/counting.md."
        ),
    ),
]

ChatTemplateOption = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        metavar="FILE",
        help="Jinja chat template that replaces the model's own, as the setting model.chat_template.",
    ),
]

MediaOption = Annotated[
    list[str] | None,
    typer.Option(
        "--media",
        metavar="SETTING=N",
        help="Setting of images and videos, such as max_pixels=1003520 or fps=1, as in the section data. Repeatable.",
    ),
]


def media_bounds(assignments: list[str] | None) -> "MediaSizes":
    """Read `--media`: bounds on media, by the names and with the limits of a run's settings.

    Raises:
        UsageError: one is not SETTING=N, or no such setting or value.
    """
    from pydantic import ValidationError

    from headway.config.data import MediaConfig
    from headway.config.mistakes import describe_all
    from headway.data.media.sizes import MediaSizes

    pairs = [assignment.partition("=") for assignment in assignments or []]
    for name, equals, value in pairs:
        if not (name and equals and value):
            raise UsageError(f"--media {name + equals + value!r} is not SETTING=N, such as max_pixels=1003520.")
    try:
        return MediaSizes.of(MediaConfig.model_validate({name: value for name, _, value in pairs}))
    except ValidationError as error:
        raise UsageError(f"--media {'; '.join(describe_all(error.errors(), MediaConfig))}.") from error


MaxCharactersOption = Annotated[
    int | None,
    typer.Option(
        "--max-characters",
        metavar="N",
        min=1,
        help="Longest text of DATA [characters], as the setting data.max_characters. Default: 5000000.",
    ),
]


def text_limit(max_characters: int | None) -> dict[str, int]:
    """The limit of an encoder that --max-characters sets; nothing without the option."""
    return {} if max_characters is None else {"max_characters": max_characters}


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]

DeviceOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="A device that `headway devices` lists, such as H100, or a dense peak [FLOP/s].",
        autocompletion=devices_from,
    ),
]

DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="NAME",
        help=(
            "Dtype of the matrix products, which chooses the peak of --device: bf16 (the default), fp8, fp16, ... "
            "Several dtypes take their shares of the FLOPs, such as fp8:0.7,bf16:0.3."
        ),
    ),
]

RanksOption = Annotated[int, typer.Option(metavar="N", help="Devices that shared the step.")]


def _compared(context: typer.Context, assignments: list[str] | None) -> list[str] | None:
    if assignments and not context.resilient_parsing:  # a shell that completes half a line parses resiliently
        from headway.config.read import without_effect

        for clause in without_effect(assignments):
            warn(f"--set {clause}.")
    return assignments


def _settings_from(incomplete: str) -> list[str]:
    """Names of settings that begin so, for a shell."""
    from headway.config import TrainConfig
    from headway.config.tree import walk

    names = (setting.name for setting in walk(TrainConfig) if setting.section is None)
    return [name for name in names if name.startswith(incomplete) and ".N." not in name]


SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="a.b=c",
        help="Change one setting, such as optim.lr=1e-3. The value is YAML. Repeatable.",
        callback=_compared,
        autocompletion=_settings_from,
    ),
]
