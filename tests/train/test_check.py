"""What was lost or repeated shows in a run's records, nothing else does, and what nothing proves is named."""

import hashlib
import json
import shutil

import pytest

from headway.cli.records import check
from headway.config import parse_config
from headway.errors import LogError
from headway.train.check import check_run
from headway.train.record import MetricsLog
from headway.train.run import train
from helpers.runs import read_metrics


def digest(step, run=1):
    return f"{(step * 0x9E3779B97F4A7C15 * run) % 2**64:016x}"


def record(step, digest_of=digest, packs=2):
    counts = {"packs": packs, "tokens": 100 + step, "segments": 3 + step % 2}
    return {"kind": "step", "step": step, "loss": 1.0, **counts, "samples_digest": digest_of(step)}


def take(folder, first, last, *, lost=None, **given):
    """Record some steps, as a process does that goes on from the one before the first."""
    folder.mkdir(exist_ok=True)
    path = folder / "metrics.jsonl"
    with MetricsLog(path, last_step=first - 1, lost=folder / "resumes.jsonl" if first > 1 or lost else None) as log:
        for step in range(first, last + 1):
            log.write(record(step, **given))
        return log.resumes


def chain_of(steps):
    """As docs/record.md says: BLAKE2b of the digest before and the five fields, as a JSON list."""
    chain = ""
    for step in steps:
        row = record(step)
        content = [chain, step, row["samples_digest"], row["packs"], row["tokens"], row["segments"]]
        chain = hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()
    return chain


def save(folder, step, *, chain=None, resumes=0):
    """A checkpoint, as far as samples go."""
    path = folder / f"checkpoints/step-{step:06d}/position.json"
    path.parent.mkdir(parents=True)
    steps = range(1, step + 1)
    used = {"samples": sum(record(number)["segments"] for number in steps)}
    report = {
        "tokens": sum(record(number)["tokens"] for number in steps),
        "samples": {"chats": {"used": used, "split": {"samples": 0}}},
    }
    chain = chain or chain_of(steps)
    path.write_text(json.dumps({"position": {}, "report": report, "samples_chain": chain, "resumes": resumes}))


@pytest.fixture
def killed(tmp_path):
    """A run of ten steps that was killed after step 6, went on from step 4, and again from there at once."""
    folder = tmp_path / "killed"
    take(folder, 1, 6)
    take(folder, 5, 4)
    take(folder, 5, 10)
    save(folder, 4)
    save(folder, 8, resumes=2)
    return folder


def test_a_run_that_went_on_where_it_was_is_proved_as_far_as_there_are_witnesses(killed, tmp_path):
    checked = check_run(killed)
    assert (checked.steps, checked.resumes, checked.unwitnessed) == (10, 2, (4,))
    assert (checked.redone, checked.checkpoints) == (2, 2)
    assert (checked.faults, checked.proved, checked.in_order) == ((), ((1, 8),), ((1, 8),))
    table = checked.as_table()
    assert "nothing was lost or repeated in steps 1 to 8" in table
    assert "samples of steps 9 to 10" in table
    assert "at the right place after step 4, because there is no later step to compare" in table
    assert "losses, gradient norms" in table
    take(tmp_path / "whole", 1, 12)
    checked = check_run(killed, tmp_path / "whole")
    assert (checked.others, checked.proved, checked.unwitnessed) == (10, ((1, 10),), ())


def test_a_run_that_goes_on_at_another_place_in_the_data_is_found(tmp_path, capsys):
    folder = tmp_path / "run"
    take(folder, 1, 6)
    take(folder, 5, 10, digest_of=lambda step: digest(step + 1))  # it skips what step 5 had
    assert check_run(folder).faults == tuple(
        f"after going on from step 4, step {step} had other samples than before" for step in (5, 6)
    )
    with pytest.raises(
        LogError, match="lost or repeated samples, or its records were changed: after going on from step 4"
    ):
        check(folder)
    assert "something was lost or repeated" in capsys.readouterr().out


def test_a_checkpoint_of_other_samples_is_found(killed):
    save(killed, 10, chain=chain_of(range(1, 10)))
    checked = check_run(killed)
    assert checked.faults == (
        "the checkpoint of step 10 followed other samples, packs, tokens or segments than the records, or the same in "
        "another order",
    )
    assert checked.proved == ()


def test_records_that_end_before_a_checkpoint_are_found(killed):
    save(killed, 12)
    assert check_run(killed).faults == ("there is a checkpoint of step 12, but the records end at step 10",)


def test_a_run_that_differs_from_another_is_found(killed, tmp_path):
    take(tmp_path / "other", 1, 10, digest_of=lambda step: digest(step, run=3 if step == 7 else 1))
    (fault,) = check_run(killed, tmp_path / "other").faults
    assert fault.startswith("1 steps, the first of them step 7, differ from")


@pytest.mark.parametrize(
    ("packs", "tokens_per_pack", "clause"),
    [
        (6, 128, "a step has 2 packs in {0}, and 6 in {1}"),
        (2, 256, "data.tokens_per_pack is 128 in {0}, and 256 in {1}"),
    ],
)
def test_a_run_with_other_packs_is_no_witness_and_accuses_nobody(killed, tmp_path, packs, tokens_per_pack, clause):
    other = tmp_path / "other"
    take(other, 1, 10, digest_of=lambda step: digest(step, run=3), packs=packs)
    for folder, tokens in ((killed, 128), (other, tokens_per_pack)):
        (folder / "config.yaml").write_text(f"data: {{tokens_per_pack: {tokens}, workers: {tokens}}}")
    checked = check_run(killed, other)
    assert (checked.faults, checked.others) == ((), None)
    assert f"that both runs took the same samples: {clause.format(killed, other)}" in checked.unproved


def test_steps_taken_again_with_other_packs_are_not_compared_but_told(tmp_path):
    take(tmp_path / "run", 1, 6)
    take(tmp_path / "run", 5, 10, packs=3, digest_of=lambda step: digest(step, run=5))
    checked = check_run(tmp_path / "run")
    assert (checked.redone, checked.regrouped, checked.faults, checked.unwitnessed) == (0, 2, (), (4,))
    assert "2 steps taken again with other packs" in checked.as_table()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([record(1), record(3)], "a record of step 3 where that of step 2 belongs"),
        ([record(1), record(2), record(2)], "a record of step 2 where that of step 3 belongs"),
        ([{"kind": "step", "step": 1}], "no samples_digest in step 1"),
        ([[1]], "line 1 is no record"),
        ([record(1) | {"samples_digest": "f" * 17}], "f{17}. is no digest of 16 hexadecimal digits"),
        ([record(1) | {"samples_digest": "\u0663" * 16}], "is no digest of 16 hexadecimal digits"),
        ([record(1) | {"samples_digest": 5}], "5 is no digest of 16 hexadecimal digits"),
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


def edited(folder, edit):
    """Change the records of a run in place."""
    path = folder / "metrics.jsonl"
    rows = read_metrics(path)
    edit(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def more(row, field, by):
    value = row[field]
    row[field] = f"{(int(value, 16) + by) % 2**64:016x}" if isinstance(value, str) else value + by


def exchange(rows):
    rows[2]["samples_digest"], rows[3]["samples_digest"] = rows[3]["samples_digest"], rows[2]["samples_digest"]


EDITS = {
    "a digest more": lambda rows: more(rows[2], "samples_digest", 1),
    "a digest more, another less": lambda rows: [
        more(rows[2], "samples_digest", 1),
        more(rows[3], "samples_digest", -1),
    ],
    "two digests exchanged": exchange,
    "tokens": lambda rows: more(rows[2], "tokens", -5),
    "tokens from one step to another": lambda rows: [more(rows[2], "tokens", -5), more(rows[3], "tokens", 5)],
    "segments": lambda rows: more(rows[2], "segments", -1),
    "packs": lambda rows: more(rows[2], "packs", 1),
    "the last step lost": lambda rows: rows.__delitem__(slice(7, None)),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_every_edit_of_a_record_before_a_checkpoint_is_found(killed, edit):
    edited(killed, edit)
    checked = check_run(killed)
    assert checked.faults
    assert (checked.proved, checked.in_order) == ((), ())
    assert "something was lost or repeated, or a record was changed" in checked.as_table()


@pytest.mark.parametrize("edit", [edit for name, edit in EDITS.items() if "lost" not in name])
def test_an_edit_behind_the_last_checkpoint_is_in_steps_that_are_named_as_unproved(killed, edit):
    edited(killed, lambda rows: edit(rows[6:]))
    checked = check_run(killed)
    shutil.rmtree(killed / "checkpoints")
    save(killed, 4, resumes=2)
    unproved = check_run(killed)
    assert checked.faults or checked.without_witness == ((9, 10),)
    assert (unproved.faults, unproved.without_witness) == ((), ((7, 10),))
    assert "order, packs, tokens and segments of steps 5 to 10, one by one" in unproved.unproved


def test_restarts_that_are_no_longer_told_of_are_found_by_checkpoints_and_by_the_ledger(killed):
    assert take(killed, 11, 10) == 3
    save(killed, 10, resumes=3)
    (killed / "goodput.jsonl").write_text('{"kind": "resumed", "step": 4}\n' * 3)
    assert check_run(killed).faults == ()
    kept = (killed / "resumes.jsonl").read_text().splitlines()
    (killed / "resumes.jsonl").write_text(kept[0] + "\n")
    assert check_run(killed).faults == (
        "a checkpoint counts 3 restarts, and resumes.jsonl tells of 1",
        "goodput.jsonl counts 3 restarts, and resumes.jsonl tells of 1",
    )
    (killed / "resumes.jsonl").unlink()
    shutil.rmtree(killed / "checkpoints")
    assert check_run(killed).faults == ("goodput.jsonl counts 3 restarts, and resumes.jsonl tells of 0",)


@pytest.mark.parametrize("steps", [0, 3])
def test_without_a_witness_nothing_is_claimed_and_the_command_fails(tmp_path, capsys, steps):
    take(tmp_path / "run", 1, steps)
    with pytest.raises(LogError, match=f"nothing is proved .* compare its {steps} steps with"):
        check(tmp_path / "run", as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["proved"], told["faults"]) == ([], [])
    assert told["without_witness"] == ([[1, 3]] if steps else [])
    assert told["verdict"] == "nothing is proved, because no step has a witness"


def test_records_of_a_real_run_are_proved_in_order_and_every_edit_of_them_is_found(raw, tmp_path):
    raw["optim"]["steps"] = 8
    train(parse_config(raw))
    folder = parse_config(raw).run.folder
    checked = check_run(folder)
    assert (checked.proved, checked.in_order, checked.checkpoints) == (((1, 8),), ((1, 8),), 1)
    assert checked.faults == ()
    for number, edit in enumerate(EDITS.values()):
        copied = tmp_path / f"copied-{number}"
        shutil.copytree(folder, copied)
        edited(copied, edit)
        assert check_run(copied).faults
