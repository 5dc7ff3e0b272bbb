"""Whatever the ranks: a run ends, each sample is trained once, and its losses are those of one process.

The steps here are uneven on purpose: the last of an epoch has fewer packs than ranks, a rank's only sample is skipped,
every sample of a step is, or is left out as over-long.
"""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from headway.checkpoint import latest_checkpoint
from headway.config import parse_config
from headway.train.check import check_run
from headway.train.run import train
from helpers.processes import TRAIN, run_processes
from helpers.runs import read_metrics

PACKS = 24  # of a step, which 1, 2, 3, 4 and 8 ranks share evenly
BROKEN, LONG, SAMPLES = (3, 28), 11, 30  # 29 packs of one sample: the last step has five, on five of the ranks at most
RANKS = [pytest.param(2, marks=pytest.mark.slow), 3, *(pytest.param(n, marks=pytest.mark.long) for n in (4, 8))]
FORMS = ["indexed", pytest.param("streamed", marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def rows(digits, tmp_path_factory):
    """Samples of a picture each, of which two are broken behind their header, and one is longer than a pack."""
    folder, lines = tmp_path_factory.mktemp("rows"), []
    for number, text in enumerate((digits / "data/one_digit.jsonl").read_text().splitlines()[:SAMPLES]):
        row = json.loads(text)
        picture, words = sorted(row["messages"][0]["content"], key=lambda part: part["type"])
        content = (digits / "data" / picture["image"]).read_bytes()
        picture["image"] = f"{number}.png"
        (folder / picture["image"]).write_bytes(content[: len(content) // 2] if number in BROKEN else content)
        words["text"] *= 9 if number == LONG else 1
        lines.append(json.dumps(row) + "\n")
    (folder / "rows.jsonl").write_text("".join(lines))
    return folder / "rows.jsonl"


def recipe(raw, rows, run, ranks, form):
    """A sample a pack, and as many packs in a step, however many ranks share them."""
    data = {
        "train": str(rows),
        "tokens_per_pack": 40,
        "samples_per_pack": 1,
        "overlong": "drop",
        "bad": {"policy": "skip", "fraction": None},
    }
    optim = {"lr": 2e-3, "accumulation": PACKS // ranks, "epochs": 1}
    if form == "streamed":
        data |= {"train": {"path": str(rows), "epochs": 1}, "stream": {"lanes": PACKS, "shuffle": 1, "open_packs": 1}}
        optim |= {"steps": 9, "epochs": None}
    return raw | {
        "data": raw["data"] | data,
        "optim": optim,
        "checkpoint": {"every": 1},
        "run": raw["run"] | {"folder": str(run)},
    }


def steps_of(folder):
    return [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "step"]


def digests(records):
    return [(record["step"], record["samples_digest"], record["tokens"]) for record in records]


def sum_of(found):
    """Digest and tokens of all steps together."""
    return sum(int(digest, 16) for _, digest, _ in found) % 2**64, sum(tokens for *_, tokens in found)


@pytest.fixture(scope="module")
def alone(raw_of_module, rows, tmp_path_factory):
    """The steps of one process, by the form of the data."""
    found = {}

    def steps(form):
        if form not in found:
            folder = tmp_path_factory.mktemp(form) / "run"
            assert train(parse_config(recipe(raw_of_module, rows, folder, 1, form))).is_complete
            found[form] = steps_of(folder)
        return found[form]

    return steps


@pytest.fixture(scope="module")
def raw_of_module(digits):
    return {
        "model": {"path": str(digits / "model"), "random_init": True},
        "data": {"workers": 0, "prefetch_bytes": 0},
        "run": {"device": "cpu", "threads": 1},
    }


@pytest.mark.dist
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", RANKS)
def test_uneven_ranks_end_with_all_samples_trained_once_as_one_process_does(
    raw_of_module, rows, alone, tmp_path, ranks, form
):
    folder, path = tmp_path / "run", tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(raw_of_module, rows, folder, ranks, form)))
    run_processes([*TRAIN, path], ranks)

    together = steps_of(folder)
    # Once a lane of a stream has ended, its rank reads on in its other lanes: the same samples, in steps of their own.
    assert sum_of(digests(together)) == sum_of(digests(alone(form)))
    if form == "indexed":
        assert digests(together) == digests(alone(form))
    for step, expected in zip(together, alone(form), strict=True) if form == "indexed" else ():
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
        assert (step["flops"], step["world_size"]) == (expected["flops"], ranks)
    samples = latest_checkpoint(folder / "checkpoints").position()["report"]["samples"]
    (counts,) = samples.values()
    assert counts["used"]["samples"] == SAMPLES - len(BROKEN) - 1
    assert counts["skipped"]["samples"] == len(BROKEN)
    assert len(list((folder / "export").iterdir())) == 1
    check = check_run(folder)
    assert (check.faults, check.steps) == ((), len(together))

    # the last step again, from the checkpoint before it
    last = latest_checkpoint(folder / "checkpoints").folder
    shutil.rmtree(last)
    run_processes([*TRAIN, path, "--resume"], ranks)
    again = steps_of(folder)
    assert [(r["loss"], r["grad_norm"]) for r in again] == [(r["loss"], r["grad_norm"]) for r in together]
    assert digests(again) == digests(together)
    assert latest_checkpoint(folder / "checkpoints").folder == Path(last)


def test_a_step_whose_every_sample_is_left_out_changes_nothing_and_the_run_goes_on(raw_of_module, rows, tmp_path):
    """A sample a step: steps 4 and 29 of the data's own order have none."""
    raw = recipe(raw_of_module, rows, tmp_path / "run", PACKS, "indexed")
    raw["optim"]["weight_decay"] = 0.5  # which would act without a gradient, as momentum would
    raw["checkpoint"] = {"every": 1, "keep": SAMPLES}
    config = parse_config(raw)
    summary = train(config)
    records = steps_of(config.run.folder)
    empty = [record["step"] for record in records if record.get("empty")]
    assert (len(records), len(empty), summary.empty, summary.skipped) == (SAMPLES - 1, 2, 2, 0)
    assert "2 with nothing to learn from" in summary.as_table()
    for record in records:
        assert (record["loss"] is None) == (record["step"] in empty)
        assert (record["tokens"] == 0) == (record["step"] in empty)
    for step in empty:
        weights = [config.run.folder / f"checkpoints/step-{n:06d}/__0_0.distcp" for n in (step - 1, step)]
        assert weights[0].read_bytes() == weights[1].read_bytes()
    shutil.rmtree(config.run.folder / f"checkpoints/step-{SAMPLES - 1:06d}")
    train(config, resume=True)
    assert [r["loss"] for r in steps_of(config.run.folder)] == [r["loss"] for r in records]
