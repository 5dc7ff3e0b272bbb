"""`headway export`: make a folder that transformers' from_pretrained opens of a checkpoint."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import JsonOption
from headway.cli.output import needs_extra, print_json, say
from headway.log.working import working


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
