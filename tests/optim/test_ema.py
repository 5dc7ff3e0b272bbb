"""The average of the weights: its closed form, its place in the model, and its part in a run."""

import math

import pytest
import torch
from torch import nn

from headway.config import parse_config
from headway.config.optim import EmaConfig
from headway.optim import WeightAverage
from headway.train.run import train
from helpers.runs import read_metrics


def model_of(*values, dtype=torch.float32):
    model = nn.ParameterDict({"learns": torch.tensor(values[0], dtype=dtype), "frozen": torch.tensor(values[0])})
    model["frozen"].requires_grad_(False)
    return model


@pytest.mark.parametrize("every", [1, 3])
def test_an_average_is_its_closed_form(every):
    weights = [0.3, -1.2, 2.0, 0.7, 5.0, -3.0, 1.1, 0.9, 4.0, 2.2]
    model = model_of(weights[0])
    average = WeightAverage(model, EmaConfig(decay=0.8, every=every, warmup=False))
    for step, weight in enumerate(weights[1:], start=1):
        model["learns"].data.fill_(weight)
        average.update(step)
    seen = weights[::every]
    n = len(seen) - 1
    expected = 0.8**n * seen[0] + sum(0.2 * 0.8 ** (n - k) * seen[k] for k in range(1, n + 1))
    assert average.state_dict().keys() == {"learns"}
    assert average.state_dict()["learns"].item() == pytest.approx(expected, rel=1e-6)


def test_warm_up_shortens_the_memory_at_first():
    model = model_of(0.0)
    average = WeightAverage(model, EmaConfig(decay=0.9))
    model["learns"].data.fill_(1.0)
    left = 1.0  # of the zero at the start, after every update
    for step in range(1, 200):
        average.update(step)
        left *= min(0.9, (1 + step) / (10 + step))
        assert average.state_dict()["learns"].item() == pytest.approx(1 - left, rel=1e-4)
    assert math.isclose((1 + 80) / (10 + 80), 0.9)  # from update 80 on, the decay is what was asked for


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_gets_its_own_weights_back_to_the_bit(dtype):
    model = model_of(1.0 / 3.0, dtype=dtype)
    average = WeightAverage(model, EmaConfig(decay=0.5, warmup=False))
    model["learns"].data.fill_(2.0 / 3.0)
    average.update(1)
    own, held = model["learns"].clone(), average.state_dict()["learns"].clone()
    with average.in_place():
        assert torch.equal(model["learns"], held.to(dtype))
        assert not torch.equal(model["learns"], own)
    assert torch.equal(model["learns"], own)
    assert torch.equal(average.state_dict()["learns"], held)


def evaluations(config):
    train(config)
    return [r["loss"] for r in read_metrics(config.run.folder / "metrics.jsonl") if r["kind"] == "evaluation"]


def test_a_run_evaluates_its_average_and_resumes_with_it(raw, digits, tmp_path):
    raw["data"]["eval"] = str(digits / "data/eval.jsonl")
    raw["eval"] = {"every": 3}

    def config(folder, **ema):
        optim = raw["optim"] | ({"ema": ema} if ema else {})
        return parse_config(raw | {"optim": optim, "run": raw["run"] | {"folder": str(tmp_path / folder)}})

    plain = evaluations(config("plain"))
    averaged = evaluations(config("averaged", decay=0.9, warmup=False))
    assert averaged != plain
    steps = [
        [record["loss"] for record in read_metrics(tmp_path / run / "metrics.jsonl") if record["kind"] == "step"]
        for run in ("plain", "averaged")
    ]
    assert steps[0] == steps[1]  # averaging changes nothing of the training
    # With decay 0 the average is the last weights.
    assert evaluations(config("copy", decay=0.0, warmup=False)) == plain

    (tmp_path / "half").mkdir()
    raw["checkpoint"] = {"every": 3}
    whole = config("half", decay=0.9, warmup=False)
    train(whole)
    checkpoints = tmp_path / "half" / "checkpoints"
    newest = max(checkpoints.iterdir())
    for path in sorted(newest.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    newest.rmdir()
    train(whole, resume=True)
    resumed = [r["loss"] for r in read_metrics(tmp_path / "half/metrics.jsonl") if r["kind"] == "evaluation"]
    assert resumed == averaged
