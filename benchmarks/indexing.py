"""How fast lengths are indexed, beside `datasets.map`, the bare tokenizer on the same texts, and headers of images.

    .venv/bin/python benchmarks/indexing.py         # about a minute; run on a quiet machine

Both sides run in one process and take turns; the index is made from nothing each time, Parquet included. Time is the
process's CPU time, so that neighbours on the machine count less; it leaves out waiting for the disk.
Writes benchmarks/results/indexing_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
import json
import os
import random
import re
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image

from headway.data import Chat, Encoder
from headway.data.index import build_index
from headway.data.sources import Source, open_source
from headway.models import load_processor
from headway.synthetic.processor import write_processor
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, spread, write

VOCABULARY = 16384
IMAGE_SIZE = (1000, 750)  # width and height of a photograph made small for a web page [pixels]
NUM_IMAGE_FILES = 200  # images are this many files, used again and again; no header read is remembered


def main() -> None:
    """Measure, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4000, help="chats of each kind")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HEADWAY_CACHE"] = folder
        record = measure(Path(folder), options.rows, options.rounds)
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def measure(folder: Path, rows: int, rounds: int) -> dict[str, Any]:
    """Index texts and images, each against its limit."""
    record: dict[str, Any] = {"what": "indexing", "environment": environment(torch.device("cpu")), "rows": rows}
    words = prose()
    processor: Any = load_processor(write_processor(folder / "model", [words], vocab_size=VOCABULARY))
    tokenizer = processor.tokenizer.backend_tokenizer
    texts = write_texts(folder, words, rows)
    written = [rendered(processor.tokenizer, texts[row]) for row in range(len(texts))]
    record["text"] = take_turns(
        rounds,
        bare=lambda: sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in written),
        mapped=lambda: sum(mapped_lengths(processor.tokenizer, folder)),
        indexed=lambda: tokens_of(texts, Encoder(processor.tokenizer), folder),
    )
    record["text"]["same_lengths"] = same_lengths(texts, processor, folder)
    record["text"]["characters"] = sum(map(len, written))
    images = write_images(folder, rows)
    paths = [images[row].images[0].path for row in range(len(images))]
    record["images"] = take_turns(
        rounds,
        bare=lambda: sum(header_read(path) for path in paths),
        indexed=lambda: tokens_of(images, Encoder(processor), folder),
    )
    return record


def prose() -> str:
    """English of many kinds: the licence and copyright notices, docstrings and comments of the standard library."""
    files = sorted(Path(textwrap.__file__).parent.glob("*.py"))
    found = [re.findall(r'"""(.*?)"""', file.read_text(encoding="utf-8"), flags=re.DOTALL) for file in files]
    return "\n".join(text for texts in found for text in texts)


def write_texts(folder: Path, words: str, rows: int) -> Source:
    """Chats of 500 to 6,000 characters of prose."""
    rng = random.Random(0)
    with (folder / "texts.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(rows):
            length = rng.randint(500, 6000)
            start = rng.randrange(len(words) - length)
            piece, cut = words[start : start + length], rng.randint(50, 400)
            file.write(json.dumps({"messages": turns(piece[:cut], piece[cut:])}) + "\n")
    return open_source(folder / "texts.jsonl")


def write_images(folder: Path, rows: int) -> Source:
    """Chats of a few words, each about a JPEG."""
    rng = np.random.default_rng(0)
    for number in range(min(rows, NUM_IMAGE_FILES)):
        noise = rng.integers(0, 255, (25, 33, 3), dtype=np.uint8)  # smooth once enlarged, as photographs are
        Image.fromarray(noise).resize(IMAGE_SIZE).save(folder / f"{number}.jpg", quality=90)
    with (folder / "images.jsonl").open("w", encoding="utf-8") as file:
        for row in range(rows):
            image = {"type": "image", "image": f"{row % NUM_IMAGE_FILES}.jpg"}
            question = [image, {"type": "text", "text": "What is to be seen here?"}]
            file.write(json.dumps({"messages": turns(question, f"Number {row}, of many colours.")}) + "\n")
    return open_source(folder / "images.jsonl")


def turns(question: Any, answer: str) -> list[dict[str, Any]]:
    """A chat of one question and its answer."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def rendered(tokenizer: Any, chat: Any) -> str:
    """The chat as the model reads it."""
    assert isinstance(chat, Chat)
    messages = [{"role": message.role, "content": message.text} for message in chat.messages]
    return str(tokenizer.apply_chat_template(messages, tokenize=False))


def mapped_lengths(tokenizer: Any, folder: Path) -> list[int]:
    """Tokens of each chat, as people count them with `datasets.map`, transformers' template and the tokenizer."""

    def count(batch: dict[str, list[Any]]) -> dict[str, list[int]]:
        texts = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in batch["messages"]]
        return {"tokens": [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]}

    with tempfile.TemporaryDirectory(dir=folder) as cache:  # nothing is remembered from turn to turn
        rows = datasets.load_dataset("json", data_files=str(folder / "texts.jsonl"), split="train", cache_dir=cache)
        lengths: list[int] = rows.map(count, batched=True, batch_size=200, remove_columns=rows.column_names)["tokens"]
        return list(lengths)


def same_lengths(source: Source, processor: Any, folder: Path) -> int:
    """Rows whose length is the same on both sides."""
    encoder, lengths = Encoder(processor.tokenizer), mapped_lengths(processor.tokenizer, folder)
    return sum(encoder.measure(source[row]).tokens == length for row, length in enumerate(lengths))


def header_read(path: str | None) -> int:
    """The tokens that an image of that size would have without any rule; only the reading counts."""
    assert path is not None
    with Image.open(path) as image:
        image.getexif()
        return image.size[0] * image.size[1]


def tokens_of(source: Source, encoder: Encoder, folder: Path) -> int:
    """Index a source from nothing in this process."""
    index = build_index(source, encoder, folder / "indices", workers=0, refresh=True)
    return index.summary().tokens


def take_turns(rounds: int, **sides: Callable[[], int]) -> dict[str, Any]:
    """Time the sides by turns, after one turn each to warm up [CPU s]; `tokens` are what a side returned."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    returned = {name: run() for name, run in sides.items()}
    for _ in range(rounds):
        for name, run in sides.items():
            begin_s = time.process_time()
            run()
            seconds[name].append(time.process_time() - begin_s)
    return {"seconds": {name: spread(values) for name, values in seconds.items()}, "tokens": returned}


def render(record: dict[str, Any]) -> str:
    """Render the Markdown page from the record."""
    rows = []
    titles = {
        ("text", "bare"): "texts, bare tokenizer",
        ("text", "mapped"): "texts, datasets.map",
        ("text", "indexed"): "texts, indexed",
        ("images", "bare"): "images, bare headers",
        ("images", "indexed"): "images, indexed",
    }
    for (kind, side), title in titles.items():
        if side not in record[kind]["seconds"]:  # a record from before the side was measured
            continue
        seconds = record[kind]["seconds"]
        rate = record["rows"] / seconds[side]["median"]
        share = seconds["bare"]["median"] / seconds[side]["median"]
        low, high = (record["rows"] / seconds[side][end] for end in ("max", "min"))
        rows.append([title, f"{rate:,.0f}", f"{low:,.0f} to {high:,.0f}", f"{100 * share:.0f} %"])
    mean = record["text"]["characters"] / record["rows"]
    same = record["text"].get("same_lengths")
    peer = (
        "datasets.map reads the same file, renders by transformers' template, and tokenises in batches of 200. "
        f"{same:,} of {record['rows']:,} lengths are the same on both sides. "
        if same is not None
        else ""
    )
    return "\n".join(
        [
            "# How fast lengths are indexed",
            "",
            f"{record['rows']:,} chats of each kind on one core. Texts have {mean:,.0f} characters in the mean, and "
            "the limit is the bare tokenizer on the very same texts, already rendered. Images are JPEGs of "
            f"{IMAGE_SIZE[0]} x {IMAGE_SIZE[1]} pixels in chats of a few words, and the limit is opening each with "
            "Pillow and reading its size and EXIF, without a chat. Indexing reads the rows, renders and tokenises each "
            f"chat, finds the supervised tokens and writes Parquet. {peer}Seconds are the process's CPU time: rows per "
            "second of one core that nothing else uses.",
            "",
            markdown_table(["", "rows/s", "range", "of the limit"], rows),
            "",
            describe_environment(record),
            "",
        ]
    )


if __name__ == "__main__":
    main()
