"""The drawing demo: scikit-learn's handwritten digits, to be drawn from a sentence and to be read, by one small model.

The 1,797 scans of 8 x 8 pixels are split before anything is composed, so that no scan which is read in the evaluation
is ever trained on. A classifier that knows the real digits judges what is drawn.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.errors import DataError
from headway.plugins import families_with
from headway.synthetic.digits import load_scans
from headway.words import Argument

SIDE = 8  # pixels of a scan
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
QUESTION = "Which digit is this?"
_REQUESTS = ("Draw a {}.", "Please draw the digit {}.", "A handwritten {}.")
FREE = "Draw a digit."
"""A request that names no digit, which guidance leads away from."""
_FREE_SHARE = 0.1  # of the requests that name no digit


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
    texts = [*(words.format(name) for words in _REQUESTS for name in NAMES), FREE, QUESTION]
    write = families_with("small_model")[0].hook("small_model")
    assert write is not None
    return Path(write(folder, texts, side=SIDE))


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
