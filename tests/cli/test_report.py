"""What `headway report` is pointed at: runs with a profile, other tools' logs, folders of evaluations alone."""

import json

import pytest

from headway.pages.page import page_of
from headway.pages.run import read_run
from helpers.pages import write_run
from helpers.traces import sidecar, two_kernels_a_step

# Lines of TorchTitan's Qwen3-VL-30B-A3B experiment on 8 H200, December 2025, one of every ten steps.
LOG = "".join(
    f"[rank0]:[titan] 2025-12-17 01:{18 + number:02}:00,000 - root - INFO - step: {10 * number:2}  loss: 12.3984  "
    f"grad_norm:  8.0045  memory: 116.16GiB(83.14%)  tps: {tps}  tflops: 301.33  mfu: {mfu}%\n"
    for number, (tps, mfu) in enumerate(
        [("5,970", "30.47"), ("6,585", "33.60"), ("6,580", "33.58"), ("6,586", "33.61")], 1
    )
)
PROFILE = "profile/steps-000010-000011-rank-0.json.gz"


def test_a_log_of_another_tool_is_a_page(headway, tmp_path):
    (tmp_path / "titan.log").write_text(LOG)
    result = headway("report", tmp_path / "titan.log", "-o", tmp_path / "page.html")
    assert result.code == 0, result.err
    assert "/titan.log, " in result.out
    text = headway("report", tmp_path / "titan.log", "--md").out
    # 1 step, then three times 10, each at a minute for 10 steps; the first is reckoned from its rate.
    assert "/titan.log\n\n31 steps in 3 min 7 s\n" in text
    assert "median 33.6 % |" in text
    assert "useful work is what torchtitan counts" in text
    page = (tmp_path / "page.html").read_text()
    assert "<figcaption><h3>MFU" in page
    assert "<figcaption><h3>Tokens per second" in page


def test_a_log_without_times_has_no_part_of_a_step_to_show(headway, tmp_path):
    (tmp_path / "hf.log").write_text(
        "".join(f"{{'loss': {9 - n}.5, 'grad_norm': 1.0, 'learning_rate': 1e-5, 'epoch': 0.0{n}}}\n" for n in range(6))
    )
    result = headway("report", tmp_path / "hf.log", "-o", tmp_path / "page.html")
    assert "from 9.5" in result.out
    for text in (result.out, (tmp_path / "page.html").read_text()):
        assert "step's time" not in text.replace("&#39;", "'")


def test_two_logs_are_named_apart(headway, tmp_path):
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.log").write_text(LOG)
    result = headway("report", tmp_path / "before/train.log", tmp_path / "after/train.log", "--md")
    assert result.out.startswith("# before (A) and after (B)"), result.err


def test_a_file_that_is_no_log_is_refused_as_by_explain(headway, tmp_path):
    (tmp_path / "x.txt").write_text("nothing\n")
    result = headway("report", tmp_path / "x.txt")
    assert result.code == 2
    assert "Error: " in result.err


@pytest.fixture
def judged(tmp_path):
    """A folder of evaluations, without a step."""
    folder = tmp_path / "judged"
    folder.mkdir()
    rows = [
        {"kind": "evaluation", "step": step, "loss": loss, "exact_match": 0.5} for step, loss in ((5, 1.5), (9, 1.25))
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answer = {"kind": "sample", "step": 9, "prompt": "<b>what</b>", "gold": "7", "answer": "8", "exact": False}
    (folder / "samples.jsonl").write_text(json.dumps(answer) + "\n")
    (folder / "run.json").write_text('{"host": "node-7", "password": "hush"}')
    return folder


def test_a_folder_of_evaluations_alone_is_a_page(headway, judged, tmp_path):
    for path in (judged, judged / "metrics.jsonl"):
        result = headway("report", path, "-o", tmp_path / "page.html")
        assert result.code == 0, result.err
        assert "2 evaluations, " in result.out
        page = (tmp_path / "page.html").read_text()
        assert '<p class="soft">2 evaluations and no step of training</p>' in page
        assert "<b>what" not in page
        assert "hush" not in page
        for part in ("<h3>Evaluations", "<h3>Answers after step 9", "node-7"):
            assert part in page
    markdown = headway("report", judged, "--md").out
    assert "2 evaluations and no step of training" in markdown
    assert "| 9 | 1.2500 | 50.0 % |" in markdown
    both = headway("report", judged, judged)
    assert "holds no record of a step" in " ".join(both.err.split())


def test_a_folder_without_anything_is_an_error(headway, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "evaluation"')
    result = headway("report", tmp_path)
    assert result.code == 2
    assert "holds no record of a step" in " ".join(result.err.split())


def test_a_profile_in_the_folder_tells_where_the_time_of_its_steps_went(headway, tmp_path):
    run = write_run(tmp_path / "run", 20)
    without = headway("report", run, "--md").out
    (run / "profile").mkdir()
    two_kernels_a_step(5).write(run / PROFILE, headway=sidecar(rank=0, world_size=1))
    text = headway("report", run, "--md").out
    assert "The mean of profiled steps 2 to 4." in text
    assert "### Where the time of all steps goes" in text
    assert "### Where the time of all steps goes" not in without
    seen = read_run(run)
    profile, page = seen.profile, page_of(seen)
    assert sum(line.ns for line in profile.mean.lines) == profile.mean.duration_ns
    assert sum(part.ns[0] for part in page.parts) == profile.mean.duration_ns
    assert page.card.points[1] == f"Why: {profile.findings[0].cause}"


def test_a_profile_that_was_cut_off_is_said_and_records_stand_alone(headway, tmp_path):
    run = write_run(tmp_path / "run", 20)
    (run / "profile").mkdir()
    (run / PROFILE).write_bytes(b"\x1f\x8b\x08\x00torn")
    text = headway("report", run, "-o", tmp_path / "page.html")
    assert text.code == 0, text.err
    assert (
        "The profile cannot be read, and records alone tell where the time went: "
        in (tmp_path / "page.html").read_text()
    )
