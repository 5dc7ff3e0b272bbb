"""`headway import-config`: read a configuration of LMMs-Engine as a recipe."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.options import JsonOption
from headway.cli.output import SCHEMA_VERSION, warn
from headway.files import write_output
from headway.report import Column, render_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headway.importing.read import KeyOutcome


def import_config(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML or JSON configuration of LMMs-Engine.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the recipe here, not to stdout.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="model.path, where FILE does not say it or says another.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="The training data, where FILE does not say them, or says others."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Optimizer steps, where FILE says none; instead of its epochs [steps]."),
    ] = None,
    leave_out: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="Go on without a key that cannot be taken over, if FILE has it; with its section. Repeatable.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Translate a configuration of LMMs-Engine into a recipe that `headway train` runs.

    Every key is translated, or named with the reason why it is not needed, or what is to be done by hand; a key that
    is not known, or asks for what Headway cannot do, is an error. What became of each key goes to stderr.
    """
    from headway.config import parse_config
    from headway.importing import import_config as translate

    given: dict[str, Any] = {}
    if model is not None:
        given["model.path"] = model
    if data is not None:
        given["data.train"] = [{"path": data}]
    if steps is not None:
        given["optim.steps"] = steps
    imported = translate(file, given, leave_out=tuple(leave_out or ()))
    parse_config(imported.recipe, source=f"the recipe made from {file}")
    keys = [key for key in imported.keys if key.is_set or key.outcome.settings]
    print(_table(keys), file=sys.stderr)
    for key in imported.absent:
        warn(f"--leave-out {key}: {file} has no such key, so nothing was left out for it.")
    if as_json:
        text = json.dumps(
            {"schema_version": SCHEMA_VERSION, "recipe": imported.recipe, "keys": [key.to_dict() for key in keys]}
        )
    else:
        text = imported.as_yaml().rstrip("\n")
    if output is None:
        print(text)
        return
    write_output(output, f"{text}\n", option="-o")


def _table(keys: "Sequence[KeyOutcome]") -> str:
    columns = [Column(name, "left") for name in ("key", "value", "", "becomes", "remark")]
    rows = [
        [
            key.key,
            _short(key.value) + ("" if key.is_set else " (its default)"),
            key.outcome.fate,
            ", ".join(f"{name}={_short(value)}" for name, value in key.outcome.settings.items()),
            key.outcome.reason,
        ]
        for key in keys
    ]
    return render_table(columns, rows)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
