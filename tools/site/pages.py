"""The pages that stand in the repository: where each lies in the site, and their links as links of the site."""

import os
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_LINK = re.compile(r"\[([^\]\n]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


@cache
def navigation() -> dict[str, list[str]]:
    """Read the sections of the site, each with its entries: `path`, or `Title <path>`; paths below docs/."""
    sections: dict[str, list[str]] = yaml.safe_load((Path(__file__).parent / "navigation.yaml").read_text("utf-8"))
    return sections


def pages_in_navigation() -> list[str]:
    """List the pages of the navigation in order: paths below docs/, without extension."""
    return [entry.rpartition("<")[2].removesuffix(">") for entries in navigation().values() for entry in entries]


def title_of(page: Path) -> str:
    """The title that the navigation gives a page of docs/, or else its first heading."""
    for entry in (entry for entries in navigation().values() for entry in entries):
        if entry.endswith(f" <{page.stem}>"):
            return entry.partition(" <")[0]
    return re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1]  # type: ignore[index]


@cache
def copied_pages() -> dict[Path, str]:
    """List the pages outside docs/ that the site has, and folders that a page stands for: each with its path there."""
    results = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
    found = {page: f"reference/benchmarks/{page.stem}" for page in results}
    found[ROOT / "benchmarks" / "log.md"] = "reference/log"
    found |= {ROOT / f"{name}.md": f"reference/repository/{name}" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY")}
    found |= {page: f"reference/plugins/{page.parent.name}" for page in sorted((ROOT / "plugins").glob("*/README.md"))}
    found |= {ROOT / "benchmarks" / name: "reference/benchmarks" for name in ("", "README.md", "results")}
    return {**found, ROOT / "recipes": "reference/recipes", ROOT / "README.md": "index"}


def relinked(text: str, page: Path, place: str) -> str:
    """Turn the relative links of a page into links that lead to the same from its place in the site.

    A page of the site is linked as such; any other file of the repository is handed out as it is.

    Args:
        text: the page, in Markdown.
        page: its file in the repository.
        place: its path in the site, without extension.
    """
    start = Path(place).parent

    def link(match: re.Match[str]) -> str:
        shown, path, heading = match[1], match[2], match[3] or ""
        target = Path(os.path.normpath(page.parent / path))
        page_there = copied_pages().get(target)
        to = f"{page_there}.md" if page_there else os.path.relpath(target, DOCS)
        if shown.rpartition("/")[2] == target.name and target.parent == DOCS:
            shown = title_of(target)  # a page is called by its file's name in the repository alone
        return f"[{shown}]({os.path.relpath(to, start)}{heading})"

    return _LINK.sub(link, text)


def home() -> str:
    """The first page: README.md, then what docs/index.md says of each page, then the navigation, which is not shown."""
    readme = relinked((ROOT / "README.md").read_text(encoding="utf-8"), ROOT / "README.md", "index")
    listed = (DOCS / "index.md").read_text(encoding="utf-8").partition("\n")[2].replace("\n## ", "\n### ")
    trees = [toctree(entries, caption) for caption, entries in navigation().items()]
    return "\n".join([readme, "## All pages", relinked(listed, DOCS / "index.md", "index"), *trees])


def indexed(glossary: str) -> str:
    """Make each term of the glossary a main entry of the index, which a search lists before pages that use the word."""

    def entries(match: re.Match[str]) -> str:
        terms = match[1].replace("**", "").split(", ")
        return ", ".join(f"**{{index}}`{term} <! {term}>`**" for term in terms)

    return re.sub(r"(?<=^\| )(\*\*[^|]+\*\*)(?= \|)", entries, glossary, flags=re.MULTILINE)


def toctree(entries: Iterable[str], caption: str = "") -> str:
    """Write the directive that hangs pages below this one."""
    name = f":caption: {caption}\n" if caption else ""
    return f"```{{toctree}}\n:hidden:\n{name}\n" + "\n".join(entries) + "\n```\n"


def repository_pages() -> dict[str, str]:
    """Write the pages that stand elsewhere in the repository: Markdown by path below docs/, without extension."""
    pages = {
        place: relinked(path.read_text(encoding="utf-8"), path, place)
        for path, place in copied_pages().items()
        if path.is_file() and place != "index"
    }
    results = {place: path for path, place in copied_pages().items() if place.startswith("reference/benchmarks/")}
    for place, path in results.items():
        if not pages[place].startswith("# "):
            pages[place] = f"# {path.stem.partition('_202')[0]}\n\n{pages[place]}"
    entries = [
        "{} <{}>".format(" ".join(path.stem.rsplit("_", 2)), place.removeprefix("reference/"))
        for place, path in results.items()
    ]
    pages["reference/benchmarks"] += "\n## Results\n\n" + toctree(entries).replace(":hidden:\n", "")
    recipes = [
        f"## {path.stem}\n\n```yaml\n{path.read_text(encoding='utf-8')}```\n"
        for path in sorted((ROOT / "recipes").glob("*.yaml"))
    ]
    head = "# Recipes as files\n\n    headway train recipes/NAME.yaml --dry-run"
    says = "[Recipes](../train.md#recipes) says what each of them is."
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    install = "# Install" + readme.partition("\n## Install")[2].partition("\n## ")[0]
    pages["reference/install"] = relinked(install, ROOT / "README.md", "reference/install")
    return {**pages, "reference/recipes": "\n\n".join([head, says, *recipes])}


def pages_that_show_commands() -> dict[str, list[str]]:
    """Find the pages of docs/ that show a command in a block of code: links from `reference/commands/`, by command."""
    shown: dict[str, list[str]] = {}
    for page in (DOCS / f"{place}.md" for place in pages_in_navigation() if "/" not in place):
        found = re.findall(r"^(?:    |\$ |)headway ([a-z-]+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for name in {*found}:
            shown.setdefault(name, []).append(f"[{title_of(page)}](../../{page.name})")
    return shown
