"""Runs with compiled blocks compile nothing twice; that their numbers are the same is a law of the engine."""

import pytest
import torch

from headway.config import parse_config
from headway.train.run import train
from helpers.runs import read_metrics


@pytest.mark.slow  # inductor's C++ compiler takes its time
@pytest.mark.parametrize("num_steps", [60, pytest.param(200, marks=pytest.mark.long)])
def test_no_step_compiles_again_over_packs_of_images_of_any_number_and_size(raw, num_steps):
    torch._dynamo.reset()
    raw["optim"]["steps"] = num_steps
    raw["data"] |= {"tokens_per_pack": 96, "strategy": "next_fit"}  # which leaves packs of many sizes
    raw["speed"] = {"compile": True, "recompiles": "error"}
    config = parse_config(raw)
    summary = train(config)
    steps = [record for record in read_metrics(config.run.folder / "metrics.jsonl") if record["kind"] == "step"]
    assert [step["step"] for step in steps if step["compiled"]] == [1]
    assert not any(step["recompiles"] for step in steps)
    assert summary.utilisation.num_steps == num_steps - 1  # the one that compiled is in no mean
    assert len({step["slots"] for step in steps}) > 20
    assert len({step["flops_by_component"]["vision.attention"] for step in steps}) > 20
