"""Sphinx's settings for the site; `python -m tools.site` builds it."""

from typing import Any

from docutils import nodes
from sphinx.domains.python import PyObject

from headway.version import __version__
from tools.site.pages import DOCS, home, indexed, relinked

project = "Headway"
release = version = __version__
extensions = ["myst_parser"]

myst_enable_extensions = ["colon_fence", "fieldlist"]
myst_heading_anchors = 4  # as GitHub makes them, which the pages' links to headings are written for
suppress_warnings = ["misc.highlighting_failure"]  # a page's JSON may have "..." in it

html_theme = "furo"
html_title = f"Headway {release}"
html_copy_source = False
html_show_sphinx = html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["search.js"]
html_favicon = "static/icon.svg"
smartquotes = False  # options begin with two hyphens
html_theme_options = {"navigation_with_keys": True}
pygments_style, pygments_dark_style = "default", "github-dark"

python_use_unqualified_type_names = True
maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
add_module_names = False


for _field in PyObject.doc_field_types:
    if _field.name == "variable":
        _field.label = "Attributes"


def setup(app: Any) -> None:
    """Have every page pass through the functions below."""
    app.connect("source-read", _read)
    app.connect("doctree-read", _anchor_rows)
    app.connect("missing-reference", _link_type)


def _read(_app: Any, place: str, source: list[str]) -> None:
    if place == "index":
        source[0] = home()
    elif not place.startswith("reference/"):
        source[0] = relinked(source[0], DOCS / f"{place}.md", place)
    if place == "glossary":
        source[0] = indexed(source[0])


def _anchor_rows(_app: Any, page: nodes.document) -> None:
    """Give the rows of a table the anchors of the index entries in them: a search shows the text at an anchor."""
    for row in page.findall(nodes.row):
        targets = [one for one in row.findall(nodes.target) if one["ids"]]
        for target, place in zip(targets, [row, *row.children], strict=False):
            place["ids"] += target["ids"]
            target["ids"] = []


def _link_type(_app: Any, env: Any, node: Any, shown: Any) -> Any:
    """Link the bare name of a type to its entry, at whichever module that stands: a public name means one thing."""
    domain, name = env.domains.python_domain, node["reftarget"]
    places = [place for place in domain.objects if place.endswith(f".{name}")] if "." not in name else []
    if node["refdomain"] != "py" or len(places) != 1:
        return None
    return domain.resolve_xref(env, node["refdoc"], env.app.builder, node["reftype"], places[0], node, shown)
