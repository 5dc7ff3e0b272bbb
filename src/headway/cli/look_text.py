"""Text of `headway look`: tokens with marks or colours, images in words, packs as strips."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING

from headway.errors import DataError
from headway.pages.samples import answer_line, counts_line, headline, media_line, pack_line
from headway.report import format_count, presentable, printable

if TYPE_CHECKING:
    from headway.data.look import DataView, ShownMedia, ShownPack, ShownPreference, TokenRun


_BEGIN, _END = ">>", "<<"  # around what is learnt, where there is no colour
_LEARNT, _MEDIA, _FAINT, _OFF = "\033[1;32m", "\033[36m", "\033[2m", "\033[0m"
_COLOURS = re.compile("\033\\[[0-9;]*m")
_BETWEEN = " || "  # columns of answers
_NARROWEST = 30  # column of an answer [characters]
_NAMED = 24  # samples of a pack that are named
_SHADES = ("\033[44m", "\033[45m")


def paragraphs(view: "DataView", width: int, most: int, *, coloured: bool) -> Iterator[str]:
    """Samples and packs for a terminal.

    Args:
        view: what there is to see.
        width: of a line, colours left out [characters].
        most: tokens of a sample that are shown [tokens].
        coloured: whether the terminal shows colours; else marks stand for them.
    """
    from headway.data.look import ShownSample, why_not_whole

    # Samples: where each is from, its media, and its tokens.
    for sample in view.samples:
        if isinstance(sample, DataError):
            yield textwrap.fill(f"left out: {sample}", width)
            continue
        lines = [presentable(sample.where), textwrap.fill(headline(sample), width), *_media_lines(sample.media)]
        if view.budget is not None and (reason := why_not_whole(sample, view.budget)):
            lines.append(reason)
        if isinstance(sample, ShownSample):
            yield "\n".join([*lines, "", *_wrapped(sample.pieces, width, most, coloured=coloured)])
        else:
            yield "\n".join([*lines, "", *_side_by_side(sample, width, most, coloured=coloured)])
    shown = {str(sample) for sample in view.samples}
    if bad := [textwrap.fill(f"bad: {error}", width) for error in view.bad[:5] if str(error) not in shown]:
        yield "\n".join(bad)
    # Packs as strips, and what became of the samples of each source.
    if view.budget is not None:
        for number, pack in enumerate(view.packs, start=1):
            strip = "".join(_strip(pack, view.budget.tokens, width, coloured=coloured))
            samples = textwrap.fill(printable(_held(pack)), width)
            yield f"{textwrap.fill(pack_line(number, pack, view.budget), width)}\n{strip}\n{samples}"
        yield "\n".join(
            textwrap.fill(printable(counts_line(name, count)), width) for name, count in view.counts.items()
        )
    if not coloured and any(not isinstance(sample, DataError) for sample in view.samples):
        legend = f"Tokens between {_BEGIN} and {_END} are learnt; | separates tokens."
        yield textwrap.fill(legend + (" A strip is a pack; . is room that is left." if view.packs else ""), width)


def _media_lines(media: "Sequence[ShownMedia]") -> list[str]:
    return [presentable(media_line(number, shown)) for number, shown in enumerate(media, start=1)]


def _side_by_side(sample: "ShownPreference", width: int, most: int, *, coloured: bool) -> Iterator[str]:
    """The prompt's tokens, then the answers in columns, or below each other where the terminal is narrow."""
    shared = sample.num_shared
    if shared:
        yield from _wrapped(sample.answers[0].pieces[:shared], width, most, coloured=coloured)
        yield ""
    in_row = min(len(sample.answers), max(1, (width + len(_BETWEEN)) // (_NARROWEST + len(_BETWEEN))))
    column = (width - (in_row - 1) * len(_BETWEEN)) // in_row
    for start in range(0, len(sample.answers), in_row):
        if start:
            yield ""
        columns: list[list[str]] = []
        for number, answer in enumerate(sample.answers[start : start + in_row], start=start):
            head = [answer_line(number, sample), *(_media_lines(answer.media) if not sample.media else ())]
            lines = [part for line in head for part in textwrap.wrap(line, column)]
            columns.append([*lines, *_wrapped(answer.pieces[shared:], column, most, coloured=coloured)])
        for row in zip_longest(*columns, fillvalue=""):
            padded = (line + " " * (column - len(_COLOURS.sub("", line))) for line in row)
            yield _BETWEEN.join(padded).rstrip()


def _held(pack: "ShownPack") -> str:
    """The samples of a pack by dataset and place, counted from 1."""
    samples = []
    for source, group in groupby(pack.items, lambda item: item.source):
        rows = [str(item.row + 1) for item in group]
        more = f" and {format_count(len(rows) - _NAMED)} more" if len(rows) > _NAMED else ""
        samples.append(f"{source} {', '.join(rows[:_NAMED])}{more}")
    return "; ".join(samples)


def _wrapped(pieces: "Sequence[TokenRun]", width: int, most: int, *, coloured: bool) -> Iterator[str]:
    """Tokens on lines of at most `width` characters; a line break in the text breaks the line too."""
    left = len(pieces) - most
    shown = [*pieces[: most // 2], None, *pieces[-(most // 2) :]] if left > 0 else [*pieces]
    # Marks and separators count towards the width, colours do not.
    line, length, inside = "", 0, False
    for place, piece in enumerate(shown):
        if piece is None:
            words, learnt = f" ... {format_count(left)} more ... ", False
        else:
            words, learnt = _text_of(piece), piece.is_learnt
        mark = "" if coloured or learnt == inside else (_BEGIN if learnt else _END)
        gap = "" if not place or mark or not length else "|"
        inside = learnt
        if length and length + len(gap) + len(mark) + len(words) > width:
            yield line
            line, length, gap = "", 0, ""
        for part in textwrap.wrap(words, width - 4, drop_whitespace=False, replace_whitespace=False) or [""]:
            if length + len(gap) + len(mark) + len(part) > width:
                yield line
                line, length, gap = "", 0, ""
            line += mark + _coloured(gap, _FAINT, coloured) + _coloured(part, _colour_of(piece), coloured)
            length += len(mark) + len(gap) + len(part)
            mark = gap = ""
        if piece is not None and piece.text.endswith("\n"):
            yield line
            line, length = "", 0
    if inside and not coloured:
        line += _END
    if line:
        yield line


def _text_of(piece: "TokenRun") -> str:
    text = printable(piece.text.replace("\n", "\\n").replace("\t", "\\t"))
    text = text or f"<{piece.token}>"
    return f"{text} x {format_count(piece.count)}" if piece.count > 1 else text


def _colour_of(piece: "TokenRun | None") -> str:
    if piece is None:
        return _FAINT
    return _LEARNT if piece.is_learnt else _MEDIA if piece.count > 1 else ""


def _coloured(text: str, colour: str, wanted: bool) -> str:
    return f"{colour}{text}{_OFF}" if wanted and colour and text else text


def _strip(pack: "ShownPack", budget: int, width: int, *, coloured: bool) -> Iterator[str]:
    """A pack as one line: its samples in proportion, alternating, and the room that is left."""
    ends = [0]
    for item in pack.items:
        ends.append(ends[-1] + item.tokens)
    places = [(cell + 0.5) * budget / width for cell in range(width)]
    cells = [next((i for i in range(len(pack.items)) if place < ends[i + 1]), None) for place in places]
    for number, group in groupby(cells):
        length = len(list(group))
        if number is None:
            yield "." * length
        elif coloured:
            yield f"{_SHADES[number % 2]}{' ' * length}{_OFF}"
        else:
            yield "#="[number % 2] * length
