"""The page of `headway look --html`: one file, without scripts, that asks nothing of the network."""

import base64
from io import BytesIO
from typing import TYPE_CHECKING

from headway.cli.look_text import counts_line, headline, media_line, pack_line
from headway.errors import DataError
from headway.report.page import html_page, safe

if TYPE_CHECKING:
    from headway.data import Budget
    from headway.data.look import DataView, ShownMedia, ShownPack, ShownSample, TokenRun

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


def page(seen: "DataView") -> str:
    """Render samples, pictures and packs as one HTML page.

    Args:
        seen: samples and packs; whatever stands in them is escaped.
    """
    parts = [f"<h1>What {safe(seen.model)} is shown</h1>"]
    parts.append('<p>Tokens on green are learnt; a box is a token, "x N" a run of N equal ones.</p>')
    for sample in seen.samples:
        parts.append(_bad(sample) if isinstance(sample, DataError) else _sample(sample, seen.budget))
    if seen.budget is not None:
        parts += [_pack(number, pack, seen.budget) for number, pack in enumerate(seen.packs, start=1)]
        parts += [f"<p>{safe(counts_line(name, count))}</p>" for name, count in seen.counts.items()]
    parts += [_bad(error) for error in seen.bad]
    body = "\n".join(parts)
    return html_page("headway look", _STYLE, body)


def _bad(error: DataError) -> str:
    return f'<p class="warn">left out: {safe(str(error))}</p>'


def _sample(sample: "ShownSample", budget: "Budget | None") -> str:
    from headway.data.look import why_not_whole

    parts = [f"<h2>{safe(sample.where)}</h2>", f"<p>{safe(headline(sample))}</p>"]
    if budget is not None and (reason := why_not_whole(sample, budget)):
        parts.append(f'<p class="warn">{safe(reason)}</p>')
    parts += [_figure(number, one, sample.where) for number, one in enumerate(sample.media, start=1)]
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
