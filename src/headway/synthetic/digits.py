"""The demo: scikit-learn's handwritten digits as a chat dataset, and a small model that learns to read them.

A sample shows 1 to 4 digits, each an image file of its own.

The 1,797 scans of 8 x 8 pixels are split into training and held-out scans first and composed afterwards, so no scan of
the evaluation is ever trained on. Each scan is rendered a few times: tilted, stretched and placed in frames of varied
size and aspect, so grids differ from image to image as they do in the wild.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.errors import DataError
from headway.version import install_command
from headway.words import Argument

# (height, width) of the frames [pixels]; multiples of 16, two patches of 8, so that no processor resizes them.
FRAMES = ((16, 16), (16, 32), (32, 16), (32, 32))
QUESTIONS = (
    "Read the digits.",
    "Which digits are these?",
    "What number is written here?",
    "Write down what you see, from left to right.",
)
MAX_DIGITS = 4
PATCH_SIZE = 8  # [pixels]; the smallest images then are one token of 2 x 2 patches
MAX_TILT_DEG = 6.0
MAX_SHEAR = 0.1


@dataclass(frozen=True)
class DigitsData:
    """Files and sizes of the dataset."""

    one_digit: Path
    train: Path
    eval: Path
    preferences: Path
    preferences_eval: Path
    num_train_scans: int
    num_eval_scans: int
    num_images: int


@dataclass(frozen=True)
class _Scan:
    pixels: NDArray[np.float64]  # (8, 8), 0 to 1
    digit: int


def write_digits(
    folder: Path,
    *,
    num_one_digit: int = 12000,
    num_train: int = 16000,
    num_eval: int = 500,
    most_digits: int = MAX_DIGITS,
    held_out: float = 0.2,
    renderings: int = 16,
    seed: int = 0,
) -> DigitsData:
    """Write images and JSONL files: single digits for a start, then several, then the held-out ones.

    Args:
        folder: created where needed; gets `images/`, `one_digit.jsonl`, `train.jsonl` and `eval.jsonl`, and
            `preferences.jsonl` and `preferences_eval.jsonl` of right and wrong readings.
        num_one_digit: training samples of one digit [samples].
        num_train: training samples of one to `most_digits` digits [samples].
        num_eval: held-out samples of one to `most_digits` digits [samples].
        most_digits: of a sample [digits].
        held_out: fraction of the scans that only the evaluation sees.
        renderings: image files per training scan; held-out scans have one [images].
        seed: seed of the split, the renderings and the composition.

    Raises:
        DataError: scikit-learn is not installed, or the folder cannot be written.
    """
    scans = load_scans()
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(scans))
    num_held = round(held_out * len(scans))
    # scans, not images, are divided: no rendering of a held-out scan is trained on
    eval_scans, train_scans = order[:num_held], order[num_held:]
    try:
        (folder / "images").mkdir(parents=True, exist_ok=True)
        train_images = _render_all(folder, "train", train_scans, scans, renderings, rng)
        eval_images = _render_all(folder, "eval", eval_scans, scans, 1, rng)
        data = DigitsData(
            one_digit=folder / "one_digit.jsonl",
            train=folder / "train.jsonl",
            eval=folder / "eval.jsonl",
            preferences=folder / "preferences.jsonl",
            preferences_eval=folder / "preferences_eval.jsonl",
            num_train_scans=len(train_scans),
            num_eval_scans=len(eval_scans),
            num_images=len(train_images) + len(eval_images),
        )
        # samples are rows of renderings: one digit for a start, then one to several
        _write_samples(data.one_digit, _compose(train_images, num_one_digit, 1, rng), rng)
        _write_samples(data.train, _compose(train_images, num_train, most_digits, rng), rng)
        _write_samples(data.eval, _compose(eval_images, num_eval, most_digits, rng), rng)
        # pairs of a right and a wrong reading, by a generator of their own, so that the samples before stay as they are
        for path, images, count in (
            (data.preferences, train_images, num_train // 4),
            (data.preferences_eval, eval_images, num_eval),
        ):
            own_rng = np.random.default_rng([seed, count])
            _write_samples(path, _compose(images, count, most_digits, own_rng), own_rng, wrong=True)
    except OSError as error:
        raise DataError(
            f"cannot write the digits to {folder}: {error.strerror}. Give another folder with {Argument('folder')}."
        ) from error
    return data


def load_scans() -> list[_Scan]:
    """Read the 1,797 scans of scikit-learn.

    Raises:
        DataError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "the demo uses the handwritten digits of scikit-learn, but scikit-learn is not installed. Install it "
            f"with: {install_command('demo')}"
        ) from error
    digits = load_digits()
    return [_Scan(image / 16.0, int(target)) for image, target in zip(digits.images, digits.target, strict=True)]


@dataclass(frozen=True)
class _Image:
    path: str  # relative to the JSONL file
    digit: int


def _render_all(
    folder: Path,
    split: str,
    indices: NDArray[np.int64],
    scans: list[_Scan],
    renderings: int,
    rng: np.random.Generator,
) -> list[_Image]:
    images = []
    for index in indices:
        for variant in range(renderings):
            name = f"images/{split}_{index:04d}_{variant}.png"
            _render(scans[index].pixels, rng).save(folder / name)
            images.append(_Image(name, scans[index].digit))
    return images


def _render(pixels_HW: NDArray[np.float64], rng: np.random.Generator) -> Any:
    """One scan as a picture: tilted, sheared, thinner or bolder, stretched to most of a frame and placed in it."""
    from PIL import Image

    height, width = FRAMES[rng.integers(len(FRAMES))]
    box_height, box_width = (round(side * rng.uniform(0.85, 1.0)) for side in (height, width))
    ink = Image.fromarray(np.round(255 * pixels_HW ** rng.uniform(0.7, 1.4)).astype(np.uint8))
    scan = ink.resize((32, 32), Image.Resampling.BICUBIC)
    tilt, shear = np.deg2rad(rng.uniform(-MAX_TILT_DEG, MAX_TILT_DEG)), rng.uniform(-MAX_SHEAR, MAX_SHEAR)
    # Rotation after a horizontal shear, about the middle of the 32 x 32 pixels.
    a, b, d, e = np.cos(tilt), np.sin(tilt) + shear, -np.sin(tilt), np.cos(tilt)
    matrix = (a, b, 16 * (1 - a - b), d, e, 16 * (1 - d - e))
    scan = scan.transform((32, 32), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
    frame = Image.new("L", (width, height))
    offset = (int(rng.integers(width - box_width + 1)), int(rng.integers(height - box_height + 1)))
    frame.paste(scan.resize((box_width, box_height), Image.Resampling.BILINEAR), offset)
    return frame


def _compose(images: list[_Image], num_samples: int, most: int, rng: np.random.Generator) -> list[list[_Image]]:
    samples = []
    for _ in range(num_samples):
        num_digits = int(rng.integers(1, most + 1))
        samples.append([images[index] for index in rng.integers(len(images), size=num_digits)])
    return samples


def _write_samples(path: Path, samples: list[list[_Image]], rng: np.random.Generator, *, wrong: bool = False) -> None:
    """Write samples, or where `wrong` pairs of the right reading and one in which a digit is another."""
    with path.open("w", encoding="utf-8") as file:
        for images in samples:
            question = [{"type": "text", "text": QUESTIONS[rng.integers(len(QUESTIONS))]}]
            pictures = [{"type": "image", "image": image.path} for image in images]
            content = pictures + question if rng.random() < 0.5 else question + pictures
            answer = "".join(str(image.digit) for image in images)
            question_turn, answer_turn = {"role": "user", "content": content}, {"role": "assistant", "content": answer}
            if not wrong:
                file.write(json.dumps({"messages": [question_turn, answer_turn]}) + "\n")
                continue
            place, added = int(rng.integers(len(answer))), int(rng.integers(1, 10))
            other = answer[:place] + str((int(answer[place]) + added) % 10) + answer[place + 1 :]
            row = {
                "prompt": [question_turn],
                "chosen": [answer_turn],
                "rejected": [{"role": "assistant", "content": other}],
            }
            file.write(json.dumps(row) + "\n")


def write_reader(folder: Path, texts: Iterable[str] = (*QUESTIONS, "user\n", "assistant\n")) -> Path:
    """Write a Qwen3-VL of about a million parameters, without weights: configuration, tokenizer and image processor.

    Weights are drawn when training starts. They are drawn wider than a large model's 0.02: in a hidden size of 128 that
    would leave every layer's output small beside its input, and learning starts several times later.

    Args:
        folder: created where needed.
        texts: what the vocabulary is learned from: their words become single tokens.

    Returns:
        The folder; `headway train` and transformers open it like any other.
    """
    from transformers import Qwen3VLConfig

    from headway.models.load import load_processor
    from headway.synthetic.processor import write_processor
    from headway.synthetic.small_model import write_generation_config

    # Answers stay digit by digit, because no number is among the digits' questions.
    write_processor(folder, texts, PATCH_SIZE, temporal_patch_size=1)
    processor: Any = load_processor(folder)
    tokenizer = processor.tokenizer
    token = tokenizer.convert_tokens_to_ids
    hidden_size, num_heads, spread = 128, 4, 0.06
    head_dim = hidden_size // num_heads
    # rotary positions of three axes: time has what height and width leave
    third = head_dim // 6
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": hidden_size,
            "intermediate_size": 2 * hidden_size,
            "num_hidden_layers": 2,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads,
            "head_dim": head_dim,
            "max_position_embeddings": 1024,
            "initializer_range": spread,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [head_dim // 2 - 2 * third, third, third],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 3,
            "hidden_size": hidden_size,
            "intermediate_size": 2 * hidden_size,
            "num_heads": num_heads,
            "patch_size": PATCH_SIZE,
            "temporal_patch_size": 1,
            "out_hidden_size": hidden_size,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
            "initializer_range": spread,
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
        architectures=["Qwen3VLForConditionalGeneration"],
    )
    config.save_pretrained(folder)
    write_generation_config(folder, processor)
    return folder
