"""Profiles: numbers like any other, that remember their models; and what a device can do, by mfu-tracker's names."""

import copy
import pickle

import pytest
import torch
from torch import nn

from headway import peak_for
from headway.compat.mfu_tracker import (
    flash_attn_flops,
    get_gpu_spec,
    param_bytes,
    profile_flops,
)
from headway.devices import copy_ceiling
from headway.errors import WorkloadError
from helpers.counter import batch_of, forward_flops, gpt2, step_flops

LENGTHS = [5, 9, 12, 3]


def test_a_profile_is_the_number_of_its_sample():
    model, batch = gpt2(), batch_of(LENGTHS)
    flops = profile_flops(model, kwargs=batch)
    assert flops == step_flops(LENGTHS)
    assert profile_flops(model, (batch["input_ids"],), with_backward=False) == forward_flops([12] * 4)
    assert f"{flops / 1e6:.3f} {flops:,} {flops}" == f"{step_flops(LENGTHS) / 1e6:.3f} {int(flops):,} {int(flops)}"
    assert model.training
    assert all(p.grad is None for p in model.parameters())  # nothing ran


def test_a_profile_travels_as_a_bare_number():
    flops = profile_flops(nn.Linear(8, 4), (torch.zeros(2, 8),))
    for same in (copy.copy(flops), copy.deepcopy(flops), pickle.loads(pickle.dumps(flops))):
        assert (same, type(same)) == (256, int)


def test_attention_that_the_profile_holds_is_not_added_again():
    model, batch = gpt2(), batch_of([9])
    flops = profile_flops(model, kwargs=batch)
    with pytest.warns(UserWarning, match="has every attention of its model already"):
        flops += flash_attn_flops(batch_size=1, seq_len=9, num_heads=4, head_dim=8)
    assert flops == step_flops([9])
    assert type(flops + 1000) is int  # and a number is taken as stated


def test_bytes_of_parameters():
    layers = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2).to(torch.bfloat16))
    layers[0].requires_grad_(False)
    assert param_bytes(layers) == 4 * 36 + 2 * 10
    assert param_bytes(layers, trainable_only=True) == 20
    layers[1].weight = layers[0].weight  # tied
    assert param_bytes(layers) == 4 * 36 + 2 * 2


@pytest.mark.parametrize(("causal", "pairs"), [(True, 2 * (1 + 2 + 3 + 4 + 5)), (False, 2 * 25)])
def test_attention_counts_exactly_the_pairs_of_its_mask(causal, pairs):
    forward = flash_attn_flops(2, 5, 3, 7, causal=causal)
    assert forward == 4 * 3 * 7 * pairs
    assert flash_attn_flops(batch_size=2, seq_len=5, num_heads=3, head_dim=7, causal=causal, with_backward=True) == (
        3 * forward
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: profile_flops(gpt2(), kwargs={"labels": torch.zeros(1, 2)}), WorkloadError, "none of input_ids"),
    ],
)
@pytest.mark.own_peak
def test_bad_input_is_one_clear_error(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_cpu_is_measured(own_folders):
    spec = get_gpu_spec("cpu")
    assert spec.peak_tflops("fp32") == pytest.approx(peak_for("cpu", "fp32").flops_per_s / 1e12)
    assert spec.peak_memory_bandwidth_tbs == copy_ceiling("cpu").best.best_per_s / 1e12
    if torch.accelerator.current_accelerator(check_available=True) is None:
        assert get_gpu_spec() == spec


@pytest.fixture
def own_folders(tmp_path, monkeypatch):
    """Do not write into the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
