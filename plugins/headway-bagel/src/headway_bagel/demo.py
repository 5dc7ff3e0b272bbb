"""The drawing demo: scikit-learn's handwritten digits, to be drawn from a sentence and to be read, by one small model.

The 1,797 scans of 8 x 8 pixels are split before anything is composed, so that no scan which is read in the evaluation
is ever trained on. A classifier that knows the real digits judges what is drawn.
"""

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headway.cli.demo import Demo
from headway.errors import DataError
from headway.log.jsonl import as_object
from headway.log.working import working
from headway.report import format_share
from headway.report.section import ReportSection
from headway.synthetic.digits import load_scans
from headway.words import Argument
from headway_bagel.command import write_grid

if TYPE_CHECKING:
    from PIL.Image import Image

    from headway.config import TrainConfig

SIDE = 8  # pixels of a scan
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
QUESTION = "Which digit is this?"
_REQUESTS = ("Draw a {}.", "Please draw the digit {}.", "A handwritten {}.")
FREE = "Draw a digit."
"""A request that names no digit, which guidance leads away from."""
_FREE_SHARE = 0.1  # share of the requests that name no digit


@dataclass(frozen=True)
class DrawnDigits:
    """Files and sizes of the dataset."""

    draw: Path
    reading: Path
    eval: Path
    num_train_scans: int
    num_eval_scans: int


def request(digit: int) -> str:
    """Ask for a digit.

    >>> request(7)
    'Draw a seven.'
    """
    return _REQUESTS[0].format(NAMES[digit])


def write_drawn_digits(folder: Path, *, held_out: float = 0.2, seed: int = 0) -> DrawnDigits:
    """Write the scans as images, and three JSONL files: to draw, to read, and held-out ones to read.

    Args:
        folder: created where needed; gets `images/`, `draw.jsonl`, `read.jsonl` and `eval.jsonl`.
        held_out: fraction of the scans that only the evaluation sees.
        seed: of the split and of the words.

    Raises:
        DataError: scikit-learn is not installed, or the folder cannot be written.
    """
    from PIL import Image

    scans = load_scans()
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(scans))
    num_held = round(held_out * len(scans))
    eval_scans, train_scans = order[:num_held].tolist(), order[num_held:].tolist()
    # scans are divided, so that the evaluation reads strokes that were never shown
    names = [f"images/{number:04d}.png" for number in range(len(scans))]
    data = DrawnDigits(
        folder / "draw.jsonl", folder / "read.jsonl", folder / "eval.jsonl", len(train_scans), len(eval_scans)
    )
    try:
        (folder / "images").mkdir(parents=True, exist_ok=True)
        for name, scan in zip(names, scans, strict=True):
            Image.fromarray(np.round(255 * scan.pixels).astype(np.uint8)).save(folder / name)
        # requests to draw, of which a share leaves the digit open
        requests = []
        for number in train_scans:
            words = _REQUESTS[rng.integers(len(_REQUESTS))].format(NAMES[scans[number].digit])
            words = FREE if rng.random() < _FREE_SHARE else words
            requests.append(_chat(words, [{"type": "image", "image": names[number]}]))
        _write(data.draw, requests)
        # the same scans to read, and the held-out ones
        for path, numbers in ((data.reading, train_scans), (data.eval, eval_scans)):
            _write(path, [_reading(names[number], scans[number].digit) for number in numbers])
    except OSError as error:
        raise DataError(
            f"cannot write the digits to {folder}: {error.strerror}. Give another folder with {Argument('folder')}."
        ) from error
    return data


def _reading(image: str, digit: int) -> dict[str, Any]:
    question = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
    return _chat(question, NAMES[digit])


def _chat(user: Any, assistant: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]}


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def write_drawer(folder: Path) -> Path:
    """Write the folder of a small model that draws such digits, without weights: configuration and tokenizer.

    Args:
        folder: created where needed.

    Returns:
        The folder; `headway train` opens it like any other.
    """
    from headway_bagel import small_model

    texts = [*(words.format(name) for words in _REQUESTS for name in NAMES), FREE, QUESTION]
    return small_model.write_drawer(folder, texts, side=SIDE)


def classify(drawn: NDArray[np.float64]) -> NDArray[np.int64]:
    """Read digits with a classifier that learnt the real ones: a support vector machine on the pixels.

    Args:
        drawn: shape (N, 8, 8), 0 to 1.

    Returns:
        The digits, shape (N,).
    """
    from sklearn.svm import SVC

    scans = load_scans()
    learnt = SVC(gamma=0.064).fit([scan.pixels.ravel() for scan in scans], [scan.digit for scan in scans])
    digits: NDArray[np.int64] = learnt.predict(drawn.reshape(len(drawn), -1))
    return digits


DRAWN = "drawn"
"""Name of the picture and the JSON file that a run folder then has."""
_LARGEST_PICTURE = 100_000  # a larger one stays out of the page of a run [bytes]
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
    from headway_bagel.drawer import open_drawer

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
    """Text of two lines: the number of drawn digits, and the shares that were read as the wanted digit."""
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


def _write_demo(folder: Path) -> str:
    """Write data and model of the demo; returns a line on the files."""
    data = write_drawn_digits(folder / "data")
    write_drawer(folder / "model")
    return (
        f"wrote {data.num_train_scans} scans to draw and to read, and {data.num_eval_scans} held out to read, to "
        f"{folder / 'data'}"
    )


def _judge_demo(config: "TrainConfig") -> tuple[dict[str, Any], str]:
    """Have a run's drawings read; returns a part of the run's record, and lines about them."""
    with working("drawing digits"):
        judged = judge_drawings(config)
    return {"drawings": judged}, text_of_drawings(judged, config.run.folder / f"{DRAWN}.png")


DEMOS = {
    "draw": Demo(
        files("headway_bagel") / "draw.yaml",
        {"data.train.0.path": "draw.jsonl", "data.train.1.path": "read.jsonl", "data.eval": "eval.jsonl"},
        _write_demo,
        _judge_demo,
    )
}


def sections(folder: Path) -> list[ReportSection]:
    """Show on a run's page what the demo had its model draw, and who read it as what was asked for."""
    file, picture = folder / f"{DRAWN}.json", folder / f"{DRAWN}.png"
    judged = as_object(file.read_bytes()) if file.is_file() else None
    digits = (judged or {}).get("digits")
    if not isinstance(digits, dict) or not picture.is_file() or picture.stat().st_size > _LARGEST_PICTURE:
        return []
    data = base64.b64encode(picture.read_bytes()).decode()
    columns = ("asked", "classifier", "itself")
    rows = [
        [name, *(str(counts.get(column, "")) for column in columns)]
        for name, counts in digits.items()
        if isinstance(counts, dict)
    ]
    headings = ("digit", "drawn", "read so by a classifier", "read so by the model")
    return [ReportSection("Drawn", headings, rows, image=data)]
