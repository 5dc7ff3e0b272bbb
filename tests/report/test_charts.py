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
    bar_chart,
    heat_strip,
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
        marks = [ChartMark(2, "stage", name), ChartMark(3, "evaluation"), ChartMark(1, "restart")]
        return line_chart(name, [1, 2, 3], [1.0, None, 3.0], form="plain", marks=marks)
    if kind == "lines":
        return lines_chart(
            name, [DrawnLine(name, [1, 2], [1.0, 2.0]), DrawnLine("b", [1, 3], [1.0, 2.0])], form="share"
        )
    if kind == "bar":
        return bar_chart(name, [(name, 2.0), ("b", 1.0)], form=plain)
    if kind == "stacked":
        return bar_chart(name, [(name, 2.0), ("b", 1.0)], form=plain, stacked=True)
    if kind == "histogram":
        return histogram(name, [1.0, 2.0, 2.0], form=plain)
    return heat_strip(name, [(name, [1.0, None, 2.0]), ("b", [3.0, 4.0, 5.0])], form=plain)


KINDS = ["line", "lines", "bar", "stacked", "histogram", "heat"]


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
    allowed = {"svg", "title", "desc", "text", "line", "polyline", "rect", "polygon", "path", "g"}
    assert {element.tag.removeprefix(SPACE) for element in root.iter()} <= allowed
    assert root.find(f"{SPACE}title").text == HOSTILE.replace("\x1b", "\\x1b")


def test_charts_in_a_file_have_their_margins_without_a_style_sheet_of_the_page():
    root = ElementTree.fromstring(svg_file({kind: drawn(kind) for kind in KINDS}))
    places = [(float(part.get("x")), float(part.get("y")), part.get("width")) for part in root.findall(f"{SPACE}svg")]
    assert [x for x, *_ in places] == [84, 84, 0, 0, 84, 112]
    assert [width for *_, width in places] == ["544", "544", "640", "640", "544", "528"]
    assert all(before < after for (_, before, _), (_, after, _) in pairwise(places))
    assert float(root.get("height")) > places[-1][1]


def test_a_long_series_keeps_the_smallest_and_the_largest_of_each_bucket():
    values = np.sin(np.arange(100_000) / 500.0)
    values[77_777], values[12_345] = 9.0, -9.0
    points = reduced(np.arange(100_000.0), values)
    assert len(points) <= 400
    assert {(77_777.0, 9.0), (12_345.0, -9.0)} <= {*points}
    assert points == sorted(points)
    chart = line_chart("loss", range(100_000), values, form="plain")
    assert len(chart) < 20_000
    assert "<polygon" in chart  # the band


def numbers_of(text):
    """Names, places and values of a chart's lines, as its script reads them."""
    lines = []
    for name, unit, xs, ys in re.findall(
        r'data-name="(.*?)" data-unit="(.*?)" data-x="(.*?)" data-y="(.*?)"(?: data-mean-x|>)', text
    ):
        places = [float(unit) * place for place in np.cumsum([int(more) for more in xs.split()])]
        lines.append((name, places, [float("nan") if y == "-" else float(y) for y in ys.split()]))
    return lines


def test_lines_share_an_axis_and_tell_their_points():
    chart = lines_chart("x", [DrawnLine("A", [0, 10], [1.0, 2.0]), DrawnLine("B", [5, 20], [4.0, None])], form="plain")
    (a, b) = numbers_of(chart)
    assert a == ("A", [0, 10], [1, 2])
    assert b[:2] == ("B", [5, 20])
    assert b[2] == pytest.approx([4.0, float("nan")], nan_ok=True)
    costs = lines_chart("x", [DrawnLine("A", [0.5, 0.75, 1.25], [1.0, 2.0, 3.0])], form="plain")
    assert numbers_of(costs)[0][1] == pytest.approx([0.5, 0.75, 1.25])


def test_a_long_series_tells_the_mean_of_each_bucket_which_smoothing_reads():
    values = np.random.default_rng(0).normal(size=10_000)
    chart = lines_chart("x", [DrawnLine("", np.arange(10_000), values)], form="plain", detail=100)
    assert len(numbers_of(chart)[0][1]) == 200
    means = re.search(r'data-mean-y="(.*?)"', chart)[1].split()
    assert [float(mean) for mean in means] == pytest.approx(values.reshape(100, 100).mean(axis=1), rel=1e-4)
    assert "data-mean" not in lines_chart("x", [DrawnLine("", [1, 2], [1.0, 2.0])], form="plain")


def heights(chart):
    """Heights of a chart's first line, from the top."""
    return [float(point.split(",")[1]) for point in re.findall(r'<polyline points="(.*?)"', chart)[0].split()]


def test_a_fall_to_a_hundredth_has_equal_room_for_equal_ratios():
    drawn = lines_chart("loss", [DrawnLine("", [1, 2, 3], [10.0, 1.0, 0.1])], form="plain", by_ratio=True)
    top, middle, bottom = heights(drawn)
    assert middle - top == pytest.approx(bottom - middle, abs=0.2)
    assert "logarithmic" in drawn
    for values in ([3.0, 2.0, 1.0], [10.0, 0.1, 0.0], [10.0, 0.1, -1.0]):  # few, and those that have no logarithm
        by_ratio, linear = (
            lines_chart("loss", [DrawnLine("", [1, 2, 3], values)], form="plain", by_ratio=asked) for asked in (1, 0)
        )
        assert "logarithmic" not in by_ratio
        assert heights(by_ratio) == heights(linear)


def test_value_and_name_of_a_bar_stand_above_it_where_a_narrow_window_begins():
    chart = bar_chart("x", [("a name that is as long as names of bars may be", 1.0), ("b", 2.0)], form=plain)
    rows = re.findall(r'<text x="(\d+)" y="([\d.]+)" text-anchor="(\w+)">(.*?)</text>', chart)
    assert [(x, anchor) for x, _, anchor, _ in rows] == [("80", "end"), ("88", "start")] * 2
    tops = [float(y) for y in re.findall(r'<rect [^>]*y="(\d+)"', chart)]
    assert all(float(y) < top < float(y) + 10 for (_, y, *_), top in zip(rows[::2], tops, strict=True))
    # a page of 375 pixels has 340 within its margins; letters of 12 pixels are 7 wide at most
    assert max(int(x) + 7 * len(name) for x, _, anchor, name in rows if anchor == "start") < 340


def test_a_gap_parts_the_line():
    assert line_chart("loss", [1, 2, 3, 4, 5], [1.0, 2.0, None, 3.0, 4.0], form="plain").count("<polyline") == 2
    assert line_chart("loss", [1, 2, 3], [1.0, None, 3.0], form="plain").count('class="dot"') == 2  # points alone


def test_marks_stand_at_their_steps_and_are_said_and_those_outside_are_not():
    marks = [
        ChartMark(5, "restart"),
        ChartMark(11, "restart"),
        ChartMark(2, "stage", "stage 2"),
        ChartMark(9, "stage", "stage 3"),
    ]
    marks += [ChartMark(4, "evaluation"), ChartMark(8, "evaluation")]
    chart = line_chart("x", [0, 10], [1.0, 2.0], form="plain", marks=marks)
    lines = re.findall(r'<line class="(\w+)" x1="([\d.]+)%" x2="\2%" y2="(\d+)"/>', chart)
    assert lines == [("restart", "50", "168"), ("stage", "20", "168"), ("stage", "90", "168"),
                     ("evaluation", "40", "7"), ("evaluation", "80", "7")]  # fmt: skip
    assert re.findall(r'x="(\d+)%" y="-5" text-anchor="(\w+)">(.*?)<', chart) == [
        ("20", "start", "stage 2"), ("90", "end", "stage 3"),  # within the chart on both sides
    ]  # fmt: skip
    described = ElementTree.fromstring(chart).find(f"{SPACE}desc").text
    assert described.endswith(
        "Went on after step 5. Stages of the data begin with steps 2 (stage 2), 9 (stage 3). Evaluations after steps "
        "4, 8."
    )


@given(st.lists(st.floats(0, 1000), min_size=2, max_size=30, unique=True).map(sorted), st.floats(NARROWEST, 2000))
def test_names_of_stages_do_not_run_into_each_other_at_any_width(steps, width):
    marks = [ChartMark(step, "stage", f"stage {number}") for number, step in enumerate(steps, 2)]
    chart = line_chart("x", [0, 1000], [1.0, 2.0], form="plain", marks=marks)
    names = [(float(x) / 100, name) for x, name in re.findall(r'x="([\d.]+)%" y="-5"[^>]*>(.*?)<', chart)]
    rooms = [name_room(place, name, width) for place, name in names]
    assert names
    assert all(
        before[1] <= after[0] + 3 for before, after in pairwise(rooms)
    )  # places are told to a tenth of a per cent
    assert len(re.findall('<line class="stage"', chart)) == len(steps)


def test_of_a_thousand_evaluations_some_are_drawn_and_all_are_counted():
    chart = line_chart(
        "x", [0, 1000], [1.0, 2.0], form="plain", marks=[ChartMark(n, "evaluation") for n in range(1000)]
    )
    assert 50 <= chart.count('<line class="evaluation"') <= 100
    assert "Evaluations after steps 0, 1, 2, 3, 4, 5, 6, 7 and 992 more." in chart


def test_cells_of_one_shade_are_drawn_as_one():
    drawn = heat_strip("x", [("a", [1.0, 1.0, None, 3.0])], form=plain)
    cells = re.findall(r'<path d="M([0-9.]+) 11h([0-9.]+)" stroke-opacity="([0-9.]+)"', drawn)
    (first, of_two, light), (last, of_one, full) = [[float(number) for number in cell] for cell in cells]
    assert of_two == 2 * of_one
    assert last == first + 3 * of_one
    assert (light, full) == (0.12, 1.0)


def test_stacked_bars_begin_where_the_one_before_ends():
    bars = re.findall(r'<rect x="([\d.]+)%" y="\d+" width="([\d.]+)%"', drawn("stacked"))
    (x, width), (after, _) = ((float(place), float(length)) for place, length in bars)
    assert after == pytest.approx(x + width, abs=0.1)


def test_bars_of_a_kind_have_its_colour():
    chart = bar_chart("x", [("a", 1.0), ("b", 2.0), ("c", 3.0)], form=plain, kinds=[0, 1, 0])
    first, other, again = re.findall(r'<rect [^>]*fill="var\((--c\d)\)"', chart)
    assert first == again != other


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
    with pytest.raises(ValueError, match="from 0 on"):
        bar_chart("bars", [("a", -1.0)], form=plain)
    with pytest.raises(ValueError, match="finite value"):
        histogram("times", [float("nan")], form=plain)
    with pytest.raises(ValueError, match="finite value"):
        heat_strip("ranks", [("a", [None])], form=plain)
