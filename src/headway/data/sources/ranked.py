"""Ranked lists of answers: which of a row's answers are better than others, by ranks, ratings or marks of a judge."""

import json
import math
from collections.abc import Mapping
from typing import Any

from headway.data.sources.json_rows import shortened, words_of
from headway.errors import DataError

Row = dict[str, Any]

MOST_ANSWERS = 64
"""Answers of a row at most: each is read with the whole prompt."""

_WORDS = ("response", "answer", "completion", "text", "content")  # keys of an answer in a ranked list
_RANKS = ("rank", "ranking")  # keys of its place, 1 the best
_RATINGS = ("overall_score", "rating", "score", "reward")  # and of its worth, the higher the better
_ASPECTS = "annotations"


def columns_of_marks(fields: Mapping[str, Any]) -> list[str]:
    """Columns of ranks and ratings beside a list of answers that are words.

    >>> columns_of_marks({"responses": ["a", "b"], "scores": [1, 2]})
    ['scores']
    """
    names = (f"{name}{plural}" for name in (*_RANKS, *_RATINGS) for plural in ("s", ""))
    return [name for name in names if isinstance(fields.get(name), list)]


def ranked_answers(fields: Mapping[str, Any], column: str, name: str | None = None) -> list[str]:
    """The answers of a ranked list, best first, without those that do not differ from the best.

    Left out are answers without a rating, answers that are as good as the best, and a second answer of the same words.

    Args:
        fields: the row's columns.
        column: the one that holds the list.
        name: what messages call it, if that is something else.

    Raises:
        DataError: there are too many, or no two of which one is better.

    >>> rated = [{"answer": "a", "rank": 2}, {"answer": "b", "rank": 1}, {"answer": "c", "rank": 1}]
    >>> ranked_answers({"answers": rated}, "answers")
    ['b', 'a']
    """
    items, name = _items(fields, column), name or column
    if len(items) > MOST_ANSWERS:
        raise DataError(f'"{name}" holds {len(items):,} answers, but at most {MOST_ANSWERS} are read. Leave some out.')
    ratings = [(rating, item) for item in items if (rating := _rating(item)) is not None]
    ratings.sort(key=lambda pair: -pair[0])
    answers: dict[str, float] = {}
    for rating, item in ratings:
        words = words_of(next((item[key] for key in _WORDS if key in item), None))
        if words is None:
            raise DataError(f'"{name}" holds {shortened(item)}, whose answer is not words.')
        if not answers or rating < next(iter(answers.values())):
            answers.setdefault(words, rating)
    if len(answers) < 2:
        raise DataError(
            f'"{name}" holds {len(items)} answers, {len(ratings)} of them rated, and none is better than another. '
            "Leave such rows out."
        )
    return list(answers)


def num_left_out(fields: Mapping[str, Any], column: str) -> int:
    """Number of a list's answers that `ranked_answers` leaves out; 0 of a list of which nothing can be learnt."""
    try:
        return len(_items(fields, column)) - len(ranked_answers(fields, column))
    except DataError:
        return 0


def _items(fields: Mapping[str, Any], column: str) -> list[Row]:
    """Each answer of a list with its marks: of objects, of an object of lists as tables have it, or of lists beside."""
    value = fields[column]
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return []
    if isinstance(value, dict):
        lengths = {len(items) for items in value.values() if isinstance(items, list)}
        if len(lengths) != 1 or not all(isinstance(items, list) for items in value.values()):
            return []
        value = [dict(zip(value, items, strict=True)) for items in zip(*value.values(), strict=True)]
    if not isinstance(value, list):
        return []
    if all(isinstance(item, dict) for item in value):
        return value
    marks = next(((name, fields[name]) for name in columns_of_marks(fields) if len(fields[name]) == len(value)), None)
    if marks is None:
        return []
    name, numbers = marks
    return [{"answer": item, name.removesuffix("s"): mark} for item, mark in zip(value, numbers, strict=True)]


def is_ranked(fields: Mapping[str, Any], column: str) -> bool:
    """Tell whether a column holds answers with ranks or ratings."""
    first = next(iter(_items(fields, column)), {})
    marks = {*_RANKS, *_RATINGS, _ASPECTS}
    return any(key in first for key in _WORDS) and bool(marks & first.keys())


def pair_of(words: Any) -> Row | None:
    """Question, chosen and rejected answer of an object within a column of words, or of its JSON; None of others."""
    if isinstance(words, str):
        if '"rejected"' not in words or not words.lstrip().startswith("{"):
            return None
        try:
            words = json.loads(words)
        except (ValueError, RecursionError):
            return None
    names = ("question", "chosen", "rejected")
    return {name: words[name] for name in names} if isinstance(words, dict) and {*names} <= words.keys() else None


def _rating(answer: Row) -> float | None:
    """The worth of an answer, the higher the better; None where it has none, as where a judge wrote N/A."""
    for key in _RANKS:
        if (rank := number_of(answer.get(key))) is not None:
            return -rank
    for key in _RATINGS:
        if (rating := number_of(answer.get(key))) is not None:
            return rating
    aspects = answer.get(_ASPECTS)
    marks = [aspect.get("Rating") for aspect in aspects.values() if isinstance(aspect, dict)] if aspects else []
    numbers = [number_of(mark) for mark in marks]
    return None if not numbers or None in numbers else math.fsum(filter(None, numbers)) / len(numbers)


def number_of(value: Any) -> float | None:
    """A number, also of its words; None of anything else.

    >>> number_of("4"), number_of(0.5), number_of("N/A"), number_of(True)
    (4.0, 0.5, None, None)
    """
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
