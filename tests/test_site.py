"""The site has every page once, every public name, and nothing that another host would have to send."""

import re
import subprocess
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from headway.cli.app import app
from helpers.pages import Browser, broken_links
from tools.site.built import requests_elsewhere
from tools.site.commands import command_pages
from tools.site.pages import copied_pages, indexed, pages_in_navigation, pages_that_show_commands, relinked
from tools.site.public import public_names
from tools.site.records import example, meaning, record_page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BUILDER = ROOT / ".venv-docs/bin/python"
COMMANDS = sorted(typer.main.get_command(app).list_commands(None))


def test_every_page_of_docs_is_in_the_navigation_once():
    listed = [page for page in pages_in_navigation() if "/" not in page]
    assert sorted([*listed, "index"]) == sorted(page.stem for page in DOCS.glob("*.md"))


@pytest.mark.parametrize("page", sorted(copied_pages()), ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_from_elsewhere_in_the_repository_have_no_broken_link(page):
    assert page.exists()
    assert page.is_dir() or broken_links(page) == []


def test_links_lead_from_a_page_of_the_repository_to_the_same_in_the_site():
    readme = "[a](docs/plan.md#the-lines) [docs/plan.md](docs/plan.md) [b](recipes) [c](src/headway/hub.py)"
    assert relinked(readme, ROOT / "README.md", "index") == (
        "[a](plan.md#the-lines) [Plan a run](plan.md) [b](reference/recipes.md) [c](../src/headway/hub.py)"
    )
    result = "[a](../README.md) [b](../../docs/plan.md) [c](https://example.org)"
    assert relinked(result, ROOT / "benchmarks/results/x.md", "reference/benchmarks/x") == (
        "[a](../benchmarks.md) [b](../../plan.md) [c](https://example.org)"
    )


def test_terms_of_the_glossary_are_main_entries_of_the_index():
    row = "| **cost model**, **ledger** | FLOPs of **each** operation |"
    shown = "| **{index}`cost model <! cost model>`**, **{index}`ledger <! ledger>`** | FLOPs of **each** operation |"
    assert indexed(row) == shown
    terms = re.findall(r"<! ([^>]+)>", indexed((DOCS / "glossary.md").read_text(encoding="utf-8")))
    assert {"MFU", "HFU", "MBU", "goodput", "pack"} <= {*terms}


def test_every_public_name_has_a_docstring():
    names = public_names()
    assert len(names) > 200
    assert [f"{one.module}.{one.name}" for one in names if not one.docstring] == []


def test_a_public_name_is_followed_to_its_docstring_or_to_none(tmp_path):
    package = tmp_path / "parcel"
    package.mkdir()
    (package / "__init__.py").write_text(
        'from parcel.inside import LIMIT, bare, told\n__all__ = ["LIMIT", "bare", "told"]'
    )
    (package / "inside.py").write_text(
        'LIMIT = 3\n"""Most."""\ndef bare(): ...\ndef told():\n    """Tell."""\ndef used(): 1\n'
    )
    page = tmp_path / "page.md"
    page.write_text("    from parcel.inside import told, used\n")
    found = [(one.module, one.name, one.home, one.docstring) for one in public_names(package, [page])]
    assert found == [
        ("parcel", "LIMIT", "parcel.inside", "Most."),
        ("parcel", "bare", "parcel.inside", None),
        ("parcel", "told", "parcel.inside", "Tell."),
        ("parcel.inside", "used", "parcel.inside", None),
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_of_a_command_has_every_word_of_its_help(command):
    page = command_pages(pages_that_show_commands())[f"commands/{command}"]
    shown = CliRunner().invoke(app, [command, "--help"]).output
    assert "--help" in shown
    shown = re.sub(r"-\n +", "-", shown)  # an option's name that goes on in the next line
    words = {word for word in re.findall(r"[\w.-]+", shown) if "-" not in word or word.startswith("--")}
    headings = {"Usage", "default", "Example", "Examples"}
    assert sorted(words - headings - {*re.findall(r"[\w.-]+", page)}) == []


def test_every_key_of_a_record_is_told_and_explained_on_the_page_of_records():
    record = example().to_dict()
    assert None not in record.values()
    page = record_page()
    assert all(f"| `{key}` |" in page for key in record)
    told = (DOCS / "record.md").read_text(encoding="utf-8")
    assert [key for key in record if not key.endswith(("_per_device", "_smoothed")) and f"`{key}`" not in told] == []


def test_a_key_that_nothing_explains_is_an_error():
    assert meaning("mfu") == "Useful model FLOPs / (wall time x peak), a fraction."
    assert meaning("mfu_of_ceiling").endswith("null without a ceiling.")
    with pytest.raises(LookupError, match="'colour' of a record means; give it a docstring"):
        meaning("colour")


@pytest.mark.parametrize(
    "fault",
    [
        '<link rel="stylesheet" href="https://fonts.example/css?family=Inter">',
        "<link href=//fonts.example/css rel=preconnect>",
        '<script async src="https://cdn.example/mermaid.js"></script>',
        '<img alt="badge" src="http://img.example/a.svg">',
        "<style>@import 'https://fonts.example/css';</style>",
        "<style>body { background: url(//img.example/a.png) }</style>",
    ],
)
def test_a_page_that_would_fetch_from_another_host_is_found(fault, tmp_path):
    fine = (
        '<link rel="canonical" href="https://a.example/"><a href="https://a.example/">a</a><script src="a.js"></script>'
    )
    (tmp_path / "page.html").write_text(fine)
    assert requests_elsewhere(tmp_path) == []
    (tmp_path / "page.html").write_text(fine + fault)
    (found,) = requests_elsewhere(tmp_path)
    assert ".example/" in found


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built once for the tests below."""
    if not BUILDER.exists():
        pytest.skip("the site's generator is not installed; `make docs` makes .venv-docs")
    folder = tmp_path_factory.mktemp("built") / "site"
    built = subprocess.run([BUILDER, "-m", "tools.site", folder], cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.slow
def test_a_search_for_mfu_has_the_page_that_explains_it_first(site):
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    pages = re.findall(r'"([^"]+)"', re.search(r'"docnames":\[(.*?)\]', index)[1])
    (page,) = re.findall(r'"mfu":\[\[(\d+),"index-\d+",true\]', index)
    assert pages[int(page)] == "glossary"


SOUGHT = (
    "qlora",
    "rlhf",
    "dpo",
    "colab",
    "push_to_hub",
    "troubleshoot",
    "faq",
    "quantiz",
    "earli",
    "docker",
    "mp",
    "overfit",
)


@pytest.mark.slow
def test_a_search_for_words_of_other_tools_has_the_page_that_answers(site):
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    pages = re.findall(r'"([^"]+)"', re.search(r'"docnames":\[(.*?)\]', index)[1])
    answers = str(pages.index("faq"))
    for stem in SOUGHT:  # as the search's own stemmer leaves words
        places = re.findall(rf'(?<!\w){stem}\w*"?:(\[[\d,]+\]|\d+)', index)
        assert any(answers in re.findall(r"\d+", place) for place in places), stem


@pytest.mark.slow
def test_fields_have_the_meaning_that_comments_in_the_source_give_them(site):
    page = re.sub(r"<[^>]+>", "", (site / "reference/api/headway.audit.html").read_text(encoding="utf-8"))
    assert "log (Log) -- rows of one device" in page  # on the field's line
    assert "peak_flops_per_s (float | None) -- the peak below useful MFU" in page  # above it


@pytest.mark.slow
def test_types_lead_to_their_entries_and_those_of_other_packages_nowhere(site):
    page = (site / "reference/api/headway.checkpoint.html").read_text(encoding="utf-8")
    (signature,) = re.findall(r'id="headway.checkpoint.find_checkpoint">(.*?)</dt>', page, flags=re.DOTALL)
    assert 'href="#headway.checkpoint.Checkpoint"' in signature
    assert 'href="headway.errors.html#headway.errors.CheckpointError"' in page
    assert "torch.optim.Optimizer" in re.sub(r"<[^>]+>", "", page)  # whose name one of headway.optim has too
    assert "headway.optim.Optimizer" not in page


@pytest.mark.slow
def test_a_dataclass_is_shown_with_the_fields_that_it_is_made_of(site):
    page = re.sub(r"<[^>]+>", "", (site / "reference/api/headway.conventions.html").read_text(encoding="utf-8"))
    assert "class headway.conventions.Step(workload: Workload, seq_len: int, recompute: str = 'none')" in page


@pytest.mark.slow
@pytest.mark.browser
def test_a_search_in_the_browser_leads_to_the_row_of_the_glossary(site, browser):
    browser.show(f"file://{site}/index.html")
    browser.follow("{ const box = document.querySelector('.sidebar-search'); box.value = 'MFU'; box.form.submit() }")
    browser.wait_for("#search-results li a")
    found = browser.value("document.querySelector('#search-results li a').href")
    assert found.startswith(f"file://{site}/glossary.html#index-")
    browser.show(found)
    row = browser.value("document.getElementById(location.hash.slice(1)).innerText")
    assert " ".join(row.split()) == "MFU model FLOPs utilisation: useful FLOPs / (wall time x peak)"
    assert browser.errors == browser.requests == []


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("width", [375, 1280])
@pytest.mark.parametrize(
    "page",
    ["index", "tutorial", "why-mfu-differs", "settings", "reference/records", "reference/api/headway"],
)
def test_a_page_fits_the_window_and_asks_no_other_host(page, width, site, browser):
    browser.show(f"file://{site}/{page}.html", width=width)
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.errors == browser.requests == []


@pytest.mark.slow
@pytest.mark.browser
def test_the_dark_site_is_dark_and_its_screens_of_commands_too(site, browser):
    def brightness(dark, element):
        browser.show(f"file://{site}/index.html", dark=dark)
        shown = browser.value(f"getComputedStyle(document.querySelector({element!r})).backgroundColor")
        return sum(map(int, re.findall(r"\d+", shown)[:3])) / 3

    for element in ("body", ".highlight"):
        assert brightness(True, element) < 60
        assert brightness(False, element) > 200


@pytest.mark.browser
def test_the_browser_tells_of_requests_and_errors(tmp_path):
    page = tmp_path / "page.html"
    page.write_text('<link rel="stylesheet" href="https://fonts.example/css?family=Inter"><script>missing()</script>')
    with Browser(tmp_path / "profile") as browser:
        browser.show(f"file://{page}")
        assert browser.requests == ["https://fonts.example/css?family=Inter"]
        assert any("missing is not defined" in error for error in browser.errors)
