"""The optimizer wrapper: the loop trains as it would without it, and every block is counted."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, SequentialLR

from headway.compat.mfu_tracker import MFUOptimizerWrapper
from headway.errors import UsageError
from helpers.counter import batch_of, gpt2, step_flops

LENGTHS = [5, 9, 12, 3]


@pytest.fixture(autouse=True)
def stated_peak(monkeypatch):
    monkeypatch.setenv("HEADWAY_PEAK_FLOPS", "1e15")


def tracked(model, optimizer=None, **options):
    return MFUOptimizerWrapper(optimizer or SGD(model.parameters(), lr=0.1, momentum=0.9), model, **options)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trained_plainly(batches, num_parts=1, model=None):
    """What a loop that zeroes, accumulates and steps by itself ends with."""
    model = model or gpt2()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for i, batch in enumerate(batches, 1):
        model(**batch).loss.backward()
        if i % num_parts == 0:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


BATCHES = [batch_of(lengths) for lengths in ([5, 9], [12, 3], [4, 4], [7, 2])]


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_a_loop_without_a_zero_grad_of_its_own_trains_right(num_parts):
    model = gpt2()
    optimizer = tracked(model, sample_batch={"input_ids": BATCHES[0]["input_ids"][:1]})
    assert optimizer.profile() == step_flops([9])
    flops = []
    for i, batch in enumerate(BATCHES, 1):
        with optimizer.track_step() as result:
            model(**batch).loss.backward()
        if i % num_parts == 0:
            optimizer.step()
        flops.append(result.flops)
    assert flops == [step_flops(lengths) for lengths in ([5, 9], [12, 3], [4, 4], [7, 2])]
    assert torch.equal(weights(model), trained_plainly(BATCHES, num_parts))


@pytest.mark.parametrize("zeroes_before", [True, False])
def test_a_loop_that_zeroes_by_itself_trains_right(zeroes_before):
    model = gpt2()
    optimizer = tracked(model)
    for batch in BATCHES:
        if zeroes_before:
            optimizer.zero_grad()
        with optimizer.track_step():
            model(**batch).loss.backward()
            optimizer.step()
        if not zeroes_before:
            model.zero_grad()
    assert torch.equal(weights(model), trained_plainly(BATCHES))


def test_gradients_from_outside_blocks_are_not_cleared():
    model = gpt2()
    optimizer = tracked(model)
    for first, second in (BATCHES[:2], BATCHES[2:]):
        model(**first).loss.backward()  # part of the step, and not measured
        with optimizer.track_step():
            model(**second).loss.backward()
        optimizer.step()
        model.zero_grad()  # the wrapper is not told
    assert torch.equal(weights(model), trained_plainly(BATCHES, 2))


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_skips_and_goes_on(fused, unscales):
    ends = []
    for wrap in (False, True):
        model = gpt2()
        inner = AdamW(model.parameters(), lr=0.01, fused=fused)
        optimizer = tracked(model, inner) if wrap else inner
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        for i, batch in enumerate(BATCHES):
            before = weights(model)
            if wrap:
                with optimizer.track_step() as result:
                    scaler.scale(model(**batch).loss).backward()
                assert result.flops > 0  # what is skipped was computed all the same
            else:
                optimizer.zero_grad()
                scaler.scale(model(**batch).loss).backward()
            if i == 1:
                model.lm_head.weight.grad[0, 0] = torch.inf
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, weights(model)) == (i == 1)
        ends.append((weights(model), scaler.get_scale()))
    assert ends[0][1] == ends[1][1] == 512.0
    assert torch.equal(ends[0][0], ends[1][0])


def test_schedulers_take_it_for_the_optimizer_that_it_is():
    ends = []
    for wrap in (False, True):
        model = gpt2()
        inner = SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = tracked(model, inner) if wrap else inner
        assert isinstance(optimizer, Optimizer)
        parts = [LambdaLR(optimizer, lambda i: (i + 1) / 2), OneCycleLR(optimizer, max_lr=0.2, total_steps=10)]
        scheduler = SequentialLR(optimizer, parts, milestones=[2])
        rates = []
        for batch in BATCHES:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
            scheduler.step()  # would warn if it had not seen the step
            rates.append((inner.param_groups[0]["lr"], inner.param_groups[0]["momentum"]))
        ends.append((rates, weights(model)))
    assert ends[0][0] == ends[1][0]
    assert torch.equal(ends[0][1], ends[1][1])


def test_a_closure_is_handed_on():
    model = nn.Linear(3, 1)
    optimizer = tracked(model, torch.optim.LBFGS(model.parameters(), max_iter=3))
    x = torch.randn(8, 3)

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure) > (model(x) - 1).square().mean()


def test_accelerate_takes_it():
    from accelerate import Accelerator

    model = gpt2()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    wrapped = tracked(model)
    prepared, optimizer = accelerator.prepare(model, wrapped)
    flops = []
    for batch in BATCHES:
        with accelerator.accumulate(prepared), wrapped.track_step() as result:
            accelerator.backward(prepared(**batch).loss * 2)  # accelerate divides by the number of parts
            optimizer.step()
            optimizer.zero_grad()
        flops.append(result.flops)
    assert flops == [step_flops(lengths) for lengths in ([5, 9], [12, 3], [4, 4], [7, 2])]
    assert torch.equal(weights(model), trained_plainly(BATCHES, 2))


@pytest.mark.slow
@pytest.mark.filterwarnings("default:The .grad attribute of a Tensor that is not a leaf")
def test_profiled_before_compiling():
    model = gpt2()
    optimizer = tracked(model, sample_batch=BATCHES[0])
    optimizer.profile()
    compiled = torch.compile(model, backend="eager")
    for batch in BATCHES:
        with optimizer.track_step() as result:
            compiled(**batch).loss.backward()
        optimizer.step()
    assert result.flops == step_flops([7, 2])
    torch.testing.assert_close(weights(model), trained_plainly(BATCHES))


def test_it_is_the_optimizer_that_was_wrapped():
    model = gpt2()
    inner = AdamW(model.transformer.parameters(), lr=0.01)
    optimizer = tracked(model, inner)
    assert optimizer is inner is optimizer.optimizer is tracked(model, inner)
    assert isinstance(optimizer, AdamW | MFUOptimizerWrapper)
    model(**BATCHES[0]).loss.backward()
    optimizer.step()
    fresh = AdamW(model.transformer.parameters(), lr=1.0)
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.param_groups[0]["lr"] == 0.01


def test_bad_input_is_one_clear_error():
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"list is no torch\.optim\.Optimizer"):
        MFUOptimizerWrapper([model.weight], model)
    with pytest.warns(UserWarning, match="backward factor is not used"):
        tracked(model, hfu_backward_factor=3.0)
