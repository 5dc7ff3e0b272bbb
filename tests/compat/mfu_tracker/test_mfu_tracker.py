"""What is written for mfu-tracker runs with the import renamed, and prints the right numbers."""

import copy
import importlib.metadata
import inspect
import math
import pickle
import re

import mfu_tracker
import pytest
import torch
import torch.utils.data
from torch import nn
from torch.optim import SGD, AdamW
from transformers import Trainer, TrainingArguments

from headway.compat import mfu_tracker as compat
from headway.compat.mfu_tracker import get_gpu_spec, param_bytes, profile_flops, track
from headway.compat.mfu_tracker.integrations import MFUCallback
from headway.devices import copy_ceiling, peak_for
from headway.errors import UnknownDeviceError, UsageError, WorkloadError
from helpers.counter import SPEC, batch_of, forward_flops, gpt2, recomputed_flops, step_flops
from helpers.models import checkpointing_name, enable_checkpointing

SPEC_BYTES = 1e11
LENGTHS = [5, 9, 12, 3]
BATCHES = [[5, 9], [12, 3], [4, 4], [7, 2]]


@pytest.fixture(autouse=True)
def stated_peak(monkeypatch):
    monkeypatch.setenv("HEADWAY_PEAK_FLOPS", "1e15")
    monkeypatch.setattr(compat.GPUSpec, "peak_memory_bandwidth_tbs", SPEC_BYTES / 1e12)  # which a CPU would measure


def test_the_loops_of_its_page_run_with_the_import_renamed(tmp_path):
    """Its page as the installed distribution has it, and a line of version 0.1.0's page that is no longer there."""
    page = importlib.metadata.metadata("mfu-tracker")
    text = page["Description"] or page.get_payload()
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    snippets = [snippet for snippet in snippets if "profile_flops_with_hfu" not in snippet]  # theirs alone
    assert len(snippets) == 5
    snippets.append(
        "from mfu_tracker import flash_attn_flops\nflops = 0\n"
        "flops += flash_attn_flops(batch_size=2, seq_len=5, num_heads=3, head_dim=7)\n"
    )
    batches = [batch_of(lengths) for lengths in BATCHES]
    for snippet in snippets:
        code = snippet.replace("from mfu_tracker", "from headway.compat.mfu_tracker")
        code = code.replace("torch.compile(model)", "torch.compile(model, backend='eager')")
        model = gpt2()
        features = [{"input_ids": torch.full((5,), 7), "labels": torch.full((5,), 7)} for _ in range(4)]
        names = {
            "model": model, "optimizer": SGD(model.parameters(), lr=0.1), "dataloader": batches, "batch": batches[0],
            "sample_ids": batches[0]["input_ids"][:1], "step": 0, "torch": torch, "Trainer": Trainer,
            "train_dataset": features, "training_args": TrainingArguments(
                str(tmp_path), max_steps=2, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True),
        }  # fmt: skip
        if "fp8" in code:  # which no CPU has
            code = code.replace('print(spec.peak_tflops("fp8"))', "")
        exec(code, names)
        if "result" in names:  # the last batch's, whose profile was another
            assert names["result"].flops == step_flops(BATCHES[-1])
        if "trainer" in names:
            assert {"throughput/mfu", "throughput/mbu"} <= names["trainer"].state.log_history[0].keys()
    assert names["flops"] == 4 * 3 * 7 * 2 * (1 + 2 + 3 + 4 + 5)


@pytest.mark.parametrize(
    "name", ["track", "profile_flops", "flash_attn_flops", "param_bytes", "get_gpu_spec", "MFUOptimizerWrapper"]
)
def test_every_name_takes_the_same_arguments(name):
    theirs, ours = inspect.signature(getattr(mfu_tracker, name)), inspect.signature(getattr(compat, name))
    renamed = {"batch"}  # its flash_attn_flops takes `batch`, where its page passes `batch_size`
    assert theirs.parameters.keys() - renamed <= ours.parameters.keys()
    assert name == "flash_attn_flops" or [*theirs.parameters] == [*ours.parameters][: len(theirs.parameters)]


def run(model, batch):
    model(**batch).loss.backward()


def test_a_profile_of_one_row_bills_the_batches_that_are_run():
    model, batch = gpt2(), batch_of(LENGTHS)
    flops = profile_flops(model, kwargs={"input_ids": batch["input_ids"][:1]})
    assert flops == step_flops([12])  # the row alone, without its mask: padding and all
    assert profile_flops(model, (batch["input_ids"],), with_backward=False) == forward_flops([12] * 4)
    for same in (copy.deepcopy(flops), pickle.loads(pickle.dumps(flops))):  # models do not travel with a number
        assert (same, type(same)) == (flops, int)
    weights = param_bytes(model)
    with track(flops, weights, dtype="fp32", spec=SPEC) as result:
        run(model, batch)
    assert result.flops == step_flops(LENGTHS)
    assert result.mfu == pytest.approx(step_flops(LENGTHS) / result.elapsed_sec / 1e15)
    assert result.hfu == result.mfu
    assert result.achieved_tflops == pytest.approx(result.mfu * 1000)
    assert result.tokens_per_sec == pytest.approx(sum(LENGTHS) / result.elapsed_sec)
    assert result.mbu == pytest.approx(2 * weights / result.elapsed_sec / 1e11)


def test_what_runs_is_billed_as_it_is_set_up():
    """Frozen layers, changed rows of the embedding, forwards alone, batches of other shapes, two models."""
    layers = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 32), nn.Linear(32, 4))
    x, sizes = torch.randn(7, 8), [8 * 16, 16 * 32, 32 * 4]
    for frozen in ([], [0], [0, 1], [2]):
        layers.requires_grad_(True)
        for place in frozen:
            layers[place].requires_grad_(False)
        with track(layers, spec=SPEC) as result:
            layers(x).sum().backward()
        first = min({0, 1, 2} - {*frozen})
        products = sum(sizes) + sum(sizes[first + 1 :]) + sum(sizes[place] for place in {0, 1, 2} - {*frozen})
        assert result.flops == 2 * 7 * products, frozen
    convolution = nn.Conv2d(3, 8, 3)
    for size, rows in ((8, 1), (10, 4)):
        with track(convolution, spec=SPEC) as result, torch.no_grad():
            convolution(torch.zeros(rows, 3, size, size))
        assert result.flops == rows * (size - 2) ** 2 * 2 * 8 * 3 * 9
    teacher, student, batch = gpt2(1), gpt2(2), batch_of(LENGTHS)
    flops = profile_flops(student, kwargs=batch) + profile_flops(teacher, kwargs=batch, with_backward=False)
    with track(flops, spec=SPEC, dtype="fp32") as result:
        with torch.no_grad():
            teacher(**batch)
        run(student, batch)
    assert result.flops == 4 * forward_flops(LENGTHS)
    student.zero_grad()
    student.resize_token_embeddings(160 + 40, mean_resizing=False)
    with track(student, spec=SPEC) as result:
        run(student, batch)
    assert result.flops == step_flops(LENGTHS) + 6 * 40 * 32 * sum(LENGTHS)


def test_work_outside_a_block_and_of_a_copy_is_not_billed():
    model = gpt2()
    with track(model, spec=SPEC) as first:
        run(model, batch_of([4]))
    run(model, batch_of(LENGTHS))
    twin = copy.deepcopy(model)
    with track(twin, spec=SPEC) as second:
        run(model, batch_of(LENGTHS))
        run(twin, batch_of([6]))
    assert (first.flops, second.flops) == (step_flops([4]), step_flops([6]))


def test_an_evaluation_in_a_block_is_counted():
    model = gpt2().eval()
    with track(model, spec=SPEC) as result, torch.no_grad():
        model(**batch_of(LENGTHS))
    assert result.flops == forward_flops(LENGTHS)


def test_what_checkpointing_runs_again_is_in_hfu_alone():
    model, batch = gpt2(), batch_of(LENGTHS)
    enable_checkpointing(model, reentrant=None)
    with track(model, spec=SPEC) as result:
        run(model, batch)
    assert result.flops == step_flops(LENGTHS)
    assert result.flop_count.recompute == recomputed_flops(LENGTHS)
    assert result.hfu / result.mfu == pytest.approx(1 + recomputed_flops(LENGTHS) / step_flops(LENGTHS))


def test_a_bare_number_is_taken_as_stated():
    with track(6e9, 100, dtype="bf16", spec=SPEC, num_gpus=2, num_tokens=30, hfu_flop_count=8e9) as result:
        pass
    assert result.flops == 6_000_000_000
    assert result.mfu == pytest.approx(6e9 / result.elapsed_sec / 4e15)
    assert result.hfu / result.mfu == pytest.approx(8 / 6)
    assert result.mbu == pytest.approx(100 / result.elapsed_sec / 2e11)
    assert result.tokens_per_sec == pytest.approx(30 / result.elapsed_sec)
    with track(6, dtype="bf16", spec=SPEC) as alone:
        pass
    assert all(math.isnan(value) for value in (alone.hfu, alone.mbu, alone.tokens_per_sec))
    theirs = mfu_tracker.gpu.GPUSpec("their card", (9, 0), 132, 1.8e9, 3.35e12, {"bf16": 989e12}, 3.35)
    with track(1e9, 1e6, dtype="bf16", spec=theirs) as result:
        pass
    assert result.mfu == pytest.approx(1e9 / result.elapsed_sec / 989e12)


def test_an_error_in_a_block_passes_and_leaves_no_numbers():
    model, batch = gpt2(), batch_of(LENGTHS)
    with pytest.raises(TypeError), track(model, spec=SPEC) as failed:
        run(model, batch | {"labels": "of another kind"})
    with pytest.raises(UsageError, match="left by an error"):
        _ = failed.mfu
    with track(model, spec=SPEC) as result:
        with pytest.raises(UsageError, match="has not ended"):
            _ = result.mfu
        with pytest.raises(UsageError, match="is open already"), track(model, spec=SPEC):
            pass
        run(model, batch)
    assert result.flops == step_flops(LENGTHS)  # and nothing of the block before


class TwoDevices(nn.Module):
    def __init__(self):
        super().__init__()
        self.here, self.there = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")


@pytest.mark.own_peak
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: track(-1).__enter__(), UsageError, "flop_count=-1"),
        (lambda: track("6e9").__enter__(), UsageError, "flop_count='6e9'"),
        (lambda: track(1, param_bytes=-2).__enter__(), UsageError, "param_bytes=-2"),
        (
            lambda: track(1, num_gpus=0).__enter__(),
            UsageError,
            "num_gpus=0 is not possible: give a number of at least 1",
        ),
        (lambda: track(1, dtype="bf17", device="cpu").__enter__(), UnknownDeviceError, "bf17"),
        (lambda: track(TwoDevices()).__enter__(), UsageError, "several devices, cpu, meta"),
        (lambda: profile_flops(gpt2(), kwargs={"labels": torch.zeros(1, 2)}), WorkloadError, "none of input_ids"),
        (lambda: MFUCallback(dtype="int4"), UsageError, "dtype='int4' is not known"),
        (lambda: compat.MFUOptimizerWrapper(gpt2(), gpt2()), UsageError, "no torch.optim.Optimizer"),
    ],
)
def test_bad_input_is_one_clear_error(monkeypatch, call, error, message):
    monkeypatch.delenv("HEADWAY_PEAK_FLOPS")
    with pytest.raises(error, match=message):
        call()


def test_bytes_of_parameters_and_a_cpus_peak(tmp_path, monkeypatch):
    layers = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2).to(torch.bfloat16))
    layers[0].requires_grad_(False)
    assert (param_bytes(layers), param_bytes(layers, trainable_only=True)) == (4 * 36 + 2 * 10, 20)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = get_gpu_spec("cpu")
    assert spec.peak_tflops("fp32") == pytest.approx(peak_for("cpu", "fp32").flops_per_s / 1e12)
    assert spec.peak_memory_bandwidth_tbs == copy_ceiling("cpu").best.best_per_s / 1e12


def wrapped(model, optimizer=None, **options):
    return compat.MFUOptimizerWrapper(optimizer or SGD(model.parameters(), lr=0.1, momentum=0.9), model, **options)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_a_loop_without_a_zero_grad_of_its_own_trains_as_with_one(num_parts):
    ends = []
    for wraps in (False, True):
        model, flops = gpt2(), []
        optimizer = wrapped(model) if wraps else SGD(model.parameters(), lr=0.1, momentum=0.9)
        for i, lengths in enumerate(BATCHES, 1):
            if wraps:
                with optimizer.track_step() as result:
                    run(model, batch_of(lengths))
                flops.append(result.flops)
            else:
                run(model, batch_of(lengths))
            if i % num_parts == 0:
                optimizer.step()
                optimizer.zero_grad() if not wraps else None
        ends.append(weights(model))
    assert flops == [step_flops(lengths) for lengths in BATCHES]
    assert torch.equal(*ends)


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_skips_and_goes_on(fused):
    ends = []
    for wraps in (False, True):
        model = gpt2()
        inner = AdamW(model.parameters(), lr=0.01, fused=fused)
        optimizer = wrapped(model, inner) if wraps else inner
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        for i, lengths in enumerate(BATCHES):
            before = weights(model)
            if wraps:
                with optimizer.track_step() as result:
                    scaler.scale(model(**batch_of(lengths)).loss).backward()
                assert result.flops > 0  # what is skipped was computed all the same
            else:
                optimizer.zero_grad()
                scaler.scale(model(**batch_of(lengths)).loss).backward()
            if i == 1:
                model.lm_head.weight.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, weights(model)) == (i == 1)
        ends.append((weights(model), scaler.get_scale()))
    assert ends[0][1] == ends[1][1] == 512.0
    assert torch.equal(ends[0][0], ends[1][0])


def test_accelerate_and_a_scheduler_take_the_wrapper_for_the_optimizer_that_it_is():
    from accelerate import Accelerator

    model = gpt2()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = wrapped(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=10)
    prepared, inner = accelerator.prepare(model, optimizer)
    flops = []
    for lengths in BATCHES:
        with accelerator.accumulate(prepared), optimizer.track_step() as result:
            accelerator.backward(prepared(**batch_of(lengths)).loss)
            inner.step()
            inner.zero_grad()
        if accelerator.sync_gradients:
            scheduler.step()  # would warn if it had not seen the step
        flops.append(result.flops)
    assert flops == [step_flops(lengths) for lengths in BATCHES]


def run_trainer(tmp_path, callback, **options):
    features = [{"input_ids": [7] * n} for n in LENGTHS * 8]
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
        gpt2(),
        TrainingArguments(str(tmp_path), **settings),
        train_dataset=features,
        eval_dataset=features[:4],
        data_collator=lambda rows: batch_of([len(row["input_ids"]) for row in rows]),
        callbacks=[callback],
    )
    trainer.train()
    return trainer.state.log_history


def test_the_callback_counts_what_the_trainer_ran(tmp_path):
    with pytest.warns(UserWarning, match="backward factor is not used"):
        callback = MFUCallback(dtype="fp32", backward_factor=3.0, num_gpus=2)
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, checkpointing_name(): True}
    history = run_trainer(tmp_path, callback, eval_strategy="steps", eval_steps=3, **options)
    logs = [log for log in history if "throughput/mfu" in log]
    assert [log["step"] for log in logs] == [4, 8]
    window = callback.run
    assert (window.num_steps, window.segments, window.num_batches) == (8, 32, 16)
    assert window.flops.total == step_flops(LENGTHS * 8)  # one epoch: every sample once
    assert window.flops.recompute == recomputed_flops(LENGTHS * 8)
    assert callback.meter.peak.flops_per_s == 2e15
    for log in logs:
        assert log["throughput/hfu"] > log["throughput/mfu"] > 0
        assert log["throughput/mbu"] > 0
        assert log["throughput/tokens_per_sec"] > 0
    assert window.bytes_moved > 2 * param_bytes(gpt2()) * window.num_batches  # read forward and backward, and more
    assert window.mbu == pytest.approx(window.bytes_moved / window.wall_s / SPEC_BYTES / 2)


def test_an_unknown_device_trains_on_without_numbers(tmp_path, monkeypatch):
    monkeypatch.delenv("HEADWAY_PEAK_FLOPS")
    with pytest.warns(UserWarning, match="not all numbers will be logged"):
        history = run_trainer(tmp_path, MFUCallback(dtype="fp8"))  # which no CPU computes in
    assert not any("throughput/mfu" in log for log in history)
    assert any("throughput/tokens_per_sec" in log for log in history)
