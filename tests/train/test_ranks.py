"""Two processes train as one: the same losses as one process that accumulates twice the packs."""

from pathlib import Path

import pytest
import torch
import yaml

from headway.train.config import load_config
from headway.train.loop import train
from headway.train.ranks import Ranks
from headway.train.record import read_metrics
from processes import TRAIN, run_processes


def test_one_process_sums_to_itself():
    ranks = Ranks(0, 1)
    assert ranks.gather("one") == ["one"]
    assert ranks.is_first
    tensor = torch.tensor(2.0)
    ranks.sum_(tensor)
    assert tensor == 2.0


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_have_the_losses_of_one_with_twice_the_accumulation(raw, digits, tmp_path):
    raw["data"]["eval"] = str(digits / "data/eval.jsonl")
    raw["eval"] = {"every": 3}
    raw["checkpoint"] = {"every": 3}
    raw["optim"]["accumulation"] = 4
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(raw))
    train(load_config(path))
    alone = read_metrics(Path(raw["run"]["folder"]) / "metrics.jsonl")

    folder = tmp_path / "two"
    run_processes([*TRAIN, path, "--set", f"run.folder={folder}", "--set", "optim.accumulation=2"], 2)
    together = read_metrics(folder / "metrics.jsonl")

    assert [(r["kind"], r["step"]) for r in together] == [(r["kind"], r["step"]) for r in alone]
    for one, two in zip(alone, together, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        if one["kind"] == "step":
            assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
            assert two["tokens"] == one["tokens"]
            assert two["flops"] == one["flops"]
            assert two["world_size"] == 2
        else:
            assert two["samples"] == one["samples"]
