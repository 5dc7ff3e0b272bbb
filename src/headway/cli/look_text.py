"""What `headway look` prints: tokens with marks or colours, images in words, packs as strips."""

import base64
import textwrap
from collections.abc import Iterator, Sequence
from io import BytesIO
from itertools import groupby
from typing import TYPE_CHECKING

from headway.errors import DataError
from headway.report import format_count, format_flops, format_share, presentable, printable
from headway.report.page import html_page, safe

if TYPE_CHECKING:
    from headway.data import Budget
    from headway.data.look import DataView, ShownMedia, ShownPack, ShownSample, TokenRun
    from headway.packing import OverlongCounts


_BEGIN, _END = ">>", "<<"  # around what is learnt, where there is no colour
_LEARNT, _MEDIA, _FAINT, _OFF = "\033[1;32m", "\033[36m", "\033[2m", "\033[0m"
_NAMED = 24  # samples of a pack that are named
_SHADES = ("\033[44m", "\033[45m")


def headline(sample: "ShownSample") -> str:
    """Lengths of a sample in words."""
    lengths = sample.lengths
    parts = [f"{format_count(lengths.tokens)} tokens"]
    parts.append(f"{format_count(lengths.supervised)} learnt ({format_share(lengths.supervised / lengths.tokens)})")
    if lengths.patches:
        parts.append(f"{format_count(lengths.patches)} patches")
    return ", ".join(parts)


def media_line(number: int, shown: "ShownMedia") -> str:
    """An image, video or sound in words."""
    parts = [f"{shown.kind} {number}: {shown.media}"]
    if shown.size is not None:
        parts.append("{} x {} pixels".format(*shown.size))
    if shown.grid is not None:
        parts.append(f"grid {'x'.join(map(str, shown.grid))}, {format_count(shown.patches or 0)} patches")
    if shown.frames is not None:
        parts.append(f"{format_count(shown.frames)} feature frames")
    return ", ".join(parts)


def pack_line(number: int, pack: "ShownPack", budget: "Budget") -> str:
    """A pack's fill and costs in words."""
    share = format_share(pack.tokens / budget.tokens)
    fill = f"{format_count(pack.tokens)} of {format_count(budget.tokens)} tokens ({share})"
    patches = f", {format_count(pack.patches)} patches" if pack.patches else ""
    return f"pack {number}, step {pack.step}: {len(pack.items)} samples, {fill}{patches}, {format_flops(pack.flops)}"


def counts_line(name: str, count: "OverlongCounts") -> str:
    """What became of a dataset's rows."""
    outcomes = [f"{format_count(count.read)} read"]
    outcomes += [
        f"{format_count(number)} {what}"
        for what in ("bad", "empty", "dropped", "truncated", "split")
        if (number := getattr(count, what))
    ]
    lost = f", {format_count(count.tokens_dropped)} tokens left out" if count.tokens_dropped else ""
    return f"{name}: {', '.join(outcomes)}{lost}"


def paragraphs(view: "DataView", width: int, most: int, *, coloured: bool) -> Iterator[str]:
    """Samples and packs for a terminal.

    Args:
        view: what there is to see.
        width: of a line, colours left out [characters].
        most: tokens of a sample that are shown [tokens].
        coloured: whether the terminal shows colours; else marks stand for them.
    """
    from headway.data.look import ShownSample, why_not_whole

    for sample in view.samples:
        if not isinstance(sample, ShownSample):
            yield textwrap.fill(f"left out: {sample}", width)
            continue
        lines = [presentable(sample.where), headline(sample)]
        lines += [presentable(media_line(number, media)) for number, media in enumerate(sample.media, start=1)]
        if view.budget is not None and (reason := why_not_whole(sample, view.budget)):
            lines.append(reason)
        yield "\n".join([*lines, "", *_wrapped(sample.pieces, width, most, coloured=coloured)])
    shown = {str(sample) for sample in view.samples}
    if bad := [textwrap.fill(f"bad: {error}", width) for error in view.bad[:5] if str(error) not in shown]:
        yield "\n".join(bad)
    if view.budget is not None:
        for number, pack in enumerate(view.packs, start=1):
            strip = "".join(_strip(pack, view.budget.tokens, width, coloured=coloured))
            samples = textwrap.fill(printable(_held(pack)), width)
            yield f"{textwrap.fill(pack_line(number, pack, view.budget), width)}\n{strip}\n{samples}"
        yield "\n".join(
            textwrap.fill(printable(counts_line(name, count)), width) for name, count in view.counts.items()
        )
    if not coloured and any(isinstance(sample, ShownSample) for sample in view.samples):
        legend = f"Tokens between {_BEGIN} and {_END} are learnt; | separates tokens."
        yield textwrap.fill(legend + (" A strip is a pack; . is room that is left." if view.packs else ""), width)


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


_LONGEST_SIDE = 320  # of a picture on the page [pixels]
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #1c2128; }
h2 { font-size: 1rem; margin: 2.2rem 0 0.2rem; overflow-wrap: anywhere; }
p { margin: 0.2rem 0; } .warn { color: #9a3412; }
.tokens { font: 13px/1.9 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f8fa;
  padding: 0.7rem; border-radius: 6px; }
.tokens span { border: 1px solid #d0d7de; border-radius: 3px; padding: 1px 0; }
.tokens .learnt { background: #c6f0cf; border-color: #4c9a61; } .tokens .run { background: #d7e8fb; }
figure { display: inline-block; margin: 0.5rem 1rem 0.5rem 0; } figcaption { font-size: 0.8rem; max-width: 20rem;
  overflow-wrap: anywhere; } img { image-rendering: auto; border: 1px solid #d0d7de; }
.strip { display: flex; height: 1.5rem; border: 1px solid #8c959f; border-radius: 3px; overflow: hidden; }
.strip div { background: #7aa7d9; border-right: 1px solid #fff; } .strip div:nth-child(even) { background: #b7cfe8; }
"""


def page(view: "DataView") -> str:
    """Render samples, pictures and packs as one HTML page.

    Args:
        view: samples and packs; whatever stands in them is escaped.
    """
    parts = [f"<h1>What {safe(view.model)} is shown</h1>"]
    parts.append('<p>Tokens on green are learnt; a box is a token, "x N" a run of N equal ones.</p>')
    for sample in view.samples:
        parts.append(_bad(sample) if isinstance(sample, DataError) else _sample(sample, view.budget))
    if view.budget is not None:
        parts += [_pack(number, pack, view.budget) for number, pack in enumerate(view.packs, start=1)]
        parts += [f"<p>{safe(counts_line(name, count))}</p>" for name, count in view.counts.items()]
    parts += [_bad(error) for error in view.bad]
    body = "\n".join(parts)
    return html_page("headway look", _STYLE, body)


def _bad(error: DataError) -> str:
    return f'<p class="warn">left out: {safe(str(error))}</p>'


def _sample(sample: "ShownSample", budget: "Budget | None") -> str:
    from headway.data.look import why_not_whole

    parts = [f"<h2>{safe(sample.where)}</h2>", f"<p>{safe(headline(sample))}</p>"]
    if budget is not None and (reason := why_not_whole(sample, budget)):
        parts.append(f'<p class="warn">{safe(reason)}</p>')
    parts += [_figure(number, media, sample.where) for number, media in enumerate(sample.media, start=1)]
    tokens = "".join(_token(piece) for piece in sample.pieces)
    return "\n".join([*parts, f'<div class="tokens">{tokens}</div>'])


def _token(piece: "TokenRun") -> str:
    kind = "learnt" if piece.is_learnt else "run" if piece.count > 1 else ""
    times = f" x {piece.count}" if piece.count > 1 else ""
    text = safe(piece.text.replace("\n", "\\n\n")) + times
    return f'<span class="{kind}" title="{piece.token}">{text}</span>'


def _figure(number: int, shown: "ShownMedia", where: str) -> str:
    from headway.data.media.images import Picture

    caption = f"<figcaption>{safe(media_line(number, shown))}</figcaption>"
    if shown.kind != "image":
        return f"<figure>{caption}</figure>"
    with Picture(shown.media, where) as opened:
        picture = opened.decode()
    picture.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
    written = BytesIO()
    picture.save(written, "PNG")
    inside = base64.b64encode(written.getvalue()).decode()
    return f'<figure><img alt="" src="data:image/png;base64,{inside}">{caption}</figure>'


def _pack(number: int, pack: "ShownPack", budget: "Budget") -> str:
    items = "".join(
        f'<div style="width:{100 * item.tokens / budget.tokens:.3f}%" '
        f'title="{safe(item.source)}, sample {item.row + 1}: {item.tokens} tokens"></div>'
        for item in pack.items
    )
    return f'<h2>{safe(pack_line(number, pack, budget))}</h2>\n<div class="strip">{items}</div>'
