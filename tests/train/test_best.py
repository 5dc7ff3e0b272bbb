"""A run that keeps its best checkpoint and ends by itself: on one process and on two, also after a kill."""

import json
import math
import signal
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForImageTextToText

from headway.answer.evaluate import Evaluation
from headway.answer.model_folder import find_model
from headway.checkpoint.export import find_checkpoint_in
from headway.checkpoint.restore import read_tensors
from headway.checkpoint.state import AVERAGE, WEIGHTS
from headway.cli.app import main
from headway.config import parse_config
from headway.errors import ConfigError, RunCompleteError, UsageError
from headway.log.held_out import HeldOutTally
from headway.models.load import load_model
from headway.pages.page import report_page
from headway.pages.run import read_run
from headway.train.best import BestEvaluation
from headway.train.check import check_run
from headway.train.run import train
from helpers.processes import TRAIN, run_processes, start_processes
from helpers.runs import read_metrics


@pytest.fixture
def overfits(raw, digits, tmp_path):
    """A configuration that learns four samples by heart, and is judged by others: as plain types, and in a file."""
    raw["data"] |= {
        "train": [{"path": str(digits / "data/train.jsonl"), "limit": 4}],
        "eval": str(digits / "data/eval.jsonl"),
    }
    raw["optim"] |= {"steps": 60, "lr": 5e-3, "schedule": "constant"}
    raw["eval"] = {"every": 2, "stop_after": 4, "max_samples": 6}
    raw["checkpoint"] = {"keep": 1, "keep_best": True, "export": "never"}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    return raw, path


def evaluations(folder):
    return [
        (record["step"], record["loss"])
        for record in read_metrics(folder / "metrics.jsonl")
        if record["kind"] == "evaluation"
    ]


def checkpoints(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.fixture
def headway(monkeypatch, capsys):
    """Run the command line in this process; its exit code, and what it said on one line."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["headway", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        return ended.value.code or 0, " ".join((output.out + output.err).split())

    return run


def ended_early(folder, stop_after):
    """The step of the best evaluation of a run, which ended after so many others, and the last step."""
    judged = evaluations(folder)
    best = min(judged, key=lambda pair: pair[1])[0]
    assert [step for step, _ in judged if step > best] == [best + 2 * n for n in range(1, stop_after + 1)]
    return best, judged[-1][0]


def test_a_run_ends_after_evaluations_that_do_not_better_it_and_its_best_checkpoint_stays(
    overfits, tmp_path, capsys, headway
):
    raw, path = overfits
    config = parse_config(raw)
    summary = train(config)
    best, last = ended_early(config.run.folder, 4)
    assert last < 60
    assert summary.is_complete
    assert summary.steps == last
    assert checkpoints(config.run.folder) == [f"step-{best:06d}", f"step-{last:06d}"]
    assert f"ended early after step {last} of 60: 4 evaluations were no better than loss" in capsys.readouterr().err
    saved = json.loads((config.run.folder / "summary.json").read_text())
    assert (saved["complete"], saved["ended_early"], saved["planned_steps"]) == (True, True, 60)
    assert saved["best_evaluation"]["step"] == best

    # what was best is used by name, and judged as it was in training
    assert find_checkpoint_in(config.run.folder, best=True).step == best
    exit_code, said = headway("evaluate", config.run.folder, "--best", "--max-samples", 6, "--json")
    assert exit_code == 0, said
    assert json.loads(said[said.index("{") : said.rindex("}") + 1])["loss"] == pytest.approx(
        dict(evaluations(config.run.folder))[best]
    )
    exit_code, said = headway("export", config.run.folder, tmp_path / "model", "--best")
    assert exit_code == 0, said
    assert f"the model after step {best}" in said
    assert (
        f"loss {dict(evaluations(config.run.folder))[best]:.4f} after step"
        in (tmp_path / "model/README.md").read_text()
    )
    load_model(str(tmp_path / "model"))
    exit_code, said = headway(
        "generate", config.run.folder, "--best", "--prompt", "Read the digits.", "--max-new-tokens", 2
    )
    assert exit_code == 0, said

    assert f"ended early, after step {last} of 60" in report_page(read_run(config.run.folder))

    # it is complete: nothing is left to resume, unless more patience is asked for
    with pytest.raises(RunCompleteError, match=r"4 evaluations were no better than loss .* eval\.stop_after is 4"):
        train(config, resume=True)
    exit_code, said = headway("train", path, "--resume-if-any")
    assert (exit_code, "ended early" in said) == (0, True)
    raw["eval"]["stop_after"] = 5
    assert train(parse_config(raw), resume=True).steps == last + 2
    assert checkpoints(config.run.folder) == [f"step-{best:06d}", f"step-{last + 2:06d}"]


def test_a_killed_run_goes_on_counting_where_it_was(overfits, tmp_path):
    raw, path = overfits
    whole = parse_config(raw)
    train(whole)
    folder = tmp_path / "killed"
    command = [*TRAIN, path, "--set", f"run.folder={folder}", "--set", "checkpoint.every=3"]
    (process,) = start_processes(command, 1, tmp_path)
    best, last = ended_early(whole.run.folder, 4)
    while num_evaluations(folder) <= best // 2 + 1:
        assert process.poll() is None, process.err.read_text()
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL, "the run ended before it could be killed"
    (ended,) = run_processes([*command, "--resume"], 1)
    assert f"ended early after step {last} of 60" in ended.stderr
    assert evaluations(folder) == evaluations(whole.run.folder)
    assert check_run(folder, whole.run.folder).faults == ()
    assert checkpoints(folder) == [f"step-{best:06d}", f"step-{last:06d}"]


def num_evaluations(folder):
    file = folder / "metrics.jsonl"
    return file.read_text().count('"kind": "evaluation"') if file.exists() else 0


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_stop_together_and_keep_the_best(overfits, tmp_path):
    _, path = overfits
    ended = run_processes([*TRAIN, path], 2)
    folder = tmp_path / "run"
    best, last = ended_early(folder, 4)
    assert f"ended early after step {last} of 60" in ended[0].stderr
    assert checkpoints(folder) == [f"step-{best:06d}", f"step-{last:06d}"]
    assert find_checkpoint_in(folder, best=True).world_size == 2


def test_the_best_is_wanted_of_a_run_that_has_none(raw, digits, tmp_path, headway):
    config = parse_config(raw)
    train(config)
    for name, message in (
        (config.run.folder, "finds no checkpoint of the best evaluation"),
        (config.run.folder / "checkpoints/step-000006", "takes a run folder"),
        (digits / "model", "takes a run folder"),
    ):
        with pytest.raises(UsageError, match=message):
            find_model(str(name), best=True)
    exit_code, said = headway("export", config.run.folder, tmp_path / "model", "--best")
    assert exit_code == 2
    assert "--best finds no checkpoint" in said
    assert "checkpoint.keep_best" in said


def test_every_door_hands_out_the_weights_that_were_judged(raw, digits, tmp_path, headway):
    """Outside witness: plain transformers opens the folders; their weights are one of the two in the checkpoint."""
    raw["data"]["eval"] = str(digits / "data/eval.jsonl")
    raw["optim"] |= {"steps": 3, "lr": 0.02, "schedule": "constant"}
    raw["optim"]["ema"] = {"decay": 0.99, "warmup": False}
    raw["eval"], raw["checkpoint"] = {"every": 1, "max_samples": 6}, {"keep_best": True}
    run = tmp_path / "run"
    summary = train(parse_config(raw))
    name, checkpoint = "model.language_model.norm.weight", find_checkpoint_in(run)
    saved = {prefix: torch.empty(32) for prefix in (AVERAGE, WEIGHTS)}
    read_tensors(checkpoint.folder, {prefix + name: tensor for prefix, tensor in saved.items()})
    assert not torch.equal(saved[AVERAGE], saved[WEIGHTS])

    # the run's own export, the command's, and either of the two on request
    folders = {Path(summary.model): AVERAGE}
    for option, prefix in (("--best", AVERAGE), ("--ema", AVERAGE), ("--no-ema", WEIGHTS)):
        folders[tmp_path / option] = prefix
        _, said = headway("export", run, tmp_path / option, option)
        assert ("moving average" in said) == (prefix == AVERAGE)
    for folder, prefix in folders.items():
        opened = AutoModelForImageTextToText.from_pretrained(folder)
        assert torch.equal(opened.get_parameter(name), saved[prefix]), folder

    # an evaluation of the run, its checkpoint and its best one gives the number that the run printed
    printed = dict(evaluations(run))
    best = min(printed, key=printed.__getitem__)
    for place, option, step in ((run, [], 3), (checkpoint.folder, [], 3), (run, ["--best"], best)):
        _, said = headway("evaluate", place, digits / "data/eval.jsonl", "--max-samples", 6, "--json", *option)
        assert json.loads(said)["loss"] == pytest.approx(printed[step], rel=1e-6)
    _, said = headway("evaluate", run, digits / "data/eval.jsonl", "--max-samples", 6, "--json", "--no-ema")
    assert json.loads(said)["loss"] != pytest.approx(printed[3], rel=1e-6)


def test_a_choice_of_weights_that_are_not_there_is_refused(raw, digits, tmp_path, headway):
    train(parse_config(raw))
    exit_code, said = headway("export", tmp_path / "run", tmp_path / "model", "--ema")
    assert exit_code == 2
    assert "holds no moving average of the weights" in said
    exit_code, said = headway("evaluate", digits / "model", digits / "data/eval.jsonl", "--no-ema")
    assert exit_code == 2
    assert "is no run and no checkpoint. Leave the option out" in said


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"eval": {"at_end": True, "stop_after": 2}}, r"eval\.stop_after compare evaluations .* Set eval\.every"),
        ({"eval": {"at_end": True}, "checkpoint": {"keep_best": True}}, r"checkpoint\.keep_best compare"),
        ({"checkpoint": {"keep_best": "accuracy"}}, r"keep_best = 'accuracy': give true, false or exact_match"),
        ({"eval": {"every": 2, "stop_after": 0}}, "stop_after"),
    ],
)
def test_settings_that_can_do_nothing_are_refused(raw, digits, sections, message):
    raw["data"]["eval"] = str(digits / "data/eval.jsonl")
    with pytest.raises(ConfigError, match=message):
        parse_config(raw | sections)


def judged(loss, exact=0, samples=10):
    return Evaluation(samples, exact, loss, 100)


def test_the_best_is_the_lowest_loss_or_the_highest_score():
    by_loss, by_score = BestEvaluation("loss"), BestEvaluation("exact_match")
    results = [judged(2.0, 3), judged(1.0, 2), judged(1.0, 3), judged(1.5, 4)]
    assert [by_loss.add(n, result) for n, result in enumerate(results, 1)] == [True, True, False, False]
    assert [by_score.add(n, result) for n, result in enumerate(results, 1)] == [True, False, False, True]
    assert (by_loss.step, by_loss.since, by_score.step, by_score.since) == (2, 2, 4, 0)
    assert [by_loss.has_ended(n) for n in (None, 3, 2, 1)] == [False, False, True, True]


def test_no_number_betters_nothing_and_other_samples_begin_anew():
    best = BestEvaluation("loss")
    assert not best.add(1, judged(math.nan))
    assert BestEvaluation.of("loss", json.loads(json.dumps(best.to_dict(), allow_nan=False))).since == 1
    assert best.add(2, judged(2.0))
    assert not best.add(3, judged(math.nan))
    assert best.add(4, judged(3.0, samples=20))  # of other samples
    state = json.loads(json.dumps(best.to_dict()))
    assert BestEvaluation.of("loss", state) == best
    assert BestEvaluation.of("exact_match", state) == BestEvaluation("exact_match")


def parting(*rows):
    """Where losses part: of each evaluation the held-out loss and the training loss before it."""
    tally = HeldOutTally()
    for step, (held_out, training) in enumerate(rows, 1):
        tally.add({"kind": "step", "step": step, "loss": training})
        tally.add({"kind": "evaluation", "step": step, "loss": held_out})
    return tally.parting


def test_losses_part_where_one_rises_and_the_other_falls():
    found = parting((2.0, 2.0), (1.8, 1.0), (1.95, 0.5))
    assert str(found) == (
        "held-out loss was least after step 2, 1.8000, and is 1.9500 after step 3, 8.3 % more, while training loss "
        "fell from 1.0000 to 0.5000"
    )
    assert parting((2.0, 2.0), (1.8, 1.0), (1.88, 0.5)) is None  # within 5 %
    assert parting((2.0, 2.0), (1.8, 1.0), (2.5, 1.5)) is None  # both rise: the run diverges
    assert parting((0.002, 1.0), (0.004, 0.5)) is None  # of nothing, twice is nothing
    assert parting((1.8, None), (2.5, 0.5)) is None


def test_a_run_is_warned_once_that_it_learns_by_heart(overfits, capsys):
    raw, _ = overfits
    raw["eval"] = {"every": 2, "max_samples": 6}
    raw["checkpoint"] = {"export": "never"}
    raw["optim"]["steps"] = 30
    config = parse_config(raw)
    train(config)
    assert capsys.readouterr().err.count("The model overfits its training samples") == 1
    page = report_page(read_run(config.run.folder))
    assert "Overfitting: held-out loss was least after step" in page
    assert "line: training, dots: held out" in page
