"""HTML pages and SVG files from templates: no request of the network, no script but our own; light, dark and on paper.

Templates escape all text, show characters that a browser would obey by their numbers, and know no name that they are
not given. `base.html.jinja` has the style, `parts.html.jinja` the parts that pages share.
"""

import base64
import hashlib
import re
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from headway.report.format import format_share, printable
from headway.report.hover import SCRIPT


def render(template: str, **values: Any) -> str:
    """Fill a template of `headway/report/templates`.

    Args:
        template: its file name.
        values: what it shows, by the names it has for them; text of anyone is escaped.
    """
    return _TEMPLATES.get_template(template).render(values)


def svg_file(charts: Mapping[str, str]) -> str:
    """Charts below each other as one SVG file, light or dark as the reader's system is.

    Args:
        charts: of `headway.report.charts`, by a heading of plain text.
    """
    rows, y = [], 0
    for heading, chart in charts.items():
        box = re.match(r'<svg role="img" viewBox="0 0 640 (\d+)"', chart)
        assert box is not None, "a chart begins with its box"
        rows.append({"heading": heading, "y": y, "height": int(box[1]), "svg": chart.removeprefix("<svg")})
        y += 36 + int(box[1])
    return render("charts.svg.jinja", charts=rows, height=y)


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
    "hover_script": SCRIPT,
    "hover_script_sha256": base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode(),
}
