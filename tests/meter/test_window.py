"""A window is total: whatever its steps were, each of its numbers is a number or not known, and so is what reads it."""

import inspect
import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from headway.cli.app import app
from headway.count import FlopCount, FlopRow
from headway.count.modalities import totals
from headway.devices import Peak
from headway.errors import HeadwayError
from headway.log.jsonl import LineFile
from headway.log.live import LiveSink, shown_fields
from headway.log.sinks import Sinks
from headway.meter import Window
from headway.report import format_rate, format_rounded, format_share
from helpers.runs import read_events

PEAK = Peak("test device", 1e12, "fp32", "made up for a test")
COUNTS = ("tokens", "slots", "segments", "num_batches", "bytes_moved")
TIMES = st.sampled_from([0.0, 1.0, 5e-324, 1e308, math.nan, math.inf])
NUMBERS = st.sampled_from([0, 1, 7, 4096, 10**15, 10**400])  # the last is larger than any float
RATES = st.sampled_from([0.0, 1e12, math.nan, math.inf])


def flops_of(total):
    return FlopCount((FlopRow("language.mlp", "tokens", total, total, total, total),) if total else ())


@st.composite
def windows(draw, smoothed=True):
    """Windows of one to eight ranks: any of them idle, no time, no work, and readings that are no numbers."""
    ranks = draw(st.integers(1, 8))
    each = st.lists(NUMBERS, min_size=ranks, max_size=ranks)
    idle = draw(st.sampled_from([0, ranks // 2 + 1, ranks]))  # none, more than half, all
    works = tuple(0 if rank < idle else work for rank, work in enumerate(draw(each)))
    busy = tuple(draw(st.lists(TIMES, min_size=ranks, max_size=ranks)))
    readings = {
        "world_size": ranks,
        "step": 1,
        "num_steps": draw(st.sampled_from([0, 1, 10])),
        "rank_flops": works,
        "rank_busy_s": busy,
        "rank_busy_flops": works,
        "packing_length": draw(st.sampled_from([None, 0, 64])),
        **{name: draw(TIMES) for name in ("wall_s", "data_wait_s", "left_out_s", "away_s", "energy_j")},
        **{name: draw(RATES) for name in ("ceiling_flops_per_s", "peak_bytes_per_s")},
        **{name: draw(NUMBERS) for name in (*COUNTS, *totals({}))},
    }
    return Window(
        flops_of(draw(NUMBERS)),
        Peak("test device", draw(RATES), "fp32", "made up for a test"),
        readings,
        smoothed=draw(windows(smoothed=False)) if smoothed and draw(st.booleans()) else None,
        extra={"loss": draw(TIMES), "grad_norm": draw(TIMES)},
    )


def is_total(value):
    """Whether JSON has a word for everything in a record."""
    return json.loads(json.dumps(value, allow_nan=False)) == value


@given(windows())
def test_every_number_of_a_window_is_one_or_not_known(window):
    names = [name for name, _ in inspect.getmembers(Window) if not name.startswith("_")]
    for name in names:
        value = getattr(window, name)
        if inspect.isroutine(value):
            value = value()
        known = [value] if isinstance(value, float) else []
        derived = isinstance(getattr(Window, name, None), property)
        derived = derived and name != "peak_flops_per_s"  # a peak is what it was given as
        assert not derived or not any(map(math.isinf, known)), name
    assert {"mfu", "slowest_rank_speed", "to_dict", "warnings", "balance"} <= set(names)
    assert is_total(window.to_dict())


@given(windows())
def test_what_reads_a_record_can_read_every_window(window):
    record = window.to_dict()
    assert all(isinstance(text, str) and "nan" not in text for _, text in shown_fields(record))
    with LiveSink(every=1, console=Console(quiet=True)) as live:
        live.write(record)
    for show in (format_rate, format_rounded, format_share):
        assert show(window.mfu) == "not known" or math.isfinite(window.mfu)


EMPTY = {"wall_s": 0.0, "flops": flops_of(0)} | dict.fromkeys(COUNTS, 0) | totals({})
WINDOWS = {
    "full": {},
    "no time": {"wall_s": 0.0},
    "no work": {"flops": flops_of(0), "rank_flops": (0,) * 3, "rank_busy_flops": (0,) * 3},
    "no tokens": {"tokens": 0, "slots": 0, "num_batches": 0},
    "most ranks idle": {"rank_flops": (300, 0, 0), "rank_busy_flops": (100, 0, 0)},
    "nobody looked": {"rank_busy_s": (0.0,) * 3},
    "nothing at all": EMPTY | {"rank_flops": (0,) * 3, "rank_busy_flops": (0,) * 3, "rank_busy_s": (0.0,) * 3},
    "no peak": {"peak": Peak("unknown", math.nan, "fp32", "unknown")},
    "no energy": {"energy_j": math.nan, "extra": {"loss": math.nan, "lr": math.inf}},
}


def window_of(step, changes):
    full = {"flops": flops_of(300), "wall_s": 0.5, "data_wait_s": 0.1, "peak": PEAK, "energy_j": 5.0,
            "rank_flops": (300, 300, 300), "rank_busy_s": (0.4, 0.4, 0.2), "rank_busy_flops": (100, 100, 100),
            "extra": {"loss": 2.0, "lr": 1e-3}} | dict.fromkeys((*COUNTS, *totals({})), 64)  # fmt: skip
    readings = {**full, **changes, "world_size": 3, "step": step}
    parts = {name: readings.pop(name) for name in ("flops", "peak", "extra")}
    return Window(readings=readings, **parts)


@pytest.mark.parametrize("order", ["as they come", "all of one kind"])
def test_records_of_empty_steps_are_logged_reported_and_explained(order):
    """Through every sink, and the commands that read a run."""
    kinds = [[*WINDOWS]] if order == "as they come" else [[name] * 5 for name in WINDOWS]
    for names in kinds:
        with TemporaryDirectory() as folder:
            path = Path(folder, "metrics.jsonl")
            with Sinks.open([f"jsonl:{path}", f"tensorboard:{folder}/tb"]) as sinks:
                for step, name in enumerate(names, start=1):
                    sinks.write(window_of(step, WINDOWS[name]).to_dict())
            assert read_events(Path(folder, "tb")).Tags()["scalars"]
            for command in (["explain", folder], ["report", folder, "-o", f"{folder}/r.html"], ["audit", str(path)]):
                result = CliRunner().invoke(app, command)
                assert isinstance(result.exception, SystemExit | HeadwayError | None), (names, command)


def test_a_rank_that_had_no_work_says_nothing_of_its_device():
    window = window_of(1, {"rank_flops": (300, 300, 0), "rank_busy_flops": (100, 50, 0), "rank_busy_s": (0.4,) * 3})
    assert (window.slowest_rank, window.heaviest_rank) == (1, 0)
    assert window.slowest_rank_speed == pytest.approx(125 / ((125 + 250) / 2))  # of the two that worked
    assert window.to_dict()["rank_flops_per_busy_s"] == [250.0, 125.0, None]
    assert window.balance == pytest.approx((600 / 3) / 300)
    idle = window_of(1, WINDOWS["most ranks idle"])
    assert (idle.slowest_rank, idle.slowest_rank_speed, idle.heaviest_rank_load) == (0, 1.0, pytest.approx(3.0))
    nothing = window_of(1, WINDOWS["nothing at all"])
    assert (nothing.slowest_rank, nothing.heaviest_rank) == (None, None)
    assert nothing.to_dict()["balance"] is None


def test_lines_of_a_window_are_those_of_json(tmp_path):
    file = LineFile(tmp_path / "a.jsonl")
    for step, changes in enumerate(WINDOWS.values(), start=1):
        file.append(window_of(step, changes).to_dict())  # refuses what is no number
    file.close()


@given(windows())
def test_a_window_is_printed_in_one_line(window):
    line = str(window)
    assert line.startswith("step 1: ")
    assert "\n" not in line
    assert len(line) < 1000


def test_the_line_of_a_window_reads():
    readings = {"step": 20, "num_steps": 10, "wall_s": 8.0, "tokens": 9_000, "slots": 12_000, "rank_flops": (10**12,)}
    window = Window(flops_of(10**12), PEAK, readings)
    # forward and both gradients of 1 TFLOP each in 8 s, against 1 TFLOP/s
    assert str(window) == "step 20: 10 steps in 8.00 s, MFU 37.5 %, 1,125 tokens/s, padding 25.0 %"
