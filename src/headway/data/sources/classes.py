"""Classes as answers: rows with a label, media with words under other names, and folders that are named for classes."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from headway.cache import cache_root
from headway.data.sources.files import File, write_cached
from headway.data.sources.json_rows import JsonLines, shortened, words_of
from headway.data.sources.references import kind_of
from headway.errors import DataError

LABEL = "label"
"""The column of classes, as `datasets` calls it."""
CAPTIONS = ("caption", "transcription", "sentence")
"""Columns of words that belong to media, where there is no text column.

Source: datasets 5.2, guides of imagefolder and audiofolder; Common Voice's sentence.
"""
_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")


def with_class(fields: Mapping[str, Any], text_column: str, *, has_media: bool) -> Mapping[str, Any]:
    """Put a row's class, or the words beside its media, under the names that schemas read.

    Args:
        fields: the row's columns, of no schema yet but that of a text.
        text_column: the column of texts and captions.
        has_media: whether the row has media.

    Raises:
        DataError: the class is missing, or no word or number.

    >>> with_class({"text": "A fine film.", "label": "good"}, "text", has_media=False)
    {'question': 'A fine film.', 'answer': 'good'}
    >>> with_class({"image": "a.png", "label": 3}, "text", has_media=True)
    {'image': 'a.png', 'text': '3'}
    """
    if LABEL not in fields:
        own = next((name for name in CAPTIONS if fields.get(name)), None)
        return _moved(fields, {own: text_column}) if own and has_media and text_column not in fields else fields
    has_question, has_text = fields.get("question") is not None, text_column in fields
    if has_question == has_text and (has_text or not has_media):
        return fields  # which of both is asked of is not known, or there is nothing to ask of
    asks = "question" if has_question else text_column if has_text else None
    if asks == text_column and not has_media and not str(fields[asks] or "").strip():  # left out as an empty document
        return {name: value for name, value in fields.items() if name != LABEL}
    answer = (words_of(fields[LABEL]) or "").strip()  # a space behind a separator is no part of a class
    if not answer:
        raise DataError(
            f'"{LABEL}" is {shortened(fields[LABEL])}, and a class is a word or a number. Delete rows without one; of '
            f"several, columns takes one: {{{LABEL}: {LABEL}.0}}; and columns: {{{text_column}: {text_column}}} learns "
            "the texts themselves."
        )
    fields = {**fields, LABEL: answer}
    return _moved(fields, {LABEL: text_column} if asks is None else {asks: "question", LABEL: "answer"})


def _moved(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    others = {name: value for name, value in fields.items() if name not in names}
    return others | {new: fields[name] for name, new in names.items()}


class ClassFolder(JsonLines):
    """Media in folders that are named for their classes, one row each.

    Their names stand in a file of the cache, a line each, so that rows have places as those of any other file.

    Args:
        file: that file.
        folder: that holds the folders of the classes, for messages to people.

    Source: datasets 5.2, imagefolder without metadata: the class is the name of the folder.
    """

    def __init__(self, file: File, folder: str) -> None:
        super().__init__(file)
        self.folder = folder

    @property
    def name(self) -> str:  # noqa: D102 - as the base class says
        return self.folder

    def place(self, number: int, data: bytes) -> str:  # noqa: ARG002, D102 - as the base class says
        fields = json.loads(data)
        return str(next(value for name, value in fields.items() if name != LABEL))


def class_folder(files: Sequence[File], folder: str) -> ClassFolder | None:
    """Open a folder that holds nothing but folders of media, named for their classes.

    Args:
        files: all that the folder holds.
        folder: path or URL.

    Returns:
        None where the media lie beside each other, or in one folder.

    Raises:
        DataError: the folder holds splits, or media lie at other depths than below a class.
    """
    media = [(file, file.name.split("/")) for file in files if kind_of(file.url)]
    depths = {len(parts) for _, parts in media}
    tops = sorted({parts[0] for _, parts in media if len(parts) > 1})
    if len(tops) < 2 and depths != {3}:
        return None
    if depths == {3} and {*_SPLITS} >= {*tops}:
        first = min(tops, key=_SPLITS.index)
        raise DataError(
            f"The folder {folder} holds the splits {', '.join(tops)}. Give one of them, such as {folder}/{first}."
        )
    astray = next((file for file, parts in media if len(parts) != 2), None)
    if astray is not None:
        raise DataError(
            f"The folder {folder} holds media without a file that says what is to be learnt of them, so each must lie "
            f"in a folder named for its class, as {tops[0]}/1.png; {astray.name} does not. Move it there, or write a "
            "file metadata.csv with the columns file_name and label."
        )
    rows = [{str(kind_of(file.url)): file.name, LABEL: parts[0]} for file, parts in media]
    listing = "".join(json.dumps(row) + "\n" for row in rows).encode()
    digest = hashlib.sha256(listing).hexdigest()[:32]
    path = cache_root() / "folders" / f"{digest}.jsonl"
    if not path.is_file():
        write_cached(path, lambda target: target.write(listing))
    # Known by what it lists: whoever deletes the cache has the same data afterwards.
    return ClassFolder(File(str(path), len(listing), stamp="", name=f"list of media {digest[:12]}"), folder)
