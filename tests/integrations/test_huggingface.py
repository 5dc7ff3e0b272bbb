"""The callback in real Trainer runs: the FLOPs of the forwards that it really ran, in its own log."""

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from headway import Workload
from headway.count.tracing.build import model_class
from headway.devices import Peak
from headway.integrations import HeadwayCallback
from tiny_models import tiny_config

LENGTHS = [5, 9] * 16


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


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_trainers_log_has_the_flops_of_its_forwards(tmp_path, accumulation):
    config = tiny_config("qwen3")
    model = model_class(config)._from_config(config)
    features = [{"input_ids": [7] * n, "labels": [7] * n, "mask": [1] * n} for n in LENGTHS]
    reported, callback = Reported(), HeadwayCallback(peak=Peak("test", 1e9, "fp32", "made up for a test"))
    arguments = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=4 // accumulation,
        gradient_accumulation_steps=accumulation,
        max_steps=6,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=features,
        eval_dataset=features[:4],
        data_collator=collate,
        callbacks=[reported, callback],  # after the one that reports, as a user's callbacks are
    )
    trainer.train()

    run = callback.run
    assert (run.segments, run.num_steps) == (6 * 4, 6)
    long = (run.tokens - 5 * run.segments) // 4  # how many of the shuffled samples had 9 tokens instead of 5
    expected = callback.meter.cost_model.count(Workload([5] * (run.segments - long) + [9] * long))
    assert run.flops.total == expected.total

    logged = [log for log in trainer.state.log_history if "headway/mfu" in log]
    assert [log["step"] for log in logged] == [2, 4, 6]
    assert all("loss" in log and log["headway/mfu"] > 0 for log in logged)
    assert [log["headway/mfu"] for log in reported.logs if "loss" in log] == [log["headway/mfu"] for log in logged]
