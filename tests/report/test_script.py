"""The page's own script beside what Python writes: the same ticks and units, smoothing as defined, order of tables."""

import json
import math

import numpy as np
import pytest

from headway.report import format_bytes, format_duration, format_flops, format_rate, format_share
from headway.report.charts import FORMS
from headway.report.page import render
from headway.report.section import ReportSection
from headway.report.svg import distinct_ticks, ratio_ticks, ticks
from helpers.pages import Browser

RANDOM = np.random.default_rng(32)


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """A page with the script and a table, whose functions are called."""
    folder = tmp_path_factory.mktemp("script")
    rows = [["b 10", "1.2 GFLOP", ""], ["b 9", "900.0 MFLOP", "x"], ["a", "not known", "x"], ["c", "3 FLOP", "x"]]
    section = ReportSection("T", ["what", "FLOPs", "words"], rows)
    page = render("comparison.html.jinja", a="a", b="b", verdict=["x"], sections=[section], notes=(), numbers={})
    (folder / "page.html").write_text(page, encoding="utf-8")
    with Browser(folder / "profile") as browser:
        browser.show((folder / "page.html").as_uri())
        yield browser
        assert browser.errors == browser.requests == []


def results(script, function, *arguments):
    return script.value(f"{json.dumps([*zip(*arguments, strict=True)])}.map(values => ({function})(...values))")


def sizes(low, high, count):
    """Numbers of any size between two powers of ten, with the six digits that a page has of them."""
    return [float(f"{value:.6g}") for value in 10 ** RANDOM.uniform(low, high, count)]


@pytest.mark.browser
@pytest.mark.parametrize(("form", "low", "high"), [
    ("plain", -12, 12), ("share", -5, 2), ("count", -1, 12), ("duration", -8, 6),
])  # fmt: skip
def test_a_value_reads_the_same_as_python_writes_it(script, form, low, high):
    write = FORMS[form]
    # Halfway between two roundings either is right: Python takes the even one, JavaScript the larger one.
    values = [value for value in sizes(low, high, 2000) if write(value * (1 - 1e-12)) == write(value * (1 + 1e-12))]
    assert len(values) > 1900
    values += [0.0, 1.0]
    assert results(script, f"value => forms.{form}(value)", values) == [write(value) for value in values]


@pytest.mark.browser
def test_ticks_are_those_of_python(script):
    lows, spans = [*sizes(-3, 7, 500), 0.0], [*sizes(-4, 7, 500), 1.0]
    highs = [low + span for low, span in zip(lows, spans, strict=True)]
    for counts in ([5] * 501, RANDOM.integers(1, 9, 501).tolist()):
        pairs = zip(
            results(script, "ticks", lows, highs, counts),
            map(ticks, lows, highs, counts),
            strict=True,
        )
        for drawn, expected in pairs:
            assert drawn == pytest.approx(expected, rel=1e-12, abs=1e-12)
    # Of values that read alike fewer are drawn; which two do is another thing halfway between two roundings.
    for form in FORMS:
        drawn = results(
            script,
            f"(low, high) => distinctTicks(low, high, forms.{form}, false).map(tick => [tick, forms.{form}(tick)])",
            lows,
            highs,
        )
        assert all(len({label for _, label in axis}) == len(axis) > 0 for axis in drawn)
    marks = results(script, "(low, high) => distinctTicks(low, high, String, false)", lows, highs)
    for axis, low, high in zip(marks, lows, highs, strict=True):
        assert axis == pytest.approx(distinct_ticks(low, high, str), rel=1e-12, abs=1e-12)
    lows = lows[:-1]
    highs = [low * factor for low, factor in zip(lows, 10 ** RANDOM.uniform(1.4, 9, 500), strict=True)]
    assert results(script, "ratioTicks", lows, highs) == [[*map(pytest.approx, ratio_ticks(*ends))]
                                                          for ends in zip(lows, highs, strict=True)]  # fmt: skip


@pytest.mark.browser
@pytest.mark.parametrize("weight", [0.0, 0.6, 0.97])
def test_smoothing_is_the_mean_of_what_came_before_with_weights_that_fall(script, weight):
    values = RANDOM.normal(size=300).tolist()
    plain = [
        math.fsum(weight**back * values[n - back] for back in range(n + 1)) / math.fsum(weight**k for k in range(n + 1))
        for n in range(len(values))
    ]
    assert results(script, "smoothed", [values], [weight])[0] == pytest.approx(plain, abs=1e-12)
    gap = script.value(f"smoothed([1, NaN, 3], {weight})")
    assert gap[2] == pytest.approx((weight * 1 + 3) / (weight + 1))  # a value that is missing has no weight


@pytest.mark.browser
def test_places_between_two_steps_are_on_a_straight_line(script):
    xs, ys = np.cumsum(RANDOM.integers(1, 9, 50)).tolist(), np.cumsum(RANDOM.integers(1, 99, 50)).tolist()
    places = RANDOM.uniform(xs[0] - 5, xs[-1] + 5, 200).tolist()
    drawn = results(script, f"x => interpolated({xs}, {ys}, x)", places)
    assert drawn == pytest.approx(np.interp(places, xs, ys).tolist())


@pytest.mark.browser
@pytest.mark.parametrize(
    "write", [format_duration, format_flops, format_rate, format_share, format_bytes, str, "{:,.2f}".format]
)
def test_cells_sort_as_the_numbers_that_they_were_written_of(script, write):
    values = sizes(-3, 6, 300) if write is not format_bytes else sizes(0, 12, 300)
    cells = [write(value) for value in values]
    numbers = results(script, "magnitude", cells)
    assert all(math.isfinite(number) for number in numbers)
    in_order = [values[place] for place in np.argsort(numbers, kind="stable")]
    assert [write(value) for value in in_order] == [write(value) for value in sorted(values)]
    assert all(results(script, "cell => Number.isNaN(magnitude(cell))", ["a", "step 3", "", "-", "3 apples"]))


COLUMN = "[...document.querySelectorAll('tbody tr')].map(row => row.cells[0].textContent)"


@pytest.mark.browser
def test_a_heading_that_is_pressed_sorts_its_table_and_a_third_time_restores_it(script):
    came = script.value(COLUMN)
    press = "document.querySelectorAll('th button')[%d].click()"
    sort = "[...document.querySelectorAll('th')].map(heading => heading.getAttribute('aria-sort'))"
    orders = []
    for _ in range(3):
        script.value(press % 1)
        orders.append(script.value(COLUMN))
    assert orders == [["b 10", "b 9", "c", "a"], ["c", "b 9", "b 10", "a"], came]  # numbers from the largest
    script.value(press % 0)
    assert script.value(COLUMN) == ["a", "b 9", "b 10", "c"]  # words from the first, numbers in them by size
    assert script.value(sort) == ["ascending", None, None]
