import json
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.count import Workload
from headway.devices import Peak
from headway.errors import ConfigError
from headway.explain.records import explain_records
from headway.explain.text import as_text
from headway.meter import Meter
from helpers.device import COST_MODEL, Clock
from helpers.runs import read_metrics

# 90 useful FLOPs per token, at 1e5 FLOP/s: a token needs 0.9 ms at peak, 1.125 ms at a ceiling of 0.8e5 FLOP/s
PEAK, CEILING = (Peak(kind, rate, "fp32", "made up for a test") for kind, rate in (("device", 1e5), ("ceiling", 0.8e5)))


def metered(path, steps, **options):
    """Write a meter's records of steps, each given as (seconds of waiting, seconds of computing, tokens, slots)."""
    clock = Clock()

    def loader():
        for waits_s, _, tokens, slots in steps:
            clock.now_s += waits_s
            yield Workload([tokens], slots=slots)

    with Meter(COST_MODEL, clock=clock, log_to=[path], **{"peak": PEAK, "log_every": 1, **options}) as meter:
        batches = meter.batches(loader())
        for _, computes_s, _, _ in steps:
            meter.count(next(batches))
            clock.now_s += computes_s
            meter.step()
    return path


def lines(waterfall):
    return {line.key: line.ns for line in waterfall.lines}


def test_counters_fill_the_lines_that_they_tell_and_one_line_says_the_rest(tmp_path):
    path = metered(tmp_path / "metrics.jsonl", [(0.25, 0.75, 100, 120)] * 3, ceiling=CEILING, recompute="full")
    found = explain_records(path)
    assert [(one.step, one.rank, one.duration_ns) for one in found.steps] == [(n, 0, 10**9) for n in (1, 2, 3)]
    assert lines(found.steps[1]) == {
        "useful": 90_000_000,  # 100 tokens x 90 FLOPs / 1e5
        "aside": 0,
        "ceiling": 22_500_000,  # x (1 / 0.8 - 1)
        "recomputation": 187_500_000,  # 30 of 120 FLOPs, of the 0.75 s in which data was there
        "padding": 93_750_000,  # 20 of 120 slots, of what is left
        "idle.data": 250_000_000,
        "unseparated": 356_250_000,
    }
    assert found.steps[1].mfu == pytest.approx(0.09)
    record = read_metrics(path)[1]
    assert found.steps[1].mfu == pytest.approx(record["mfu"])
    assert "run.profile.start=N" in found.notes[0]


def test_a_window_of_several_steps_is_their_mean(tmp_path):
    path = metered(tmp_path / "m.jsonl", [(0, 1, 100, 100), (0.5, 1.5, 200, 200)] * 2, log_every=2)
    found = explain_records(path)
    assert [one.step for one in found.steps] == [2, 4]
    assert lines(found.steps[0]) == {
        "useful": 135_000_000, "ceiling": 0, "recomputation": 0, "padding": 0, "idle.data": 250_000_000,
        "aside": 0, "unseparated": 1_115_000_000,
    }  # fmt: skip
    assert any("Their mean" in note for note in found.notes)
    assert any("taken as the peak" in note for note in found.notes)


def test_what_is_not_training_is_in_the_step_that_ends_after_it(tmp_path):
    clock = Clock()
    with Meter(COST_MODEL, clock=clock, log_to=[tmp_path / "metrics.jsonl"], peak=PEAK, log_every=1) as meter:
        for away_s in (0, 4, 0, 0):
            with meter.away("checkpoint"):
                clock.now_s += away_s
            meter.count(Workload([100]))
            clock.now_s += 1
            meter.step()
    found = explain_records(tmp_path / "metrics.jsonl")
    assert [(one.duration_ns, lines(one)["aside"]) for one in found.steps[:3]] == [
        (10**9, 0),
        (5 * 10**9, 4 * 10**9),
        (10**9, 0),
    ]
    assert found.steps[1].mfu == pytest.approx(0.09 / 5)
    assert found.steps[1].lines[-2].mfu_to == pytest.approx(0.09)  # as recorded
    assert [(one.id, one.share) for one in found.findings] == [("checkpoint", 0.5)]  # of both together


@given(
    wall_s=st.floats(1e-6, 1e5),
    num_steps=st.integers(1, 7),
    world_size=st.integers(1, 5),
    flops=st.lists(st.integers(0, 10**15), min_size=1, max_size=4),
    recompute=st.integers(0, 10**15),
    padding=st.integers(0, 500),
    of_ceiling=st.none() | st.floats(0.01, 1.5),
    data_wait_s=st.none() | st.floats(0, 10),
    away_s=st.none() | st.floats(0, 1e4),
)
def test_lines_add_up_whatever_was_recorded(
    tmp_path_factory, wall_s, num_steps, world_size, flops, recompute, padding, of_ceiling, data_wait_s, away_s
):
    names = ("language.mlp", "language.attention", "vision.mlp", "language.head")
    record = {
        "step": 9, "num_steps": num_steps, "wall_s": wall_s, "world_size": world_size, "tokens": 700,
        "slots": 700 + padding, "peak_flops_per_s": 1e12, "flops_per_s_per_device": 1e11, "mfu_of_ceiling": of_ceiling,
        "flops": {"total": sum(flops), "recompute": recompute}, "data_wait_s": data_wait_s,
        "away_s": away_s,
        "flops_by_component": dict(zip(names, flops, strict=False)),
    }  # fmt: skip
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_text(json.dumps(record))
    (waterfall,) = explain_records(path).steps
    assert waterfall.duration_ns == round(wall_s * 1e9) // num_steps + round((away_s or 0) * 1e9) // num_steps
    assert sum(line.ns for line in waterfall.lines) == waterfall.duration_ns


def test_padding_is_charged_its_slots_of_the_time_and_not_its_flops_at_peak(tmp_path):
    path = metered(tmp_path / "metrics.jsonl", [(0.0, 1.0, 17, 100)] * 12)  # MFU 1.5 %, padded to 83 %
    first = explain_records(path).findings[0]
    assert first.id == "padding"
    assert first.share == pytest.approx(0.83)
    assert "83.0 % of the slots" in first.seen


def test_recomputation_is_charged_its_part_of_the_time(tmp_path):
    path = metered(tmp_path / "metrics.jsonl", [(0.0, 1.0, 17, 17)] * 12, recompute="full")
    first = explain_records(path).findings[0]
    assert (first.id, first.share) == ("recomputation", pytest.approx(0.25))  # 30 of 120 FLOPs


def compiling_run(path, num_steps, log_every=1):
    """Write the records of a meter each of whose steps compiles for 4 s and computes for 1 s."""
    clock = Clock()
    with (
        patch("headway.meter.environment.Compilation.happened", lambda _: True),
        Meter(COST_MODEL, clock=clock, log_to=[path], peak=PEAK, log_every=log_every) as meter,
    ):
        windows = []
        for _ in range(num_steps):
            meter.count(Workload([100]))
            with meter.away("compile"):
                clock.now_s += 4
            clock.now_s += 1
            windows.append(meter.step())
        with pytest.warns(UserWarning, match="there is nothing to sum up"):
            meter.close()
    assert windows == [None] * num_steps  # none has a rate
    return read_metrics(path)


@pytest.mark.parametrize("log_every", [1, 2])
def test_a_run_that_compiles_in_every_step_has_records_and_its_finding(tmp_path, log_every):
    records = compiling_run(tmp_path / "metrics.jsonl", 6 * log_every, log_every)
    assert [record["step"] for record in records] == [log_every * (n + 1) for n in range(6)]
    assert {(record["num_steps"], record["num_left_out"], record["left_out_s"]) for record in records} == {
        (0, log_every, 1.0 * log_every)
    }
    assert {(record["compile_s"], record["mfu"], record["step_s"]) for record in records} == {
        (4.0 * log_every, None, None)
    }
    found = explain_records(tmp_path / "metrics.jsonl")
    assert [(one.duration_ns, lines(one)) for one in found.steps] == [
        (5 * 10**9, {"aside": 4 * 10**9, "unseparated": 10**9})
    ] * 6
    assert found.findings[0].id == "recompilation"
    assert found.findings[0].share == pytest.approx(0.8)
    assert any("no step is counted" in note for note in found.notes)


def test_left_out_windows_do_not_change_what_counted_steps_say(tmp_path):
    steps = [(0.25, 0.75, 100, 100)] * 8
    all_of_them = explain_records(metered(tmp_path / "a.jsonl", steps))
    warmed_up = explain_records(metered(tmp_path / "b.jsonl", steps, num_warmup_steps=3))
    assert warmed_up.steps == all_of_them.steps[3:]
    assert warmed_up.findings == all_of_them.findings
    assert len(read_metrics(tmp_path / "b.jsonl")) == 8


def step_record(step, **changes):
    return {"kind": "step", "step": step, "wall_s": 1.0, **changes}


def write(path, *records):
    path.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in records))
    return path


@pytest.mark.parametrize(
    ("records", "said", "numbers"),
    [
        ([step_record(1), '{"kind": "st'], "line 2 of metrics.jsonl cannot be read", [1]),
        ([step_record(1), step_record(2), step_record(2), step_record(3)], "1 steps were recorded again", [1, 2, 3]),
        ([step_record(1), {"kind": "evaluation", "step": 1}, step_record(2)], "records lack FLOPs", [1, 2]),
        (
            [step_record(1, flops={"total": 7}), step_record(2)],
            "of 1 of 2 records is not known, because the records lack a p",
            [1, 2],
        ),
        ([step_record(1), step_record(2, wall_s=None)], "1 records of steps do not tell how long", [1]),
        ([step_record(1, world_size=8)], "of 8 ranks together", [1]),
    ],
)
def test_what_is_missing_is_said_and_the_rest_is_shown(tmp_path, records, said, numbers):
    found = explain_records(write(tmp_path / "metrics.jsonl", *records))
    assert [one.step for one in found.steps] == numbers
    assert any(said in note for note in found.notes), found.notes


def test_a_torn_last_line_a_resume_and_a_missing_end_are_said(tmp_path):
    with write(tmp_path / "metrics.jsonl", step_record(1), step_record(2)).open("a") as file:
        file.write('{"kind": "step", "st')
    write(tmp_path / "resumes.jsonl", {"kind": "resumed", "step": 1, "lost": []})
    (tmp_path / "config.yaml").write_text("run: {}\n")
    notes = " ".join(explain_records(tmp_path / "metrics.jsonl").notes)
    assert "the last line was not written to its end" in notes
    assert "resumed once, after step 1" in notes
    assert "has not ended, or was killed: these are its records up to step 2" in notes


def test_what_is_beside_the_steps_is_told_from_the_ledger(tmp_path):
    write(tmp_path / "metrics.jsonl", step_record(1), step_record(2))
    ns = {"step": 2 * 10**9, "evaluation": 3 * 10**9, "compile": 10**9}
    start = {"kind": "start", "schema_version": 1, "wall_s": 0.0, "pid": 1, "host": "node"}
    write(tmp_path / "goodput.jsonl", start, {"kind": "spans", "wall_s": 6.0, "ns": ns})
    write(tmp_path / "run.json", {"device": {"name": "NVIDIA H200"}})
    found = explain_records(tmp_path / "metrics.jsonl")
    assert found.steps[0].device_name == "NVIDIA H200"
    assert "compile 1.00 s, evaluation 3.00 s. The records do not say in which steps" in found.notes[-1]
    assert [(one.id, one.share) for one in found.findings] == [("evaluation", 0.5), ("compiling", 1 / 6)]
    assert "eval.every" in found.findings[0].next


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no record of a step with its time.*no line that can be read.*Let the run take a step"),
        ('{"kind": "evaluation", "step": 3, "loss": 1.0}\n', "only 1 other records"),
        ('{"step": 1, "mfu": 0.4}\n', "wall_s, or step_s"),
        ('{"step": 1, "wall_s": 1, "flops": {"total": "x"}, "peak_flops_per_s": 1e9}', "step 1 has a value that"),
        ('{"step": 1, "wall_s": 1, "data_wait_s": "long"}', "step 1 has a value that Headway does not write"),
        ('{"step": 1, "wall_s": NaN}', "no record of a step"),
    ],
)
def test_records_that_tell_nothing_are_one_error(tmp_path, text, said):
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=said):
        explain_records(tmp_path / "metrics.jsonl")


def test_a_rank_or_a_step_that_records_do_not_have_is_an_error(tmp_path):
    path = write(tmp_path / "metrics.jsonl", step_record(4), step_record(5))
    with pytest.raises(ConfigError, match=r"records are of all ranks together.*run\.profile\.ranks"):
        explain_records(path, rank=1)
    with pytest.raises(ConfigError, match=r"step=3: .*it has 2 records, 4 to 5"):
        explain_records(path, step=3)


def test_many_steps_are_shown_by_their_places_and_the_slow_ones_by_name(tmp_path):
    records = [step_record(n, wall_s=3.0 if n in (500, 7000) else 1.0 + n / 1e6) for n in range(1, 10_001)]
    text = as_text(explain_records(write(tmp_path / "metrics.jsonl", *records)))
    assert text.startswith(
        "of 10,000 steps  step  rank        ms  largest loss               share\n"
        "---------------  ----  ----  --------  -----------------------  -------\n"
        "fastest             1     0  1,000.00  unseparated: no profile  100.0 %\n"
    )
    assert "\n1 of 2 slow       500     0  3,000.00" in text
    assert "\n1 of 2 slow      7000     0  3,000.00" in text
    assert "The mean of 10,000 steps of rank 0 on unknown device: 1,005.40 ms" in text
    assert "the median is step 5001, 1,005.00 ms" in text
    assert len(text.splitlines()) < 30


@pytest.mark.parametrize(("core_wait_s", "found"), [(0.0, {"unstable-steps"}), (1.5, {"shared-cores"})])
def test_steps_are_compared_without_the_time_that_they_waited_for_a_core(tmp_path, core_wait_s, found):
    """Every third step takes two and a half times as long."""
    slow = {"wall_s": 2.5, "core_wait_s": core_wait_s}
    records = [step_record(n, tokens=100, **(slow if n % 3 == 0 else {"wall_s": 1.0})) for n in range(1, 25)]
    explained = explain_records(write(tmp_path / "metrics.jsonl", *records))
    assert {finding.id for finding in explained.findings} == found


@pytest.mark.parametrize("says_so", [True, False])
def test_steps_that_a_profile_made_slower_are_in_no_finding_where_records_tell_them(tmp_path, says_so):
    """Of 24 steps three take four times as long, since they were recorded."""
    records = [
        step_record(
            n, tokens=100, wall_s=4.0 if n in (12, 13, 14) else 1.0, num_profiled=int(says_so and n in (12, 13, 14))
        )
        for n in range(1, 25)
    ]
    found = explain_records(write(tmp_path / "metrics.jsonl", *records))
    assert {finding.id for finding in found.findings} == (set() if says_so else {"unstable-steps"})
    assert len(found.steps) == 24  # all are shown


def test_a_long_run_is_explained_in_windows_whose_sums_are_those_of_its_steps(tmp_path, monkeypatch):
    """Records of 100 steps are held in at most 16: twelve windows of 8 and one of 4, numbered by their last step."""
    times = [(0.25, 0.5 + step / 64, 100, 120) for step in range(100)]
    path = metered(tmp_path / "metrics.jsonl", times, ceiling=CEILING)
    whole = explain_records(path)
    monkeypatch.setattr("headway.explain.run_folder._MOST_RECORDS", 16)
    windows = explain_records(path)
    assert "the run is long: up to 8 records that follow each other are joined into one." in windows.notes
    assert [window.step for window in windows.steps] == [*range(8, 97, 8), 100]
    for place, window in enumerate(windows.steps):
        steps = whole.steps[8 * place : 8 * place + 8]
        assert window.duration_ns == pytest.approx(sum(step.duration_ns for step in steps) / len(steps), abs=1)
        for line in window.lines:
            of_steps = [part.ns for step in steps for part in step.lines if part.key == line.key]
            assert line.ns == pytest.approx(sum(of_steps) / len(steps), abs=16)
    # a step that is asked for stands alone
    (alone,) = explain_records(path, step=37).steps
    assert (alone.step, alone.duration_ns) == (37, whole.steps[36].duration_ns)
