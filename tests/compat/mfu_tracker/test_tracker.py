"""Tracked blocks: what ran in them, to the FLOP, however the profile was made."""

import copy
import math
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from headway.compat.mfu_tracker import param_bytes, profile_flops, track
from headway.errors import UnknownDeviceError, UsageError, WorkloadError
from helpers.counter import SPEC, batch_of, forward_flops, gpt2, recomputed_flops, step_flops
from helpers.models import enable_checkpointing

LENGTHS = [5, 9, 12, 3]
pytestmark = pytest.mark.filterwarnings("default:result.mbu is a floor:UserWarning")


def run(model, batch):
    model(**batch).loss.backward()


def test_a_profile_of_one_row_bills_the_batches_that_are_run():
    model, batch = gpt2(), batch_of(LENGTHS)
    flops = profile_flops(model, kwargs={"input_ids": batch["input_ids"][:1]})
    assert flops == step_flops([12])  # the row alone, without its mask: padding and all
    weights = param_bytes(model)
    with track(flops, weights, dtype="fp32", spec=SPEC) as result:
        run(model, batch)
    assert result.flops == step_flops(LENGTHS)
    assert result.mfu == pytest.approx(step_flops(LENGTHS) / result.elapsed_sec / 1e15)
    assert result.hfu == result.mfu
    assert result.achieved_tflops == pytest.approx(result.mfu * 1000)
    assert result.mbu == pytest.approx(2 * weights / result.elapsed_sec / 1e11)
    assert result.tokens_per_sec == pytest.approx(sum(LENGTHS) / result.elapsed_sec)


@pytest.mark.parametrize("num_batches", [1, 2, 4])
def test_accumulation_changes_nothing_per_step(num_batches):
    model = gpt2()
    parts = [batch_of(LENGTHS[i::num_batches]) for i in range(num_batches)]
    with track(model, dtype="fp32", spec=SPEC) as step:
        singles = []
        for part in parts:
            with track(model, dtype="fp32", spec=SPEC) as single:
                run(model, part)
            singles.append(single)
    assert step.flops == sum(single.flops for single in singles) == step_flops(LENGTHS)


def test_what_is_frozen_is_not_billed():
    layers = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 32), nn.Linear(32, 4))
    x = torch.randn(7, 8)
    for frozen in ([], [layers[0]], [layers[0], layers[1]], [layers[2]]):
        layers.requires_grad_(True)
        for layer in frozen:
            layer.requires_grad_(False)
        with FlopCounterMode(display=False) as witness:
            layers(x).sum().backward()
        with track(layers, spec=SPEC) as result:
            layers(x).sum().backward()
        assert result.flops == witness.get_total_flops() == profile_flops(layers, (x,))


def bce(logits, target):
    return nn.functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))


def test_a_gradient_that_an_input_asks_for_is_billed():
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    for frozen in (False, True):
        layers.requires_grad_(not frozen)
        for asked in (False, True):
            if frozen and not asked:
                continue
            x = torch.randn(2, 3, 8, 8, requires_grad=asked)
            with track(layers, spec=SPEC) as result, FlopCounterMode(display=False) as witness:
                layers(x).sum().backward()
            assert result.flops == witness.get_total_flops() == profile_flops(layers, (x,))


def test_both_steps_of_an_adversarial_training():
    generator, critic = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16)), nn.Linear(16, 1)
    z, real = torch.randn(5, 8), torch.randn(5, 16)
    both = profile_flops(generator, (z,)) + profile_flops(critic, (real,))
    with track(both, spec=SPEC) as result, FlopCounterMode(display=False) as witness:
        bce(critic(generator(z)), 1.0).backward()
    assert result.flops == witness.get_total_flops()
    with track(both, spec=SPEC) as result, FlopCounterMode(display=False) as witness:
        (bce(critic(generator(z).detach()), 0.0) + bce(critic(real), 1.0)).backward()
    assert result.flops == witness.get_total_flops()


def test_a_model_that_is_changed_in_place_is_traced_again_when_it_is_profiled():
    model, batch = gpt2(), batch_of(LENGTHS)
    assert profile_flops(model, kwargs=batch) == step_flops(LENGTHS)
    model.resize_token_embeddings(200, mean_resizing=False)  # 40 more rows of the embedding, which is the head
    with track(profile_flops(model, kwargs=batch), spec=SPEC, dtype="fp32") as result:
        run(model, batch)
    assert result.flops == step_flops(LENGTHS) + 6 * 40 * 32 * sum(LENGTHS)
    layers = nn.Sequential(nn.Linear(8, 4, bias=False))
    x = torch.zeros(2, 8)
    assert profile_flops(layers, (x,)) == 2 * 64 * 2
    layers.append(nn.Linear(4, 3, bias=False))
    assert profile_flops(layers, (x,)) == 2 * 64 * 2 + 3 * 2 * 24


def test_a_model_without_tokens_is_counted_for_each_shape_that_it_is_given():
    convolution = nn.Conv2d(3, 8, 3)
    for size, rows in ((8, 1), (10, 4)):
        with track(convolution, spec=SPEC) as result, torch.no_grad():
            convolution(torch.zeros(rows, 3, size, size))
        assert result.flops == rows * (size - 2) ** 2 * 2 * 8 * 3 * 9


@pytest.mark.filterwarnings("default:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.slow
@pytest.mark.parametrize("profiled_first", [True, False])
def test_a_compiled_model_is_counted(profiled_first):
    model, batch = gpt2(), batch_of(LENGTHS)
    tracked = profile_flops(model, kwargs=batch) if profiled_first else None
    compiled = torch.compile(model, backend="eager")
    if tracked is None:
        run(compiled, batch)  # compiled before anything watches
        tracked = profile_flops(compiled, kwargs=batch)
    for _ in range(2):
        with track(tracked, spec=SPEC, dtype="fp32") as result:
            run(compiled, batch)
        assert result.flops == step_flops(LENGTHS)


def test_an_exception_passes_and_leaves_no_numbers():
    model, batch = gpt2(), batch_of(LENGTHS)
    with pytest.raises(ZeroDivisionError), track(model, spec=SPEC) as failed:
        run(model, batch | {"labels": 1 / 0})
    with pytest.raises(UsageError, match="left by an exception"):
        _ = failed.mfu
    with track(model, spec=SPEC) as result:
        with pytest.raises(UsageError, match="has not ended"):
            _ = result.mfu
        run(model, batch)
    assert result.flops == step_flops(LENGTHS)  # and nothing of the block before


def test_a_teacher_and_a_student_are_counted_together():
    teacher, student, batch = gpt2(1), gpt2(2), batch_of(LENGTHS)
    flops = profile_flops(student, kwargs=batch) + profile_flops(teacher, kwargs=batch, with_backward=False)
    with track(flops, spec=SPEC, dtype="fp32") as result:
        with torch.no_grad():
            teacher(**batch)
        run(student, batch)
    assert result.flops == 4 * forward_flops(LENGTHS)


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


def test_the_peak_is_autocasts_where_the_block_computes_in_it():
    model, batch = gpt2(), batch_of(LENGTHS)
    with track(model, spec=SPEC) as plain:
        run(model, batch)
    with track(model, spec=SPEC) as mixed, torch.autocast("cpu", torch.bfloat16):
        run(model, batch)
    assert plain.achieved_tflops / plain.mfu == pytest.approx(1000)
    assert mixed.achieved_tflops / mixed.mfu == pytest.approx(2000)


def test_tracking_dispatches_nothing_of_its_own():
    model, batch = gpt2(), batch_of(LENGTHS)

    class Operations(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    profile_flops(model, kwargs=batch)
    shapes = {
        "input_ids": batch["input_ids"],
        "labels": batch["labels"],
    }  # labels, masks on the CPU are read at once
    with Operations() as bare:
        run(model, shapes)
    model.zero_grad()
    with Operations() as tracked, track(model, spec=SPEC, dtype="fp32"):
        run(model, shapes)
    assert Counter(tracked.names) - Counter(bare.names) == {"aten.detach.default": 1}
    assert not Counter(bare.names) - Counter(tracked.names)


def test_a_watched_model_can_be_saved_whole(tmp_path):
    model = nn.Linear(4, 2)
    profile_flops(model, (torch.zeros(1, 4),))
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    with track(loaded, spec=SPEC) as result:
        loaded(torch.zeros(3, 4)).sum().backward()
    assert result.flops == 2 * 3 * 4 * 2 * 2  # no gradient of the input


def test_generation_in_a_block_is_refused_when_it_is_read_and_not_before():
    model = gpt2().eval()
    with track(model, spec=SPEC) as result, torch.no_grad():
        cache = model(torch.tensor([[3, 4, 5]]), past_key_values=DynamicCache(config=model.config)).past_key_values
        model(torch.tensor([[6]]), past_key_values=cache)
    with pytest.raises(WorkloadError, match="past_key_values"):
        _ = result.flops


def test_a_block_without_a_forward_is_refused():
    model = gpt2()
    with track(model, spec=SPEC) as result:
        pass
    with pytest.raises(UsageError, match="no forward of GPT2LMHeadModel ran"):
        _ = result.mfu
    with track(model, spec=SPEC) as result:
        loss = model(**batch_of([3])).loss
    with track(model, spec=SPEC) as backward:
        loss.backward()
    assert result.flops == forward_flops([3])  # its backward had not begun when the block ended
    with pytest.raises(UsageError, match="no forward of GPT2LMHeadModel ran"):
        _ = backward.mfu


class TwoDevices(nn.Module):
    def __init__(self):
        super().__init__()
        self.here, self.there = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")


@pytest.mark.own_peak
@pytest.mark.parametrize(
    ("what", "options", "error", "message"),
    [
        (-1, {}, UsageError, "flop_count=-1"),
        (math.inf, {}, UsageError, "flop_count=inf"),
        ("6e9", {}, UsageError, "flop_count='6e9'"),
        (1, {"param_bytes": -2}, UsageError, "param_bytes=-2"),
        (1, {"num_tokens": -1}, UsageError, "num_tokens=-1"),
        (1, {"num_gpus": 0}, UsageError, "num_gpus=0"),
        (1, {"dtype": "bf17", "device": "cpu"}, UnknownDeviceError, "bf17"),
        (1, {"dtype": "int4", "device": "cpu"}, UnknownDeviceError, "int4"),
        (TwoDevices(), {}, UsageError, "several devices, cpu, meta"),
    ],
)
def test_bad_input_is_one_clear_error(what, options, error, message):
    with pytest.raises(error, match=message):
        track(what, **options).__enter__()


def test_the_mbu_of_the_weights_alone_says_that_it_is_a_floor():
    with track(6, param_bytes=100, dtype="bf16", spec=SPEC) as result:
        pass
    with pytest.warns(UserWarning, match=r"floor: .*Meter\(model, optimizer=optimizer\)"):
        assert result.mbu == pytest.approx(100 / result.elapsed_sec / 1e11)


def test_what_checkpointing_runs_again_is_in_hfu_alone():
    model, batch = gpt2(), batch_of(LENGTHS)
    enable_checkpointing(model, reentrant=None)
    with track(model, spec=SPEC) as result:
        run(model, batch)
    assert result.flops == step_flops(LENGTHS)
    assert result.flop_count.recompute == recomputed_flops(LENGTHS)
    assert result.hfu / result.mfu == pytest.approx(1 + recomputed_flops(LENGTHS) / step_flops(LENGTHS))


def test_a_twin_of_a_watched_model_is_watched_by_itself():
    model = gpt2()
    profile_flops(model, kwargs=batch_of(LENGTHS))
    twin = copy.deepcopy(model)
    with track(twin, spec=SPEC) as result:
        run(twin, batch_of([4]))
        run(model, batch_of(LENGTHS))
    assert result.flops == step_flops([4])


def test_a_model_counts_as_it_was_set_up_when_the_block_ended():
    model, batch = gpt2(), batch_of(LENGTHS)
    results = []
    for trained in (True, False):
        model.requires_grad_(trained)
        model.lm_head.requires_grad_(True)  # and the embedding, which is the head
        with track(model, spec=SPEC, dtype="fp32") as result:
            run(model, batch)
        results.append(result)
    assert results[0].flops == step_flops(LENGTHS)
    assert results[1].flops < step_flops(LENGTHS)
    assert results[1].flop_count.dgrad == results[0].flop_count.dgrad  # the embedding lies below everything
