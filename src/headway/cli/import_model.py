"""`headway import-model`: a checkpoint in another project's layout as a model folder."""

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.output import needs_extra, say
from headway.errors import CheckpointError
from headway.log.working import working
from headway.plugins import families_with

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
