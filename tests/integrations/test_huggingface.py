"""The callback in real Trainer runs: the FLOPs of the forwards that it really ran, in its own log."""

import gzip
import json
import sys
import time
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, ViTConfig, ViTForImageClassification

import headway
from headway import Workload, trace
from headway.devices import Peak
from headway.errors import UsageError
from headway.explain.findings.gaps import purpose_of
from headway.integrations import HeadwayCallback
from headway.meter import Goodput
from headway.meter.pauses import HostEvidence
from helpers.device import Clock
from helpers.models import tiny_model
from helpers.runs import leave_settings_out, read_events, read_mlflow, wandb_history

LENGTHS = [5, 9] * 16
PEAK = Peak("test", 1e12, "fp32", "made up for a test")


def collate(features):
    width = max(len(one["input_ids"]) for one in features)

    def padded(name, value):
        return torch.tensor([one[name] + [value] * (width - len(one[name])) for one in features])

    return {"input_ids": padded("input_ids", 0), "attention_mask": padded("mask", 0), "labels": padded("labels", -100)}


class Reported(TrainerCallback):
    """Stands where W&B and TensorBoard stand: it keeps what it is handed to report."""

    def __init__(self):
        self.logs = []

    def on_log(self, _args, _state, _control, logs=None, **_):
        self.logs.append(dict(logs))


def tiny():
    return tiny_model("qwen3")


def train(path, callbacks, *, resume=None, samples=list, **options):
    """Run six steps of four samples, with an evaluation and a checkpoint every third, unless the options differ."""
    features = [{"input_ids": [7] * n, "labels": [7] * n, "mask": [1] * n} for n in LENGTHS]
    arguments = TrainingArguments(
        str(path),
        **{
            "per_device_train_batch_size": 4, "max_steps": 6, "logging_steps": 2, "eval_strategy": "steps",
            "eval_steps": 3, "save_steps": 3, "report_to": [], "use_cpu": True, "disable_tqdm": True,
            "remove_unused_columns": False, "dataloader_pin_memory": False,
        }
        | options,
    )  # fmt: skip
    trainer = Trainer(
        tiny(),
        arguments,
        train_dataset=samples(features),
        eval_dataset=features[:4],
        data_collator=collate,
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def of_headway(log):
    return {name: value for name, value in log.items() if name.startswith("headway/")}


def expected_flops(run):
    """Count a run of samples of 5 and 9 tokens, from how many there were of both together."""
    long = (run.tokens - 5 * run.segments) // 4
    return trace(tiny()).count(Workload([5] * (run.segments - long) + [9] * long))


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_a_trainers_log_has_the_flops_of_its_forwards(tmp_path, accumulation):
    reported, callback = Reported(), HeadwayCallback(peak=PEAK)
    sizes = {"per_device_train_batch_size": 4 // accumulation, "gradient_accumulation_steps": accumulation}
    trainer = train(tmp_path, [reported, callback], **sizes)  # after the one that reports, as a user's callbacks are

    run = callback.run
    assert (run.segments, run.num_steps) == (6 * 4, 6)
    assert run.flops == expected_flops(run)

    logged = [log for log in trainer.state.log_history if "headway/mfu" in log]
    assert [log["step"] for log in logged] == [2, 4, 6]
    assert all("loss" in log and log["headway/mfu"] > 0 for log in logged)
    assert [of_headway(log) for log in reported.logs if "loss" in log] == [of_headway(log) for log in logged]


def test_a_callback_that_is_added_later_reports_first_as_well(tmp_path):
    reported, callback = Reported(), HeadwayCallback(peak=PEAK)

    trainer = Trainer(
        tiny(),
        TrainingArguments(
            str(tmp_path), max_steps=2, logging_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True,
            disable_tqdm=True, remove_unused_columns=False, dataloader_pin_memory=False, save_strategy="no",
        ),
        train_dataset=[{"input_ids": [7] * 5, "labels": [7] * 5, "mask": [1] * 5}] * 4,
        data_collator=collate,
        callbacks=[reported],
    )  # fmt: skip
    trainer.add_callback(callback)
    trainer.train()
    assert len(reported.logs) == 3
    assert all("headway/mfu" in log for log in reported.logs if "loss" in log)


def test_a_resumed_run_measures_its_own_steps_and_logs_under_the_steps_of_the_whole(tmp_path):
    train(tmp_path, [HeadwayCallback(peak=PEAK)], max_steps=3)
    callback = HeadwayCallback(peak=PEAK, names=("tokens", "num_steps"))
    trainer = train(tmp_path, [callback], resume=True)
    run = callback.run
    assert (run.num_steps, run.segments) == (3, 3 * 4)
    assert run.flops == expected_flops(run)
    logged = {log["step"]: log for log in trainer.state.log_history if "headway/tokens" in log}
    assert {step: log["headway/num_steps"] for step, log in logged.items()} == {4: 1, 6: 2}
    assert sum(log["headway/tokens"] for log in logged.values()) == run.tokens


class Forgets(TrainerCallback):
    """Has the model compiled anew in each step."""

    def on_step_begin(self, *_args, **_):
        torch.compiler.reset()


# dynamo looks at the gradient of whatever it traces, and hides the warning only where warnings are no errors
@pytest.mark.filterwarnings("default:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.slow
def test_a_run_in_which_every_step_compiled_says_so(tmp_path):
    callback = HeadwayCallback(peak=PEAK)
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    with pytest.warns(UserWarning, match="of 3 steps, all were warm-up or compiled something"):
        train(tmp_path, [callback, Forgets()], max_steps=3, eval_strategy="no", save_strategy="no", **compiled)
    assert callback.run.num_steps == 0
    assert np.isnan(callback.run.mfu)


class Slow(TrainerCallback):
    """An evaluation that takes very long, by the clock that the meter reads."""

    def __init__(self, clock):
        self._clock = clock

    def on_prediction_step(self, *_, **__):
        self._clock.now_s += 1000.0

    def on_step_begin(self, *_, **__):
        self._clock.now_s += 1.0


# 32 samples in fours are epochs of 8 steps
@pytest.mark.parametrize(("options", "evaluations"), [({}, 2), ({"eval_strategy": "epoch", "max_steps": 16}, 2)])
def test_an_evaluation_takes_no_time_of_the_steps(tmp_path, options, evaluations):
    clock = Clock()
    callback = HeadwayCallback(peak=PEAK, clock=clock)
    train(tmp_path, [callback, Slow(clock)], save_strategy="no", **options)
    steps = callback.run.num_steps
    assert clock.now_s == 100.0 + steps * 1.0 + evaluations * 1000.0
    assert callback.run.wall_s == steps


def test_a_checkpoint_takes_no_time_of_the_steps(tmp_path, monkeypatch):
    clock, save_model = Clock(), Trainer.save_model

    def save_slowly(trainer, *args, **kwargs):
        clock.now_s += 1000.0
        save_model(trainer, *args, **kwargs)

    monkeypatch.setattr(Trainer, "save_model", save_slowly)
    callback = HeadwayCallback(peak=PEAK, clock=clock)
    train(tmp_path, [callback, Slow(clock)])  # with two evaluations, each before a checkpoint
    assert clock.now_s == 100.0 + 6 * 1.0 + 4 * 1000.0
    assert callback.run.wall_s == 6.0


class SlowSamples(list):
    """Samples that take their time."""

    def __getitem__(self, index):
        time.sleep(0.01)
        return super().__getitem__(index)


def test_the_wait_for_samples_is_told_and_charged(tmp_path):
    with Goodput(tmp_path / "goodput.jsonl") as ledger:
        callback = HeadwayCallback(peak=PEAK, goodput=ledger)
        train(tmp_path / "run", [callback], samples=SlowSamples, eval_strategy="no")
        seconds = ledger.report().seconds
    samples_s = 6 * 4 * 0.01
    assert samples_s <= callback.run.data_wait_s <= callback.run.wall_s
    assert seconds["data wait"] >= samples_s
    assert seconds["step"] > 0


def test_a_number_that_no_window_has_is_named(tmp_path):
    callback = HeadwayCallback(peak=PEAK, names=("mfu", "mfuu"))
    with pytest.warns(RuntimeWarning, match=r"a window has no mfuu to log; it has .*mfu, hfu.*Training goes on"):
        trainer = train(tmp_path, [callback])
    assert trainer.state.global_step == trainer.state.max_steps


def test_hooks_are_not_called_by_hand():
    callback = HeadwayCallback()
    with pytest.warns(RuntimeWarning, match=r"called by no transformers\.Trainer"):
        callback.on_train_begin(None, None, None, model=None)
    assert isinstance(callback.failure, UsageError)


class Picture(torch.nn.Module):
    """Of no form that is read by itself: it takes neither token ids nor a workload."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 5))

    def forward(self, pixels, labels=None):
        logits = self.layers(pixels)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class ReadPicture(Picture):
    """Reads the values of its data, which a trace has not."""

    def forward(self, pixels, labels=None):
        torch.linalg.svdvals(pixels.flatten(1)).tolist()
        return super().forward(pixels, labels)


def train_pictures(path, callbacks, kind=Picture):
    data = [{"pixels": torch.randn(3, 4, 4), "labels": torch.tensor(i % 5)} for i in range(12)]
    options = TrainingArguments(
        path, max_steps=3, per_device_train_batch_size=4, report_to=[], use_cpu=True, logging_steps=1
    )
    trainer = Trainer(kind(), options, train_dataset=data, callbacks=callbacks)
    trainer.train()
    return trainer


def test_a_model_that_cannot_be_counted_is_trained_with_one_warning(tmp_path):
    callback = HeadwayCallback(peak=PEAK)
    with pytest.warns(RuntimeWarning) as told:
        trainer = train_pictures(tmp_path / "a", [callback], ReadPicture)
    (warning,) = [str(one.message) for one in told if "HeadwayCallback" in str(one.message)]
    assert warning.startswith("HeadwayCallback measures this training no further: ")
    assert "Training goes on without its numbers. For models" in warning
    assert "give it cost_model=headway.trace(model, inputs=...), workload=...: a cost model, and a function" in warning
    assert trainer.state.global_step == 3
    assert not any(name.startswith("headway/") for log in trainer.state.log_history for name in log)
    assert not trainer.model._forward_pre_hooks
    trainer.model(torch.randn(2, 3, 4, 4), torch.tensor([0, 1]))  # no hook is left to refuse it
    plain = train_pictures(tmp_path / "b", [])
    assert trainer.state.log_history[-1].keys() == plain.state.log_history[-1].keys()


def test_a_model_of_any_arguments_is_counted_by_itself(tmp_path):
    callback = HeadwayCallback(peak=PEAK, watch=True)
    train_pictures(tmp_path, [callback])
    assert callback.failure is None
    # forward and the gradient of the weights of 48 x 5, for 3 batches of 4
    assert callback.run.flops.total == 2 * 2 * 48 * 5 * 3 * 4


@pytest.mark.slow
def test_a_model_that_the_trainer_compiles_is_counted_in_each_step_but_the_first(tmp_path):
    callback = HeadwayCallback(peak=PEAK)
    options = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 3, "logging_steps": 1}
    options |= {"report_to": [], "use_cpu": True, "per_device_train_batch_size": 2, "save_strategy": "no"}
    rows = [{"input_ids": [7] * 9, "labels": [7] * 9}] * 6
    trainer = Trainer(tiny(), TrainingArguments(tmp_path, **options), train_dataset=rows, callbacks=[callback])
    trainer.train()
    assert (callback.run.num_steps, callback.run.num_left_out) == (2, 1)
    assert callback.run.flops == trace(tiny()).count(Workload([9] * 4))


def test_a_model_that_takes_pictures_alone_is_counted_by_itself(tmp_path):
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8
    )
    data = [{"pixel_values": torch.randn(3, 32, 32), "labels": torch.tensor(i % 2)} for i in range(12)]
    options = TrainingArguments(
        tmp_path, max_steps=3, per_device_train_batch_size=4, report_to=[], use_cpu=True, logging_steps=1
    )
    callback = HeadwayCallback(peak=PEAK)
    trainer = Trainer(ViTForImageClassification(config), options, train_dataset=data, callbacks=[callback])
    trainer.train()
    assert callback.failure is None
    # 16 patches of 8 x 8 x 3 values; with the class token 17 places; a layer has four 32 x 32 matrices, an MLP of
    # 2 x 32 x 64, and 17 x 17 pairs of 2 x 32 products; the head reads one place. All of it thrice, but for the
    # gradient of the pictures.
    stem = 16 * 192 * 32
    rest = 2 * (17 * (4 * 32 * 32 + 2 * 32 * 64) + 17 * 17 * 2 * 32) + 32 * 2
    assert callback.run.flops.total == 12 * 2 * (2 * stem + 3 * rest)
    assert trainer.state.log_history[0]["headway/mfu"] > 0


def test_the_way_out_that_the_warning_names_counts_it(tmp_path):
    model = Picture()
    cost = trace(model, inputs={"pixels": torch.randn(1, 3, 4, 4), "labels": torch.tensor([0])})
    callback = HeadwayCallback(peak=PEAK, cost_model=cost, workload=lambda given: Workload([1] * len(given["labels"])))
    trainer = train_pictures(tmp_path, [callback])
    assert callback.failure is None
    # 12 pictures; 48 x 5 products forward and for the weight's gradient; pictures need none
    assert callback.run.flops.total == 12 * 2 * 2 * 48 * 5
    assert trainer.state.log_history[0]["headway/mfu"] > 0


def test_a_batch_in_mid_run_that_cannot_be_counted_ends_the_numbers_and_not_the_training(tmp_path):
    given = []

    def workload(arguments):
        given.append(arguments)
        if len(given) > 2:
            raise ZeroDivisionError("a workload of one's own may fail of anything")
        return Workload([4])

    cost = trace(Picture(), inputs={"pixels": torch.randn(1, 3, 4, 4), "labels": torch.tensor([0])})
    callback = HeadwayCallback(peak=PEAK, cost_model=cost, workload=workload)
    with pytest.warns(RuntimeWarning, match="no further: ZeroDivisionError: a workload of one's own may fail"):
        trainer = train_pictures(tmp_path, [callback])
    assert trainer.state.global_step == 3
    assert len(given) == 3
    assert ["headway/mfu" in log for log in trainer.state.log_history] == [True, True, False, False]


@pytest.mark.slow
# MLflow's models use a loader that SQLAlchemy 2.1 announces the end of; nothing that its user can change
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")
def test_trackers_hold_what_the_log_history_holds(tmp_path, monkeypatch):
    import wandb

    leave_settings_out(monkeypatch, tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "digits")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tensorboard"))
    wandb.teardown()
    callback = HeadwayCallback(peak=PEAK, names=("mfu", "tokens", "flops", "padding_share"))
    trainer = train(tmp_path, [callback], report_to=["wandb", "tensorboard", "mlflow"])
    history = [(log["step"], of_headway(log)) for log in trainer.state.log_history if "headway/mfu" in log]
    assert [step for step, _ in history] == [2, 4, 6]
    series = {name: [(step, log[name]) for step, log in history] for name in history[0][1]}
    assert {"headway/mfu", "headway/tokens", "headway/flops/total", "headway/padding_share"} <= set(series)

    held, _, status = read_mlflow(f"sqlite:///{tmp_path}/runs.db", "digits")
    assert {name: values for name, values in held.items() if name.startswith("headway/")} == series
    assert status == "FINISHED"

    # these two are handed names below "train/"; TensorBoard's scalars are 32-bit floats
    events = read_events(tmp_path / "tensorboard")
    for name, values in series.items():
        read = [(event.step, event.value) for event in events.Scalars(f"train/{name}")]
        assert read == [(step, float(np.float32(value))) for step, value in values]
    wandb.finish()  # the Trainer leaves its run open
    rows = [row for row in wandb_history(tmp_path) if "train/headway/mfu" in row]
    for name, values in series.items():
        assert [(row["train/global_step"], row[f"train/{name}"]) for row in rows] == values


class StackAt(TrainerCallback):
    """Takes down the stack in each of its calls, as a profile does."""

    def __init__(self):
        self.stacks, self.evidence = {}, HostEvidence(None)

    def on_log(self, *_, **__):
        self.stacks["logging"] = self.evidence._stack(sys._getframe())

    def on_save(self, *_, **__):
        self.stacks["checkpoint"] = self.evidence._stack(sys._getframe())

    def on_step_end(self, *_, **__):
        self.stacks["pause"] = self.evidence._stack(sys._getframe())

    def on_prediction_step(self, *_, **__):
        self.stacks["evaluation"] = self.evidence._stack(sys._getframe())


def test_what_a_callback_pauses_for_is_the_chore_that_the_trainer_does_and_no_other(tmp_path):
    callback = StackAt()
    train(tmp_path, [callback])
    purposes = {chore: purpose_of(stack).name for chore, stack in callback.stacks.items()}
    assert purposes == {"logging": "logging", "checkpoint": "checkpoint", "pause": "", "evaluation": "evaluation"}


def test_two_lines_profile_steps_of_a_trainer(tmp_path):
    callback = HeadwayCallback(peak=PEAK)
    with headway.profile(None, tmp_path / "profile", steps=range(3, 5)) as window:
        trainer = train(tmp_path, [callback])
    with gzip.open(window.path) as file:
        trace = json.load(file)
    names = Counter(event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation")
    assert (names["ProfilerStep#3"], names["ProfilerStep#4"], names["ProfilerStep#5"]) == (1, 1, 0)
    assert names["module:model.layers.0.mlp.up_proj"] == 3  # those of two steps, and of the evaluation after the third
    assert (names["phase:forward"], names["phase:evaluation"], names["phase:checkpoint"]) == (2, 1, 1)
    assert names["phase:data_wait"] >= 2
    steps = trace["headway"]["steps"]
    for step in steps.values():
        counted = headway.trace(tiny()).count(Workload(**step["workload"]))
        assert sum(sum(both.values()) for both in step["useful_flops"].values()) == counted.total
    assert all(step["slots"] > step["tokens"] and step["padding_flops"] > 0 for step in steps.values())
    assert len(trainer.state.log_history) > 3


def test_a_loss_is_the_same_to_the_bit_in_a_profiled_run(tmp_path):
    def losses(window):
        torch.manual_seed(0)
        with window:
            trainer = train(tmp_path, [HeadwayCallback(peak=PEAK)], max_steps=3, logging_steps=1, eval_strategy="no")
        return [log["loss"] for log in trainer.state.log_history if "loss" in log]

    assert losses(headway.profile(None, tmp_path / "profile", steps=range(2, 4))) == losses(nullcontext())
