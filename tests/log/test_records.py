"""A file of records keeps what was measured, once, and its one reader gives back every record as it was."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headway.count import FlopCount, FlopRow, Workload
from headway.devices import Peak
from headway.errors import LogError
from headway.log.jsonl import read_jsonl
from headway.log.records import RecordLines, StepRecord, joined, read_records
from headway.log.sinks import Sinks
from headway.meter import Meter, Window
from helpers.device import COST_MODEL, Clock

PEAK = Peak("test device", 1e12, "fp32", "made up for a test")
FLOPS = FlopCount((FlopRow("language.mlp", "tokens", 300, 300, 300),))


def window(flops=FLOPS, peak=PEAK, extra=None, **readings):
    """A window of one step and one rank, with other entries."""
    of_ranks = {"rank_flops": (900,), "rank_busy_s": (0.3,), "rank_busy_flops": (300,)}
    usual = {"step": 1, "wall_s": 0.5, "tokens": 90, "slots": 100, **of_ranks}
    return Window(flops, peak, usual | readings, extra={"loss": 2.5} if extra is None else extra)


OLD = Path(__file__).with_name("records_of_version_1.jsonl")
"""Steps and an evaluation of `headway train` over two sources, and a window of a loop with phases, as Headway wrote
them before its files had headers."""


def written(path, records):
    lines = RecordLines()
    path.write_bytes(b"".join(map(lines.encode, records)))
    return path


def test_records_of_an_older_file_are_what_they_were(tmp_path):
    whole = read_jsonl(OLD)
    assert list(read_records(OLD)) == whole
    assert [record["kind"] for record in whole] == ["step", "step", "evaluation", "step", "step"]
    # What a file of today is read as has the same names.
    (record,) = read_records(written(tmp_path / "a.jsonl", [window().to_dict()]))
    of_train = {"loss", "lr", "epoch", "grad_norm", "compiled", "recompiles", "packs", "making_s", "samples_digest"}
    sampled = {"extra_passes", "core_wait_s", "machine_state"}
    assert record.keys() - sampled == whole[0].keys() - (of_train - {"loss"}) - {"sources"}


def test_what_follows_from_the_numbers_of_an_older_record_is_computed_again():
    """The whole records of the older file are the witness: their rates were computed by the code of that time."""
    for old in read_jsonl(OLD)[:2]:
        by_component = old["flops_by_component"]
        counted = {
            "components": [*by_component], "flops_by_component": [*by_component.values()],
            "flops": {name: old["flops"][name] for name in ("forward", "dgrad", "wgrad", "recompute")},
            "rank_busy_s": [old["flops"]["forward"] / old["rank_flops_per_busy_s"][0]],
            "rank_busy_flops": [old["flops"]["forward"]],
            "num_batches": 1, "packing_length": 64, "ceiling_flops_per_s": None, "peak_bytes_per_s": None,
        }  # fmt: skip
        again = StepRecord({name: value for name, value in old.items() if name not in DERIVED} | counted)
        assert again.keys() == old.keys()
        assert {name: again[name] for name in DERIVED} == {
            name: pytest.approx(old[name], rel=1e-12) for name in DERIVED
        }


DERIVED = (
    "data_wait_share", "tokens_per_s", "slots_per_s", "padding_share", "mfu", "hfu", "step_s", "flops_per_s",
    "flops_per_s_per_device", "tokens_per_s_per_device", "slots_per_s_per_device", "supervised_per_s", "images_per_s",
    "patches_per_s", "flops_share_by_component", "mfu_of_all_devices", "fill", "balance", "straggler_share",
    "heaviest_rank", "heaviest_rank_load", "slowest_rank", "slowest_rank_speed", "rank_flops_per_busy_s",
)  # fmt: skip


def series():
    """Steps of a run whose facts, entries and zeros change: media, another peak, numbers of one's own, ranks."""
    seen = FlopCount((FlopRow("vision.mlp", "patches", 10), *FLOPS.rows))
    changes = [
        {}, {"extra": {"loss": None}}, {"extra": {}}, {"flops": seen}, {},
        {"peak": Peak("another", 2e12, "bf16", "elsewhere")},
        {"flops": seen, "extra": {"compiled": False, "loss": 0}}, {"num_left_out": 2, "num_steps": 0},
        {"optimizer": {"name": "AdamW"}, "places": [{"s": 0.25}]},
        {"world_size": 2, "rank_flops": (900, 0), "rank_busy_s": (0.3, 0.0), "rank_busy_flops": (300, 0)},
        {"world_size": 200, "rank_flops": (9,) * 200, "rank_busy_s": (0.3,) * 200, "rank_busy_flops": (3,) * 200},
    ]  # fmt: skip
    return [window(**other, step=step).to_dict() for step, other in enumerate(changes * 2, start=1)]


def test_a_file_gives_back_each_record_and_says_nothing_twice(tmp_path):
    records = series()
    path = written(tmp_path / "a.jsonl", records)
    assert list(read_records(path)) == records
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    headers = [line for line in lines if line["kind"] == "run"]
    assert lines[0] in headers
    assert len(headers) == len({header["name"] for header in headers}) == 6  # those of the second half are there
    for line in lines:
        assert not {"mfu", "flops_per_s", "padding_share", "peak_source", "step_s"} & line.keys()


def test_two_writers_and_records_of_ones_own_share_a_file(tmp_path):
    path, own = tmp_path / "a.jsonl", {"step": 7, "kind": "mine", "mfu": 0.5, "bad": float("nan")}
    one, two, expected = Sinks.open([path]), Sinks.open([path]), []
    for step, peak in enumerate((PEAK, replace(PEAK, flops_per_s=3e12)) * 2):
        (one, two)[step % 2].write(window(peak=peak).to_dict())
        expected.append(window(peak=peak).to_dict())
    one.write(own)
    for sinks in (one, two):
        sinks.close()
    assert list(read_records(path)) == [*expected, own | {"bad": "NaN"}]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"kind": "run"', '"kind": "ran"'),  # its header is lost
        ('"wall_s": 0.5', '"wall_s": "half"'),
        ('"tokens": 90, ', ""),
        ('"flops_by_component": [900]', '"flops_by_component": [900, 1]'),
        ('"rank_flops": [900]', '"rank_flops": 900'),
        ('"step": 2', '"step": 2,'),
    ],
)
def test_a_line_that_was_edited_is_named(tmp_path, old, new):
    path = written(tmp_path / "a.jsonl", [window(step=step).to_dict() for step in (1, 2, 3)])
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(LogError, match=r"a.jsonl, line [23] cannot be read as a record"):
        list(read_records(path))


def test_a_torn_last_line_is_passed_over(tmp_path):
    path = written(tmp_path / "a.jsonl", [window(step=step).to_dict() for step in (1, 2)])
    path.write_bytes(path.read_bytes()[:-20])
    assert [record["step"] for record in read_records(path)] == [1]


def test_records_that_are_joined_are_the_record_of_a_window():
    """The meter itself adds steps up where a window has several."""
    written = {}
    for log_every in (1, 2):
        clock, windows = Clock(), []
        meter = Meter(
            COST_MODEL, clock=clock, peak=PEAK, log_every=log_every, packing_length=100, recompute="full",
            on_window=windows.append, ceiling=Peak("measured", 5e11, "fp32", "here"),
        )  # fmt: skip
        for lengths, away_s in (([30, 20], 0.0), ([70], 2.0), ([5], 0.0), ([], 0.0)):
            meter.await_data()
            clock.now_s += 0.25
            meter.got_data()
            with meter.away():
                clock.now_s += away_s
            with meter.phase("update"):
                meter.count(Workload(lengths, slots=max(1, sum(lengths)) + 10))
                clock.now_s += 1.0
            meter.step(skipped=lengths == [70])
        meter.close()
        written[log_every] = [window.to_dict() for window in windows]
    pairs = zip(written[1][::2], written[1][1::2], strict=True)
    again = [StepRecord(joined(one.measured, other.measured)) for one, other in pairs]
    differing = {"collection_s", "core_wait_s", "peak_memory_bytes", "places"}  # as the machine was
    for record, window in zip(again, written[2], strict=True):
        numbers = {name: value for name, value in record.items() if name not in differing}
        assert numbers == {name: near(value) for name, value in window.items() if name not in differing}


def near(value):
    """The same but for the rounding of a sum of floats."""
    if isinstance(value, dict):
        return {name: near(part) for name, part in value.items()}
    return pytest.approx(value, rel=1e-12) if isinstance(value, float) else value


def test_the_loss_of_a_source_of_pairs_is_a_mean_over_pairs():
    """Joined records of three packs say what one record of all their pairs would."""
    packs = [(2, 40, 0.5), (1, 100, 2.0), (3, 6, 1.0)]  # pairs, targets, mean loss of a pair

    def step(pairs, targets, loss):
        sources = {
            "pairs": {"loss": loss, "tokens": targets, "supervised": targets, "units": pairs, "waste": 0.0},
            "text": {"loss": loss, "tokens": 9, "supervised": targets, "waste": 0.0},
        }
        return window().measured() | {"sources": sources}

    record = step(*packs[0])
    for pack in packs[1:]:
        record = joined(record, step(*pack))
    of_pairs, of_text = record["sources"]["pairs"], record["sources"]["text"]
    assert of_pairs["loss"] == pytest.approx(sum(pairs * loss for pairs, _, loss in packs) / 6)
    assert (of_pairs["units"], of_pairs["supervised"]) == (6, 146)
    assert of_text["loss"] == pytest.approx(sum(targets * loss for _, targets, loss in packs) / 146)
    assert "units" not in of_text
