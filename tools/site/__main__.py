"""Build the site: write the reference from the code, run Sphinx strictly, and check what came out."""

import argparse
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from sphinx.application import Sphinx
from sphinx.util.console import nocolor

from tools.site.api import api_pages
from tools.site.built import requests_elsewhere
from tools.site.commands import command_pages
from tools.site.pages import DOCS, ROOT, pages_that_show_commands, repository_pages
from tools.site.public import public_names
from tools.site.records import record_page

REFERENCE = DOCS / "reference"  # written anew by each build, and in no commit


def main() -> int:
    """Build the site; give the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "site", help="where the site is written")
    folder = parser.parse_args().folder.resolve()
    write_reference()
    shutil.rmtree(folder, ignore_errors=True)
    nocolor()
    with TemporaryDirectory() as scratch:
        app = Sphinx(
            srcdir=DOCS,
            confdir=Path(__file__).parent,
            outdir=folder,
            doctreedir=Path(scratch),
            buildername="html",
            status=None,
            warningiserror=True,
        )
        app.build()
    entries = set(app.env.domains.python_domain.objects)
    faults = [f"{one} is on no page" for one in missing_names(entries)] + requests_elsewhere(folder)
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults or app.statuscode:
        return 1
    print(f"{len(app.env.found_docs)} pages with {len(entries)} entries of the API; open {folder / 'index.html'}")
    return 0


def write_reference() -> None:
    """Write every generated page below docs/reference/, and nothing else there."""
    shutil.rmtree(REFERENCE, ignore_errors=True)
    pages = {**command_pages(pages_that_show_commands()), **api_pages(), "records": record_page()}
    for place, text in {**{f"reference/{name}": text for name, text in pages.items()}, **repository_pages()}.items():
        path = DOCS / f"{place}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def missing_names(entries: set[str]) -> list[str]:
    """Find public names that have no entry at any module that offers them."""
    at = {(one.home, one.name): [] for one in public_names()}
    for one in public_names():
        at[one.home, one.name].append(f"{one.module}.{one.name}")
    return [places[0] for places in at.values() if not entries.intersection(places)]


if __name__ == "__main__":
    sys.exit(main())
