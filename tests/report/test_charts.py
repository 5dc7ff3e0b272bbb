import re
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.report.charts import (
    FORMS,
    ChartMark,
    DrawnLine,
    _smoothed,
    histogram,
    lines_chart,
    reduced,
)
from headway.report.page import svg_file
from headway.report.svg import AXES, NARROWEST, distinct_ticks, label_extent, labels, name_room, ticks

SPACE = "{http://www.w3.org/2000/svg}"
HOSTILE = '<script>alert(1)</script>"><img onerror=x> ]]> </style> \x1b[2J'


def line_chart(title, steps, values, **options):
    return lines_chart(title, [DrawnLine("", steps, values)], **options)


def plain(value):
    return f"{value:.3g}"


def drawn(kind, name="loss"):
    if kind == "line":
        dots = [DrawnLine(name, [1, 2], [1.0, 2.0])]
        marks = [ChartMark(2, name), ChartMark(1)]
        return line_chart(name, [1, 2, 3], [1.0, None, 3.0], form="plain", marks=marks, dots=dots, x_name=name)
    if kind == "lines":
        return lines_chart(
            name, [DrawnLine(name, [1, 2], [1.0, 2.0]), DrawnLine("b", [1, 3], [1.0, 2.0])], form="share"
        )
    return histogram(name, [1.0, 2.0, 2.0], form=plain)


KINDS = ["line", "lines", "histogram"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_chart_is_svg_with_title_and_description_and_takes_the_width_that_it_is_given(kind):
    root = ElementTree.fromstring(drawn(kind))
    assert root.get("role") == "img"
    assert root.get("width") == "100%"
    assert root.get("viewBox") is None
    assert root.find(f"{SPACE}title").text == "loss"
    assert root.find(f"{SPACE}desc").text
    assert drawn(kind) == drawn(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_names_stay_text(kind):
    root = ElementTree.fromstring(drawn(kind, HOSTILE))
    allowed = {"svg", "title", "desc", "text", "line", "rect", "path", "g"}
    assert {element.tag.removeprefix(SPACE) for element in root.iter()} <= allowed
    assert root.find(f"{SPACE}title").text == HOSTILE.replace("\x1b", "\\x1b")


def test_charts_in_a_file_have_their_margins_without_a_style_sheet_of_the_page():
    root = ElementTree.fromstring(svg_file({kind: drawn(kind) for kind in KINDS}))
    places = [(float(part.get("x")), float(part.get("y")), part.get("width")) for part in root.findall(f"{SPACE}svg")]
    assert [x for x, *_ in places] == [58, 58, 58]
    assert [width for *_, width in places] == ["572", "572", "572"]
    assert all(before < after for (_, before, _), (_, after, _) in pairwise(places))
    assert float(root.get("height")) > places[-1][1]


def test_a_long_series_keeps_the_smallest_and_the_largest_of_each_bucket():
    values = np.sin(np.arange(100_000) / 500.0)
    values[77_777], values[12_345] = 9.0, -9.0
    points = reduced(np.arange(100_000.0), values)
    assert len(points) <= 300
    assert {(77_777.0, 9.0), (12_345.0, -9.0)} <= {*points}
    assert points == sorted(points)
    chart = line_chart("loss", range(100_000), values, form="plain", is_noisy=True)
    assert len(chart) < 20_000


def curve(chart, kind, place=0):
    """Places of a curve, in thousandths of the plot and tenths of a pixel from its top; None for a gap."""
    path = re.findall(rf'<path class="{kind}" stroke[^>]* d="(.*?)"', chart)[place]
    places, at = [], np.zeros(2, int)
    for begin, x, y in re.findall(r"([Ml])(-?\d+) (-?\d+)", path):
        at = np.array([int(x), int(y)]) + (at if begin == "l" else 0)
        places += [None, tuple(at)] if begin == "M" and places else [tuple(at)]
    return places


def test_a_curve_stands_where_its_values_are():
    chart = line_chart("x", [0, 5, 10], [0.0, 0.5, 0.25], form="share")
    assert curve(chart, "line") == [(0, 1500), (500, 250), (1000, 875)]  # of an axis from 0 to 60 %
    assert ">60 %</text>" in chart


def test_lines_share_an_axis_and_the_second_has_another_colour_and_both_their_names():
    chart = lines_chart("x", [DrawnLine("A", [0, 10], [0.0, 2.0]), DrawnLine("B", [5, 20], [2.0, 1.0])], form="count")
    assert curve(chart, "line") == [(0, 1500), (500, 0)]
    assert curve(chart, "line", 1) == [(250, 0), (1000, 750)]
    assert re.findall(r'fill="var\((.*?)\)"/><text x="100%" y="-5" [^>]*>(\w)<', chart) == [("--b", "B"), ("--a", "A")]


def test_a_noisy_line_is_smoothed_over_its_values_and_an_outlier_does_not_squash_it():
    values = np.random.default_rng(0).normal(10, 1, size=4000)
    values[1234] = 1000.0
    chart = line_chart("x", range(4000), values, form="duration", is_noisy=True)
    raw, smooth = (np.array([y for _, y in curve(chart, kind)]) for kind in ("faint", "line"))
    assert smooth.std() < raw.std() / 5
    assert raw.min() < 0  # outside of the plot, where it is cut
    assert "1000.00 s" not in chart.partition("<desc>")[0] + chart.partition("</desc>")[2]
    assert "16 min 40 s" in chart  # said in words
    few = line_chart("x", range(39), values[:39], form="plain", is_noisy=True)
    assert "faint" not in few


@given(st.lists(st.one_of(st.none(), st.floats(0.1, 10)), min_size=40, max_size=200).filter(any))
def test_a_smoothed_value_is_between_the_values_around_it(values):
    numbers = np.array([np.nan if value is None else value for value in values])
    smooth = _smoothed(numbers)
    finite = numbers[np.isfinite(numbers)]
    assert np.nanmin(smooth) >= finite.min() - 1e-9
    assert np.nanmax(smooth) <= finite.max() + 1e-9
    assert np.isfinite(smooth[np.isfinite(numbers)]).all()


def test_the_values_under_the_pointer_are_means_of_buckets_in_words():
    chart = line_chart("x", [1, 2, 4], [0.5, None, 0.25], form="share")
    assert 'data-at="0 1000" data-steps="1|4" data-values="50.0 %|25.0 %"' in chart
    values = np.arange(8000.0)
    told = re.search(r'data-steps="(.*?)" data-values="(.*?)"', line_chart("x", values, values, form="count"))
    assert told[1].split("|")[:2] == ["0 to 99", "100 to 199"]
    assert told[2].split("|")[:2] == ["50", "150"]


def test_a_fall_to_a_hundredth_has_equal_room_for_equal_ratios():
    drawn = line_chart("loss", [1, 2, 3], [10.0, 1.0, 0.1], form="plain", by_ratio=True)
    (_, top), (_, middle), (_, bottom) = curve(drawn, "line")
    assert middle - top == pytest.approx(bottom - middle, abs=20)  # the axis ends at the usual values
    for values in ([3.0, 2.0, 1.0], [10.0, 0.1, 0.0], [10.0, 0.1, -1.0]):  # few, and those that have no logarithm
        by_ratio, linear = (line_chart("loss", [1, 2, 3], values, form="plain", by_ratio=asked) for asked in (1, 0))
        assert by_ratio == linear


def test_a_gap_parts_the_line():
    assert curve(line_chart("x", [1, 2, 3, 4], [1.0, 2.0, None, 3.0], form="plain"), "line").count(None) == 1


def test_dots_stand_above_the_line_and_are_not_cut():
    dots = [DrawnLine("held out", [4, 10], [1.5, 1.0])]
    chart = line_chart("x", [0, 10], [1.0, 2.0], form="plain", dots=dots)
    assert [place for place in curve(chart, "ring") if place] == [(400, 750), (1000, 1500)]
    assert chart.index('class="line"') < chart.index('class="curves dots"') < chart.index('class="ring')
    assert "held out: 2 values over step 4 to 10, from 1 to 1.5." in chart


def test_marks_stand_at_their_steps_and_are_said_and_those_outside_are_not():
    marks = [ChartMark(5, "restart"), ChartMark(11, "restart"), ChartMark(2, "stage 2"), ChartMark(9, "stage 3")]
    chart = line_chart("x", [0, 10], [1.0, 2.0], form="plain", marks=marks)
    assert re.findall(r'<line class="mark" x1="([\d.]+)%" x2="\1%" y2="150"/>', chart) == ["20", "50", "90"]
    assert re.findall(r'x="(\d+)%" y="-5" text-anchor="(\w+)">(.*?)<', chart) == [
        ("20", "start", "stage 2"), ("50", "start", "restart"),  # a third has no room on a narrow screen
    ]  # fmt: skip
    described = ElementTree.fromstring(chart).find(f"{SPACE}desc").text
    assert described.endswith("Marked: restart at 5, stage 2 at 2, stage 3 at 9.")


@given(st.lists(st.floats(0, 1000), min_size=2, max_size=30, unique=True).map(sorted), st.floats(NARROWEST, 2000))
def test_names_of_stages_do_not_run_into_each_other_at_any_width(steps, width):
    marks = [ChartMark(step, f"stage {number}") for number, step in enumerate(steps, 2)]
    chart = line_chart("x", [0, 1000], [1.0, 2.0], form="plain", marks=marks)
    names = [(float(x) / 100, name) for x, name in re.findall(r'x="([\d.]+)%" y="-5"[^>]*>(.*?)<', chart)]
    rooms = [name_room(place, name, width) for place, name in names]
    assert names
    assert all(
        before[1] <= after[0] + 3 for before, after in pairwise(rooms)
    )  # places are told to a tenth of a per cent
    assert len(re.findall('<line class="mark"', chart)) == len(steps)


def test_of_a_thousand_marks_some_are_drawn_and_all_are_counted():
    marks = [ChartMark(n, "restart") for n in range(1000)]
    chart = line_chart("x", [0, 1000], [1.0, 2.0], form="plain", marks=marks)
    assert 50 <= chart.count('<line class="mark"') <= 100
    assert "restart at 7 and 992 more." in chart


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (3, 47, [10, 20, 30, 40]), (2, 2, [2]), (-1, 1, [-1, -0.5, 0, 0.5, 1])],
)
def test_ticks_are_round(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_a_small_range_far_from_zero_has_ticks_within_it():
    assert ticks(1.0000001, 1.0000002) == pytest.approx([1 + n * 1e-8 for n in (10, 12, 14, 16, 18, 20)], abs=1e-12)


ENDS = st.tuples(st.integers(0, 10**7), st.integers(1, 10**7)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(ENDS, st.floats(NARROWEST, 2000))
def test_labels_of_ticks_neither_overlap_nor_are_cut_at_any_width(ends, width):
    placed = labels(*ends, lambda step: f"{step:,.10g}")
    assert placed
    rooms = [label_extent(place, label, width) for place, label in placed]
    assert all(before[1] < after[0] for before, after in pairwise(rooms))
    assert -AXES.left <= rooms[0][0]
    assert rooms[-1][1] <= width + AXES.right + 1e-6


@given(st.floats(-1e3, 1e3), st.floats(1e-9, 1e3), st.sampled_from([*FORMS]))
def test_ticks_of_values_read_differently(low, span, form):
    marks = distinct_ticks(low, low + span, FORMS[form])
    assert marks == sorted(marks)
    assert len({FORMS[form](tick) for tick in marks}) == len(marks) > 0


def test_nothing_to_draw_is_an_error():
    with pytest.raises(ValueError, match="make no line"):
        line_chart("loss", [1], [None], form="plain")
    with pytest.raises(ValueError, match="finite value"):
        histogram("times", [float("nan")], form=plain)
