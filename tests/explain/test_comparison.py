import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.explain.comparison import compare, comparison_text
from headway.explain.explanation import JobExplanation, unprofiled_waterfall
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from helpers.traces import US, sidecar, two_kernels_a_step

MS = 10**6


def job(*steps, notes=()):
    """Steps made of their lines: {key: ns}, which are all told but the rest."""
    return JobExplanation(
        tuple(
            unprofiled_waterfall(number, duration_ns, [(key, key, ns, {}) for key, ns in told.items()], "a device")
            for number, (duration_ns, told) in enumerate(steps, start=1)
        ),
        notes,
    )


def test_each_line_is_compared_by_its_mean_and_the_differences_add_up():
    a = job(
        (100 * MS, {"useful": 30 * MS, "idle.data": 40 * MS}), (110 * MS, {"useful": 30 * MS, "idle.data": 50 * MS})
    )
    b = job((80 * MS, {"useful": 30 * MS, "recomputation": 8 * MS, "idle.data": 5 * MS}))
    compared = compare(("a", a), ("b", b))
    assert [(line.key, line.a_ns, line.b_ns) for line in compared.lines] == [
        ("useful", 30 * MS, 30 * MS),
        ("recomputation", 0, 8 * MS),
        ("idle.data", 45 * MS, 5 * MS),
        ("unseparated", 30 * MS, 37 * MS),
    ]
    assert compared.ns == sum(line.ns for line in compared.lines) == -25 * MS
    assert (compared.a.mean.mfu, compared.b.mean.mfu) == (pytest.approx(60 / 210), pytest.approx(30 / 80))


@given(
    st.lists(
        st.tuples(st.integers(1, 10**12), st.dictionaries(st.sampled_from("abcdef"), st.integers(-(10**9), 10**12))),
        min_size=1,
        max_size=7,
    ),
    st.lists(
        st.tuples(st.integers(1, 10**12), st.dictionaries(st.sampled_from("defghi"), st.integers(-(10**9), 10**12))),
        min_size=1,
        max_size=7,
    ),
)
def test_means_are_whole_nanoseconds_that_add_up(first, second):
    compared = compare(("a", job(*first)), ("b", job(*second)))
    assert sum(line.a_ns for line in compared.lines) == compared.a.mean.duration_ns
    assert sum(line.b_ns for line in compared.lines) == compared.b.mean.duration_ns
    assert sum(line.ns for line in compared.lines) == compared.ns
    if len(first) < 4:  # so that no first step is left out
        assert compared.a.mean.duration_ns == sum(duration for duration, _ in first) // len(first)


def test_slow_first_steps_are_left_out_and_named():
    compared = compare(("a", job(*[(900 * MS, {})], *[(100 * MS, {})] * 5)), ("b", job((100 * MS, {}))))
    assert (compared.a.mean.left_out, compared.a.mean.num_steps, compared.ns) == ((1,), 5, 0)
    assert "A: step 1 at the beginning took over twice the median and is left out." in compared.notes


def test_a_note_of_both_is_said_once():
    compared = compare(("a", job((MS, {}), notes=("both", "of a"))), ("b", job((MS, {}), notes=("both",))))
    assert compared.notes == ("both", "A: of a")


def test_a_profile_and_records_have_their_rest_in_different_lines(tmp_path):
    traced = explain([read_trace(two_kernels_a_step(5).write(tmp_path / "t.json"))])
    compared = compare(("t", traced), ("r", job((100 * US, {"idle.data": 10 * US}))))
    assert compared.notes[0] == "one of the two has no profile: what it cannot separate stands in one line."
    assert sum(line.ns for line in compared.lines) == compared.ns == 0


def test_a_comparison_reads_at_80_columns(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    kept = sidecar()
    faster = sidecar(ceiling_flops_per_s=1e9)
    a, b = (
        explain([read_trace(two_kernels_a_step(5).write(tmp_path / name, headway=facts))])
        for name, facts in (("a.json", kept), ("b.json", faster))
    )
    text = comparison_text(compare(("a.json", a), ("b.json", b)))
    assert max(map(len, text.splitlines())) <= 80
    assert "ceiling loss" in text
    assert "slow: mlp" in text
    assert "A step of B takes as long as one of A, within 0.5 %. MFU 30.0 % -> 30.0 %." in text


def test_what_got_better_and_worse_is_said_in_words():
    a = job((100 * MS, {"useful": 30 * MS, "idle.data": 40 * MS}))
    b = job((80 * MS, {"useful": 30 * MS, "idle.data": 15 * MS}))
    text = comparison_text(compare(("before", a), ("after", b)), markdown=True)
    assert "| idle.data | 40.00 | 15.00 | -25.00 | -25.0 % |\n" in text
    assert text.endswith("| the step | 100.00 | 80.00 | -20.00 | -20.0 % |")
    assert text.index("A step of B") < text.index("| per step |")  # what differs stands before the table
    assert "* A step of B takes 20.00 ms less than one of A (-20.0 %). MFU 30.0 % -> 37.5 %.\n" in text
    assert "* Better: idle.data (-25.00 ms).\n* Kernels and waiting that only a profile tells apart: +5.00 ms." in text


def test_what_is_known_is_named_before_what_only_a_profile_tells():
    a = job((100 * MS, {"useful": 30 * MS, "padding": 0}))
    b = job((130 * MS, {"useful": 30 * MS, "padding": 10 * MS}))
    text = comparison_text(compare(("before", a), ("after", b)), markdown=True)
    assert (
        "* Worse: padding (+10.00 ms).\n* Kernels and waiting that only a profile tells apart: +20.00 ms; what padding"
        in text
    )
    text = comparison_text(compare(("after", b), ("before", a)), markdown=True)
    assert "* Better: padding (-10.00 ms).\n* Kernels and waiting that only a profile tells apart: -20.00 ms." in text
