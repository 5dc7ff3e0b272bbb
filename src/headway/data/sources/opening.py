"""Datasets by their paths: which files, in which format."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.cache import cache_root
from headway.data.media.sizes import MediaSizes
from headway.data.samples import Document, Sample
from headway.data.sources.documents import SampleBy, Text, TokenFile
from headway.data.sources.files import COMPRESSIONS, File, find_files, without_query, write_cached
from headway.data.sources.reader import Reader
from headway.data.sources.references import MediaRules, kind_of
from headway.data.sources.schemas import Normaliser
from headway.data.sources.source import Shard, Source
from headway.data.sources.tables import Arrow, Parquet
from headway.data.sources.tar import Tar
from headway.data.sources.text_rows import DelimitedReader, JsonArray, JsonLines
from headway.errors import ConfigError, DataError, foreign

FORMATS: dict[str, type[Reader]] = {
    "jsonl": JsonLines,
    "json": JsonArray,
    "csv": DelimitedReader,
    "parquet": Parquet,
    "arrow": Arrow,
    "webdataset": Tar,
    "text": Text,
    "tokens": TokenFile,
}
"""Readers by the names of their formats."""

EXTENSIONS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet",
    ".arrow": "arrow", ".feather": "arrow", ".tar": "webdataset", ".tgz": "webdataset", ".txt": "text",
    ".npy": "tokens", ".bin": "tokens",
}  # fmt: skip
"""Formats by extension; .gz and .zst may follow, except behind tables, which compress within."""

# Tables that `datasets`' imagefolder, videofolder and audiofolder read beside their media. Source: datasets 5.2.
_METADATA_FILES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_TABLES = ("parquet", "arrow")
_WAYS_OUT = {
    ".xls .xlsx .ods .numbers": "Save the sheet as CSV in UTF-8.",
    ".zip .7z .rar .tar.bz2 .xz .bz2": "Unpack it, and give the folder or the file within.",
    ".md .rst .tex .html .py .log": "Name the format text to learn its words.",
    ".pdf .doc .docx .epub .odt": "Save its words as .txt.",
    ".pkl .pickle .pt .pth .h5 .hdf5 .npz .db .sqlite": "Write its rows as JSON Lines or Parquet.",
    ".yaml .yml .toml": "A configuration is for `headway train`; its data are in files of their own.",
}
"""Advice on files of other kinds, by their extensions."""
_UNREAD_MEDIA = (".heic", ".heif", ".svg", ".psd", ".raw", ".cr2", ".nef", ".dng", ".eps")
_PEEK_BYTES = 2**20
_LABEL = "label"  # the column of classes, as `datasets` calls it
_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
_SETTINGS = {"text": ("sample_by",), "tokens": ("token_dtype", "end_token")}


class ClassFolder(JsonLines):
    """Media in folders that are named for their classes, one row each; a file of the cache lists them, a line each.

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
        return next(str(value) for name, value in json.loads(data).items() if name != _LABEL)


def open_source(
    path: str | Path,
    *,
    name: str | None = None,
    format: str = "auto",  # noqa: A002 - the word that everyone uses
    schema: str = "auto",
    columns: Mapping[str, str] | None = None,
    root: str | Path | None = None,
    allow_remote: bool = False,
    sample_by: SampleBy | None = None,
    token_dtype: str | None = None,
    end_token: int | None = None,
    sizes: MediaSizes | None = None,
) -> Source:
    """Open a dataset.

    Args:
        path: a file, a folder, one that `datasets` saved, or a glob; here or behind any URL that fsspec opens. Files
            are taken in the order of their names.
        name: how the run calls the dataset; by default its path without folders and extensions.
        format: one of `FORMATS`; "auto" tells it from each file's extension.
        schema: form of the rows, one of `schemas.SCHEMAS`; "auto" tells it from each row's columns.
        columns: the dataset's own names of columns, by the names that schemas read: {"question": "Frage"}.
        root: the folder or URL that rows' media paths start from and stay below; by default each file's own.
        allow_remote: whether rows may name media on the web or in object stores.
        sample_by: unit of plain text that is a document: "paragraph" (the default), "line" or "document" (the file).
        token_dtype: of files of bare token ids, one of `documents.DTYPES`.
        end_token: the id that ends a document in files of token ids.
        sizes: bounds of its own on what is read of its media; those of the run where None.

    Raises:
        ConfigError: an unknown format, schema or setting, or one that no file takes.
        DataError: no such files, or none whose format is known.
    """
    location = str(path)
    if format not in ("auto", *FORMATS):
        raise ConfigError(f"Unknown format {format!r}. Allowed: auto, {', '.join(FORMATS)}.")
    rules = MediaRules(None if root is None else str(root), allow_remote)
    called = name or _short_name(location)
    all_files, folder = find_files(location)
    is_media_alone = folder is not None and format == "auto" and not _data_files(all_files)
    classes = _class_folder(all_files, str(folder)) if is_media_alone else None
    files = [] if classes else _with_formats(all_files, folder, format)
    settings = {"sample_by": sample_by, "token_dtype": token_dtype, "end_token": end_token}
    settings = {setting: value for setting, value in settings.items() if value is not None}
    for setting in settings:
        if not any(setting in _SETTINGS.get(file_format, ()) for _, file_format in files):
            raise ConfigError(f"{setting} is {settings[setting]!r}, but no file of {location} takes it. Leave it out.")
    readers: list[tuple[Reader, str]] = [] if classes is None else [(classes, classes.folder)]
    for file, file_format in files:
        options = {setting: settings[setting] for setting in _SETTINGS.get(file_format, ()) if setting in settings}
        readers.append((FORMATS[file_format](file, **options), file.folder))
    shards = []
    for reader, media_folder in readers:
        names_files = without_query(reader.file.url).rpartition("/")[2].lower() in _METADATA_FILES
        normaliser = Normaliser(schema, media_folder, rules, dict(columns or {}), names_files, sizes or MediaSizes())
        shards.append(Shard(called, reader, normaliser))
    return Source(called, tuple(shards))


def own_names(paths: Sequence[str], chosen: Sequence[str | None] | None = None) -> list[str]:
    """Names for datasets that are used together: where files have one name, their folders tell which is which.

    Args:
        paths: of the datasets.
        chosen: names that the run chose for them; None where it chose none.

    >>> own_names(["pictures/train.jsonl", "words/train.parquet", "words/test.jsonl"])
    ['pictures/train', 'words/train', 'test']
    >>> own_names(["corpus/*.txt"])
    ['corpus']
    """
    chosen = chosen or [None] * len(paths)
    plain = [_public(path) for path in paths]
    parts = [[*path.rstrip("/").split("/")[:-1], _short_name(path)] for path in plain]
    names = [name or part[-1] for name, part in zip(chosen, parts, strict=True)]

    def are_shared() -> list[bool]:
        by_path = Counter(name for name, _ in {*zip(names, paths, strict=True)})
        return [own is None and by_path[name] > 1 for name, own in zip(names, chosen, strict=True)]

    for depth in range(2, 1 + max(map(len, parts), default=0)):
        longer = ["/".join(part[-depth:]) for part in parts]
        names = [new if is_shared else name for is_shared, new, name in zip(are_shared(), longer, names, strict=True)]
    # In one folder the extensions tell.
    return [path if is_shared else name for is_shared, path, name in zip(are_shared(), plain, names, strict=True)]


def _short_name(path: str) -> str:
    """The file or folder without its extension; of a glob that is all stars, the folder before."""
    plain = _public(path)
    stems = [part.partition(".")[0] for part in reversed(plain.rstrip("/").split("/"))]
    return next((stem for stem in stems if any(map(str.isalnum, stem))), plain)


def _public(path: str) -> str:
    """A path or address without its user and query: passwords and signatures are nobody's name."""
    return re.sub(r"://[^/]*@", "://", without_query(path))


def _with_formats(files: list[File], folder: str | None, format: str) -> list[tuple[File, str]]:  # noqa: A002
    if folder is not None and (saved := _saved_by_datasets(files, folder)):
        return [(file, "arrow") for file in saved]
    if format != "auto":
        return [(file, format) for file in files]
    if folder is not None:
        data_files = _data_files(files)
        formats = {EXTENSIONS[file.extension] for file in data_files}
        if len(formats) > 1:
            raise DataError(
                f"The folder {folder} holds files of several formats, {', '.join(sorted(formats))}, so what its "
                f"dataset is cannot be told. Give a glob, such as {folder}/*{data_files[0].extension}, or one file."
            )
        other = next((file for file in files if file.extension in _UNREAD_MEDIA), None)
        if not data_files and other is not None:
            raise DataError(
                f"The folder {folder} holds {other.name}, and pictures of the kind {other.extension} are not read. "
                "Convert them to JPEG or PNG, or move them elsewhere."
            )
        if not data_files and any(kind_of(file.url) for file in files):
            raise DataError(
                f"The folder {folder} holds pictures, videos or sounds and no file that says what is to be learnt of "
                "them. Put a file metadata.csv beside them with the columns file_name and text, or file_name, question "
                "and answer, a row for each; or sort them into a folder for each class."
            )
        if formats == {"text"} and (media := next((file for file in files if kind_of(file.url)), None)):
            texts = data_files[0].name.rpartition("/")[0] + "/" * ("/" in data_files[0].name) + "*.txt"
            raise DataError(
                f"The folder {folder} holds texts, such as {data_files[0].name}, beside pictures, videos or sounds, "
                f"such as {media.name}, and nothing says how they belong together. Put a file metadata.csv there with "
                f"the columns file_name and text; or give {folder}/{texts} for the texts alone, or "
                "move them elsewhere where each folder of pictures is a class."
            )
        files = data_files or files
    return [(file, _format_of(file)) for file in files]


def _class_folder(files: Sequence[File], folder: str) -> ClassFolder | None:
    """The reader of a folder that holds nothing but folders of media, named for their classes; None for any other."""
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
    rows = [{str(kind_of(file.url)): file.name, _LABEL: parts[0]} for file, parts in media]
    listing = "".join(json.dumps(row) + "\n" for row in rows).encode()
    digest = hashlib.sha256(listing).hexdigest()[:32]
    path = cache_root() / "folders" / f"{digest}.jsonl"
    if not path.is_file():
        write_cached(path, lambda target: target.write(listing))
    # Known by what it lists: whoever deletes the cache has the same data afterwards.
    return ClassFolder(File(str(path), len(listing), stamp="", name=f"list of media {digest[:12]}"), folder)


def _data_files(files: list[File]) -> list[File]:
    return [file for file in files if file.extension in EXTENSIONS]


def _format_of(file: File) -> str:
    file_format = EXTENSIONS.get(file.extension)
    if file_format == "json" and _holds_lines(file):
        return "jsonl"
    if file_format is None or (file_format in _TABLES and file.compression):
        way_out = next((text + " " for names, text in _WAYS_OUT.items() if file.extension in names.split()), "")
        if kind := kind_of(file.url):
            way_out = f"It is one {kind}: give its folder, with a file metadata.csv, or a folder for each class. "
        raise DataError(
            f"The format of {file.url} is not known by its extension. {way_out}Known are {', '.join(EXTENSIONS)}, "
            f"those of tables excepted also followed by {' or '.join(COMPRESSIONS)}; or name the format, one of "
            f"{', '.join(FORMATS)}."
        )
    return file_format


def _holds_lines(file: File) -> bool:
    """Tell whether a .json file has a whole object on its first line and more below, as JSON Lines under that name."""
    with suppress(DataError), foreign(DataError), file.opened() as stream:  # a failure is told when the file is read
        first = stream.readline(_PEEK_BYTES)
        is_line = first.lstrip(b"\xef\xbb\xbf \t").startswith(b"{") and bool(stream.read(1))
        return is_line and isinstance(json.loads(first.decode("utf-8-sig")), dict)
    return False


def _saved_by_datasets(files: list[File], folder: str) -> list[File]:
    """The files of a dataset that `datasets` saved, in its order; none of any other folder.

    Source: datasets 5.2, Dataset.save_to_disk and DatasetDict.save_to_disk.
    """
    within = {file.url[len(folder) :].lstrip("/"): file for file in files}
    if "dataset_dict.json" in within:
        splits = _content(within["dataset_dict.json"]).get("splits", [])
        raise DataError(
            f"The folder {folder} holds the splits {', '.join(splits)}. Give the folder of one of them, such as "
            f"{folder}/{splits[0] if splits else 'train'}."
        )
    if not {"state.json", "dataset_info.json"} <= within.keys():
        return []
    names = [file["filename"] for file in _content(within["state.json"])["_data_files"]]
    missing = [name for name in names if name not in within]
    if missing:
        raise DataError(f"The folder {folder} lacks {', '.join(missing)}, which its state.json names. Copy it again.")
    return [within[name] for name in names]


def _content(file: File) -> dict[str, Any]:
    with (
        foreign(lambda reason: DataError(f"{file.url} cannot be read: {reason} Save the dataset again.")),
        file.opened() as stream,
    ):
        content: dict[str, Any] = json.load(stream)
    return content


def read_samples(path: str | Path) -> list[Sample]:
    """Read a whole dataset into memory, in order.

    Args:
        path: anything that `open_source` opens.

    Raises:
        DataError: the dataset is missing or empty, or a row cannot be used; the message names file and row.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "chats.jsonl"
    >>> _ = file.write_text('{"messages": [{"role": "user", "content": "Hi"}]}')
    >>> read_samples(file)[0].messages
    (Message(role='user', parts=(TextPart(text='Hi'),), tool_calls=(), name=None, reasoning='', learnt=True),)
    """
    return list(samples_of(open_source(path)))


def samples_of(source: Source) -> Iterator[Sample]:
    """Yield all samples of an open dataset, in order, without documents that hold no words.

    Raises:
        DataError: a row cannot be used; the message names file and row.
    """
    for shard in source.shards:
        for _, sample in shard.rows():
            if isinstance(sample, DataError):
                raise sample
            if not (isinstance(sample, Document) and sample.is_blank):
                yield sample
