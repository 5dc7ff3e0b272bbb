"""A tiny model folder of Bagel's architecture, and samples that ask for pictures, edit them and ask about them."""

import json

import numpy as np
from PIL import Image

from headway.models.load import load_processor
from headway.synthetic.processor import write_tokenizer
from helpers import tiny_bagel

WORDS = ["Draw a red square.", "Make it blue.", "What is this?", "a square", "a circle"]


def write_model(folder, vae=None):
    """A model folder without weights."""
    tokenizer = load_processor(write_tokenizer(folder, WORDS))
    tiny_bagel.config(vae, vocab_size=len(tokenizer)).save_pretrained(folder)
    return folder


def image(content):
    return {"type": "image", "image": content}


def chat(user, assistant):
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]}


def write_data(folder, samples=24):
    """Pictures to draw, edits and questions, in turn; the paths of a file of all, and of one of pictures alone."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    rows = []
    for number in range(samples):
        names = [f"{number}-{which}.png" for which in range(2)]
        for name in names:
            sides = rng.integers(4, 9, 2)
            Image.fromarray(rng.integers(0, 255, (*sides, 3), dtype=np.uint8)).save(folder / name)
        words = WORDS[number % 5]
        rows.append(
            [
                chat(words, [image(names[0])]),
                chat([image(names[0]), {"type": "text", "text": WORDS[1]}], [image(names[1])]),
                chat([image(names[0]), {"type": "text", "text": WORDS[2]}], words),
            ][number % 3]
        )
    for name, chosen in (("all.jsonl", rows), ("pictures.jsonl", rows[::3])):
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in chosen))
    return folder / "all.jsonl", folder / "pictures.jsonl"
