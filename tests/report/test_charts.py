import re
from xml.etree import ElementTree

import numpy as np
import pytest

from headway.report.charts import DrawnLine, bar_chart, heat_strip, histogram, line_chart, lines_chart, reduced, ticks

SPACE = "{http://www.w3.org/2000/svg}"
HOSTILE = '<script>alert(1)</script>"><img onerror=x> ]]> </style> \x1b[2J'


def plain(value):
    return f"{value:.3g}"


def drawn(kind, name="loss"):
    if kind == "line":
        return line_chart(name, [1, 2, 3], [1.0, None, 3.0], form=plain)
    if kind == "bar":
        return bar_chart(name, [(name, 2.0), ("b", 1.0)], form=plain)
    if kind == "stacked":
        return bar_chart(name, [(name, 2.0), ("b", 1.0)], form=plain, stacked=True)
    if kind == "histogram":
        return histogram(name, [1.0, 2.0, 2.0], form=plain)
    return heat_strip(name, [(name, [1.0, None, 2.0]), ("b", [3.0, 4.0, 5.0])], form=plain)


KINDS = ["line", "bar", "stacked", "histogram", "heat"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_chart_is_svg_with_title_description_and_box(kind):
    root = ElementTree.fromstring(drawn(kind))
    assert root.get("role") == "img"
    assert root.get("viewBox").startswith("0 0 640 ")
    assert root.find(f"{SPACE}title").text == "loss"
    assert root.find(f"{SPACE}desc").text
    assert drawn(kind) == drawn(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_names_stay_text(kind):
    root = ElementTree.fromstring(drawn(kind, HOSTILE))
    allowed = {"svg", "title", "desc", "text", "line", "polyline", "circle", "rect", "polygon", "path", "g"}
    assert {one.tag.removeprefix(SPACE) for one in root.iter()} <= allowed
    assert root.find(f"{SPACE}title").text == HOSTILE.replace("\x1b", "\\x1b")


def test_a_long_series_keeps_the_smallest_and_the_largest_of_each_bucket():
    values = np.sin(np.arange(100_000) / 500.0)
    values[77_777], values[12_345] = 9.0, -9.0
    points = reduced(np.arange(100_000.0), values)
    assert len(points) <= 400
    assert {(77_777.0, 9.0), (12_345.0, -9.0)} <= {*points}
    assert points == sorted(points)
    chart = line_chart("loss", range(100_000), values, form=plain)
    assert len(chart) < 20_000
    assert "<polygon" in chart  # the band


def test_lines_share_an_axis_and_tell_their_points():
    drawn = lines_chart("x", [DrawnLine("A", [0, 10], [1.0, 2.0]), DrawnLine("B", [5, 20], [4.0, None])], form=plain)
    told = re.findall(
        r'data-name="(.)" data-of="step" data-unit="1" data-x="(.*?)" data-v="(.*?)" data-from="0"', drawn
    )
    assert told == [("A", "0 10", "1|2"), ("B", "5", "4")]
    costs = lines_chart("x", [DrawnLine("A", [0.5, 0.75, 1.25], [1.0, 2.0, 3.0])], form=plain)
    unit, steps = re.search(r'data-unit="(.*?)" data-x="(.*?)"', costs).groups()
    assert [float(unit) * one for one in np.cumsum([int(more) for more in steps.split()])] == pytest.approx(
        [0.5, 0.75, 1.25]
    )


def test_a_fall_to_a_hundredth_has_equal_room_for_equal_ratios():
    def heights(chart):
        points = re.findall(r'points="(.*?)" fill="none"', chart)[0].split()
        return [float(point.split(",")[1]) for point in points]

    drawn = lines_chart("loss", [DrawnLine("", [1, 2, 3], [10.0, 1.0, 0.1])], form=plain, by_ratio=True)
    top, middle, bottom = heights(drawn)
    assert middle - top == pytest.approx(bottom - middle, abs=0.2)
    assert "logarithmic" in drawn
    for values in ([3.0, 2.0, 1.0], [10.0, 0.1, 0.0], [10.0, 0.1, -1.0]):  # few, and those that have no logarithm
        linear = lines_chart("loss", [DrawnLine("", [1, 2, 3], values)], form=plain, by_ratio=True)
        assert "logarithmic" not in linear
        assert linear == lines_chart("loss", [DrawnLine("", [1, 2, 3], values)], form=plain)


def test_a_narrow_window_has_a_bars_name_and_value_in_sight():
    chart = bar_chart("x", [("a name that is as long as names of bars may be", 1.0), ("b", 2.0)], form=plain)
    ends = [float(x) for x in re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="end">', chart)]
    assert len(ends) == 4
    # a page of 390 pixels has 358 within its margins, of a chart that is drawn at 34 rem, 544 pixels, of 640
    assert max(ends) * 544 / 640 < 358
    assert 'text-anchor="start"' not in chart


def test_a_gap_parts_the_line():
    assert line_chart("loss", [1, 2, 3, 4, 5], [1.0, 2.0, None, 3.0, 4.0], form=plain).count("<polyline") == 2
    assert drawn("line").count("<circle") == 2  # a point alone


def test_a_mark_stands_at_its_step_and_one_outside_nowhere():
    drawn = line_chart("x", [0, 10], [1.0, 2.0], form=str, marks=[5, 11])
    (place,) = re.findall(r'<line x1="([0-9.]+)" x2="\1" y1="[0-9]+" y2="[0-9]+" stroke="var\(--c2\)"', drawn)
    ends = re.search(r'points="([0-9.]+),[0-9.]+ ([0-9.]+),', drawn)
    assert float(place) == (float(ends[1]) + float(ends[2])) / 2


def test_cells_of_one_shade_are_drawn_as_one():
    drawn = heat_strip("x", [("a", [1.0, 1.0, None, 3.0])], form=plain)
    cells = re.findall(r'<path d="M([0-9.]+) 11h([0-9.]+)" stroke-opacity="([0-9.]+)"', drawn)
    (first, of_two, light), (last, of_one, full) = [[float(one) for one in cell] for cell in cells]
    assert of_two == 2 * of_one
    assert last == first + 3 * of_one
    assert (light, full) == (0.12, 1.0)


def test_stacked_bars_begin_where_the_one_before_ends():
    bars = re.findall(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)"', drawn("stacked"))
    (x, width), (after, _) = ((float(one), float(two)) for one, two in bars)
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


def test_nothing_to_draw_is_an_error():
    with pytest.raises(ValueError, match="make no line"):
        line_chart("loss", [1], [None], form=plain)
    with pytest.raises(ValueError, match="from 0 on"):
        bar_chart("bars", [("a", -1.0)], form=plain)
    with pytest.raises(ValueError, match="finite value"):
        histogram("times", [float("nan")], form=plain)
    with pytest.raises(ValueError, match="finite value"):
        heat_strip("ranks", [("a", [None])], form=plain)


@pytest.mark.parametrize("last", [9, 150, 1500, 15_000, 150_000, 1_500_000, 1234])
def test_no_tick_is_cut_at_the_edge(last):
    chart = line_chart("loss", [1, last // 2, last], [1.0, 0.5, 0.25], form=plain)
    ticks = re.findall(r'<text x="([\d.]+)" y="\d+" text-anchor="middle">([\d,]+)</text>', chart)
    assert ticks
    assert all(float(x) + 3.75 * len(said) <= 641 for x, said in ticks)
