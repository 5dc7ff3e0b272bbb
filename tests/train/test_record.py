import json

import pytest
import torch

from headway.errors import TrainingError
from headway.log.run_files import write_json
from headway.meter.clock import HostCopy
from headway.train.best import BestEvaluation
from headway.train.progress import evaluation_line, step_line
from headway.train.record import MetricsLog
from helpers.cases import a_full_disk
from helpers.runs import read_metrics


def lines(*steps):
    return "".join(json.dumps({"kind": "step", "step": step}) + "\n" for step in steps)


def test_records_after_the_checkpoint_are_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(1, 2, 3, 4, 5))
    with MetricsLog(path, last_step=3) as log:
        log.write({"step": 4, "again": True})
    assert [(r["step"], r.get("again")) for r in read_metrics(path)] == [(1, None), (2, None), (3, None), (4, True)]


def test_a_line_torn_by_a_kill_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(1, 2, 3) + '{"kind": "st')
    with MetricsLog(path, last_step=3):
        pass
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3]


def test_a_damaged_line_inside_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for damaged in ("oops", "[" * 5000, f'{{"step": {"9" * 5000}}}'):
        path.write_text(lines(1) + damaged + "\n" + lines(2))
        with pytest.raises(TrainingError, match="line 2 is not the record"):
            MetricsLog(path, last_step=3)


def test_a_whole_record_without_its_line_break_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(1, 2)[:-1])
    with MetricsLog(path, last_step=2) as log:
        log.write({"step": 3})
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3]


def test_losses_are_summed_up_as_they_pass_over_a_resume_too(tmp_path):
    path = tmp_path / "metrics.jsonl"
    losses = [4.0, None, 3.0, 2.0, 9.0]
    for part, last in ((losses, 0), ([1.0], 4)):
        with MetricsLog(path, last_step=last) as log:
            for number, loss in enumerate(part, start=last + 1):
                log.write({"kind": "step", "step": number, "loss": loss})
    assert (log.losses.steps, log.losses.skipped, log.losses.first, log.losses.last) == (5, 1, 4.0, 1.0)
    path.unlink()
    assert (MetricsLog(None, last_step=0).losses.first, MetricsLog(None, last_step=0).losses.last) == (None, None)


def test_records_that_the_disk_refuses_are_one_warning_and_follow_once_there_is_room(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, last_step=0) as log:
        log.write({"step": 1})
        with a_full_disk(path.stat().st_size + 5):
            with pytest.warns(
                RuntimeWarning, match=r"Records in .*metrics.jsonl: OSError.* The records wait in memory"
            ):
                log.write({"step": 2})
            log.write({"step": 3})
            assert [r["step"] for r in read_metrics(path)] == [1]
            assert log.num_missing == 2
        log.write({"step": 4})
        assert log.num_missing == 0
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3, 4]
    log = MetricsLog(path, last_step=4)
    with a_full_disk(path.stat().st_size), pytest.warns(RuntimeWarning, match="Records in"):
        log.write({"step": 5})
    with a_full_disk(path.stat().st_size):
        log.__exit__(None, None, None)
    assert log.num_missing == 1  # which the run's summary tells


def test_records_go_on_in_a_new_file_where_somebody_deleted_theirs(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, last_step=0) as log:
        log.write({"kind": "step", "step": 1, "loss": 2.0})
        path.unlink()
        with pytest.warns(RuntimeWarning, match="was deleted during the run"):
            log.write({"kind": "step", "step": 2, "loss": 1.0})
        log.write({"kind": "step", "step": 3, "loss": 1.0})
    assert [r["step"] for r in read_metrics(path)] == [2, 3]
    assert (log.losses.steps, log.losses.first) == (3, 2.0)


def test_other_ranks_write_nowhere(tmp_path):
    with MetricsLog(None, last_step=0) as log:
        log.write({"step": 1})
    assert list(tmp_path.iterdir()) == []


def test_numbers_come_back_as_they_were():
    assert HostCopy(torch.tensor([1.5, -2.0])).read() == [1.5, -2.0]


def test_json_is_written_whole(tmp_path):
    write_json(tmp_path / "a.json", {"x": 1})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_refused_write_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "run.json"
    write_json(path, {"a": 1})
    before = path.read_text()
    with a_full_disk(2), pytest.raises(OSError, match="File too large"):
        write_json(path, {"a": 2})
    assert path.read_text() == before
    assert [one.name for one in tmp_path.iterdir()] == ["run.json"]


def test_the_line_of_a_step():
    record = {
        "step": 7,
        "loss": 1.23456,
        "lr": 0.0015,
        "grad_norm": 0.5,
        "tokens_per_s": 12345.6,
        "step_s": 0.25,
        "data_wait_share": 0.01,
        "padding_share": 0.0,
        "flops_per_s": 4e10,
        "mfu": 0.4,
        "peak_memory_bytes": 2**30,
    }
    assert step_line(record, 1000) == (
        "step    7/1000  loss 1.2346  lr 1.50e-03  grad 0.50  time 250 ms  tokens/s 12,346  wait 1.0 %  "
        "padding 0.0 %  useful 40.0 GFLOP/s  MFU 40.0 %  memory 1.0 GiB"
    )


def test_the_line_of_an_evaluation():
    record = {"step": 400, "exact_match": 0.914, "exact": 457, "samples": 500, "loss": 0.12}
    line = "evaluation after step 400: exact match 91.4 % (457 of 500), loss 0.1200"
    assert evaluation_line(record, BestEvaluation("loss")) == line  # nothing is best where no loss is a number
    assert evaluation_line(record, BestEvaluation("loss", 400, 0.12)) == line
    assert evaluation_line(record, BestEvaluation("loss", 300, 0.1)) == f"{line}; best loss 0.1000 after step 300"


def test_a_step_keeps_to_the_width_of_the_terminal():
    record = {"step": 7, "loss": 1.652, "lr": 2e-3, "grad_norm": 2.22, "step_s": 0.5, "tokens_per_s": 1991.0}
    record |= {
        "data_wait_share": 0.01,
        "padding_share": 0.0,
        "flops_per_s": 12.4e9,
        "mfu": 0.126,
        "peak_memory_bytes": 1,
    }
    whole = step_line(record, 150)
    assert [len(step_line(record, 150, width=width)) <= width for width in (40, 80, 120)] == [True] * 3
    assert step_line(record, 150, width=40) == "step   7/150  loss 1.6520  MFU 12.6 %"
    assert step_line(record, 150, width=200) == whole
