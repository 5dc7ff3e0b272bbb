"""A gradient that is not finite ends the run and names the samples, or its update is left out as if it had not been."""

import json
import signal
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from headway.checkpoint import latest_checkpoint, training_tensors
from headway.checkpoint.restore import read_tensors, saved_tensors
from headway.config import OptimConfig, parse_config
from headway.errors import TrainingError
from headway.optim import Optimizer
from headway.optim.optimizer import take_step
from headway.train import run as run_module
from helpers.runs import read_metrics


def optimizer_of(model, rule, held):
    groups = [{"params": list(model.parameters()), "rule": rule, "lr_factor": 1.0, "weight_decay": 0.1}]
    return Optimizer(groups, OptimConfig(steps=1, lr=0.1, betas=(0.9, 0.95), eps=1e-8, state=held or "auto"))


@pytest.mark.parametrize(("rule", "held"), [("adamw", None), ("adamw", "bfloat16"), ("muon", None)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_skipped_update_leaves_weights_and_moments_as_if_it_had_not_been(rule, held, bad):
    torch.manual_seed(0)
    one, other = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    other.load_state_dict(one.state_dict())
    optimizers = [optimizer_of(model, rule, held) for model in (one, other)]
    for gradient in (torch.randn(64, 64), None, torch.randn(64, 64)):
        for model, optimizer in zip((one, other), optimizers, strict=True):
            if gradient is not None:
                model.weight.grad = gradient.clone()
                take_step(optimizer, torch.tensor([1.0, 2.0]), skips=True)
            elif model is one:
                model.weight.grad = torch.full((64, 64), bad)
                take_step(optimizer, torch.tensor([1.0, bad]), skips=True)
            else:
                optimizer.updates += 1  # rounding goes by the run's steps, whatever became of them
    for (name, tensor), same in zip(
        training_tensors(one, optimizers[0]).items(), training_tensors(other, optimizers[1]).values(), strict=True
    ):
        assert torch.equal(tensor, same), name


@pytest.fixture
def poison(monkeypatch):
    """Make the gradients of some steps, counted from 1, not finite."""

    def spoil(*steps):
        original = run_module.prepare

        def prepare(config, **given):
            run = original(config, **given)
            parameter = next(p for name, p in run.model.named_parameters() if name.endswith("norm.weight"))
            calls = []

            def hook(gradient):
                calls.append(1)
                return gradient * float("nan") if len(calls) in steps else gradient

            parameter.register_hook(hook)
            return run

        monkeypatch.setattr(run_module, "prepare", prepare)

    return spoil


def weights_after(config, step):
    folder = config.run.folder / f"checkpoints/step-{step:06d}"
    tensors = {name: torch.empty_like(tensor, device="cpu") for name, tensor in saved_tensors(folder).items()}
    read_tensors(folder, tensors)
    return tensors


def test_a_run_leaves_the_update_out_counts_it_and_goes_on(raw, poison, monkeypatch):
    poison(3)
    raw["optim"] |= {"on_nonfinite": "skip"}
    monkeypatch.setattr(run_module, "MOST_SKIPPED", 2)
    raw["checkpoint"] = {"every": 1, "keep": 9}
    config = parse_config(raw)
    summary = run_module.train(config)
    records = [record for record in read_metrics(config.run.folder / "metrics.jsonl") if record["kind"] == "step"]
    assert [record.get("skipped", False) for record in records] == [False, False, True, False, False, False]
    assert (records[2]["loss"], records[2]["grad_norm"]) == (None, None)
    before, after, later = (weights_after(config, step) for step in (2, 3, 4))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(not torch.equal(after[name], later[name]) for name in after)
    assert summary.skipped == json.loads((config.run.folder / "summary.json").read_text())["skipped_updates"] == 1
    assert "1 updates left out" in summary.as_table()


def test_too_many_in_a_row_end_the_run(raw, poison, monkeypatch):
    poison(2, 3, 4)
    raw["optim"] |= {"on_nonfinite": "skip"}
    monkeypatch.setattr(run_module, "MOST_SKIPPED", 2)
    with pytest.raises(TrainingError, match=r"step 4 has loss .* after 2 updates in a row that were left out"):
        run_module.train(parse_config(raw))


def test_the_error_names_the_samples_and_leaves_the_last_checkpoint_whole(raw, poison):
    poison(3)
    raw["checkpoint"] = {"every": 1}
    config = parse_config(raw)
    with pytest.raises(TrainingError, match=r"step 3 has loss \d.* and gradient norm nan.*train.jsonl") as caught:
        run_module.train(config)
    told = json.loads((config.run.folder / "not-finite-rank-0.json").read_text())
    assert told["step"] == 3
    assert told["packs"][0][0] in str(caught.value)
    assert latest_checkpoint(config.run.folder / "checkpoints").step == 2
    assert all(tensor.isfinite().all() for tensor in weights_after(config, 2).values())


def test_a_row_of_left_out_updates_goes_on_where_it_was_and_keeps_the_checkpoint_before_it(raw, poison, monkeypatch):
    """Killed or ended, a run that is lost must not train on for as many steps again, nor delete what was good."""
    poison(*range(3, 99))
    raw["optim"] |= {"on_nonfinite": "skip"}
    monkeypatch.setattr(run_module, "MOST_SKIPPED", 3)
    raw["checkpoint"] = {"every": 1, "keep": 1}
    config = parse_config(raw)
    with pytest.raises(TrainingError, match=r"step 6 has loss .* after 3 updates in a row"):
        run_module.train(config)
    saved = sorted(path.name for path in (config.run.folder / "checkpoints").iterdir())
    assert saved == ["step-000002", "step-000005"]
    poison(*range(1, 99))
    with pytest.raises(TrainingError, match=r"step 6 has loss .* after 3 updates in a row"):
        run_module.train(config, resume=True)


def test_a_run_stopped_before_any_update_was_taken_ends_as_others_do(raw, poison, monkeypatch):
    poison(*range(1, 99))
    raw["optim"] |= {"on_nonfinite": "skip"}
    monkeypatch.setattr(run_module, "MOST_SKIPPED", 5)
    asked = []

    @contextmanager
    def stopped():
        yield lambda: asked.append(1) or (signal.SIGTERM if len(asked) == 2 else 0)

    monkeypatch.setattr(run_module, "stop_requests", stopped)
    summary = run_module.train(parse_config(raw))
    assert (summary.steps, summary.skipped, summary.first_loss, summary.last_loss) == (2, 2, None, None)
    assert "none: every update was left out" in summary.as_table()
    assert json.loads((summary.folder / "summary.json").read_text())["first_loss"] is None
