"""The FLOPs that a plan says of a run on preferences are those that the run bills."""

from pathlib import Path

import pytest

from headway.cli.plan_data import lengths_of_data
from headway.cli.resolve import resolve_ledger
from headway.config import parse_config
from headway.predict.predictor import Predictor
from headway.train.run import train
from helpers.rollouts import write_pairs
from helpers.runs import read_metrics, write_model

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.mark.parametrize("reference", ["stored", "adapters-off", "none"])
def test_a_plan_has_the_flops_of_the_run(raw, tmp_path, monkeypatch, reference):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    model, data = write_model(tmp_path / "model", "qwen3"), write_pairs(tmp_path / "pairs.jsonl", 40)
    raw["model"] = {"path": str(model), "random_init": True}
    raw["data"] |= {"train": str(data), "tokens_per_pack": 300}
    raw["optim"] = {"epochs": 1, "lr": 5e-3, "schedule": "constant", "accumulation": 2}
    raw["preference"] = {"loss": "sigmoid", "reference": reference}
    if reference == "adapters-off":
        raw["model"]["lora"] = {"rank": 4, "targets": ["q_proj", "down_proj"]}
    config = parse_config(raw)
    ledger = resolve_ledger(config.model)
    planned = Predictor.of(config, ledger).at(config, 1, lengths_of_data(config, ledger))
    train(config)
    steps = [r for r in read_metrics(Path(raw["run"]["folder"]) / "metrics.jsonl") if r["kind"] == "step"]
    assert len(steps) > 3
    full = steps[:-1]  # the last step of an epoch is short

    def mean(number):
        return sum(map(number, full)) / len(full)

    rel = 1e-6  # each of a mean's rows is rounded to whole FLOPs
    assert planned.flops.total == pytest.approx(mean(lambda r: r["flops"]["total"]), rel=rel)
    assert planned.flops.recompute == pytest.approx(mean(lambda r: r["flops"]["recompute"]), rel=rel)
    assert planned.flops.recompute > 0
    if reference == "stored":  # the forward of the model that trains
        assert planned.packs.reference.total == pytest.approx(mean(lambda r: r["flops"]["forward"]), rel=rel)
    elif reference == "adapters-off":
        phases = mean(lambda r: r["phases"]["reference"]["flops"]["total"])
        assert planned.packs.reference.total == pytest.approx(phases, rel=rel)
    else:
        assert planned.packs.reference is None
