"""The router's numbers in the metrics of a run, against what the routers of the same model choose."""

import torch

from headway.config import parse_config
from headway.train.prepare import prepare
from headway.train.run import train
from headway.train.run_folder import RunFolder
from headway.train.watch import LoopPhase
from helpers.runs import read_metrics


def test_a_step_records_how_its_slots_were_routed(raw, mixture, tmp_path):
    raw["model"]["path"] = str(mixture)
    raw["optim"] |= {"steps": 1, "accumulation": 2, "warmup_steps": 0}
    train(parse_config(raw))
    (record,) = [r for r in read_metrics(tmp_path / "run/metrics.jsonl") if r["kind"] == "step"]

    raw["run"]["folder"] = str(tmp_path / "again")
    config = parse_config(raw)
    with RunFolder(config.run.folder) as folder:
        run = prepare(config, resume=False, phase=LoopPhase(), folder=folder)
    loads = torch.zeros(2, 8)

    def count(layer):
        def hook(_module, _args, out):
            loads[layer] += out[2].flatten().bincount(minlength=8)

        return hook

    for number, layer in enumerate(run.model.model.language_model.layers):
        layer.mlp.gate.register_forward_hook(count(number))
    with run.feed:
        for batch in next(iter(run.feed)):
            run.model(**batch.model_inputs())
    ratios = loads.amax(1) / loads.mean(1)
    assert record["router"] == {
        "max_over_mean": ratios.mean().item(),
        "worst_max_over_mean": ratios.max().item(),
        "unused": (loads == 0).sum().item(),
    }
    assert ratios.max() > 1.0
