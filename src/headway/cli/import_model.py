"""`headway import-model`: a checkpoint in another project's layout as a model folder."""

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.output import needs_extra, say
from headway.log.working import working


def import_model(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Checkpoint in the layout of ByteDance-Seed/Bagel.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Model folder to write, which `headway train` opens.")],
) -> None:
    """Write a model folder from a checkpoint of BAGEL's; its weights are linked where the file system can.

    Example: headway import-model models/BAGEL-7B-MoT models/bagel
    """
    with needs_extra("reading a checkpoint"):
        from headway.importing.bagel import import_bagel
    with working("reading the checkpoint"):
        config = import_bagel(folder, target)
    text = config.text_config
    say(
        f"wrote {target}: {text.num_hidden_layers} layers of {text.hidden_size} in both copies, a tower of "
        f"{config.vision_config.num_hidden_layers} layers, an autoencoder of {config.latent_features} numbers a patch"
    )
