import re

import pytest

from headway.audit.rows import Log, LogRow, near
from headway.audit.waterfalls import explain_log
from headway.errors import ConfigError
from headway.explain.text import as_text


def row(step, **numbers):
    stamp = {"stamp_s": numbers.pop("stamp_s")} if "stamp_s" in numbers else {}
    return LogRow(step, **stamp, **{name: near(value, 1e-9) for name, value in numbers.items()})


def logged(rows, **wanted):
    return explain_log(Log("a tool", (), tuple(rows)), "train.log", **wanted)


def lines(waterfall):
    return {line.key: line.ns for line in waterfall.lines}


def test_the_printed_mfu_is_the_needed_work_and_the_rest_is_one_line():
    found = logged([row(1, step_s=2.0, mfu=0.25), row(2, step_s=3.0, mfu=0.2)])
    assert [lines(one) for one in found.steps] == [
        {"useful": 500_000_000, "unseparated": 1_500_000_000},
        {"useful": 600_000_000, "unseparated": 2_400_000_000},
    ]
    assert any("`headway audit` recomputes useful work" in note for note in found.notes)


def test_a_log_that_tells_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"no line that tells a step's time, its rate or its loss"):
        logged([])


def test_a_step_is_the_time_between_stamps_and_the_first_has_the_tokens_of_the_others():
    # 10 s apart at 100 tokens/s: 1,000 tokens a step; the first one at 50 tokens/s took 20 s
    stamped = [row(n, stamp_s=10.0 * n, mfu=0.3, tokens_per_s=100.0 if n > 1 else 50.0) for n in range(1, 5)]
    found = logged(stamped)
    assert [one.duration_ns for one in found.steps] == [20 * 10**9, 10**10, 10**10, 10**10]
    # lines of every tenth step
    found = logged([row(10 * n, stamp_s=10.0 * n, mfu=0.3) for n in range(1, 5)])
    assert [(one.step, one.duration_ns) for one in found.steps] == [(20, 10**9), (30, 10**9), (40, 10**9)]
    assert any("1 of 4 lines do not tell how long" in note for note in found.notes)


@pytest.mark.parametrize("of", ["mfu", "flops_per_s", "tokens_per_s"])
def test_without_a_time_none_is_invented_and_steps_stand_beside_each_other_by_their_rates(of):
    """A quarter of the rate is four times as long, if steps have equal work; the text has no time and JSON none."""
    rates = [0.1, *[0.4] * 6]
    found = logged([row(n, **({"mfu": rate} | {of: rate})) for n, rate in enumerate(rates, start=1)])
    lengths = [step.duration_ns for step in found.steps]
    assert [length / lengths[-1] for length in lengths] == pytest.approx([4.0, *[1.0] * 6])
    record = found.to_dict()
    times = [record["mean"]["duration_ns"], *(step["duration_ns"] for step in record["steps"])]
    assert {*times, *(line["ns"] for step in record["steps"] for line in step["lines"])} == {None}
    assert not found.is_timed
    text = as_text(found)
    assert not re.search(r"\bms\b|[0-9] s\b", text)
    assert "25.0 % of the median" in text
    assert any("do not tell how long a step takes" in note for note in found.notes)
    (first,) = [finding for finding in found.findings if finding.id == "first-steps"]
    assert (first.ns, first.share) == (0, pytest.approx(3 / 10))
    assert "took 4.0 times as long as the others" in first.seen


def test_without_an_mfu_nothing_is_known_of_the_needed_work():
    found = logged([row(7, step_s=1.5, flops_per_s=1e14)])
    assert (found.steps[0].mfu, lines(found.steps[0])) == (None, {"unseparated": 1_500_000_000})
    assert any("`headway audit` computes useful work" in note for note in found.notes)


def test_a_step_that_the_log_does_not_have_is_an_error():
    with pytest.raises(ConfigError, match=r"step=9: train\.log has no line .* Its steps are 7 to 7"):
        logged([row(7, step_s=1.5)], step=9)
    with pytest.raises(ConfigError, match=r"rank=1: a line of train\.log stands for the whole job"):
        logged([row(7, step_s=1.5)], rank=1)
