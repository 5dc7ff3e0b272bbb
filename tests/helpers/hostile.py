"""Inputs that no honest program writes: values put in place of others anywhere in a file, and files that are none."""

import json
import math
import os

ODD = [
    None, True, False, -1, 0, 2**31, 2**63, 10**30, -(10**30), 1e308, 5e-324, 0.1, "", "x", "1", [], {}, [1], [[1]],
    {"a": 1}, "\x1b[2J", "\u202e", "é" * 50, "9" * 5000, math.nan, math.inf, -math.inf, "1e5", " 1 ", "\x00",
]  # fmt: skip
CUTS = ["\x00", "{", "]", ",", "\\", '"', "9" * 5000, "1e999999", "-", "\ud7ff"]

# What may stand under any name that a command takes.
FILES = {
    "empty": b"", "zeros": b"\0" * 5000, "noise": bytes(range(256)) * 20, "deep": b'{"a":' * 50_000, "null": b"null",
    "digits": b'{"step": ' + b"9" * 5000 + b"}\n", "infinite": b'{"step": 1e999, "wall_s": Infinity, "kind": "step"}\n',
    "cut": b'{"traceEvents": [{"ph": "X", "cat": "kernel"', "gzip": b"\x1f\x8b\x08\x00" + b"x" * 100,
    "utf-16": '{"step": 1}'.encode("utf-16"), "yaml": b"model: !!python/object:os.system [x]\n",
    "layers": b'{"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 1000000000}',
    "widths": b'{"model_type": "qwen3", "hidden_size": -64, "vocab_size": 100000000000000000000}',
    "anchors": b"a: &a [*a]\n", "list": b"[1, 2]", "text": "a line of text \u202e\n".encode(),
}  # fmt: skip


def mutated(value, random, share):
    """A copy of JSON data in which some values are others, some keys gone or renamed, some lists longer or shorter."""
    if random.random() < share:
        return random.choice(ODD)
    if isinstance(value, dict):
        pairs = ((key, mutated(inner, random, share)) for key, inner in value.items() if random.random() > share / 3)
        return {(random.choice(["", "x", key + "2"]) if random.random() < share / 3 else key): it for key, it in pairs}
    if isinstance(value, list):
        items = [mutated(inner, random, share) for inner in value]
        return (items + items[:1])[: len(items) + random.choice([0, 0, 0, 0, -1, 1])] if items else items
    return value


def damaged(value, random):
    """JSON of data, which is cut or has a piece put in, once in ten."""
    text = json.dumps(value)
    place = random.randrange(len(text) + 1)
    chance = random.random()
    if chance < 0.05:
        return text[:place]
    return text[:place] + random.choice(CUTS) + text[place:] if chance < 0.1 else text


def write_files(folder):
    """Write each of FILES, a folder, a pipe and a link to itself; gives them by name."""
    paths = {name: folder / name for name in FILES}
    for name, path in paths.items():
        path.write_bytes(FILES[name])
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to("link")
    return paths | {name: folder / name for name in ("folder", "pipe", "link", "missing")}
