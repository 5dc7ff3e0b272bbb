"""Profiles: numbers like any other, that remember their models; and what a device can do, by mfu-tracker's names."""

import copy
import pickle

import pytest
import torch
from torch import nn

import headway.compat.mfu_tracker.flops
from headway import Peak, peak_for
from headway.compat.mfu_tracker import (
    GPUSpec,
    compute_mbu,
    compute_mfu,
    flash_attn_flops,
    get_gpu_spec,
    gpu_spec,
    param_bytes,
    profile_flops,
    profile_flops_with_hfu,
    track,
)
from headway.devices import copy_ceiling, named_device
from headway.devices.probe import Reported
from headway.errors import UnknownDeviceError, UsageError, WorkloadError
from helpers import checkpointing
from helpers.tiny_gpt2 import SPEC, batch_of, forward_flops, gpt2, recomputed_flops, step_flops

LENGTHS = [5, 9, 12, 3]


def test_a_profile_is_the_number_of_its_sample():
    model, batch = gpt2(), batch_of(LENGTHS)
    flops = profile_flops(model, kwargs=batch)
    assert flops == step_flops(LENGTHS)
    assert profile_flops(model, (batch["input_ids"],), with_backward=False) == forward_flops([12] * 4)
    assert f"{flops / 1e6:.3f} {flops:,} {flops}" == f"{step_flops(LENGTHS) / 1e6:.3f} {int(flops):,} {int(flops)}"
    assert model.training
    assert all(p.grad is None for p in model.parameters())  # nothing ran


def test_arithmetic_is_arithmetic_and_what_is_counted_stays():
    model, batch = gpt2(), batch_of(LENGTHS)
    forward = profile_flops(model, kwargs=batch, with_backward=False)
    assert forward * 3 == 3 * forward == step_flops(LENGTHS)
    assert forward - 1 == forward_flops(LENGTHS) - 1
    assert type(forward * 2.0) is float
    assert type(forward - 1) is type(forward // 2) is int
    extra = sum([profile_flops(model, kwargs=batch), 1000]) * 2
    assert extra == 2 * (step_flops(LENGTHS) + 1000)
    for tracked, counted in ((forward * 3, 0), (extra, 2000)):
        with track(tracked, spec=SPEC, dtype="fp32") as result:
            model(**batch_of([7])).loss.backward()
        assert result.flops == step_flops([7]) + counted
    with track(int(extra), spec=SPEC, dtype="fp32") as stated:
        model(**batch).loss.backward()
    assert stated.flops == extra


def test_a_profile_travels_as_a_bare_number():
    flops = profile_flops(nn.Linear(8, 4), (torch.zeros(2, 8),))
    for same in (copy.copy(flops), copy.deepcopy(flops), pickle.loads(pickle.dumps(flops))):
        assert (same, type(same)) == (256, int)
    attention = flash_attn_flops(1, 3, 1, 2)
    assert copy.deepcopy(attention).flops_per_pair == attention.flops_per_pair == 8


def test_attention_that_the_profile_holds_is_not_added_again():
    model, batch = gpt2(), batch_of([9])
    flops = profile_flops(model, kwargs=batch)
    with pytest.warns(UserWarning, match="holds this attention already"):
        flops += flash_attn_flops(batch_size=1, seq_len=9, num_heads=4, head_dim=8)
    assert flops == step_flops([9])
    other = flash_attn_flops(batch_size=1, seq_len=9, num_heads=4, head_dim=16)  # none of the model's
    assert other == 4 * 4 * 16 * 45
    assert flops + other == step_flops([9]) + int(other)


@pytest.mark.parametrize(("causal", "pairs"), [(True, 2 * (1 + 2 + 3 + 4 + 5)), (False, 2 * 25)])
def test_attention_counts_exactly_the_pairs_of_its_mask(causal, pairs):
    forward = flash_attn_flops(2, 5, 3, 7, causal=causal)
    assert forward == 4 * 3 * 7 * pairs
    assert (
        flash_attn_flops(batch=2, seq_len=5, num_heads=3, head_dim=7, causal=causal, with_backward=True) == 3 * forward
    )


def test_both_numbers_of_a_checkpointed_model():
    model, batch = gpt2(), batch_of(LENGTHS)
    plain = profile_flops_with_hfu(model, kwargs=batch)
    assert plain.flops == plain.hfu_flops == step_flops(LENGTHS)
    checkpointing.enable(model)
    again = profile_flops_with_hfu(model, kwargs=batch)
    assert again.flops == step_flops(LENGTHS)
    assert again.hfu_flops == step_flops(LENGTHS) + recomputed_flops(LENGTHS)
    assert profile_flops_with_hfu(model, kwargs=batch, with_backward=False).hfu_flops == forward_flops(LENGTHS)
    with track(again.flops, hfu_flop_count=again.hfu_flops, spec=SPEC, dtype="fp32") as result:
        model(**batch_of([7])).loss.backward()
    assert result.hfu / result.mfu == pytest.approx(1 + recomputed_flops([7]) / step_flops([7]))


def test_bytes_of_parameters():
    layers = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2).to(torch.bfloat16))
    layers[0].requires_grad_(False)
    assert param_bytes(layers) == 4 * 36 + 2 * 10
    assert param_bytes(layers, trainable_only=True) == 20
    layers[1].weight = layers[0].weight  # tied
    assert param_bytes(layers) == 4 * 36 + 2 * 2


def test_the_module_that_mfu_tracker_calls_flops():
    assert headway.compat.mfu_tracker.flops.profile_flops is profile_flops
    assert all(hasattr(headway.compat.mfu_tracker.flops, name) for name in headway.compat.mfu_tracker.flops.__all__)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: flash_attn_flops(seq_len=5, num_heads=1, head_dim=1), UsageError, "number of sequences once"),
        (lambda: flash_attn_flops(1, 5, 1, 1, batch=1), UsageError, "number of sequences once"),
        (lambda: flash_attn_flops(1, 5, 0, 1), UsageError, "num_heads=0"),
        (lambda: flash_attn_flops(1, -5, 1, 1), UsageError, "seq_len=-5"),
        (lambda: profile_flops(gpt2(), kwargs={"labels": torch.zeros(1, 2)}), WorkloadError, "none of input_ids"),
        (lambda: compute_mfu(-1, 1.0, spec=SPEC), UsageError, "flop_count=-1"),
        (lambda: compute_mfu(1, 0.0, spec=SPEC), UsageError, "elapsed_sec=0.0"),
        (lambda: compute_mfu(1, 1.0, num_gpus=0, spec=SPEC), UsageError, "num_gpus=0"),
        (lambda: compute_mfu(1, 1.0, dtype="bf17", spec=SPEC), UnknownDeviceError, "no peak for 'bf17'"),
        (lambda: compute_mbu(float("nan"), 1.0, spec=SPEC), UsageError, "param_bytes=nan"),
        (lambda: compute_mbu(1, 1.0, spec=GPUSpec("mine")), UnknownDeviceError, "bandwidth of mine is not known"),
    ],
)
def test_bad_input_is_one_clear_error(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_shares_of_what_a_device_can_do():
    assert compute_mfu(3e15, 2.0, dtype="bf16", num_gpus=3, spec=SPEC) == pytest.approx(0.25)
    assert compute_mbu(1e11, 2.0, num_gpus=2, spec=SPEC) == pytest.approx(0.25)


def test_a_cpu_is_measured(own_folders):
    spec = get_gpu_spec("cpu")
    assert spec.peak_tflops("fp32") == pytest.approx(peak_for("cpu", "fp32").flops_per_s / 1e12)
    assert spec.peak_memory_bandwidth_tbs == copy_ceiling("cpu").best.best_per_s / 1e12
    if torch.accelerator.current_accelerator(check_available=True) is None:
        assert get_gpu_spec() is spec


def test_a_peak_can_be_stated(monkeypatch):
    monkeypatch.setenv("HEADWAY_PEAK_FLOPS", "5e12")
    assert get_gpu_spec("cpu").peak_tflops("bf16") == 5
    monkeypatch.setenv("HEADWAY_PEAK_FLOPS", "6e12")
    assert get_gpu_spec("cpu").peak_tflops("bf16") == 6
    assert GPUSpec("mine", stated_flops_per_s={"fp32": 1e12}).peak(torch.float32) == Peak(
        "mine", 1e12, "fp32", "stated in a GPUSpec", "override"
    )


def test_a_gpu_is_looked_up_by_its_exact_name(monkeypatch):
    h100 = named_device("h100-sxm")
    monkeypatch.setattr(gpu_spec, "report", lambda _device: Reported("NVIDIA H100 80GB HBM3"))
    monkeypatch.setattr(gpu_spec, "device_at", lambda _device: h100)
    monkeypatch.setattr(
        gpu_spec, "peak_for", lambda _device, dtype: Peak("it", h100.peak_flops_per_s[dtype], dtype, "")
    )
    gpu_spec._spec.cache_clear()
    spec = get_gpu_spec("cuda:7")
    assert spec.name == "NVIDIA H100 80GB HBM3"
    assert spec.peak_tflops("bf16") == 989.4  # NVIDIA's datasheet, dense
    assert spec.peak_memory_bandwidth_tbs == 3.35


@pytest.mark.own_peak
def test_an_unknown_gpu_is_an_error_and_no_guess(monkeypatch):
    monkeypatch.setattr(gpu_spec, "report", lambda _device: Reported("NVIDIA H100 9000 Ultra"))
    with pytest.raises(UnknownDeviceError, match="HEADWAY_PEAK_FLOPS"):
        get_gpu_spec("cuda:6")
    monkeypatch.setenv("HEADWAY_PEAK_FLOPS", "5e12")
    assert get_gpu_spec("cuda:6").name == "NVIDIA H100 9000 Ultra"


@pytest.fixture
def own_folders(tmp_path, monkeypatch):
    """Do not write into the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
