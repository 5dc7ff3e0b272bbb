"""`headway demo`: write the handwritten digits, and train on them with a shipped recipe."""

import io
import json
import sys
from enum import StrEnum
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.draw import write_grid
from headway.cli.options import JsonOption
from headway.cli.output import needs_extra, print_result
from headway.cli.train import ResumeOption, SetOption, print_summary
from headway.errors import UsageError
from headway.log.working import working
from headway.report import format_share, render_pairs
from headway.stores import refuse

if TYPE_CHECKING:
    from PIL.Image import Image

    from headway.config import TrainConfig


class Demo(StrEnum):
    """The demos, and the data alone."""

    read = "read"
    draw = "draw"
    data = "data"


WhatArgument = Annotated[
    Demo,
    typer.Argument(
        help="read: a model learns to read digits. draw: a model learns to draw as well. data: nothing is trained, but "
        "pictures of single digits are written for a model of yours."
    ),
]
FolderOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Where data, model folder and run go; made where it is missing. If not given: runs/digits, runs/draw, "
        "or digits for the data alone.",
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

    Example: headway demo data --folder digits
    """
    if what is Demo.data:
        if steps is not None or settings or resume:
            raise UsageError(
                "demo data trains nothing, so --steps, --set and --resume cannot take effect: leave them out."
            )
        refuse(folder or Path(), "--folder")
        _print_data(folder or Path("digits"), as_json=as_json)
        return
    refuse(folder or Path(), "--folder")
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
        from headway.train.run import train
        from headway.train.run_folder import refuse_existing_run

    if not resume:
        refuse_existing_run(config.run.folder)
        print(_write_drawn(folder) if draws else _write(folder), file=sys.stderr)
    summary = train(config, resume=resume)
    if not draws or not summary.is_complete:
        print_summary(summary, as_json=as_json)
        return

    with working("drawing digits"):
        judged = judge_drawings(config)
    note = text_of_drawings(judged, config.run.folder / f"{DRAWN}.png")
    print_result(
        lambda: summary.to_dict() | {"drawings": judged}, lambda: f"{summary.as_table()}\n{note}", as_json=as_json
    )


def _print_data(folder: Path, *, as_json: bool) -> None:
    """Write pictures of single digits, to train on and held out, and print what was written."""
    with needs_extra("drawing digits"):
        from headway.synthetic.digits import write_digits

        data = write_digits(folder, num_one_digit=0, num_train=6000, num_eval=200, most_digits=1, renderings=4)
    record = {"train": str(data.train), "eval": str(data.eval), "images": data.num_images}
    pairs = [
        ("train", f"{data.train}, 6,000 samples of {data.num_train_scans:,} scans"),
        ("held out", f"{data.eval}, 200 samples of {data.num_eval_scans:,} other scans"),
        ("next", f"headway new-model tiny --data {data.train}"),
    ]
    print_result(lambda: record, lambda: render_pairs(pairs), as_json=as_json)


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


DRAWN = "drawn"
"""Name of the picture and the JSON file that a run folder then has."""
_EACH = 20  # pictures of each digit
_SEED = 0


def judge_drawings(config: "TrainConfig") -> dict[str, Any]:
    """Draw each digit some times with a run's newest model, and have the pictures read.

    Writes `drawn.png`, a row for each digit, and `drawn.json` into the run folder.

    Returns:
        How many were drawn, the shares that a classifier of the real digits and the model itself read as asked, and
        both numbers of each digit.
    """
    import numpy as np
    import torch

    from headway.answer.model_folder import find_model, open_model
    from headway.answer.pictures import open_drawer
    from headway.synthetic.drawn_digits import FREE, NAMES, SIDE, classify, request

    location = find_model(str(config.run.folder))
    opened = open_model(location, dtype=torch.float32, device=torch.device("cpu"), for_generation=False)
    # Draw each digit several times, in rows of one digit.
    texts = [request(digit) for digit in range(len(NAMES)) for _ in range(_EACH)]
    pictures = open_drawer(opened).draw(texts, size=(SIDE, SIDE), away_from=FREE, seed=_SEED)
    rows = [pictures[start : start + _EACH] for start in range(0, len(pictures), _EACH)]
    # Two judges: a classifier trained on the real digits, and the model reading its own pictures.
    pixels = np.stack([np.asarray(picture.convert("L")) / 255.0 for picture in pictures])
    outside = (classify(pixels).reshape(len(NAMES), _EACH) == np.arange(len(NAMES))[:, None]).sum(1).tolist()
    own = [_num_read(opened, row, name) for row, name in zip(rows, NAMES, strict=True)]
    write_grid([[_enlarged(picture) for picture in row] for row in rows], config.run.folder / f"{DRAWN}.png")
    counts = zip(NAMES, outside, own, strict=True)
    judged = {
        "drawn": len(pictures),
        "read_by_classifier": sum(outside) / len(pictures),
        "read_by_itself": sum(own) / len(pictures),
        "digits": {
            name: {"asked": _EACH, "classifier": by_classifier, "itself": other}
            for name, by_classifier, other in counts
        },
    }
    (config.run.folder / f"{DRAWN}.json").write_text(json.dumps(judged) + "\n", encoding="utf-8")
    return judged


def text_of_drawings(judged: dict[str, Any], path: Path) -> str:
    """Say in two lines how many digits were drawn, and which shares were read as what was asked for."""
    return (
        f"drawn digits  {judged['drawn']}, in {path}\n"
        f"read as asked {format_share(judged['read_by_classifier'])} by a classifier of the real digits, "
        f"{format_share(judged['read_by_itself'])} by the model itself"
    )


def _num_read(opened: Any, pictures: "list[Image]", name: str) -> int:
    """Count the pictures of a digit that the model itself reads as that digit, by exact match as in an evaluation."""
    import torch

    from headway.answer.evaluate import EvalSet
    from headway.answer.model_folder import make_encoder
    from headway.data import Chat
    from headway.data.samples import ImagePart, Media, Message, Origin, TextPart
    from headway.models.head import model_with_loss
    from headway.models.parallel.ranks import Ranks
    from headway.packing.budget import Budget
    from headway.synthetic.drawn_digits import QUESTION

    chats = []
    for number, picture in enumerate(pictures):
        data = io.BytesIO()
        picture.save(data, format="PNG")
        shown = Message("user", (ImagePart(Media(None, data.getvalue())), TextPart(QUESTION)))
        answer = Message("assistant", (TextPart(name),))
        chats.append(Chat((shown, answer), Origin("drawn", "drawn", number, "picture")))
    held_out = EvalSet(chats, make_encoder(opened.processor, opened.model), Budget(1024), Ranks(0, 1))
    return held_out.evaluate(model_with_loss(opened.model, chunk=None), torch.device("cpu")).exact


def _enlarged(picture: "Image") -> "Image":
    return picture.resize((4 * picture.width, 4 * picture.height), resample=0)
