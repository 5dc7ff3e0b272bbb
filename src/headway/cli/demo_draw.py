"""The end of `headway demo draw`: digits are drawn, and a classifier and the model itself read them."""

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.cli.draw import write_grid
from headway.report import format_share

if TYPE_CHECKING:
    from PIL.Image import Image

    from headway.config import TrainConfig

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

    from headway.answer.model_folder import find_model, open_model
    from headway.answer.pictures import open_drawer
    from headway.synthetic.drawn_digits import FREE, NAMES, SIDE, classify, request

    found = find_model(str(config.run.folder))
    opened = open_model(found, dtype=torch.float32, device=torch.device("cpu"), for_generation=False)
    texts = [request(digit) for digit in range(len(NAMES)) for _ in range(_EACH)]
    pictures = open_drawer(opened).draw(texts, size=(SIDE, SIDE), away_from=FREE, seed=_SEED)
    rows = [pictures[start : start + _EACH] for start in range(0, len(pictures), _EACH)]
    pixels = np.stack([np.asarray(picture.convert("L")) / 255.0 for picture in pictures])
    outside = (classify(pixels).reshape(len(NAMES), _EACH) == np.arange(len(NAMES))[:, None]).sum(1).tolist()
    own = [_num_read(opened, row, name) for row, name in zip(rows, NAMES, strict=True)]
    write_grid([[_enlarged(picture) for picture in row] for row in rows], config.run.folder / f"{DRAWN}.png")
    counts = zip(NAMES, outside, own, strict=True)
    judged = {
        "drawn": len(pictures),
        "read_by_classifier": sum(outside) / len(pictures),
        "read_by_itself": sum(own) / len(pictures),
        "digits": {name: {"asked": _EACH, "classifier": one, "itself": other} for name, one, other in counts},
    }
    (config.run.folder / f"{DRAWN}.json").write_text(json.dumps(judged) + "\n", encoding="utf-8")
    return judged


def said_of(judged: dict[str, Any], path: Path) -> str:
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
    held = EvalSet(chats, make_encoder(opened.processor, opened.model), Budget(1024), Ranks(0, 1))
    return held.evaluate(model_with_loss(opened.model, chunk=None), torch.device("cpu")).exact


def _enlarged(picture: "Image") -> "Image":
    return picture.resize((4 * picture.width, 4 * picture.height), resample=0)
