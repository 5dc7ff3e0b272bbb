"""The boundary to files of models that anybody may have written: config.json, tokenizer.json, adapter_config.json.

The libraries that read them raise whatever they like, and tokenizers' Rust code panics with what is no `Exception`.
What would take all memory or time is looked for before they read.
"""

import base64
import json
import logging
import math
import re
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headway.files import open_plain
from headway.report import printable
from headway.safe_path import current_folder_kept_out

MAX_LAYERS = 10_000  # by each number of layers in a config.json; the deepest models have some hundreds
MAX_WIDTH = 2**31  # longest vector, and most entries of a vocabulary; the largest are below 2**20
MAX_GROWTH = 64  # letters that a normaliser or decoder may make of each one; honest ones make 1 to 18

MAX_EDGE = 2**15  # pixels of an edge to which a processor resizes; honest ones are below 2,000
MAX_PIXELS = 2**28  # most pixels to which a processor enlarges an image

_EDGES = ("height", "width")
_LEAST_PIXELS = ("shortest_edge", "min_pixels")  # pixels in all for the one, an edge or pixels for the other
_REPEATS = re.compile(r"[*+{?]")
_COLOURS = re.compile(r"\x1b\[[\d;]*m")  # a library's own; a stranger's change nothing but colours
_LAYERS = ("layer", "depth", "block")  # in the names of numbers of layers
_SIZED = ("size", "dim", "length", "len", "tokens", "width", "window", "offset", "index", "id")  # no number of them
_MOST_RANK = 2**16  # honest ones are below 1,024
_MATCH_S = 10  # for all names of a model [s]
_MATCH = """
import json, re, sys
pattern, names = json.load(sys.stdin)
json.dump([name for name in names if re.fullmatch(pattern, name)], sys.stdout)
"""
# Settings of adapters by which peft imports a module of the file's choice, builds as many layers as it says, or
# computes something else than x A B.
_NOT_OF_STRANGERS = (
    "megatron_config", "layer_replication", "auto_mapping", "monteclora_config", "arrow_config", "velora_config",
)  # fmt: skip
_WIDTHS = ("hidden_size", "intermediate_size", "vocab_size", "embed_dim")  # no model leaves these sizes open by -1


def check_plain_files(folder: Path) -> None:
    """Refuse a folder with a pipe or a device in it, or a link to one: a library would read it without end.

    Raises:
        ValueError: there is one.
        OSError: the folder cannot be read.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ValueError(f"{path.name} is a pipe or a device, not a file")


class _PrintableNames(logging.Filter):
    """Shows control characters in a library's log by their numbers, because the log names strangers' tensors."""

    def filter(self, record: logging.LogRecord) -> bool:
        lines = _COLOURS.sub("", record.getMessage()).expandtabs(4).split("\n")
        record.msg, record.args = "\n".join(map(printable, lines)), ()
        return True


_PRINTABLE_NAMES = _PrintableNames()


def print_names_safely() -> None:
    """Make transformers' log lines show the characters that a terminal would obey; one call is enough."""
    for handler in logging.getLogger("transformers").handlers:
        handler.addFilter(_PRINTABLE_NAMES)


def check_config(path: Path) -> None:
    """Refuse a config.json that would be built without end, or not at all.

    Raises:
        ValueError: it is no JSON, or a number of layers or a width is not one that a model has.
        OSError: it cannot be read, or is a pipe.
    """
    for name, value in _numbers(_content(path)):
        words = name.lower().replace("-", "_").split("_")
        counts = any(word.rstrip("s") in _LAYERS for word in words) and not any(word in _SIZED for word in words)
        if counts and value > MAX_LAYERS:
            raise ValueError(f"{name} is {str(value)[:20]}, but a model has at most {MAX_LAYERS:,} layers")
        if name in _WIDTHS and not 0 <= value <= MAX_WIDTH:  # a value that is no number fails here too
            raise ValueError(f"{name} is {str(value)[:20]}, but a model has 0 to {MAX_WIDTH:,}")


def check_tokenizer(path: Path) -> None:
    """Refuse a tokenizer.json that makes a long text of each letter: every step of it multiplies the one before.

    Raises:
        ValueError: it is no JSON, or its normaliser or decoder makes more than MAX_GROWTH letters of one.
        OSError: it cannot be read, or is a pipe.
    """
    content = _content(path)
    for part in ("normalizer", "decoder"):
        growth = 1
        for step in _steps(content.get(part)):
            growth *= max(1, _growth(step))
        if growth > MAX_GROWTH:
            raise ValueError(
                f"its {part} makes up to {growth:,} letters of each letter, but at most {MAX_GROWTH} are allowed"
            )


def check_processor(path: Path) -> None:
    """Refuse settings of a processor by which it would enlarge pictures beyond the memory.

    Raises:
        ValueError: it is no JSON, or a least size is above MAX_EDGE or MAX_PIXELS.
        OSError: it cannot be read, or is a pipe.
    """
    for name, value in _numbers(_content(path)):
        most = MAX_EDGE if name in _EDGES else MAX_PIXELS if name in _LEAST_PIXELS else math.inf
        if value > most:
            raise ValueError(f"{name} is {str(value)[:20]}, but at most {most:,} are allowed")


def check_adapters(path: Path) -> None:
    """Refuse an adapter_config.json by which peft would import a module, or build without end.

    Raises:
        ValueError: it is no JSON, no LoRA, or has a setting or a rank that is not one of a stranger's.
        OSError: it cannot be read, or is a pipe.
    """
    content = _content(path)
    if content.get("peft_type") != "LORA":
        raise ValueError(f"peft_type is {str(content.get('peft_type'))[:40]!r}, but Headway reads LORA adapters only")
    if name := next((name for name in _NOT_OF_STRANGERS if content.get(name) is not None), None):
        raise ValueError(f"{name} is {str(content[name])[:40]!r}, but must be null")
    patterns = [content.get(name) for name in ("rank_pattern", "alpha_pattern")]
    names = [name for pattern in patterns if isinstance(pattern, dict) for name in pattern]
    names += [name for name in (content.get("layers_pattern"),) if isinstance(name, str)]
    if name := next((name for name in names if _REPEATS.search(name)), None):  # peft takes it for an expression
        raise ValueError(f"{name[:40]!r} is an expression with repetitions. Name modules in full")
    ranks = [content.get("r"), *(patterns[0].values() if isinstance(patterns[0], dict) else ())]
    if rank := next((rank for rank in ranks if type(rank) is not int or not 0 < rank <= _MOST_RANK), None):
        raise ValueError(f"a rank is {str(rank)[:20]!r}, but must be a whole number from 1 to {_MOST_RANK:,}")


def matching_names(pattern: str, names: Iterable[str]) -> list[str]:
    """Names that a stranger's regular expression matches, found in a process that can be stopped.

    Raises:
        ValueError: it is no expression, matches nothing, or takes longer than some seconds.
    """
    try:
        with current_folder_kept_out():
            process = subprocess.run(
                [sys.executable, "-I", "-c", _MATCH],
                input=json.dumps([pattern, [*names]]),
                capture_output=True,
                text=True,
                timeout=_MATCH_S,
                check=False,
            )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"to match names with {pattern[:80]!r} takes more than {_MATCH_S} s") from error
    matches: list[str] = json.loads(process.stdout) if process.returncode == 0 else []
    if not matches:
        raise ValueError(f"{pattern[:80]!r} is no regular expression, or no module of the model has such a name")
    return matches


def _content(path: Path) -> Mapping[str, Any]:
    with open_plain(path) as file:
        try:
            content = json.load(file)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path.name} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no object")
    return content


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, int | float]]:
    """Every number of a configuration by its name; of lists by the list's."""
    waiting = [(name, value)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.items()
        elif type(value) in (int, float):
            yield name, value


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """Steps of a normaliser or decoder, those of sequences within it in their place."""
    waiting = [part]
    while waiting:
        step = waiting.pop()
        if isinstance(step, dict):
            waiting += [part for key in ("normalizers", "decoders") for part in step.get(key) or ()]
            yield step


def _growth(step: Mapping[str, Any]) -> int:
    """Letters that a step may make of one.

    Source: `Replace`, and `Precompiled`, whose table is a trie of so many bytes and then the words that it leads to,
    each ended by a zero byte; tokenizers 0.23, normalizers/replace.rs, and spm_precompiled 0.1, src/lib.rs.
    """
    if isinstance(text := step.get("content"), str):
        return len(text)
    if isinstance(table := step.get("precompiled_charsmap"), str):
        raw = base64.b64decode(table)
        (trie,) = struct.unpack("<I", raw[:4]) if len(raw) >= 4 else (0,)
        return max(map(len, raw[4 + trie :].split(b"\0")))
    return 1
