"""The section of phases on a run's page: bars over the steps and a table, without a script."""

import json
import re

import pytest

from headway.pages.run import read_run, report_markdown, report_page
from headway.pages.steps import phase_chart
from helpers.loops import metered_rl_loop
from helpers.pages import Browser


def page_of(folder, **options):
    metered_rl_loop(folder / "m.jsonl", **options)
    return report_page(read_run(folder / "m.jsonl"))


def test_the_page_shows_phases_over_the_steps_and_of_the_mean_step(tmp_path):
    text = page_of(tmp_path, num_steps=250, server=4)
    section = re.search(r'<section class="phases">.*?</section>', text, re.DOTALL)[0]
    assert "Phases of a step" in section
    for cell in ("rollout", "reference", "other devices", "the step", "100.0 %"):
        assert f"{cell}</td>" in section
    assert "each bar the mean of several" in section
    assert "250" in section
    numbers = json.loads(re.search(r'id="headway-report">(.*?)</script>', text, re.DOTALL)[1])
    assert sum(phase["ns"] for phase in numbers["phases"]) == numbers["mean_step"]["duration_ns"]


def test_a_run_without_phases_has_no_such_section(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1, "wall_s": 1.0}\n{"step": 2, "wall_s": 1.0, "phases": {}}\n')
    run = read_run(tmp_path / "m.jsonl")
    assert phase_chart(run.explanation.steps) is None
    assert 'class="phases"' not in report_page(run)


def test_bars_are_as_high_as_their_steps_are_long(tmp_path):
    metered_rl_loop(tmp_path / "m.jsonl", num_steps=3)
    chart = phase_chart(read_run(tmp_path / "m.jsonl").explanation.steps)
    rects = [rect for of_colour in chart["by_colour"].values() for rect in of_colour]
    heights = {}
    for x, _, height in rects:
        heights[x] = heights.get(x, 0) + height
    assert list(heights.values()) == pytest.approx([chart["box"][1]] * 3, abs=0.5)
    assert min(y for _, y, _ in rects) == pytest.approx(0, abs=0.3)


def test_hostile_names_of_phases_stay_text(tmp_path):
    metered_rl_loop(tmp_path / "m.jsonl")
    hostile = "<script>alert(1)</script>"
    records = (tmp_path / "m.jsonl").read_text().replace('"rollout"', json.dumps(hostile))
    (tmp_path / "m.jsonl").write_text(records)
    assert hostile not in report_page(read_run(tmp_path / "m.jsonl"))


def test_the_markdown_has_the_table_too(tmp_path):
    metered_rl_loop(tmp_path / "m.jsonl")
    text = report_markdown(read_run(tmp_path / "m.jsonl"))
    assert "| by phase |" in text
    assert "decode steps of 16.0 rows" in text


@pytest.mark.browser
def test_the_section_fits_a_narrow_window(tmp_path):
    (tmp_path / "page.html").write_text(page_of(tmp_path, answers=[11] * 15 + [251]))
    with Browser(tmp_path / "profile") as browser:
        for dark in (False, True):
            browser.show(f"file://{tmp_path}/page.html", width=375, dark=dark)
            assert browser.value("document.documentElement.scrollWidth") <= 375
            wide = "(place => place.scrollWidth - place.clientWidth)(document.querySelector('.phases .wide'))"
            assert browser.value(wide) == 0
            colours = browser.value("[...document.querySelectorAll('.phases path')].map(p => getComputedStyle(p).fill)")
            assert len(set(colours)) == len(colours) > 3
        assert browser.errors == browser.requests == []
