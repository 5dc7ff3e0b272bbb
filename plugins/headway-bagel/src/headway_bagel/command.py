"""`headway draw` and `import-model`: pictures of a trained model, and BAGEL's checkpoint as a model folder."""

import re
from enum import StrEnum
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli import opened
from headway.cli.options import spread
from headway.cli.output import needs_extra, say
from headway.errors import UsageError
from headway.files import write_output
from headway.log.working import working

if TYPE_CHECKING:
    from PIL.Image import Image


class RenormName(StrEnum):
    """Ways to keep guided velocities from growing."""

    none = "none"
    per_image = "global"
    channel = "channel"
    text_channel = "text-channel"


_SIZE = re.compile(r"([0-9]{1,5})x([0-9]{1,5})")


@spread()
def draw(
    model: opened.ModelArgument,
    text: Annotated[list[str], typer.Argument(metavar="TEXT...", help="What to draw; a picture for each.")],
    image: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="A picture to edit, shown before each text. Repeatable.")
    ] = None,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="PNG to write; with several texts, one beside another."),
    ] = Path("drawn.png"),
    size: Annotated[
        str | None,
        typer.Option(
            metavar="HxW", help="Size of a picture [pixels]; that of the last --image, or the model's largest."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Forward passes from noise to picture.")] = 24,
    guidance: Annotated[
        float,
        typer.Option(metavar="G", min=0.0, help="How far the picture goes beyond a request without text; 1 for none."),
    ] = 2.0,
    image_guidance: Annotated[
        float,
        typer.Option(metavar="G", min=0.0, help="How far it goes beyond a request without images; 1 for none."),
    ] = 1.0,
    away_from: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A text that --guidance leads away from, in place of no text.")
    ] = None,
    guide_between: Annotated[
        tuple[float, float],
        typer.Option(metavar="LOW HIGH", help="Times of the flow that are guided: 1 is noise, 0 the picture."),
    ] = (0.0, 1.0),
    renorm: Annotated[
        RenormName,
        typer.Option(help="Keep what guidance gives no longer than what was asked for, per picture or patch."),
    ] = RenormName.none,
    renorm_min: Annotated[float, typer.Option(metavar="X", help="--renorm shortens to no less than this share.")] = 0.0,
    shift: Annotated[
        float | None,
        typer.Option(metavar="S", min=1e-3, help="Shift of the times towards noise; the model's own if not given."),
    ] = None,
    seed: opened.SeedOption = 0,
    *,
    opening: opened.OpenOptions,
) -> None:
    """Draw pictures with a model that draws, such as the one that `headway demo draw` trains.

    With --image the pictures are edits. What is asked for is computed anew in every step, and again for each guidance
    that is not 1.

    Example: headway draw runs/draw/run "Draw a seven." --size 8x8 -o seven.png
    """
    # Options first: opening a model takes seconds.
    match = _SIZE.fullmatch(size) if size is not None else None
    if size is not None and match is None:
        raise UsageError(f"--size {size!r} is not HxW in pixels, for example --size 512x768.")
    for path in image or ():
        if not path.is_file():
            raise UsageError(f"There is no image {str(path)!r}. Give the path of a file.")
    with needs_extra("drawing"):
        from headway_bagel.drawer import open_drawer
        from headway_bagel.sampling import Guidance
    # The sampler's guidance: how far text and images pull each step.
    guided = Guidance(guidance, image_guidance, guide_between, renorm.value, renorm_min)
    model_opened, _ = opened.open_where(model, opening, for_generation=False)
    drawer = open_drawer(model_opened)
    with working("drawing"):
        pictures = drawer.draw(
            text,
            size=(int(match[1]), int(match[2])) if match else None,
            images=image or (),
            guidance=guided,
            away_from=away_from,
            steps=steps,
            shift=shift,
            seed=seed,
        )
    write_grid([pictures], output)
    width, height = pictures[0].size
    say(f"{len(pictures)} pictures of {height} x {width} pixels in {output}")


def write_grid(rows: "list[list[Image]]", path: Path) -> None:
    """Write pictures of one size as one PNG, row by row.

    Raises:
        UsageError: the file cannot be written.
    """
    from PIL import Image as Pillow

    width, height = rows[0][0].size
    grid = Pillow.new("RGB", (width * max(map(len, rows)), height * len(rows)))
    for place, row in enumerate(rows):
        for column, picture in enumerate(row):
            grid.paste(picture, (column * width, place * height))
    png = BytesIO()
    grid.save(png, format="PNG", optimize=True)
    write_output(path, png.getvalue(), option="-o")


def import_model(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Checkpoint in the layout of ByteDance-Seed/Bagel.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Model folder to write, which `headway train` opens.")],
) -> None:
    """Write a model folder from a checkpoint in BAGEL's own layout; weights are linked where the file system can.

    Example: headway import-model models/BAGEL-7B-MoT models/bagel
    """
    with needs_extra("reading a checkpoint"):
        from headway_bagel.checkpoint import read_checkpoint
    with working("reading the checkpoint"):
        text = read_checkpoint(folder, target)
    say(text)


COMMANDS = {"draw": draw, "import-model": import_model}
