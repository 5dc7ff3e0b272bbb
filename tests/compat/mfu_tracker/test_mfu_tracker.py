"""What is written for mfu-tracker runs with the import renamed, and prints the right numbers."""

import inspect

import mfu_tracker
import pytest
from transformers import Trainer, TrainingArguments

from headway.compat import mfu_tracker as compat
from headway.compat.mfu_tracker import GPUSpec, integrations
from headway.compat.mfu_tracker.integrations.hf_trainer import MFUCallback
from headway.compat.mfu_tracker.tracker import Numbers
from headway.errors import UsageError
from helpers.counter import batch_of, gpt2, recomputed_flops, step_flops
from helpers.models import checkpointing_name

SPEC_BYTES = 1e11
LENGTHS = [5, 9, 12, 3] * 8


@pytest.fixture(autouse=True)
def stated_peak(monkeypatch):
    monkeypatch.setenv("HEADWAY_PEAK_FLOPS", "1e15")
    monkeypatch.setattr(GPUSpec, "peak_memory_bandwidth_tbs", SPEC_BYTES / 1e12)  # and not one that is measured here


@pytest.mark.parametrize(
    "name", ["track", "profile_flops", "flash_attn_flops", "param_bytes", "get_gpu_spec", "MFUOptimizerWrapper"]
)
def test_every_name_takes_the_same_arguments(name):
    theirs, ours = inspect.signature(getattr(mfu_tracker, name)), inspect.signature(getattr(compat, name))
    renamed = {"batch"}  # its flash_attn_flops takes `batch`, where its page passes `batch_size`
    assert theirs.parameters.keys() - renamed <= ours.parameters.keys()
    assert name == "flash_attn_flops" or [*theirs.parameters] == [*ours.parameters][: len(theirs.parameters)]


def collate(features):
    return batch_of([len(one["input_ids"]) for one in features])


def run_trainer(tmp_path, callback, **options):
    model = gpt2()
    features = [{"input_ids": [7] * n} for n in LENGTHS]
    settings = {
        "per_device_train_batch_size": 4,
        "max_steps": 8,
        "logging_steps": 4,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        **options,
    }
    trainer = Trainer(
        model,
        TrainingArguments(str(tmp_path), **settings),
        train_dataset=features,
        eval_dataset=features[:4],
        data_collator=collate,
        callbacks=[callback],
    )
    trainer.train()
    return trainer.state.log_history


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=pytest.mark.core), 4])
def test_the_callback_counts_what_the_trainer_ran(tmp_path, accumulation):
    callback = MFUCallback(sample_batch=batch_of([3]), dtype="fp32", metric_prefix="throughput")
    history = run_trainer(
        tmp_path,
        callback,
        per_device_train_batch_size=4 // accumulation,
        gradient_accumulation_steps=accumulation,
        eval_strategy="steps",
        eval_steps=3,
    )
    logs = [log for log in history if "throughput/mfu" in log]
    assert [log["step"] for log in logs] == [4, 8]
    run = callback.run
    assert (run.num_steps, run.segments, run.num_batches) == (8, 32, 8 * accumulation)
    assert run.flops.total == step_flops(LENGTHS)  # one epoch: every sample once
    for log in logs:
        assert log["throughput/hfu"] == log["throughput/mfu"] > 0
        assert log["throughput/mbu"] > 0
        assert log["throughput/tokens_per_sec"] > 0
    weights = 2 * compat.param_bytes(gpt2())
    assert run.bytes_moved > weights * run.num_batches  # read forward and backward, and more on top
    assert run.mbu == pytest.approx(run.bytes_moved / run.wall_s / SPEC_BYTES)


def test_an_unknown_device_trains_on_without_numbers(tmp_path, monkeypatch):
    monkeypatch.delenv("HEADWAY_PEAK_FLOPS")
    with pytest.warns(UserWarning, match="not all numbers will be logged"):
        history = run_trainer(tmp_path, MFUCallback(dtype="fp8"))  # which no CPU computes in
    assert not any("throughput/mfu" in log for log in history)
    assert any("throughput/tokens_per_sec" in log for log in history)


def test_a_spec_of_its_own_is_taken():
    theirs = mfu_tracker.gpu.GPUSpec("their card", (9, 0), 132, 1.8e9, 3.35e12, {"bf16": 989e12}, 3.35)
    with compat.track(1e9, 1e6, dtype="bf16", spec=theirs) as result:
        pass
    assert result.mfu == pytest.approx(1e9 / result.elapsed_sec / 989e12)


def test_the_modules_that_its_page_imports_are_here():
    assert integrations.MFUCallback is MFUCallback
    theirs = [field for field in dir(mfu_tracker.UtilizationResult) if not field.startswith("_")]
    assert {"mfu", "hfu", "mbu", "elapsed_sec", "tokens_per_sec"} <= {*theirs} & {*Numbers._fields}


@pytest.mark.slow
@pytest.mark.core
def test_recomputation_is_read_off_the_model_and_in_hfu_alone(tmp_path):
    with pytest.warns(UserWarning, match="backward factor is not used"):
        callback = MFUCallback(backward_factor=3.0, num_gpus=2, metric_prefix="")
    history = run_trainer(tmp_path, callback, **{checkpointing_name(): True})
    log = next(log for log in history if "mfu" in log)
    assert callback.run.flops.total == step_flops(LENGTHS)
    assert callback.run.flops.recompute == recomputed_flops(LENGTHS)
    again = 1 + recomputed_flops(LENGTHS) / step_flops(LENGTHS)
    assert log["hfu"] / log["mfu"] == pytest.approx(again, rel=0.01)  # of some of the samples
    assert callback.meter.peak.flops_per_s == 2e15


def test_bad_input_is_one_clear_error():
    with pytest.raises(UsageError, match="dtype='int4' is not known"):
        MFUCallback(dtype="int4")
