"""Layouts of rows: the table of them, and the meaning of a set of columns, resolved once."""

import difflib
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from headway.data.sources.marks import GRADES, HARMLESS_COLUMNS, check_columns_of, speaks_of_learning
from headway.data.sources.preferences import is_ranked, pair_of
from headway.data.sources.references import KINDS, is_nothing, kind_of, media_key
from headway.data.sources.text_rows import listed, shortened
from headway.errors import DataError
from headway.words import Argument

TEXT, MEDIA = "text", "media"
"""Names in the table of the text column, and of any media of the row or its archive."""

MEDIA_COLUMNS = {name: kind for kind in KINDS for name in (kind, f"{kind}s")}
"""Columns of media, and their kinds."""
MEDIA_PATHS = (
    *(f"{kind}_{part}" for kind in KINDS for part in ("path", "file", "name", "url")),
    *(f"img{part}" for part in ("", "_path", "_file", "_name")),
)
"""Columns that hold media or name a file of them, if a row has no column of their kind."""
FILE_NAMES = ("file_name", "filename", "file_path", "filepath", "file", "path")
"""Columns that do so if nothing could be learnt without them, or if the file is there and a question is about it."""

_IN_CHATS = ("tools", "chat_template_kwargs", "label", "kto_tag", "objects")
_WORDED = ("context", "system", "system_prompt")  # no other values of these are read
_NULLABLE = ("label", "kto_tag", TEXT)  # columns that count as present with any value, null included
_NUMBER = re.compile(r"(?:^|_)(?:id|idx|index)s?$|Id$")  # columns that number rows
_ALIKE = 0.8  # likeness of names such as answer_0 and answer_1
_MOST_FREE = 64  # columns among which a mapping is looked for

Pairs = tuple[tuple[str, str], ...]
Kinds = Mapping[str, str]
"""Kinds of the values of columns that hold something, by `_kind`."""


@dataclass(frozen=True)
class Layout:
    """An entry of the table, with the settings of its schema.

    Attributes:
        schema: how its columns become a sample.
        columns: those that a row must have, by the roles that they have; each (name, role).
        forms: form of the value of a column, where it must have one; each (name, form).
        rank: of two layouts that fit, the lower one is taken.
        source: who writes rows so.
        makes: "chat", "document", or a "preference" of answers of which some are better than others.
        reads: columns that are read beside those; each (name, role).
        has_class: whether one of its columns is a class.
        marks: values of a mark with which the first answer is better, and the second; "sign" takes its sign.
        by_name: whether it is taken only if its schema is named.
        names_file: whether a column such as `file_name` is the media if the file is there.
    """

    schema: str
    columns: Pairs
    forms: Pairs
    rank: int
    source: str = field(repr=False)
    makes: str
    reads: Pairs
    has_class: bool
    marks: tuple[Any, ...] = ()
    by_name: bool = False
    names_file: bool = False

    @property
    def names(self) -> dict[str, str]:
        """Its columns' own names, by their roles."""
        return {role: name for name, role in self.columns}

    @property
    def mapping(self) -> str:
        """Columns of the layout, as people map them."""
        return mapping({name: name for name, _ in self.columns if name != MEDIA})

    def fits(self, kinds: Mapping[str, str]) -> bool:
        """Tell whether columns of these kinds are its own; an empty list may be one, but of no preference."""
        forms, others = dict(self.forms), ("turns", "empty") if self.makes == "preference" else ("turns",)
        return all(
            name in kinds and (kinds[name] == forms[name] if name in forms else kinds[name] not in others)
            for name, _ in self.columns
        )

    def __str__(self) -> str:
        return " and ".join(name for name, _ in self.columns)


class RowReading(NamedTuple):
    """Columns of a row as a layout reads them.

    Attributes:
        layout: what the columns are taken for.
        roles: for each column that is read, the name under which it is.
        asides: columns that are not read, or are grades, and have a name that speaks of learning, by the table's names.
    """

    layout: Layout
    roles: dict[str, str]
    asides: dict[str, str]

    def __call__(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The columns that are read, under the names of their roles."""
        return {role: fields[name] for name, role in self.roles.items()}


def _pairs(words: str) -> Pairs:
    """Names and the texts behind "=" in them; the name itself without a "="."""
    parts = [word.partition("=") for word in words.split()]
    return tuple((name, role or name) for name, _, role in parts)


def _layout(schema: str, columns: str, reads: str = "", marks: Collection[Any] = (), **settings: Any) -> Layout:
    """An entry of the table; behind ":" in a column's name stands the form of its value."""
    forms = tuple((name, form) for name, form in re.findall(r"(\w+):(\w+)", columns))
    pairs = _pairs(re.sub(r":\w+", "", columns))
    has_class = "label" in dict(pairs)
    return Layout(schema, pairs, forms, reads=_pairs(reads), has_class=has_class, marks=tuple(marks), **settings)


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
LAYOUTS = tuple(_layout(**_TABLE["schemas"][row["schema"]] | row) for row in _TABLE["layouts"])
"""All layouts, in the order of the table."""
SCHEMAS = ("auto", *_TABLE["schemas"])
"""Values of `schema`; "auto" takes the layout that a row has."""
_PROMPTS = {name: _pairs(words) for name, words in _TABLE["prompts"].items()}
DIGEST = sha256(repr((LAYOUTS, _PROMPTS)).encode()).hexdigest()[:8]
"""Digest of the table, which changes when rows come to be read otherwise."""

_FORMS: dict[str, Callable[[dict[str, Any], str], bool]] = {
    "list": lambda fields, name: isinstance(fields[name], list),
    "object": lambda fields, name: isinstance(fields[name], dict),
    "pair": lambda fields, name: pair_of(fields[name]) is not None,
    "ranked": is_ranked,
}
_FORMS_OF = {name: form for layout in LAYOUTS for name, form in layout.forms}
_COLUMNS = (*(layout.columns for layout in LAYOUTS), *(layout.reads for layout in LAYOUTS), *_PROMPTS.values())
_NAMES = [name for pairs in _COLUMNS for pair in pairs for name in pair[::-1] if name != MEDIA]
COLUMNS = tuple(dict.fromkeys((*_NAMES, *MEDIA_COLUMNS, *_IN_CHATS)))
"""Names of columns that schemas read."""
_KNOWN = {*COLUMNS, *MEDIA_PATHS, *FILE_NAMES}


@lru_cache(maxsize=1024)
def _own_names(columns: tuple[str, ...]) -> dict[str, str]:
    """Columns that the table knows, by its names: spaces and capitals do not count where no other has a name."""
    own_names: dict[str, str] = {}
    for name in columns:
        plain = name if name in _KNOWN else name.strip().lower().replace(" ", "_")
        if plain in _KNOWN and (plain == name or (plain not in columns and plain not in own_names)):
            own_names[plain] = name
    return own_names


def reading_of(
    fields: Mapping[str, Any],
    *,
    schema: str = "auto",
    mapped: Collection[str] = (),
    has_members: bool = False,
    names_files: bool = False,
    is_there: Callable[[str], bool] = lambda _name: False,
) -> RowReading:
    """Find the layout that the columns of a row have, and their roles in it.

    Args:
        fields: the row's columns.
        schema: the one that is named, or "auto".
        mapped: columns that the dataset's user named, which are meant.
        has_members: whether media are stored with the row.
        names_files: whether a column such as `file_name` is known to name media.
        is_there: whether a file of media that a column names is there.

    Raises:
        DataError: no layout fits, or two.
    """
    columns = tuple(fields)
    values = {name: fields[own] for name, own in _own_names(columns).items()}
    kinds = tuple(_kind(name, values, is_there) for name in values)
    reading = _resolved(columns, kinds, schema, frozenset(mapped), has_members, names_files)
    if not isinstance(reading, RowReading):
        raise _refusal(fields, *reading, schema)
    return reading


def _kind(name: str, values: dict[str, Any], is_there: Callable[[str], bool]) -> str:
    """Kind of a column's value, as far as layouts ask for it: empty for a value of no further kind.

    A column that names media has their kind, with a question mark behind it where a file of that name is not there.
    """
    value = values[name]
    if name in MEDIA_COLUMNS:
        return "null" if is_nothing(value) else ""
    if value is None:
        return "null"
    if value in ([], {}):
        return "empty"
    if name in _WORDED:
        return "" if isinstance(value, str) else "turns"
    if name in _FORMS_OF:
        return _FORMS_OF[name] if _FORMS[_FORMS_OF[name]](values, name) else ""
    kind = _kind_of_media(name, value) if name in MEDIA_PATHS or name in FILE_NAMES else ""
    return f"{kind}?" if kind and name in FILE_NAMES and not is_there(str(value)) else kind


def _kind_of_media(name: str, value: Any) -> str:
    """The kind of media that a column holds, or of the file that it names; empty for other columns."""
    if isinstance(value, str):
        return ("://" not in value and kind_of(value)) or ""
    is_medium = isinstance(value, bytes) or (isinstance(value, dict) and media_key(value) is not None)
    kind = "image" if name.startswith("img") else next(filter(name.startswith, KINDS), "")
    return kind if is_medium else ""


@lru_cache(maxsize=4096)
def _resolved(
    columns: tuple[str, ...],
    kinds: tuple[str, ...],
    schema: str,
    mapped: frozenset[str],
    has_members: bool,
    names_files: bool,
) -> RowReading | tuple[tuple[Layout, ...], dict[str, str]]:
    """The meaning of a set of columns; or layouts between which nothing decides, and columns that name media.

    The kinds are those of columns that the table knows, as `_kind` tells them.
    """
    own_names = _own_names(columns)
    kind_of_column = dict(zip(own_names, kinds, strict=True))
    present = {name: kind for name, kind in kind_of_column.items() if kind != "null" or name in _NULLABLE}
    media = {name: name for name in kind_of_column if name in MEDIA_COLUMNS}
    filled = {MEDIA_COLUMNS[name] for name in media if not kind_of_column[name]}
    paths = _paths(kind_of_column, filled, MEDIA_PATHS)
    files = _paths(kind_of_column, filled | {*paths.values()}, FILE_NAMES)

    def fitting(paths: Mapping[str, str]) -> tuple[Layout, ...]:
        is_pictured = has_members or bool(filled) or bool(paths)
        return _fitting(present | ({MEDIA: ""} if is_pictured else {}), schema, mapped)

    layouts = fitting(paths)
    if files and (names_files or not layouts):
        paths = paths | files
        layouts = fitting(paths)
    elif files and layouts[0].names_file and not any(kind_of_column[name].endswith("?") for name in files):
        paths = paths | files
    if len(layouts) == 1 and layouts[0].schema == "rejected" and len(chats := _chats(present, mapped)) > 1:
        layouts = chats
    if len(layouts) != 1:
        return layouts, {kind: own_names[name] for name, kind in paths.items()}
    # a medium in a column of its own goes before one that the layout reads elsewhere, which is then told as unread
    roles = {name: role for name, role in _roles(layouts[0], present, mapped) if role not in filled} | media
    roles = {name: role for name, role in roles.items() if role not in paths.values() or name not in media} | paths
    roles = {own_names[name]: role for name, role in roles.items() if name in own_names}
    table_names = {own: name for name, own in own_names.items()}
    asides = {own: table_names.get(own, own) for own in columns if roles.get(own, GRADES[0]) in GRADES}
    asides = {own: name for own, name in asides.items() if speaks_of_learning(name)}
    return RowReading(layouts[0], roles, asides)


def _paths(kinds: Mapping[str, str], filled: set[str], columns: Iterable[str]) -> dict[str, str]:
    """The first column that holds or names each kind of media that a row has no column of."""
    paths: dict[str, str] = {}
    for name in columns:
        kind = kinds.get(name, "").rstrip("?")
        if kind in KINDS and kind not in filled and kind not in paths.values():
            paths[name] = kind
    return paths


def _fitting(kinds: Kinds, schema: str, mapped: frozenset[str], least_rank: int = 0) -> tuple[Layout, ...]:
    """The layouts that a set of columns has: one, or none, or several between which nothing decides."""
    layouts = [layout for layout in LAYOUTS if layout.rank >= least_rank and layout.fits(kinds)]
    layouts = [layout for layout in layouts if layout.schema == schema or (schema == "auto" and not layout.by_name)]
    needs = {layout: {name for name, _ in layout.columns} for layout in layouts}

    # Mapped columns are meant: the layout that needs the fewest columns beside these goes first.
    def num_others(layout: Layout) -> int:
        return len(needs[layout] - mapped - {MEDIA})

    meant = [layout for layout in layouts if mapped & needs[layout]]
    if meant:
        layouts = [layout for layout in meant if num_others(layout) == min(map(num_others, meant))]
    least = min((layout.rank for layout in layouts), default=0)
    layouts = [layout for layout in layouts if layout.rank == least]
    # Among layouts of one rank, one that reads every column of another loses nothing; if both do, the first is taken.
    reads = {layout: {MEDIA, *dict(_roles(layout, kinds, mapped))} for layout in layouts}

    def beats(layout: Layout, other: Layout) -> bool:
        is_mutual = needs[layout] <= reads[other]
        return needs[other] <= reads[layout] and not (is_mutual and layouts.index(other) <= layouts.index(layout))

    best: list[Layout] = []
    while layouts:
        best += [layout for layout in layouts if not any(beats(other, layout) for other in layouts)] or layouts
        left = [layout for layout in layouts if layout not in best]
        layouts = [layout for layout in left if not any(beats(other, layout) for other in best)]
    return tuple(best)


def _roles(layout: Layout, kinds: Kinds, mapped: frozenset[str]) -> list[tuple[str, str]]:
    """Columns of a row that a layout reads, and their roles: one column for each role."""
    roles = [(name, role) for name, role in layout.columns if name != MEDIA]
    wanted = [*layout.reads, *((name, name) for name in _IN_CHATS if layout.makes != "document")]
    if layout.schema == "rejected":  # beside a chat, whose columns are its own
        for chat in _chats(kinds, mapped)[:1]:
            wanted += _roles(chat, kinds, mapped)
        wanted += [(name, name) for name, kind in kinds.items() if name.startswith("rejected_") and kind != "empty"]
    elif layout.makes == "preference":
        required = dict(roles)
        prompt = next((pair for pair in _PROMPTS["names"] if pair[0] in kinds and pair[0] not in required), None)
        if prompt is not None:
            roles.append(prompt)
            wanted += _PROMPTS.get(prompt[1], ())
        wanted += _PROMPTS["beside"]
    if mapped:  # only what is mapped counts, and what has the name by which it is read
        wanted = [(name, role) for name, role in wanted if name == role != "context" or name in mapped]
    for name, role in wanted:
        if kinds.get(name, "turns") != "turns" and not any(name == own or role == other for own, other in roles):
            roles.append((name, role))
    return roles


def _chats(kinds: Kinds, mapped: frozenset[str]) -> tuple[Layout, ...]:
    """Layouts of the chat beside which a rejected answer stands."""
    others = {name: kind for name, kind in kinds.items() if name != MEDIA and not name.startswith("rejected_")}
    return _fitting(others, "auto", mapped & others.keys(), 1)


def _refusal(fields: Mapping[str, Any], layouts: tuple[Layout, ...], media: dict[str, str], schema: str) -> DataError:
    """The error of a row that fits no layout, or several."""
    if layouts:
        return DataError(
            f"the row can be read in {len(layouts)} ways, by {' or by '.join(map(str, layouts))}. Headway does not "
            "choose one, because it would lose the columns of the others. Name the columns that you mean, with "
            f"{' or '.join(layout.mapping for layout in layouts)}, or remove the others."
        )
    way = _proposed_columns(fields, media)
    allowed = {layout.schema: layout for layout in reversed(LAYOUTS) if schema in ("auto", layout.schema)}
    if schema == "auto" or allowed[schema].makes != "preference":
        own_names = _own_names(tuple(fields))
        check_columns_of({name: fields[own] for name, own in own_names.items() if fields[own] is not None}, ways=way)
    needed = "; ".join(f"{allowed[name]} ({name})" for name in SCHEMAS if name in allowed)
    return DataError(
        f"the row has {listed(fields) or 'no columns'}, and no schema reads them as they are. Say which is which, for "
        f"example with {way}, or name the schema and its text column. The row is {shortened(dict(fields))}, and needs "
        f"the columns of a schema: {needed}. In CSV, the first line names the columns."
    )


def mapping(columns: Mapping[str, str]) -> str:
    """Columns as people map them: the name that schemas read, and the dataset's own."""
    return str(Argument("columns", dict(columns)))


def _proposed_columns(fields: Mapping[str, Any], media: dict[str, str]) -> str:
    """A mapping of columns with which a row could be read, in the words of whoever asked.

    Columns that have a role by their names keep it. Those that name files of media, given by their kinds, are in it.

    >>> _proposed_columns({"image": "a.png", "question": "What?", "id": 3, "best_answer": "A cat."}, {})
    "columns={'answer': 'best_answer'}"
    """
    names = _own_names(tuple(fields))
    has_media = bool(media) or any(not is_nothing(fields[own]) for name, own in names.items() if name in MEDIA_COLUMNS)
    # Left to be mapped is what has no role by its name, and is no note on the row, unless that is all there is. Some
    # names have a role only beside media, others only where their values have a form.
    fit = [layout for layout in LAYOUTS if not layout.forms and (has_media or layout.schema != "caption")]
    roleless = {*_FORMS_OF, *(name for layout in LAYOUTS for name, _ in layout.columns if layout.schema == "caption")}
    roleless -= {name for layout in fit for name, _ in layout.columns}
    with_roles = {own for name, own in names.items() if name not in roleless}
    left = [name for name, value in fields.items() if value not in (None, "", [], {})]
    left = [name for name in left if name not in with_roles and name not in media.values()]
    free = ([name for name in left if name not in HARMLESS_COLUMNS and not _NUMBER.search(name)] or left)[:_MOST_FREE]
    free.sort(key=lambda name: not isinstance(fields[name], str))  # words first
    longest = sorted(free, key=lambda name: -len(str(fields[name])))
    # Two columns of like names could be answers of which one is better.
    prompts = [name for name, _ in _PROMPTS["names"] if name in names]
    alike = _alike(tuple(free))
    question = next((name for name in longest if name not in alike[0]), None) if alike else None
    if len(alike) == 1 and (prompts or question):
        ((first, second),) = alike
        columns = media | ({} if prompts else {"prompt": str(question)}) | {"chosen": first, "rejected": second}
        return f"{mapping(columns)} where {first} is the better answer"
    # A layout of which one column is missing.
    for layout in sorted(LAYOUTS, key=lambda layout: layout.rank or 9):
        missing = [name for name, _ in layout.columns if name not in names and name != MEDIA]
        present = [name for name, _ in layout.columns if name in names and name != MEDIA]
        if len(missing) == 1 and present and free and not layout.forms:
            best = max(free, key=lambda name: _suits(name, fields[name], missing[0]))
            label = {"label": names["label"]} if "label" in present else {}  # a text may be meant without
            return mapping(media | {missing[0]: best} | label)
    if has_media and longest:
        return mapping(media | {TEXT: longest[0]})
    if len(free) > 1:
        return mapping({"question": free[0], "answer": free[1]})
    return mapping({TEXT: free[0]} if free else {"question": "Frage", "answer": "Antwort"})


@lru_cache(maxsize=64)
def _alike(names: tuple[str, ...]) -> list[tuple[str, str]]:
    """Pairs of columns of like names."""
    return [pair for pair in combinations(names, 2) if difflib.SequenceMatcher(None, *pair).ratio() >= _ALIKE]


def _suits(name: str, value: Any, column: str) -> tuple[float, ...]:
    """Fitness of a column for a missing one: by its name, by words in it; as a text, by their number."""
    likeness = len(str(value)) if column == TEXT else difflib.SequenceMatcher(None, name.lower(), column).ratio()
    return column in name.lower(), isinstance(value, str), likeness
