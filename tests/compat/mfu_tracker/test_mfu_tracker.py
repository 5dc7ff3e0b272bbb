"""What is written for mfu-tracker runs with the import renamed, and prints the right numbers."""

import importlib
import inspect

import mfu_tracker
import pytest
import torch
from transformers import Trainer, TrainingArguments

from headway.compat import mfu_tracker as compat
from headway.compat.mfu_tracker import GPUSpec
from headway.compat.mfu_tracker.integrations.hf_trainer import MFUCallback
from headway.errors import UnknownDeviceError, UsageError, WorkloadError
from helpers import checkpointing
from helpers.tiny_gpt2 import batch_of, gpt2, recomputed_flops, step_flops

SPEC_BYTES = 1e11
LENGTHS = [5, 9, 12, 3] * 8


@pytest.fixture(autouse=True)
def stated_peak(monkeypatch):
    monkeypatch.setenv("HEADWAY_PEAK_FLOPS", "1e15")
    monkeypatch.setattr(GPUSpec, "bytes_per_s", SPEC_BYTES)  # and not one that is measured here


# its own flash_attn_flops takes `batch`, its page passes `batch_size`: here both do
@pytest.mark.parametrize("name", [name for name in mfu_tracker.__all__ if name not in ("GPUSpec", "UtilizationResult")])
def test_every_name_takes_the_same_arguments(name):
    theirs, ours = inspect.signature(getattr(mfu_tracker, name)), inspect.signature(getattr(compat, name))
    assert [*theirs.parameters][:1] == [*ours.parameters][:1] or name == "flash_attn_flops"
    assert theirs.parameters.keys() - {"flops", "hfu_flops"} <= ours.parameters.keys()


def test_a_spec_of_its_own_is_taken():
    theirs = mfu_tracker.gpu.GPUSpec("their card", (9, 0), 132, 1.8e9, 3.35e12, {"bf16": 989e12}, 3.35)
    assert compat.compute_mfu(989e12, 2.0, dtype="bf16", spec=theirs) == pytest.approx(0.5)
    assert compat.compute_mbu(3.35e12, 4.0, spec=theirs) == pytest.approx(0.25)
    with compat.track(1e9, 1e6, dtype="bf16", spec=theirs) as result:
        pass
    assert result.mfu == pytest.approx(1e9 / result.elapsed_sec / 989e12)
    with pytest.raises(UnknownDeviceError, match="their card, given as spec, has no peak for 'fp4'"):
        compat.compute_mfu(1.0, 1.0, dtype="fp4", spec=theirs)
    with pytest.raises(UsageError, match="spec='H100' is no GPUSpec"):
        compat.compute_mfu(1.0, 1.0, spec="H100")


@pytest.mark.parametrize("name", ["GPUSpec", "UtilizationResult"])
def test_results_have_the_attributes_that_the_page_reads(name):
    read = {
        "GPUSpec": ("peak_tflops", "peak_memory_bandwidth_tbs"),
        "UtilizationResult": ("mfu", "hfu", "mbu", "elapsed_sec", "achieved_tflops", "achieved_tbs", "tokens_per_sec"),
    }
    assert all(hasattr(getattr(compat, name), attribute) for attribute in read[name])


def test_the_modules_that_its_scripts_import_are_here():
    for module in ("flops", "integrations", "integrations.hf_trainer"):
        theirs = importlib.import_module(f"mfu_tracker.{module}")
        ours = importlib.import_module(f"headway.compat.mfu_tracker.{module}")
        names = [n for n, v in vars(theirs).items() if getattr(v, "__module__", "").startswith(theirs.__name__)]
        assert names
        assert all(hasattr(ours, name) for name in names if not name.startswith("_"))


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


@pytest.mark.slow
@pytest.mark.core
def test_recomputation_is_in_hfu_alone(tmp_path):
    exact, stated = MFUCallback(metric_prefix=""), MFUCallback(backward_factor=3.0, num_gpus=2)
    logged = {}
    for callback in (exact, stated):
        history = run_trainer(tmp_path, callback, **{checkpointing.NAME: True})
        logged[callback] = next(log for log in history if any(key.endswith("mfu") for key in log))
        assert callback.run.flops.total == step_flops(LENGTHS)
        assert callback.run.flops.recompute == recomputed_flops(LENGTHS)
    again = 1 + recomputed_flops(LENGTHS) / step_flops(LENGTHS)
    assert logged[exact]["hfu"] / logged[exact]["mfu"] == pytest.approx(again, rel=0.01)  # of some of the samples
    assert logged[stated]["throughput/hfu"] / logged[stated]["throughput/mfu"] == pytest.approx(4 / 3)
    assert stated.meter.peak.flops_per_s == 2 * exact.meter.peak.flops_per_s


def test_an_unknown_device_trains_on_without_numbers(tmp_path, monkeypatch):
    monkeypatch.delenv("HEADWAY_PEAK_FLOPS")
    with pytest.warns(UserWarning, match="no MFU and no MBU will be logged"):
        history = run_trainer(tmp_path, MFUCallback(dtype="fp8"))  # which no CPU computes in
    assert not any("throughput/mfu" in log for log in history)
    assert any("throughput/tokens_per_sec" in log for log in history)


def test_bad_input_is_one_clear_error():
    for options, message in (
        ({"dtype": "int4"}, "dtype='int4' is not known"),
        ({"num_gpus": 0}, "num_gpus=0"),
        ({"backward_factor": 1.5}, "at least 2"),
        ({"backward_factor": 3.0, "hfu_backward_factor": 3.0}, "give one of them"),
    ):
        with pytest.raises(UsageError, match=message):
            MFUCallback(**options)


def test_a_sample_that_cannot_be_counted_is_an_error_before_the_first_step(tmp_path):
    with pytest.raises(WorkloadError, match="none of input_ids"):
        run_trainer(tmp_path, MFUCallback(sample_batch={"labels": torch.zeros(1, 3)}))
