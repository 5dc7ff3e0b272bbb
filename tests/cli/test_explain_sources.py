"""What `headway explain` makes of run folders, records, logs, and two things at once."""

import csv
import json
import shutil
import tarfile
from pathlib import Path

import pytest

from headway.cli import explain_sources
from headway.cli.explain_sources import SourceKind, source_of
from helpers.traces import sidecar, two_kernels_a_step

# TorchTitan's page on Qwen3-VL-30B-A3B (8 H200, December 2025): its numbers and times
TITAN_PAGE = Path(__file__).parents[1] / "explain" / "titan_page.tsv"


def titan_lines(experiment):
    """The log of one of the six experiments; the page gives three of them as results without a step, loss or time."""
    with TITAN_PAGE.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t") if row["experiment"] == str(experiment)]
    return "".join(_line(row) for row in rows)


def _line(row):
    stamp = f"2025-12-17 {row['time']} - root - INFO - " if row["time"] else ""
    tflops = f"  tflops: {row['tflops']}" if row["tflops"] else ""
    return (
        f"[rank0]:[titan] {stamp}step: {row['step'] or 1:>2}  loss: ?  memory: {row['memory_gib']}GiB"
        f"({row['memory_percent']}%)  tps: {row['tps']}{tflops}  mfu: {row['mfu_percent']}%\n"
    )


def trace_of(path, *, rank=0, num_steps=5):
    path.parent.mkdir(parents=True, exist_ok=True)
    return two_kernels_a_step(num_steps).write(path, headway=sidecar(rank=rank, world_size=2))


@pytest.fixture
def run(tmp_path):
    """A run folder whose three steps took a second each, half of it waiting for data."""
    folder = tmp_path / "run"
    folder.mkdir()
    records = [{"kind": "step", "step": n, "wall_s": 1.0, "data_wait_s": 0.5} for n in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def log(tmp_path):
    """Write the log of an experiment of TorchTitan's page."""

    def write(experiment):
        path = tmp_path / f"{experiment}.log"
        path.write_text(titan_lines(experiment))
        return path

    return write


def said(result):
    return " ".join(result.err.split())


def test_a_run_folder_is_explained_by_its_records_and_keeps_the_explanation(headway, run):
    code, out, err = headway("explain", run, "--json")
    record = json.loads(out)
    assert (code, err) == (0, "")
    assert [(one["step"], one["duration_ns"]) for one in record["steps"]] == [(1, 10**9), (2, 10**9), (3, 10**9)]
    assert {line["key"]: line["ns"] for line in record["steps"][0]["lines"]} == {
        "idle.data": 500_000_000, "unseparated": 500_000_000
    }  # fmt: skip
    assert json.loads((run / "explain.json").read_text()) == record
    assert sorted(path.name for path in run.iterdir()) == ["explain.json", "metrics.jsonl"]


def test_one_step_of_a_run_is_not_kept_for_the_whole(headway, run):
    assert headway("explain", run, "--step", 2, "--rank", 0, "--md").code == 0
    assert not (run / "explain.json").exists()


def test_a_run_folder_that_cannot_be_written_to_is_explained_all_the_same(headway, run):
    (run / "explain.json").mkdir()
    result = headway("explain", run)
    assert result.code == 0
    assert "idle: waiting for data" in result.out
    assert result.err.startswith(f"Warning: {run}/explain.json cannot be written: ")


def test_a_run_with_profiles_is_explained_by_the_newest_of_all_its_ranks(headway, run):
    for name in ("steps-000010-000011-rank-0", "steps-000200-000204-rank-0"):
        trace_of(run / "profile" / f"{name}.json.gz")
    trace_of(run / "profile" / "steps-000200-000204-rank-1.json.gz", rank=1)
    record = json.loads(headway("explain", run, "--json").out)
    assert {step["rank"] for step in record["steps"]} == {0, 1}
    assert record["notes"][0].startswith("this is the profile of steps 200 to 204, 2 ranks, in ")
    assert "the last of 2 windows" in record["notes"][0]
    assert f"headway explain {run / 'metrics.jsonl'}" in record["notes"][0]
    assert headway("explain", run / "metrics.jsonl").out.count("unseparated") > 0


def test_a_folder_of_traces_alone_is_explained(headway, tmp_path):
    trace_of(tmp_path / "profile" / "steps-000003-000007-rank-0.json.gz")
    for folder in (tmp_path, tmp_path / "profile"):
        assert "useful work at peak" in headway("explain", folder, "--by", "module").out


def test_records_by_another_name_are_known_by_their_first_line(headway, run, tmp_path):
    moved = (run / "metrics.jsonl").rename(tmp_path / "steps.log")
    assert "idle: waiting for data" in headway("explain", moved).out


def test_two_runs_are_compared(headway, run, tmp_path):
    faster = tmp_path / "faster"
    faster.mkdir()
    (faster / "metrics.jsonl").write_text('{"kind": "step", "step": 9, "wall_s": 0.75, "data_wait_s": 0.25}\n')
    record = json.loads(headway("explain", run, faster, "--json").out)
    assert (record["schema_version"], record["difference_ns"]) == (1, -250_000_000)
    assert record["lines"] == [
        {"name": "idle: waiting for data", "key": "idle.data", "a_ns": 500_000_000, "b_ns": 250_000_000,
         "difference_ns": -250_000_000},
        {"name": "unseparated: no profile", "key": "unseparated", "a_ns": 500_000_000, "b_ns": 500_000_000,
         "difference_ns": 0},
    ]  # fmt: skip
    assert (record["a"]["name"], record["a"]["num_steps"], record["b"]["num_steps"]) == (str(run), 3, 1)
    assert "Better: idle: waiting for data (-250.00 ms)." in headway("explain", run, faster).out


def test_two_traces_of_one_rank_are_compared_and_of_two_ranks_are_one_job(headway, tmp_path):
    first, same = (trace_of(tmp_path / f"{name}.json.gz") for name in "ab")
    other = trace_of(tmp_path / "other.json.gz", rank=1)
    assert json.loads(headway("explain", first, same, "--json").out)["difference_ns"] == 0
    assert {step["rank"] for step in json.loads(headway("explain", first, other, "--json").out)["steps"]} == {0, 1}
    assert "difference_ns" in json.loads(headway("explain", first, other, "--compare", "--json").out)


@pytest.mark.parametrize(
    ("experiment", "ids"),
    [
        (1, ["not-compute-bound"]),
        (2, ["not-compute-bound"]),
        (3, ["not-compute-bound"]),
        (4, ["falling-rate", "first-steps"]),
        (5, ["unstable-steps", "not-compute-bound", "first-steps"]),
        (6, ["not-compute-bound"]),  # three rows, each faster than the one before: nothing comes and goes
    ],
)
def test_what_torchtitans_page_shows_in_its_lines(headway, log, experiment, ids):
    record = json.loads(headway("explain", log(experiment), "--json").out)
    assert [finding["id"] for finding in record["findings"]] == ids
    is_timed = experiment > 3  # whose lines have stamps
    for step in record["steps"]:
        assert sum(line["share"] for line in step["lines"]) == pytest.approx(1)
        assert (step["duration_ns"] is not None) == is_timed
        assert {line["ns"] is not None for line in step["lines"]} == {is_timed}
    assert (record["mean"]["duration_ns"] is not None) == is_timed


def test_the_numbers_of_torchtitans_findings(headway, log):
    (unstable, vague, first) = json.loads(headway("explain", log(5), "--json").out)["findings"]
    # the rates of steps 3 to 10 are 1.46 to 7.28 % of the peak; their deciles 1.72 and 4.59
    assert "take 2.7 times as long for the same work as the fastest, such as step 8 beside step 10" in unstable["seen"]
    assert "though nearly all have as many tokens" in unstable["seen"]
    assert (unstable["mfu_from"], unstable["mfu_to"]) == (
        pytest.approx(0.027, abs=5e-4),
        pytest.approx(0.0459, abs=1e-4),
    )
    assert vague["seen"].startswith("MFU is 2.7 %, and kernels at a fifth of the peak would take 13.5 %")
    assert "the first 2 steps of 10 took 53.68 s, 28.07 s, the others 10.90 s" in first["seen"]
    (falling, _) = json.loads(headway("explain", log(4), "--json").out)["findings"]
    assert falling["seen"].startswith("the rate of the work fell by 3.8 % from step 2 to step 18")


def test_two_logs_are_compared(headway, log):
    result = headway("explain", log(5), log(6))
    assert "A step of B takes 4,340.85 ms more than one of A (+36.9 %). MFU 2.7 % -> 2.1 %." in result.out


@pytest.mark.parametrize("command", ["explain", "report", "goodput", "audit", "check"])
def test_a_folder_of_runs_names_the_runs_within_it(headway, run, command):
    result = headway(command, run.parent)
    assert result.code == 2
    assert "is no run's folder. Runs within it: run. Name one of them." in said(result)
    shutil.copytree(run, run.parent / "all/digits/run")
    assert "Runs within it: digits/run. Name one of them." in said(headway(command, run.parent / "all"))


def test_an_empty_metrics_jsonl_is_an_error_with_a_way_out(headway, run):
    (run / "metrics.jsonl").write_text("")
    result = headway("explain", run)
    assert result.code == 2
    assert "holds no record of a step with its time" in said(result)
    assert "Let the run take a step" in said(result)
    assert not (run / "explain.json").exists()


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"\x89PNG\r\n\x1a\n\x00\x00", "a picture."),
        (b"", "empty: a program that was killed before it wrote leaves such a file."),
        (b"\x80\x04\x95\x00", "a pickle of Python, such as a snapshot of torch's memory."),
    ],
)
def test_a_file_that_can_be_nothing_of_the_kind_is_an_error_in_a_sentence(headway, tmp_path, content, kind):
    path = tmp_path / "file"
    path.write_bytes(content)
    result = headway("explain", path)
    assert result.code == 2
    assert said(result).startswith(f"Error: {path} is {kind}")
    assert "torchtitan" not in said(result)


H200_TRACE = Path(__file__).parents[1] / "explain" / "h200_two_blocks.json.gz"
# ms-swift, add_train_message and PerfMetricsLogCallback
SWIFT = {"loss": 1.9, "MFU": 0.11, "global_step/max_steps": "5/100", "percentage": "5.00%", "elapsed_time": "3s"}


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("trace.json.gz", H200_TRACE.read_bytes(), SourceKind.TRACES),
        ("of_powershell.json", '{"traceEvents": []}'.encode("utf-16"), SourceKind.TRACES),
        ("any.jsonl", b'{"step": 1, "step_s": 2.0}\n', SourceKind.RECORDS),
        ("metrics.jsonl", b"", SourceKind.RECORDS),  # of a run that has just begun
        ("logging.jsonl", json.dumps(SWIFT).encode() + b"\n", SourceKind.LOG),
        ("titan.log", titan_lines(1).encode(), SourceKind.LOG),
        ("shapes.parquet", b"PAR1\x15\x04\x00\x00", SourceKind.FOREIGN),
        ("nothing", b"", SourceKind.FOREIGN),
    ],
)
def test_the_kind_of_a_source_is_asked_once(tmp_path, monkeypatch, name, content, kind):
    path, opened = tmp_path / name, []
    path.write_bytes(content)
    open_plain = explain_sources.open_plain
    monkeypatch.setattr(explain_sources, "open_plain", lambda file: opened.append(file) or open_plain(file))
    source = source_of(path)
    assert (source.kind, source.files, opened) == (kind, (path,), [path])


def test_an_archive_of_ranks_is_explained_as_one_job(headway, tmp_path):
    names = []
    for rank in (0, 1, 2):
        trace = two_kernels_a_step(3)
        names.append(trace.write(tmp_path / f"rank{rank}.json", distributedInfo={"rank": rank, "world_size": 3}))
    path = tmp_path / "job.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.add(name, name.name)
    result = headway("explain", path, "--json")
    assert {step["rank"] for step in json.loads(result.out)["steps"]} == {0, 1, 2}


def test_text_that_is_nothing_of_the_kind_is_an_error_that_names_the_kinds(headway, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"# A page\n\nof prose.\n")
    result = headway("explain", path)
    assert result.code == 2
    assert (
        f"{path} is neither a trace of torch.profiler nor the records of a run, so Headway read it as a log."
        in said(result)
    )
    assert "the step lines of torchtitan" in said(result)


def test_a_file_that_is_not_there_is_an_error(headway, tmp_path):
    result = headway("explain", tmp_path / "gone")
    assert (result.code, said(result)) == (
        2,
        f"Error: {tmp_path / 'gone'} is not there. Give a trace, a run folder, its metrics.jsonl, or a training log.",
    )


def test_what_cannot_be_compared_or_taken_is_refused(headway, run, log, tmp_path):
    trace = trace_of(tmp_path / "t.json.gz")
    for arguments, text in (
        ((run, run / "metrics.jsonl"), "are the same, so there is nothing to compare"),
        ((trace, trace), "are the same, so there is nothing to compare"),
        ((run, trace, log(4)), "--compare takes two sources, not 3"),
        ((run, "--compare"), "--compare takes two sources, not 1"),
        ((run, log(4), "--by", "module"), "--by module cannot take effect in a comparison"),
        ((log(2), log(4)), "2.log does not tell how long its steps took"),
        ((run, "--by", "kernel"), "--by kernel: records tell nothing of kernels; a profile does (run.profile)"),
        ((run, "--whole"), "--whole needs a trace, but"),
    ):
        result = headway("explain", *arguments)
        assert (result.code, result.out) == (2, "")
        assert text in said(result)


def test_a_log_and_a_run_are_compared_by_what_both_tell(headway, run, log):
    assert "idle: waiting for data" in headway("explain", run, log(4)).out
