"""Pages of runs in a browser: whole at any width, read by pointer and keyboard, printed, the same without a script."""

import json
import re

import pytest

from headway.pages.page import report_page
from headway.pages.run import read_run
from helpers.pages import Browser, write_run

pytestmark = pytest.mark.browser

# Words of charts that stand out of their chart, and elements that stand out of the window, at whatever width.
CUT = """(() => {
  const right = document.documentElement.clientWidth, name = at => `${at.nodeName} ${at.textContent.slice(0, 40)}`;
  const texts = [...document.querySelectorAll("svg.chart text")].filter(text => {
    const box = text.getBoundingClientRect(), chart = text.closest("svg.chart").getBoundingClientRect();
    return box.width && (box.left < chart.left - 1 || box.right > chart.right + 1 || box.bottom > chart.bottom + 1);
  });
  const wide = [...document.querySelectorAll("body *:not(svg *)")].filter(node => {
    const box = node.getBoundingClientRect();
    const isCut = node.matches(".value") && node.scrollWidth > node.clientWidth + 1;
    return box.width && (box.right > right + 1 || box.left < -1 || isCut);
  });
  return [...texts, ...wide].map(name);
})()"""
OPENED = "for (const part of document.querySelectorAll('details')) part.open = true"
FIGURE = """[...document.querySelectorAll("figure")].find(part => part.querySelector("h3").textContent === %r)"""
REMARK = f"{FIGURE}.querySelector('.remark').textContent"
PLACE = f"""(() => {{
  const plot = {FIGURE}.querySelector(".curves");
  plot.scrollIntoView({{ block: "center" }});
  const {{ left, width, top }} = plot.getBoundingClientRect();
  return [left + width * %f, top + 60];
}})()"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages of one run and of two, in a browser."""
    folder = tmp_path_factory.mktemp("pages")
    source = "measured at start: fp32 matmul 256x256x256, 1 thread, best of repeats"
    run = write_run(folder / "run", 20, away_s=0.1, convention="a convention of a long name/1", peak_source=source)
    other = write_run(folder / "other", 15, peak_source=source)
    command = ["headway", "train", "recipes/" + "a-name-without-any-space" * 8]
    (run / "run.json").write_text(json.dumps({"command": command, "host": "node-7"}))
    (other / "config.yaml").write_text(f"data: {{path: {'/data/' + 'corpus' * 30}}}\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "evaluation", "step": 10, "loss": 1.25, "exact_match": 0.5}\n')
    (run / "config.yaml").write_text(f"data: {{tokens_per_pack: 1, path: {'/data/' + 'pages' * 30}}}\n")
    conventions = [{"name": "palm", "version": 1, "flops": 1e12, "why": "x " * 40}]
    (run / "summary.json").write_text(json.dumps({"mfu": 0.1, "conventions": conventions}))
    (folder / "one.html").write_text(report_page(read_run(run)))
    (folder / "two.html").write_text(report_page(read_run(run), read_run(other)))
    (folder / "long.html").write_text(report_page(read_run(write_run(folder / "long", 1500, away_s=0.1))))
    with Browser(folder / "profile") as browser:

        def show(name, **how):
            browser.show((folder / f"{name}.html").as_uri(), **how)
            return browser

        yield show
        assert browser.errors == browser.requests == []


@pytest.mark.parametrize("width", [320, 375, 600, 1280])
@pytest.mark.parametrize("name", ["one", "two", "long"])
def test_nothing_is_cut_and_nothing_is_wider_than_the_window(pages, name, width):
    browser = pages(name, width=width)
    for act in ("", OPENED):
        browser.value(act)
        assert browser.value("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        assert browser.value(CUT) == []
    assert browser.value("document.querySelectorAll('svg text').length") > 20


def share(step, first=1, last=20):
    """Where a step stands in a plot that shows all of the run."""
    return (step - first) / (last - first)


def test_the_values_of_a_step_are_shown_under_the_pointer_in_all_charts(pages):
    browser = pages("one")
    came = browser.value(REMARK % "Loss")
    browser.point(*browser.value(PLACE % ("Time of a step", share(7))))
    assert browser.value(REMARK % "Time of a step") == "step 7: 2.50 s"
    assert browser.value(REMARK % "Loss") == "step 7: 0.4286"
    assert browser.value("document.querySelectorAll('.cursor').length") > 3
    browser.point(1, 1)
    assert browser.value(REMARK % "Loss") == came == "line: training, dots: held out"
    assert browser.value("document.querySelectorAll('.cursor').length") == 0


def tab_to(browser, part, name):
    """Press Tab until an element has the focus whose part has a name."""
    for _ in range(60):
        browser.press("Tab")
        if browser.value(f"document.activeElement.querySelector('{part}')?.textContent") == name:
            return
    raise AssertionError(f"Tab never reaches {name}")


def test_arrow_keys_move_from_step_to_step_and_folds_open_by_keyboard(pages):
    browser = pages("one")
    tab_to(browser, "title", "Loss")
    for key, remark in (("ArrowRight", "step 1: 3"), ("ArrowRight", "step 2: 1.5"), ("End", "step 20: 0.15")):
        browser.press(key)
        assert browser.value(REMARK % "Loss") == remark
    for key, step in (("ArrowLeft", 19), ("Home", 1)):
        browser.press(key)
        assert browser.value(REMARK % "Loss").startswith(f"step {step}: ")
    assert browser.value("document.querySelector('figure .remark').getAttribute('aria-live')") == "polite"
    tab_to(browser, "h2", "Learning")
    browser.press("Enter")
    assert browser.value("document.activeElement.parentNode.open")


def test_of_two_runs_the_values_of_both_are_shown(pages):
    browser = pages("two")
    browser.point(*browser.value(PLACE % ("Time of a step", share(7))))
    assert browser.value(REMARK % "Time of a step") == "step 7: A 2.50 s, B 2.50 s"


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_prints_with_its_folds_open(pages, dark):
    browser = pages("one", width=700, dark=dark, media="print")
    assert browser.value(
        "[...document.querySelectorAll('.fold table')].every(part => part.getBoundingClientRect().height > 0)"
    )
    assert browser.value(CUT) == []


def test_a_page_whose_script_is_refused_says_all_that_it_says(tmp_path):
    text = report_page(read_run(write_run(tmp_path / "run", 20)))
    words = []
    with Browser(tmp_path / "profile") as browser:
        for page in (text, text.replace("const charts", "const  charts")):
            (tmp_path / "page.html").write_text(page)
            browser.show((tmp_path / "page.html").as_uri())
            words.append(re.sub(r"\s+", " ", browser.value("document.body.innerText")))
        assert words[0] == words[1]
        assert len(browser.errors) == 1  # another script than that whose hash the policy holds is refused
