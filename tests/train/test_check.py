"""What was lost or repeated shows in a run's records, and nothing else does."""

import json

import pytest

from headway.cli.check import check
from headway.errors import LogError
from headway.train.check import check_run
from headway.train.record import MetricsLog


def digest(step, run=1):
    return f"{(step * 0x9E3779B97F4A7C15 * run) % 2**64:016x}"


def record(step, digest_of=digest, packs=2):
    return {"kind": "step", "step": step, "loss": 1.0, "packs": packs, "samples_digest": digest_of(step)}


def take(folder, first, last, *, lost=None, **given):
    """Record some steps, as a process does that goes on from the one before the first."""
    folder.mkdir(exist_ok=True)
    path = folder / "metrics.jsonl"
    with MetricsLog(path, last_step=first - 1, lost=folder / "resumes.jsonl" if first > 1 or lost else None) as log:
        for step in range(first, last + 1):
            log.write(record(step, **given))


def save(folder, step, total=None):
    """A checkpoint, as far as samples go."""
    path = folder / f"checkpoints/step-{step:06d}/position.json"
    path.parent.mkdir(parents=True)
    total = sum(int(digest(one), 16) for one in range(1, step + 1)) if total is None else total
    path.write_text(json.dumps({"position": {}, "samples_digest": f"{total % 2**64:016x}"}))


@pytest.fixture
def killed(tmp_path):
    """A run of ten steps that was killed after step 6, went on from step 4, and again from there at once."""
    folder = tmp_path / "killed"
    take(folder, 1, 6)
    take(folder, 5, 4)
    take(folder, 5, 10)
    for step in (4, 8):
        save(folder, step)
    return folder


def test_a_run_that_went_on_where_it_was_is_proved_to(killed, tmp_path):
    found = check_run(killed)
    assert (found.steps, found.resumes, found.unwitnessed, found.redone, found.checkpoints) == (10, 2, 1, 2, 2)
    assert found.faults == ()
    assert "nothing was lost or repeated" in found.as_table()
    take(tmp_path / "whole", 1, 12)
    assert check_run(killed, tmp_path / "whole").others == 10


def test_a_run_that_goes_on_at_another_place_in_the_data_is_found(tmp_path, capsys):
    folder = tmp_path / "run"
    take(folder, 1, 6)
    take(folder, 5, 10, digest_of=lambda step: digest(step + 1))  # it skips what step 5 had
    assert check_run(folder).faults == tuple(
        f"after going on from step 4, step {step} had other samples than before" for step in (5, 6)
    )
    with pytest.raises(LogError, match="lost or repeated samples: after going on from step 4"):
        check(folder)
    assert "something was lost or repeated" in capsys.readouterr().out


def test_a_checkpoint_of_other_samples_is_found(killed):
    save(killed, 10, total=sum(int(digest(step), 16) for step in range(1, 10)))
    assert check_run(killed).faults == ("the checkpoint of step 10 had other samples behind it than the records",)


def test_records_that_end_before_a_checkpoint_are_found(killed):
    save(killed, 12)
    assert check_run(killed).faults == ("there is a checkpoint of step 12, and the records end at step 10",)


def test_a_run_that_differs_from_another_is_found(killed, tmp_path):
    take(tmp_path / "other", 1, 10, digest_of=lambda step: digest(step, run=3 if step == 7 else 1))
    (fault,) = check_run(killed, tmp_path / "other").faults
    assert fault.startswith("1 steps, the first of them step 7, differ from")


def test_steps_taken_again_with_other_packs_are_not_compared_but_told(tmp_path):
    take(tmp_path / "run", 1, 6)
    take(tmp_path / "run", 5, 10, packs=3, digest_of=lambda step: digest(step, run=5))
    found = check_run(tmp_path / "run")
    assert (found.redone, found.regrouped, found.faults) == (0, 2, ())
    assert "2 steps taken again with other packs" in found.as_table()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([record(1), record(3)], "a record of step 3 where that of step 2 belongs"),
        ([record(1), record(2), record(2)], "a record of step 2 where that of step 3 belongs"),
        ([{"kind": "step", "step": 1}], "no samples_digest in step 1"),
        ([[1]], "line 1 is no record"),
        ([record(1) | {"samples_digest": "f" * 17}], "records that headway train did not write: OverflowError"),
        ([record(1) | {"packs": None}], "records that headway train did not write: TypeError"),
    ],
)
def test_records_that_prove_nothing_are_an_error(tmp_path, lines, message):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(LogError, match=message):
        check_run(tmp_path)


def test_a_folder_without_a_run_is_told(tmp_path):
    with pytest.raises(LogError, match=r"metrics.jsonl cannot be read: No such file or directory"):
        check_run(tmp_path)
