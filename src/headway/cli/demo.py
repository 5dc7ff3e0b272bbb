"""`headway demo`: write the handwritten digits, then train on them with a shipped recipe."""

import json
import sys
from enum import StrEnum
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import JsonOption
from headway.cli.output import needs_extra, print_json
from headway.cli.train import ResumeOption, SetOption, print_summary
from headway.log.working import working


class Demo(StrEnum):
    """What the model learns."""

    read = "read"
    draw = "draw"


WhatArgument = Annotated[
    Demo, typer.Argument(help="What the model learns: to read digits, or to draw those that a sentence names as well.")
]
FolderOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Where data, model folder and run go; made where it is missing. runs/digits, or runs/draw, if not given.",
        show_default=False,
    ),
]
StepsOption = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Optimizer steps [steps]; the recipe's own number if not given.")
]


def demo(
    what: WhatArgument = Demo.read,
    folder: FolderOption = None,
    steps: StepsOption = None,
    settings: SetOption = None,
    resume: ResumeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a small vision-language model to read, or to draw, handwritten digits, on a CPU in a few minutes.

    Writes scikit-learn's digits as chat samples and a model folder of about a million parameters, and then does what
    `headway train recipes/digits.yaml` does, or recipes/draw.yaml. Of a model that draws, it has what it drew read by a
    classifier of the real digits, and by the model itself.
    """
    from headway.config import load_config

    draws = what is Demo.draw
    folder = folder or Path("runs", "draw" if draws else "digits")
    paths = {"model.path": folder / "model", "data.eval": folder / "data" / "eval.jsonl", "run.folder": folder / "run"}
    played = ("train.0", "draw.jsonl"), ("train.1", "read.jsonl")
    if not draws:
        played = ("stages.0", "one_digit.jsonl"), ("stages.1", "train.jsonl")
    paths |= {f"data.{place}.path": folder / "data" / file for place, file in played}
    overrides = [f"{key}={json.dumps(str(path))}" for key, path in paths.items()]
    if steps is not None:  # the recipe's proportions, on another number of steps
        quarter = max(1, steps // 4)
        overrides += [f"optim.steps={steps}", f"optim.warmup_steps={steps // 32}"]
        overrides += [f"eval.every={quarter}", f"checkpoint.every={quarter}"]
    with as_file(files("headway.synthetic") / ("draw.yaml" if draws else "digits.yaml")) as recipe:
        config = load_config(recipe, (*overrides, *(settings or ())))

    with needs_extra("training"):
        from headway.train.loop import train
        from headway.train.run_folder import refuse_existing_run

    if not resume:
        refuse_existing_run(config.run.folder)
        print(_write_drawn(folder) if draws else _write(folder), file=sys.stderr)
    summary = train(config, resume=resume)
    if not draws or not summary.is_complete:
        print_summary(summary, as_json=as_json)
        return
    from headway.cli.demo_draw import DRAWN, judge_drawings, said_of

    with working("drawing digits"):
        judged = judge_drawings(config)
    if as_json:
        print_json(summary.to_dict() | {"drawings": judged})
        return
    print_summary(summary, as_json=False)
    print(said_of(judged, config.run.folder / f"{DRAWN}.png"))


def _write(folder: Path) -> str:
    """Write data and model of the reading demo; returns what was written."""
    from headway.synthetic.digits import write_digits, write_reader

    data = write_digits(folder / "data")
    write_reader(folder / "model")
    return (
        f"wrote {data.num_images} images of {data.num_train_scans} scans to train on and {data.num_eval_scans} "
        f"held out, as chat samples, to {folder / 'data'}"
    )


def _write_drawn(folder: Path) -> str:
    """Write data and model of the drawing demo; returns what was written."""
    from headway.synthetic.drawn_digits import write_drawer, write_drawn_digits

    data = write_drawn_digits(folder / "data")
    write_drawer(folder / "model")
    return (
        f"wrote {data.num_train_scans} scans to draw and to read, and {data.num_eval_scans} held out to read, to "
        f"{folder / 'data'}"
    )
