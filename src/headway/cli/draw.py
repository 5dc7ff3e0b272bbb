"""`headway draw`: draw a picture for each sentence with a trained model."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli import opened
from headway.cli.output import needs_extra
from headway.errors import UsageError
from headway.log.working import working

if TYPE_CHECKING:
    from PIL.Image import Image

_SIZE = re.compile(r"([0-9]{1,5})x([0-9]{1,5})")


def draw(
    model: opened.ModelArgument,
    text: Annotated[list[str], typer.Argument(metavar="TEXT...", help="What to draw; a picture for each.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="PNG to write; with several texts, one beside another."),
    ] = Path("drawn.png"),
    size: Annotated[
        str | None, typer.Option(metavar="HxW", help="Size of a picture [pixels]; the model's largest if not given.")
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Forward passes from noise to picture.")] = 24,
    guidance: Annotated[
        float, typer.Option(metavar="G", min=0.0, help="How far beyond an empty request the picture goes; 1 for none.")
    ] = 2.0,
    away_from: Annotated[
        str, typer.Option(metavar="TEXT", help="A request for nothing in particular, which guidance leads away from.")
    ] = "",
    seed: opened.SeedOption = 0,
    base: opened.BaseOption = None,
    device: opened.DeviceOption = "auto",
    dtype: opened.DtypeOption = opened.WeightDtype.auto,
) -> None:
    """Draw pictures with a model that draws, such as the one that `headway demo draw` trains.

    Example: headway draw runs/draw/run "Draw a seven." --size 8x8 -o seven.png
    """
    match = _SIZE.fullmatch(size) if size is not None else None
    if size is not None and match is None:
        raise UsageError(f"--size {size!r} is not HxW in pixels, for example --size 512x768.")
    with needs_extra("drawing"):
        from headway.train.draw import Drawer
    found, _ = opened.open_where(model, base, device, dtype, for_generation=False)
    drawer = Drawer(found)
    height, width = (int(match[1]), int(match[2])) if match else (drawer.largest, drawer.largest)
    with working("drawing"):
        pictures = drawer.draw(
            text, height=height, width=width, steps=steps, guidance=guidance, away_from=away_from, seed=seed
        )
    write_grid([pictures], output)
    print(f"{len(pictures)} pictures of {height} x {width} pixels in {output}")


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
    try:
        grid.save(path, format="PNG", optimize=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}. Give another file.") from error
