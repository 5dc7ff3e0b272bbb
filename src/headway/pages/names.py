"""Names by which a reader distinguishes runs: the shortest part of their paths that differs."""

import itertools
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from headway.log.run_files import METRICS
from headway.report import printable
from headway.report.secrets import hide_people

_LONGEST = 48  # length of a name [characters]
_BEFORE = 12  # beginning of a window of a long name before the place where names differ [characters]


def names_of_runs(paths: Sequence[Path]) -> list[str]:
    """Name run folders, or files of records, each differently for the eye.

    Args:
        paths: at least one, which is named with the folder that it is in; metrics.jsonl stands for its folder.

    Returns:
        As many names of at most 48 characters, a number in brackets behind them where paths alone do not differ.

    >>> names_of_runs([Path("/runs/before/run"), Path("/runs/after/run")])
    ['before', 'after']
    >>> names_of_runs([Path("/runs/digits/run/metrics.jsonl")])
    ['digits/run']
    """
    parts = [_parts(path) for path in paths]
    last = [path[-1] for path in parts]
    if len(parts) == 1:
        own, with_folder = (printable("/".join(parts[0][-count:])) for count in (1, 2))
        return _shortened([with_folder if len(with_folder) <= _LONGEST else own])
    # An ending that all paths share tells nothing, as `run` in a/run and b/run.
    while all(len(path) > 1 for path in parts) and len({path[-1] for path in parts}) == 1:
        parts = [path[:-1] for path in parts]
    most = max(map(len, parts))
    suffixes = (["/".join(path[-length:]) for path in parts] for length in range(1, most + 1))
    names = next((tried for tried in suffixes if len({*tried}) == len(paths)), last)
    shown = _shortened([printable(name) for name in names])
    # Names that look alike nevertheless are numbered, past numbers that are names themselves.
    looks = Counter(map(_look, shown))
    used = {look for look, count in looks.items() if count == 1}
    names = []
    for name in shown:
        numbered = (f"{name} ({n})" for n in itertools.count(1))
        distinct = name if looks[_look(name)] == 1 else next(tried for tried in numbered if _look(tried) not in used)
        used.add(_look(distinct))
        names.append(distinct)
    return names


def _parts(path: Path) -> tuple[str, ...]:
    absolute = path.absolute()
    folder = absolute.parent if absolute.name == METRICS else absolute
    parts = hide_people(str(folder)).split("/")  # pages are shown to others
    return tuple(part for part in parts if part not in ("", ".", "..")) or (str(folder),)


def _shortened(names: Sequence[str]) -> list[str]:
    """Names of bounded length, each with the place where it differs from the rest."""
    room = _LONGEST - 6  # for "..." on both sides
    differs = next((place for place, letters in enumerate(zip(*names, strict=False)) if len({*letters}) > 1), 0)
    start = max(0, differs - _BEFORE)
    return [name if len(name) <= _LONGEST else _window(name, min(start, len(name) - room), room) for name in names]


def _window(name: str, start: int, room: int) -> str:
    end = start + room
    return f"{'...' if start else ''}{name[start:end]}{'...' if end < len(name) else ''}"


def _look(name: str) -> str:
    """A name as the eye has it: letters that are composed in another way look the same."""
    return unicodedata.normalize("NFKC", name)
