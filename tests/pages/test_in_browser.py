"""Pages of reports in a browser: read at any width, by pointer and keyboard, zoomed, smoothed, over other axes."""

import json
import math

import pytest

from headway.pages.comparison import compared_page
from headway.pages.run import read_run, report_page
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
    return box.width && (box.right > right + 1 || box.left < -1);
  });
  const scrolled = [...document.querySelectorAll(".wide")].filter(node => node.scrollWidth > node.clientWidth + 1);
  return [...texts, ...wide, ...scrolled].map(name);
})()"""
OPENED = "for (const part of document.querySelectorAll('details')) part.open = true"
READOUT = "document.querySelectorAll('.readout')[%d].textContent"
CAPTIONS = "[...document.querySelectorAll('figure:has(.readout) figcaption')].map(caption => caption.textContent)"
PLACE = """(() => {
  const svg = document.querySelectorAll("svg[data-of]")[%d];
  svg.scrollIntoView({ block: "center" });
  const box = svg.getBoundingClientRect(), left = 84, right = 12;
  return [box.left + left + (box.width - left - right) * %f, box.top + 60];
})()"""
LABELS = """[...document.querySelectorAll("svg[data-of]")[%d].querySelectorAll("text")].map(text => text.textContent)"""
CURVES = """[...document.querySelectorAll("svg[data-of]")[%d].querySelectorAll(".curves g > *")].map(
  curve => curve.getAttribute("d") ?? curve.getAttribute("points"))"""
FOCUSED = """(() => {
  const at = document.activeElement, caption = at.closest("figure")?.querySelector("figcaption").textContent;
  return at === document.body ? null : [at.tagName.toLowerCase(), caption ?? ""];
})()"""


@pytest.fixture
def pages(tmp_path):
    """Pages of one run and of two, in a browser."""
    source = "measured at start: fp32 matmul 256x256x256, 1 thread, best of repeats"
    run = write_run(tmp_path / "run", 20, away_s=0.1, convention="a convention of a long name/1", peak_source=source)
    other = write_run(tmp_path / "other", 15, peak_source=source)
    command = ["headway", "train", "recipes/" + "a-name-without-any-space" * 8]
    (run / "run.json").write_text(json.dumps({"command": command, "host": "node-7"}))
    (other / "config.yaml").write_text(f"data: {{path: {'/data/' + 'corpus' * 30}}}\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "evaluation", "step": 10, "loss": 1.25, "exact_match": 0.5}\n')
    (run / "config.yaml").write_text(f"data: {{tokens_per_pack: 1, path: {'/data/' + 'pages' * 30}}}\n")
    (run / "summary.json").write_text(
        json.dumps({"mfu": 0.1, "conventions": [{"name": "palm", "version": 1, "flops": 1e12, "why": "x " * 40}]})
    )
    (tmp_path / "one.html").write_text(report_page(read_run(run)))
    (tmp_path / "two.html").write_text(compared_page(read_run(run), read_run(other)))
    with Browser(tmp_path / "profile") as browser:

        def show(name, **how):
            browser.show((tmp_path / f"{name}.html").as_uri(), **how)
            return browser

        yield show
        assert browser.errors == browser.requests == []


@pytest.mark.parametrize("width", [320, 375, 600, 1280])
@pytest.mark.parametrize("name", ["one", "two"])
def test_nothing_is_cut_and_nothing_is_wider_than_the_window(pages, name, width):
    browser = pages(name, width=width)
    browser.value(OPENED)
    assert browser.value("document.querySelectorAll('svg text').length") > 20
    assert browser.value("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    if width > 320:  # on which the longest names of bars end in dots
        assert browser.value(CUT) == []


@pytest.mark.parametrize("steps", [150, 1500])
def test_ticks_of_long_runs_are_not_cut(tmp_path, steps):
    text = report_page(read_run(write_run(tmp_path / "run", steps, away_s=0.1)))
    assert ">logging, eval, checkpoint, compile</text>" in text  # the longest name of the waterfall
    (tmp_path / "page.html").write_text(text)
    with Browser(tmp_path / "profile") as browser:
        for width in (375, 1280):
            browser.show((tmp_path / "page.html").as_uri(), width=width)
            assert browser.value(CUT) == []


def stops_before(browser, target):
    """Press Tab until an element has the focus; list the stops before it, some of the browser's own choice."""
    stops = []
    for _ in range(browser.value("document.querySelectorAll('*').length")):
        browser.press("Tab")
        if (stop := browser.value(FOCUSED)) == target:
            return stops
        stops.append(stop)
    raise AssertionError(f"Tab never reaches {target}, but {stops}")


def share(step, first=1, last=20):
    """Where a step stands in a plot that shows all of the run."""
    return (step - first) / (last - first)


def test_the_value_of_a_step_is_shown_under_the_pointer_and_by_the_keyboard(pages):
    browser = pages("one")
    captions = browser.value(CAPTIONS)
    loss, time = captions.index("Loss"), captions.index("Time of a step")
    assert browser.value(READOUT % time) == ""
    browser.point(*browser.value(PLACE % (time, share(7))))
    assert browser.value(READOUT % time) == "step 7: 2.50 s"
    browser.point(*browser.value(PLACE % (loss, share(3))))
    assert browser.value(READOUT % loss) == "step 3: training 1"
    browser.point(*browser.value(PLACE % (loss, share(10))))
    assert browser.value(READOUT % loss) == "step 10: training 0.3, held-out 1.25"
    assert "select" in [stop[0] for stop in stops_before(browser, ["svg", "Loss"]) if stop]
    browser.press("Home")
    for key, readout in (("ArrowRight", "step 2: training 1.5"), ("End", "step 20: training 0.15")):
        browser.press(key)
        assert browser.value(READOUT % loss) == readout
    assert not [stop for stop in stops_before(browser, ["summary", "Loss"]) if stop and stop[1] != "Loss"]
    browser.press("Enter")
    assert browser.value("document.activeElement.parentNode.open")
    assert browser.value("document.querySelectorAll('svg[tabindex=\"0\"]').length") == len(captions)
    assert browser.value("document.querySelector('.readout').getAttribute('aria-live')") == "polite"


def test_of_two_runs_the_values_of_both_are_shown_where_both_have_one(pages):
    browser = pages("two")
    time = browser.value(CAPTIONS).index("Time of a step")
    browser.point(*browser.value(PLACE % (time, share(7))))
    assert browser.value(READOUT % time) == "step 7: A 2.50 s, B 2.50 s"
    browser.point(*browser.value(PLACE % (time, share(18))))  # B has ended
    assert browser.value(READOUT % time) == "step 18: A 508 ms"


def test_a_chart_is_zoomed_by_dragging_and_all_charts_over_steps_with_it(pages):
    browser = pages("one")
    captions = browser.value(CAPTIONS)
    loss, time = captions.index("Loss"), captions.index("Time of a step")
    came = browser.value(CURVES % time), browser.value(LABELS % time)
    x, y = browser.value(PLACE % (loss, share(5)))
    to_x, _ = browser.value(PLACE % (loss, share(10)))
    browser.drag((x, y), (to_x, y))
    assert browser.value("ofSteps.range") == [5, 10]
    steps = [label for label in browser.value(LABELS % time) if label.isdecimal()]
    assert steps == ["5", "6", "7", "8", "9", "10"]
    assert "2.00 s" in browser.value(LABELS % time)  # step 7 is within, so that the axis is as high as before
    # From the tenth step on nothing lasts long, and the axis of values follows.
    browser.value("document.querySelectorAll('.controls button')[2].click()")
    assert (browser.value(CURVES % time), browser.value(LABELS % time)) == came
    x, y = browser.value(PLACE % (time, share(10)))
    browser.drag((x, y), (browser.value(PLACE % (time, share(20)))[0], y))
    assert not [label for label in browser.value(LABELS % time) if label.endswith(" s")]
    browser.value("document.querySelectorAll('svg[data-of]')[0].dispatchEvent(new MouseEvent('dblclick'))")
    assert (browser.value(CURVES % time), browser.value(LABELS % time)) == came


def test_a_chart_is_zoomed_by_keys_and_the_range_follows_the_cursor(pages):
    browser = pages("one")
    time = browser.value(CAPTIONS).index("Time of a step")
    came = browser.value(CURVES % time)
    browser.value(f"document.querySelectorAll('svg[data-of]')[{time}].focus()")
    browser.press("Home")
    for _ in range(3):
        browser.press("+")
    assert browser.value("ofSteps.range") == [1, pytest.approx(1 + 19 / 8)]
    for _ in range(19):
        browser.press("ArrowRight")
    assert browser.value(READOUT % time) == "step 20: 500 ms"
    assert browser.value("ofSteps.range")[1] == 20
    browser.press("-")
    assert browser.value("ofSteps.range") == [pytest.approx(20 - 19 / 4), 20]
    browser.press("0")
    assert browser.value("ofSteps.range") is None
    assert browser.value(CURVES % time) == came


def choose(browser, which, value):
    browser.value(
        f"(choice => {{ choice.value = {value!r}; choice.dispatchEvent(new Event('change')); }})"
        f"(document.querySelectorAll('.controls select')[{which}])"
    )


def test_charts_are_read_over_tokens_and_over_time(pages):
    browser = pages("one")
    time = browser.value(CAPTIONS).index("Time of a step")
    choose(browser, 0, "tokens")
    assert {"500", "1,000", "1,500", "2,000", "tokens"} <= {*browser.value(LABELS % time)}
    browser.point(*browser.value(PLACE % (time, share(7))))  # 100 tokens a step
    assert browser.value(READOUT % time) == "tokens 700 (step 7): 2.50 s"
    choose(browser, 0, "seconds")
    assert "time of training [s]" in browser.value(LABELS % time)
    # Steps last 500 to 509 ms and 0.1 s beside; the seventh lasts 2.5 s.
    seconds = [0.1 + (2.5 if step == 7 else 0.5 + 0.001 * (step % 10)) for step in range(1, 21)]
    whole, up_to_7 = sum(seconds) - seconds[0], sum(seconds[1:7])
    browser.point(*browser.value(PLACE % (time, up_to_7 / whole)))
    assert browser.value(READOUT % time) == f"{sum(seconds[:7]):.2f} s (step 7): 2.50 s"
    choose(browser, 0, "step")
    browser.point(*browser.value(PLACE % (time, share(7))))
    assert browser.value(READOUT % time) == "step 7: 2.50 s"


def test_of_two_runs_each_is_read_over_its_own_tokens(pages, tmp_path):
    b = write_run(tmp_path / "more", 15, tokens=300)
    (tmp_path / "two.html").write_text(compared_page(read_run(tmp_path / "run"), read_run(b)))
    browser = pages("two")
    time = browser.value(CAPTIONS).index("Time of a step")
    choose(browser, 0, "tokens")
    ends = [float(curve.split("L")[-1].split()[0]) for curve in browser.value(CURVES % time)]
    assert ends == pytest.approx([1000 * (2000 - 100) / (4500 - 100), 1000], abs=0.1)


def test_a_smoothed_line_stands_over_a_faint_one_and_its_value_is_told(pages):
    browser = pages("one")
    time = browser.value(CAPTIONS).index("Time of a step")
    choose(browser, 1, "0.9")
    assert len(browser.value(CURVES % time)) == 2
    assert browser.value("document.querySelectorAll('svg[data-of] .faint').length") > 3
    browser.point(*browser.value(PLACE % (time, share(7))))
    values = [2.5 if step == 7 else 0.5 + 0.001 * step for step in range(1, 8)]
    weights = [0.9**back for back in reversed(range(7))]
    mean = math.fsum(map(math.prod, zip(values, weights, strict=True))) / math.fsum(weights)
    assert browser.value(READOUT % time) == f"step 7: 2.50 s, smoothed {1000 * mean:.0f} ms"
    # The loss on held-out samples has one value, and stays as it is.
    browser.point(*browser.value(PLACE % (browser.value(CAPTIONS).index("Loss"), share(10))))
    assert browser.value(READOUT % 0).endswith(", held-out 1.25")
    choose(browser, 1, "0")
    assert len(browser.value(CURVES % time)) == 1


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_prints_without_controls_and_with_its_tables(pages, dark):
    browser = pages("one", width=700, dark=dark, media="print")
    hidden = (
        "[...document.querySelectorAll('.controls, .readout')].every(part => getComputedStyle(part).display === 'none')"
    )
    assert browser.value(hidden)
    assert browser.value(CUT) == []


def test_a_page_whose_script_is_refused_says_all_that_it_says(tmp_path):
    text = report_page(read_run(write_run(tmp_path / "run", 20)))
    words, places = {}, {}
    with Browser(tmp_path / "profile") as browser:
        for name, page in (("with", text), ("without", text.replace("const charts", "const  charts"))):
            (tmp_path / "page.html").write_text(page)
            browser.show((tmp_path / "page.html").as_uri())
            assert (browser.value("document.querySelector('.controls') === null")) == (name == "without")
            browser.value("document.querySelector('.controls')?.remove()")
            words[name] = browser.value("document.body.innerText.split(/\\s+/).join(' ')")
            places[name] = [browser.value(CURVES % chart) for chart in range(4)]
        assert words["with"] == words["without"]
        assert places["with"] == places["without"]
        assert len(browser.errors) == 1  # another script than that whose hash the policy holds is refused
