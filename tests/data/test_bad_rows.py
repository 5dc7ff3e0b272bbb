import json
import multiprocessing
import os
import pickle
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.data.bad_rows import OUTCOMES, BadSamples, RowTally, SampleCounts, sample_error
from headway.data.samples import Origin, SampleError
from headway.errors import CheckpointError, ConfigError, DataError


def bad(row=0, source="chats", reason="it is empty. Fill it."):
    return SampleError(Origin(source, "chats.jsonl", row, f"line {row + 1}"), reason)


def counts_of(**read):
    counts = SampleCounts()
    for source, samples in read.items():
        counts.count(source, "read", samples)
    return counts


def test_an_error_stops_at_the_first_bad_sample():
    counts = counts_of(chats=10)
    with pytest.raises(SampleError, match=r"^chats\.jsonl, line 1: it is empty"):
        BadSamples().handle(bad(), counts)
    assert counts["chats"]["skipped"] == RowTally(0, 0)


def test_skipped_samples_are_counted_and_named_in_the_quarantine(tmp_path):
    file = tmp_path / "run" / "quarantine.jsonl"
    policy, counts = BadSamples("skip", quarantine=file), counts_of(chats=2, books=1)
    policy.handle(bad(7, reason="naïve\nwords"), counts, tokens=5)
    policy.handle(bad(0, "books"), counts)
    assert [json.loads(line) for line in file.read_text("utf-8").splitlines()] == [
        {"source": "chats", "file": "chats.jsonl", "row": 7, "place": "line 8", "reason": "naïve\nwords"},
        {"source": "books", "file": "chats.jsonl", "row": 0, "place": "line 1", "reason": "it is empty. Fill it."},
    ]
    assert (counts["chats"]["skipped"], counts["books"]["skipped"]) == (RowTally(1, 5), RowTally(1, 0))
    assert counts.total("skipped") == RowTally(2, 5)


def test_one_more_than_the_limit_stops():
    policy, counts = BadSamples("skip", limit=2, fraction=None), counts_of(chats=5)
    policy.handle(bad(0), counts)
    policy.handle(bad(1), counts)
    with pytest.raises(
        DataError, match=r"3 of 5 samples could not be used \(3 of chats\), and at most 2 may be skipped"
    ):
        policy.handle(bad(2), counts)


def test_a_share_is_judged_once_a_hundred_samples_are_read():
    policy, counts = BadSamples("skip", limit=None, fraction=0.05), counts_of(chats=99)
    for row in range(6):  # 6 % of 99: too few to judge
        policy.handle(bad(row), counts)
    counts.count("chats", "read", 21)  # 6 of 120 is 5 %: allowed
    policy.check(counts)
    with pytest.raises(
        DataError, match=r"7 of 120 samples .* at most 5\.00% may be skipped\. The last: chats\.jsonl, line 7"
    ):
        policy.handle(bad(6), counts)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"policy": "ignore"}, "Unknown policy for bad samples 'ignore'. Allowed: error, skip"),
        ({"policy": "skip", "limit": -1}, "is -1; it must be 0 or more"),
        ({"policy": "skip", "fraction": 1.5}, "is 1.5; it must be from 0 to 1"),
        ({"quarantine": "q.jsonl"}, "would stay empty"),
    ],
)
def test_a_setting_that_cannot_take_effect_is_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        BadSamples(**settings)


def test_a_quarantine_that_cannot_be_written_stops(tmp_path):
    (tmp_path / "file").write_text("")
    policy = BadSamples("skip", quarantine=tmp_path / "file" / "quarantine.jsonl")
    with pytest.raises(DataError, match=r"quarantine\.jsonl cannot be written"):
        policy.handle(bad(), counts_of(chats=1))


def _write_until_killed(file, started):
    policy, counts = BadSamples("skip", limit=None, fraction=None, quarantine=file), SampleCounts()
    row = 0
    while True:
        policy.handle(bad(row, reason="x" * 300), counts)
        row += 1
        if row == 20:
            started.set()


def test_what_a_kill_left_of_a_line_is_gone_with_the_next_one(tmp_path):
    file = tmp_path / "quarantine.jsonl"
    policy = BadSamples("skip", quarantine=file)
    policy.handle(bad(1), counts_of(chats=1))
    whole = file.read_bytes()
    for end in (whole[:40], whole[:1]):
        file.write_bytes(whole + end)
        policy.handle(bad(2), counts_of(chats=1))
        assert [json.loads(line)["row"] for line in file.read_text().splitlines()] == [1, 2]
    file.write_text("somebody's notes\nwithout an end")
    policy.handle(bad(2), counts_of(chats=1))
    assert file.read_text().startswith("somebody's notes\nwithout an end\n{")
    file.write_bytes(whole[:-1])  # a whole row without its end
    policy.handle(bad(2), counts_of(chats=1))
    assert [json.loads(line)["row"] for line in file.read_text().splitlines()] == [1, 2]


def test_processes_share_a_quarantine_and_a_kill_leaves_whole_lines(tmp_path):
    file, context = tmp_path / "quarantine.jsonl", multiprocessing.get_context("spawn")
    started = [context.Event() for _ in range(2)]
    processes = [context.Process(target=_write_until_killed, args=(file, event)) for event in started]
    for process in processes:
        process.start()
    for event in started:
        assert event.wait(60)
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    # A killed write can end between two pages of memory: a part of a line is left, which the next write removes.
    BadSamples("skip", quarantine=file).handle(bad(999_999), counts_of(chats=1))
    rows = [json.loads(line)["row"] for line in file.read_bytes().decode().splitlines()]
    assert rows[-1] == 999_999
    for row in range(20):
        assert rows.count(row) == 2


tallies = st.dictionaries(
    st.sampled_from(["a", "b", "c"]),
    st.fixed_dictionaries({o: st.tuples(st.integers(0, 9), st.integers(0, 99)) for o in OUTCOMES}),
)


def made(content):
    counts = SampleCounts()
    for source, outcomes in content.items():
        for outcome, (samples, tokens) in outcomes.items():
            counts.count(source, outcome, samples, tokens)
    return counts


@given(tallies, tallies)
def test_counts_add_up_over_ranks_and_survive_json(ours, theirs):
    summed = made(ours)
    summed.add(made(theirs))
    for source in {*ours, *theirs}:
        for outcome in OUTCOMES:
            pairs = [content[source][outcome] for content in (ours, theirs) if source in content]
            assert summed[source][outcome] == tuple(sum(numbers) for numbers in zip(*pairs, strict=True))
    assert SampleCounts.from_dict(json.loads(json.dumps(summed.to_dict()))) == summed


@pytest.mark.parametrize("content", [None, {"a": 3}, {"a": {"read": {"samples": 1, "tokens": 1}}}])
def test_damaged_counts_are_refused(content):
    with pytest.raises(CheckpointError, match="counts of samples are damaged"):
        SampleCounts.from_dict(content)


def test_an_error_gets_its_origin_once_and_survives_pickling():
    origin = Origin("chats", "chats.jsonl", 3, "line 4")
    error = sample_error(DataError("too short.", where="chats.jsonl, line 4"), origin)
    assert (error.origin, error.reason) == (origin, "too short.")
    again = pickle.loads(pickle.dumps(sample_error(error, Origin("other", "x", 0, "line 1"))))
    assert (again.origin, str(again)) == (origin, "chats.jsonl, line 4: too short.")
