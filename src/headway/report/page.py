"""One HTML page: no request of the network, no script but its own; light and dark, on paper and on a telephone."""

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from headway.report.format import printable

_NUMBER = re.compile(r"[-+]?\d[\d,.]*( \S+)?")  # perhaps with its unit
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_COLOURS = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c2128; --soft: #57606a; --grid: #d8dee4; --card: #f6f8fa;
  --c0: #1f6feb; --c1: #9cc3f5; --c2: #b35900; --c3: #2f7d4f; --c4: #8250df; --c5: #bf3989; --c6: #57606a;
  --c7: #0a7a7a; }
@media (prefers-color-scheme: dark) { :root { --paper: #0d1117; --ink: #e6edf3; --soft: #9da7b1; --grid: #30363d;
  --card: #161b22; --c0: #58a6ff; --c1: #275a94; --c2: #e09b4f; --c3: #56c07f; --c4: #b391f5; --c5: #f17fbf;
  --c6: #9da7b1; --c7: #4cc2c2; } }
"""
CHART_STYLE = (
    _COLOURS
    + """* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem auto; max-width: 80rem; padding: 0 1rem;
  color: var(--ink); background: var(--paper); overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.2rem; margin: 2rem 0 0.4rem; } .verdict { font-size: 1.15rem; }
h3, figcaption { font-size: 1rem; font-weight: 600; margin: 0 0 0.3rem; } figure { margin: 0; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: 0.4rem 1.5rem; }
.facts > div { border-top: 1px solid var(--grid); padding-top: 0.2rem; } dt { color: var(--soft); font-size: 0.85rem; }
dd { margin: 0; } .charts { display: grid; gap: 1.2rem 2rem; align-items: start; }
.charts > * { min-width: 0; margin-bottom: 0.5rem; } svg { display: block; width: 100%; max-width: 48rem; }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); } summary, .note { color: var(--soft); }
.said { margin: 0; min-height: 1.5em; }
table { border-collapse: collapse; font-size: 0.9rem; } td, th { padding: 0.15rem 0.7rem 0.15rem 0; text-align: right;
  border-bottom: 1px solid var(--grid); overflow-wrap: break-word; }
td:first-child, th:first-child, .words { text-align: left; } code { font-size: 0.9em; }
.wide { overflow-x: auto; } pre { background: var(--card); padding: 0.7rem; white-space: pre-wrap; font-size: 0.8rem; }
@media (max-width: 600px) { svg { min-width: 34rem; } }
@media (min-width: 1100px) { .charts { grid-template-columns: 1fr 1fr; } .charts > .whole { grid-column: 1 / -1; } }
@media print { .said { display: none; } @page { size: A4; margin: 15mm; } body { max-width: none; margin: 0; }
  .charts { display: block; } .charts > * { margin-bottom: 1rem; } figure > .wide, tr { break-inside: avoid; }
  h2, h3, figcaption, summary { break-after: avoid; }
  details::details-content { content-visibility: visible; display: block; } }
"""
)


def html_page(title: str, style: str, body: str, *, script: str = "") -> str:
    """Render a whole page, whose policy forbids every request, and every script but the one that is given.

    Args:
        title: plain text.
        style: CSS, of the project's own.
        body: HTML in which other people's text is escaped already.
        script: JavaScript, of the project's own, that runs once the page has been read; allowed by its hash.
    """
    policy = _POLICY
    if script:
        policy += f"; script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        body += f"\n<script>{script}</script>"
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{safe(title)}</title><style>{style}</style>"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def svg_file(charts: Mapping[str, str]) -> str:
    """Charts below each other as one SVG file, light or dark as the reader's system is.

    Args:
        charts: of `headway.report.charts`, by a heading of plain text.
    """
    parts, y = [], 0
    for heading, chart in charts.items():
        box = re.match(r'<svg role="img" viewBox="0 0 640 (\d+)"', chart)
        assert box is not None, "a chart begins with its box"
        height = int(box[1])
        parts.append(f'<text x="12" y="{y + 20}" font-weight="bold">{safe(heading)}</text>')
        parts.append(f'<svg y="{y + 28}" width="640" height="{height}"{chart.removeprefix("<svg")}')
        y += 36 + height
    style = f"{_COLOURS}text {{ font-family: system-ui, sans-serif; font-size: 12px; fill: var(--ink); }}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {y}" width="640" height="{y}"><style>{style}</style>'
        f'<rect width="640" height="{y}" fill="var(--paper)"/>{"".join(parts)}</svg>\n'
    )


def safe(text: str) -> str:
    """Text of anyone as HTML that shows it."""
    return escape(printable(text))


def sentence(text: str) -> str:
    """A sentence of anyone as HTML, its first letter large.

    >>> sentence("the run goes on (`headway goodput` has all of it).")
    'The run goes on (<code>headway goodput</code> has all of it).'
    """
    return with_code(text[:1].upper() + text[1:])


def with_code(text: str) -> str:
    """Text of anyone as HTML, in which what stands between backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", safe(text))


def fact_list(facts: Iterable[tuple[str, str]]) -> str:
    """Render names and values, each value below its name."""
    shown = "".join(f"<div><dt>{safe(name)}</dt><dd>{safe(value)}</dd></div>" for name, value in facts)
    return f'<dl class="facts">{shown}</dl>'


def html_table(headings: Sequence[str], rows: Sequence[Sequence[str]], pictures: Sequence[str] = ()) -> str:
    """Render a table of plain text.

    Args:
        headings: of the columns.
        rows: their cells.
        pictures: a small JPEG in base64 before each row, "" for none; none at all where empty.
    """
    shown = [
        f'<td><img alt="what row {place} is about" src="data:image/jpeg;base64,{safe(picture)}"></td>'
        if picture
        else "<td></td>"
        for place, picture in enumerate(pictures, 1)
    ] or [""] * len(rows)
    kinds = [
        ' class="words"' if (column or pictures) and _is_words(row[column] for row in rows) else ""
        for column in range(len(headings))
    ]
    head = "".join(f'<th scope="col"{kind}>{safe(heading)}</th>' for kind, heading in zip(kinds, headings, strict=True))
    head = f'<th scope="col">shown</th>{head}' if pictures else head
    body = "".join(
        f"<tr>{picture}"
        + "".join(f"<td{kind}>{safe(cell)}</td>" for kind, cell in zip(kinds, row, strict=True))
        + "</tr>\n"
        for picture, row in zip(shown, rows, strict=True)
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _is_words(cells: Iterable[str]) -> bool:
    """Whether a column holds sentences and no number: it then stands on the left."""
    texts = [*cells]
    return any(" " in cell for cell in texts) and not any(_NUMBER.fullmatch(cell) for cell in texts)


def chart_figure(
    caption: str, chart: str, headings: Sequence[str], rows: Sequence[Sequence[str]], says: str = ""
) -> str:
    """Render a chart with the table of its numbers, which opens below it, and a sentence as HTML between them."""
    below = f"{says}<details><summary>Table</summary>{html_table(headings, rows)}</details>"
    return f'<figure><figcaption>{safe(caption)}</figcaption><div class="wide">{chart}</div>{below}</figure>'
