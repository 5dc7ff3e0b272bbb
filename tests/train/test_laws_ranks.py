"""Whatever the ranks: a run ends, each sample is trained once, and its losses are those of one process.

The steps here are uneven on purpose: the last of an epoch has fewer packs than ranks, a rank's only sample is skipped,
every sample of a step is, or is left out as over-long.
"""

import json
import math
import sys

import pytest
import yaml
from PIL import Image

from headway.train.check import check_run
from headway.train.checkpoint import latest_checkpoint
from headway.train.config import parse_config
from headway.train.loop import train
from helpers.processes import TRAIN, run_processes
from helpers.run_records import read_metrics

PACKS = 24  # of a step, which 1, 2, 3, 4 and 8 ranks share evenly
SAMPLES = 29  # of which the second, last step of an epoch has five: fewer than half of eight ranks have one
RANKS = [2, 3, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (4, 8))]


@pytest.fixture(scope="module")
def rows(digits, tmp_path_factory):
    """Samples of one picture each, of which two are broken behind their header, and one is longer than a pack."""
    folder = tmp_path_factory.mktemp("rows")
    lines = [json.loads(line) for line in (digits / "data/one_digit.jsonl").read_text().splitlines()[:SAMPLES]]
    for number, line in enumerate(lines):
        (name,) = line["images"]
        content = (digits / "data" / name).read_bytes()
        (folder / f"{number}.png").write_bytes(content[:-40] if number in (3, 28) else content)
        line["images"] = [f"{number}.png"]
        with Image.open(folder / f"{number}.png"):
            pass  # the header is sound, so that the row is measured as a good one
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "rows.jsonl"


def recipe(raw, rows, run, ranks, *, epochs=1, streamed=False):
    """One sample a pack; as many packs in a step, however many ranks share them."""
    part = {"path": str(rows), "epochs": epochs} if streamed else {"path": str(rows)}
    data = {"train": [part], "tokens_per_pack": 60, "workers": 0, "overlong": "drop"}
    data |= {"index": False, "open_packs": 1} if streamed else {"strategy": "best_fit"}
    data |= {"bad": {"policy": "skip", "fraction": None}}
    optim = {"lr": 2e-3, "accumulation": PACKS // ranks} | ({"steps": 9} if streamed else {"epochs": epochs})
    changes = {"data": data, "optim": optim, "checkpoint": {"every": 1}, "run": raw["run"] | {"folder": str(run)}}
    return raw | changes


def steps_of(folder):
    return [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "step"]


def samples_of(folder):
    samples = latest_checkpoint(folder / "checkpoints").position()["report"]["samples"]
    return samples
