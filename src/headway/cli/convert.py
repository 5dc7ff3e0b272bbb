"""`headway import-config`, `import-model` and `export`: settings and weights of others, and ours for others."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.options import JsonOption
from headway.cli.output import SCHEMA_VERSION, needs_extra, print_json, say, warn
from headway.errors import CheckpointError
from headway.files import write_output
from headway.log.working import working
from headway.plugins import families_with
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

    overrides: dict[str, Any] = {}
    if model is not None:
        overrides["model.path"] = model
    if data is not None:
        overrides["data.train"] = [{"path": data}]
    if steps is not None:
        overrides["optim.steps"] = steps
    imported = translate(file, overrides, leave_out=tuple(leave_out or ()))
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


_LAYOUTS = ", ".join(family.layout for family in families_with("read_checkpoint"))


def import_model(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help=f"Checkpoint in the layout of {_LAYOUTS}.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Model folder to write, which `headway train` opens.")],
) -> None:
    """Write a model folder from a checkpoint in its own project's layout; weights are linked where the file system can.

    Example: headway import-model models/BAGEL-7B-MoT models/bagel
    """
    with needs_extra("reading a checkpoint"):
        # Each reader refuses a folder of another layout before it writes anything; the first one's words are shown.
        readers = [family.hook("read_checkpoint") for family in families_with("read_checkpoint")]
    refusals = []
    with working("reading the checkpoint"):
        for read_folder in readers:
            assert read_folder is not None
            try:
                text = read_folder(folder, target)
                break
            except CheckpointError as error:
                refusals.append(error)
        else:
            raise refusals[0]
    say(text)


class Dtype(StrEnum):
    """Dtypes of exported weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


SourceArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_OR_CHECKPOINT", help="A run folder, for its newest checkpoint, or one folder of its checkpoints/."
    ),
]
FolderArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the model goes; must not exist.")]
DtypeOption = Annotated[
    Dtype | None, typer.Option(help="Floating-point type of the weights; that of training if not given.")
]
EmaOption = Annotated[bool, typer.Option("--ema", help="The weights' moving average instead of the last weights.")]
MergeOption = Annotated[
    bool, typer.Option("--merge-lora", help="Low-rank adapters added into the weights, instead of a folder of them.")
]


def export(
    source: SourceArgument,
    folder: FolderArgument,
    dtype: DtypeOption = None,
    ema: EmaOption = False,
    merge_lora: MergeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a Hugging Face folder of a checkpoint: weights, config, generation config and processor.

    The checkpoint may have been written by any number of processes; one process reads it, layer by layer, so memory for
    one weight file (5 GB) and one layer is enough. Every file of the checkpoint is checked first.
    """
    with needs_extra("exporting"):
        import torch

        from headway.checkpoint.card import FILE_NAME as CARD
        from headway.checkpoint.export import export as write
        from headway.checkpoint.export import find_checkpoint_in
        from headway.models.load import processor_note

    checkpoint = find_checkpoint_in(source)
    chosen = None if dtype is None else getattr(torch, dtype.value)
    with working(f"writing the model after step {checkpoint.step:,}"):
        write(checkpoint, folder, dtype=chosen, average=ema, merge_adapters=merge_lora)
    if as_json:
        print_json({"folder": str(folder), "step": checkpoint.step})
    else:
        what = "the adapters" if (folder / "adapter_config.json").is_file() else "the model"
        say(f"{folder}: {what} after step {checkpoint.step}")
        has_card = (folder / CARD).is_file()
        say(f"model card: {folder / CARD if has_card else 'none, as no records of its run can be read'}")
        if (note := processor_note(folder)) is not None:
            say(f"processor: {note}")
