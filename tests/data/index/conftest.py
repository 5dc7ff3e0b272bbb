"""Datasets as people have them, and the encoder that measures them."""

import json
import random

import pytest

from headway.data.sources import open_source

WORDS = ("Which", "digits", "do", "you", "see?", "One,", "two,", "three.")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def chats(tmp_path):
    """Make a source of text chats; some rows can be broken."""

    def make(rows, broken=(), folder="data"):
        rng = random.Random(rows)
        (tmp_path / folder).mkdir(exist_ok=True)
        lines = []
        for row in range(rows):
            question = " ".join(rng.choices(WORDS, k=rng.randint(1, 60)))
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": f"It is {row}."}]
            lines.append('{"messages": [' if row in broken else json.dumps({"messages": turns}))
        file = tmp_path / folder / "chats.jsonl"
        file.write_text("\n".join(lines))
        return open_source(file)

    return make
