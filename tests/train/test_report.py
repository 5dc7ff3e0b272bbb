"""Reports of real runs: what was done to them on purpose is what they say."""

import copy
import re
import time
from pathlib import Path

import pytest
import yaml

from headway.config import parse_config
from headway.data.feed import make
from headway.pages.page import report_page
from headway.pages.run import read_run
from headway.train.run import train
from helpers.pages import Browser, report_markdown
from helpers.processes import TRAIN, start_processes

A4 = round((210 - 2 * 15) / 25.4 * 96)  # width of a page without its margins of 15 mm [pixels of CSS]


def run_of(raw, name, **settings):
    changed = copy.deepcopy(raw)
    for section, values in settings.items():
        changed.setdefault(section, {}).update(values)
    changed["optim"]["steps"] = 16
    changed["run"]["folder"] = str(Path(raw["run"]["folder"]).with_name(name))
    train(parse_config(changed))
    return Path(changed["run"]["folder"])


def line(text, name):
    """B - A of a line of the comparison [ms]."""
    (match,) = re.finditer(rf"^\| (?:- )?{name} \|.*\| ([-+\d,.]+) ms \|$", text, flags=re.MULTILINE)
    return float(match[1].replace(",", ""))


@pytest.mark.slow
def test_a_slow_loader_is_found_between_two_runs(raw, monkeypatch):
    a = run_of(raw, "a")
    encode = make.PackMaker.__call__

    def late(self, pieces):
        time.sleep(0.2)
        return encode(self, pieces)

    monkeypatch.setattr(make.PackMaker, "__call__", late)
    b = run_of(raw, "b")
    text = report_markdown(read_run(a), read_run(b))
    assert line(text, "data") > 100
    assert line(text, "data") > 0.5 * line(text, "the step")
    assert "Worse: idle: waiting for data" in text


def test_padding_is_found_between_two_runs(raw):
    a = run_of(raw, "a")
    b = run_of(raw, "b", data={"bucket_tokens": 640})
    text = report_markdown(read_run(a), read_run(b))
    assert line(text, "padding and masked work") > 0.5 * line(text, "useful work at peak")
    assert "| data.bucket_tokens | None | 640 |" in text
    assert re.search(r"B computes \+\d{2,}\.\d % FLOPs for each useful one", text)


@pytest.mark.slow
def test_a_killed_run_and_its_resumption_say_so(raw, tmp_path):
    raw["optim"]["steps"], raw["checkpoint"] = 400, {"every": 4, "export": "never"}
    path, folder = tmp_path / "run.yaml", Path(raw["run"]["folder"])
    path.write_text(yaml.safe_dump(raw))
    (process,) = start_processes([*TRAIN, path], 1, tmp_path)
    limit_s = time.monotonic() + 120
    while not [*folder.glob("checkpoints/step-*")] and time.monotonic() < limit_s:
        time.sleep(0.05)
    process.kill()
    process.wait()
    killed = report_page(read_run(folder))
    assert "· unfinished</p>" in killed
    step = max(int(one.name.removeprefix("step-")) for one in folder.glob("checkpoints/step-*"))
    raw["optim"]["steps"] = step + 3
    train(parse_config(raw), resume=True)
    resumed = report_page(read_run(folder))
    assert "unfinished" not in resumed
    assert f"resumed once, after step {step}" in resumed
    assert f"1 to {step + 3}, {step + 3} records" in resumed


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("width", [375, 1280])
def test_a_browser_shows_both_pages_whole(raw, tmp_path, width):
    a, b = run_of(raw, "a"), run_of(raw, "b", data={"tokens_per_pack": 320})
    pages = {"one": report_page(read_run(a)), "two": report_page(read_run(a), read_run(b))}
    with Browser(tmp_path / "profile") as browser:
        seen = {}
        for name, text in pages.items():
            (tmp_path / f"{name}.html").write_text(text)
            for dark in (False, True):
                browser.show((tmp_path / f"{name}.html").as_uri(), width=width, dark=dark)
                assert browser.value("document.documentElement.scrollWidth") <= width
                seen[name, dark] = browser.value("getComputedStyle(document.body).backgroundColor")
                boxes = browser.value(
                    "[...document.querySelectorAll('.grid .chart')].map(s => s.getBoundingClientRect().width)"
                )
                assert all(box > 200 for box in boxes)
            assert seen[name, False] != seen[name, True]
            rows = "[...document.querySelectorAll('details tr')].map(row => row.checkVisibility())"
            assert not any(browser.value(rows))
            browser.show((tmp_path / f"{name}.html").as_uri(), width=A4, media="print")
            inside = "[...document.querySelectorAll('svg')].every(s => s.getBoundingClientRect().right <= innerWidth)"
            assert browser.value(inside)
            assert browser.value("document.documentElement.scrollWidth") <= A4
            assert all(browser.value(rows)), "paper cannot be clicked, so folds are open on it"
        assert browser.errors == browser.requests == []


@pytest.mark.browser
def test_a_font_from_elsewhere_would_be_seen(raw, tmp_path):
    text = report_page(read_run(run_of(raw, "a")))
    link = '<link rel="stylesheet" href="https://fonts.example/css"></head>'
    page = tmp_path / "page.html"
    page.write_text(text.replace("</head>", link))
    with Browser(tmp_path / "profile") as browser:
        browser.show(page.as_uri())
        assert browser.errors or browser.requests  # the page's own policy refuses it, which is an error
