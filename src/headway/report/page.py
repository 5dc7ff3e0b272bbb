"""HTML pages and SVG files from templates: no request of the network, no script but our own; light, dark and on paper.

Templates escape all text, show characters that a browser would obey by their numbers, and know no name that they are
not given. `base.html.jinja` has the style, `parts.html.jinja` the parts that pages share.
"""

import base64
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from headway.report.format import format_share
from headway.report.secrets import printable
from headway.report.svg import within

_SCRIPT = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
_WIDTH, _HEADING, _APART = 640, 28, 8  # width of a file of charts, room of a heading, and room below a chart [pixels]


def render(template: str, **values: Any) -> str:
    """Fill a template of `headway/report/templates`; text of anyone is escaped."""
    return _TEMPLATES.get_template(template).render(values)


def svg_file(charts: Mapping[str, str]) -> str:
    """Charts below each other, by headings of plain text, as one SVG file, light or dark as the reader's system is."""
    rows, y = [], 0
    for heading, drawn in charts.items():
        placed, height = within(drawn, y + _HEADING, _WIDTH)
        rows.append({"heading": heading, "y": y, "svg": placed})
        y += _HEADING + height + _APART
    return render("charts.svg.jinja", charts=rows, width=_WIDTH, height=y)


def _shown(value: object) -> object:
    """Plain text in characters that a browser only shows; HTML that a macro made of such text stays as it is."""
    return printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


_TEMPLATES = Environment(
    loader=PackageLoader("headway.report"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_shown,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.filters |= {"share": format_share, "split_at_code": re.compile(r"`([^`]+)`").split}
_TEMPLATES.globals |= {
    "script": _SCRIPT,
    "script_sha256": base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode(),
}
