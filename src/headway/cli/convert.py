"""`headway import-model` and `export`: weights of others, and ours for others."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.opened import BestOption
from headway.cli.options import JsonOption
from headway.cli.output import needs_extra, print_result, say
from headway.errors import CheckpointError
from headway.log.working import working
from headway.plugins import families_with
from headway.report import presentable

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
    best: BestOption = False,
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

    checkpoint = find_checkpoint_in(source, best=best)
    chosen = None if dtype is None else getattr(torch, dtype.value)
    with working(f"writing the model after step {checkpoint.step:,}"):
        write(checkpoint, folder, dtype=chosen, average=ema, merge_adapters=merge_lora)
    # What was written: adapters alone, unless merged; a card, if the run left records.
    what = "the adapters" if (folder / "adapter_config.json").is_file() else "the model"
    has_card = (folder / CARD).is_file()
    lines = [
        f"{folder}: {what} after step {checkpoint.step}",
        f"model card: {folder / CARD if has_card else 'none, as no records of its run can be read'}",
    ]
    if (note := processor_note(folder)) is not None:
        lines.append(f"processor: {note}")
    print_result(
        lambda: {"folder": str(folder), "step": checkpoint.step},
        lambda: presentable("\n".join(lines)),
        as_json=as_json,
    )
