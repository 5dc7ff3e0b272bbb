"""Samples of a mix's kind, made up and small: chats as JSON Lines, with image and video files where they have such.

Lengths follow the mix, scaled down with the pack, so that a pack holds about as many samples as the real one. The words
follow each other by a fixed rule most of the time, so that there is something to learn.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from headway.errors import DataError
from headway.packing.budget import square_grid
from headway.packing.lengths import Mix
from headway.words import Argument

Message: TypeAlias = dict[str, Any]
"""A turn of a chat, as a row of JSON has it."""
# One token each for a tokenizer that learned from them, and a space.
WORDS = tuple(f"{onset}{rime}" for onset in "bdfgklmnprst" for rime in ("al", "en", "ir", "om", "ut"))
_RULE = 0.9  # share of the words that follow from the one before
_OVERHEAD = 16  # tokens that a chat's turns take beside its words
_FRAME = (2, 4)  # height and width of a video's frames [tokens]
_TIMESTAMP = 12  # tokens that a model which writes times takes beside each pair of frames, at most
VIDEO_FPS = 2  # frames of a second, as many as the model reads


def vocabulary_texts() -> list[str]:
    """Texts for a small tokenizer to learn from: words with their spaces, the turns of a chat and times in a video."""
    return [
        *(f" {word}" for word in WORDS for _ in range(8)),
        *["user\n", "assistant\n", "<0.5 seconds>", "<12.5 seconds>"] * 8,
        *WORDS,
    ]


def write_small_data(
    folder: Path,
    mix: Mix,
    *,
    scale: float,
    num_samples: int,
    longest: int,
    patch_size: int,
    merge_size: int,
    seed: int,
    change: Callable[[list[Message], int], list[Message]] | None = None,
) -> Path:
    """Write made-up samples of a mix.

    Args:
        folder: created where needed; gets `samples.jsonl` and the media.
        mix: distribution of the samples' lengths.
        scale: of every length; the small pack's tokens over the real one's.
        num_samples: how many [samples].
        longest: no sample is longer [tokens].
        patch_size: side of a vision patch [pixels]; 1 where there is no vision.
        merge_size: patches per side that one token stands for [patches].
        seed: of everything random.
        change: makes of a sample's messages, and its number, those that the model's family trains on; None for them.

    Returns:
        The file of samples.

    Raises:
        DataError: the folder cannot be written.
    """
    rng = np.random.default_rng(seed)
    tokens, media, number = mix.draw(rng, num_samples)
    # lengths of the mix, made smaller; a chat's turns take their share of each
    words = np.maximum(1, np.round((tokens - media) * scale)).astype(int) - _OVERHEAD
    side = patch_size * merge_size
    try:
        (folder / "media").mkdir(parents=True, exist_ok=True)
        with (folder / "samples.jsonl").open("w", encoding="utf-8") as file:
            for row in range(num_samples):
                # media first, each with its share of the room, then words for question and answer
                room = longest - 2 * _OVERHEAD
                content: list[dict[str, Any]] = []
                for place in range(int(number[row])):
                    size = max(1, round(media[row] / number[row] * scale))
                    size = max(1, min(size, room // (int(number[row]) + 1)))
                    part, media_tokens = _write_media(folder, mix, f"{row:05d}_{place}", size, side, rng)
                    content.append(part)
                    room -= media_tokens
                count = max(2, min(int(words[row]), room))
                content.append({"type": "text", "text": _sentence(count // 2, rng)})
                answer = _sentence(count - count // 2, rng)
                turns: list[Message] = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
                messages = turns if change is None else change(turns, row)
                file.write(json.dumps({"messages": messages}) + "\n")
    except OSError as error:
        raise DataError(
            f"cannot write samples to {folder}: {error.strerror}. Give another folder with "
            f"{Argument('run.folder', example='FOLDER')}."
        ) from error
    return folder / "samples.jsonl"


def _sentence(num_words: int, rng: np.random.Generator) -> str:
    place = int(rng.integers(len(WORDS)))
    words = []
    for _ in range(max(1, num_words)):
        words.append(WORDS[place])
        place = (7 * place + 3) % len(WORDS) if rng.random() < _RULE else int(rng.integers(len(WORDS)))
    return " " + " ".join(words)


def _write_media(
    folder: Path, mix: Mix, name: str, tokens: int, side: int, rng: np.random.Generator
) -> tuple[dict[str, Any], int]:
    """Write an image or a video of about so many tokens; returns the part of a message, and what it takes [tokens]."""
    if mix.kind == "videos":
        pair_tokens = _FRAME[0] * _FRAME[1] + _TIMESTAMP
        pairs = max(2, tokens // pair_tokens)
        path = f"media/{name}.mp4"
        _write_video(folder / path, 2 * pairs, _FRAME[0] * side, _FRAME[1] * side, rng)
        return {"type": "video", "video": path}, pairs * pair_tokens
    _, height, width = square_grid(tokens, 1)
    pixels = _shades(height * side, width * side, rng)
    path = f"media/{name}.png"
    Image.fromarray(pixels).save(folder / path)
    return {"type": "image", "image": path}, height * width + 2


def _shades(height: int, width: int, rng: np.random.Generator) -> Any:
    corners = rng.integers(0, 256, (2, 2, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(corners).resize((width, height), Image.Resampling.BILINEAR))


def _write_video(path: Path, num_frames: int, height: int, width: int, rng: np.random.Generator) -> None:
    import av  # only videos need PyAV, and rows of text do not

    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("mpeg4", rate=VIDEO_FPS)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        first, last = (_shades(height, width, rng).astype(float) for _ in range(2))
        for number in range(num_frames):
            share = number / max(1, num_frames - 1)
            pixels = (first + (last - first) * share).astype(np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode(None):
            container.mux(packet)
