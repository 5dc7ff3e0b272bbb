"""What `headway demo draw` shows in the end: drawn digits, and who reads them as what was asked for."""

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.cli.draw import write_grid
from headway.report import format_share

if TYPE_CHECKING:
    from PIL.Image import Image

    from headway.train.config import TrainConfig

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
    import torch

    from headway.synthetic.drawn_digits import FREE, NAMES, SIDE, classify, request
    from headway.train.draw import Drawer
    from headway.train.opened import find_model, open_model

    found = find_model(str(config.run.folder))
    opened = open_model(found, dtype=torch.float32, device=torch.device("cpu"), for_generation=False)
    asked = [digit for digit in range(len(NAMES)) for _ in range(_EACH)]
    pictures = Drawer(opened).draw(
        [request(digit) for digit in asked], height=SIDE, width=SIDE, away_from=FREE, seed=_SEED
    )
    pixels = np.stack([np.asarray(picture.convert("L")) / 255.0 for picture in pictures])
    outside = classify(pixels) == np.array(asked)
    own = np.array(_read(opened, pictures, asked))
    rows = [pictures[start : start + _EACH] for start in range(0, len(pictures), _EACH)]
    write_grid([[_enlarged(picture) for picture in row] for row in rows], config.run.folder / f"{DRAWN}.png")
    judged = {
        "drawn": len(asked),
        "read_by_classifier": float(outside.mean()),
        "read_by_itself": float(own.mean()),
        "digits": {
            name: {
                "asked": _EACH,
                "classifier": int(outside[i * _EACH : (i + 1) * _EACH].sum()),
                "itself": int(own[i * _EACH : (i + 1) * _EACH].sum()),
            }
            for i, name in enumerate(NAMES)
        },
    }
    (config.run.folder / f"{DRAWN}.json").write_text(json.dumps(judged) + "\n", encoding="utf-8")
    return judged


def said_of(judged: dict[str, Any], path: Path) -> str:
    """Say in two lines what came of it."""
    return (
        f"drawn digits  {judged['drawn']}, in {path}\n"
        f"read as asked {format_share(judged['read_by_classifier'])} by a classifier of the real digits, "
        f"{format_share(judged['read_by_itself'])} by the model itself"
    )


def _read(opened: Any, pictures: "list[Image]", asked: list[int]) -> list[bool]:
    """Say of each picture whether the model reads it as what was asked for, by exact match as in an evaluation."""
    import torch

    from headway.data import Chat
    from headway.data.samples import ImagePart, Media, Message, Origin, TextPart
    from headway.models.head import model_with_loss
    from headway.packing.budget import Budget
    from headway.synthetic.drawn_digits import NAMES, QUESTION
    from headway.train.evaluate import EvalSet
    from headway.train.opened import make_encoder
    from headway.train.ranks import Ranks

    encoder = make_encoder(opened.processor, opened.model)
    losses = model_with_loss(opened.model, chunk=None)
    found = []
    for number, (picture, digit) in enumerate(zip(pictures, asked, strict=True)):
        data = io.BytesIO()
        picture.save(data, format="PNG")
        shown = Message("user", (ImagePart(Media(None, data.getvalue())), TextPart(QUESTION)))
        chat = Chat(
            (shown, Message("assistant", (TextPart(NAMES[digit]),))), Origin("drawn", "drawn", number, "picture")
        )
        one = EvalSet([chat], encoder, Budget(1024), Ranks(0, 1)).evaluate(losses, torch.device("cpu"))
        found.append(one.exact == 1)
    return found


def _enlarged(picture: "Image") -> "Image":
    return picture.resize((4 * picture.width, 4 * picture.height), resample=0)
