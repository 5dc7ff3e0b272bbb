"""Folders that are named for the classes of the media in them."""

import hashlib
import json
from collections.abc import Sequence

from headway.cache import cache_root
from headway.data.sources.files import File, write_cached
from headway.data.sources.json_rows import JsonLines
from headway.data.sources.references import kind_of
from headway.errors import DataError

LABEL = "label"
"""The column of classes, as `datasets` calls it."""
_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")


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
