"""Forwards that are counted by themselves cost what their loop really computes.

The witness of a loop is a count of the matrix products that PyTorch dispatched while it ran, forward and backward:
2 FLOPs for each multiply-add, of whatever the loop did.
"""

import copy
import threading
import warnings
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from headway import Workload, trace
from headway.errors import UsageError, WorkloadError
from headway.meter import Meter
from headway.meter.watch import ForwardWatch
from helpers.loops import PEAK, ROWS, collate, tiny

IDS = torch.full((2, 9), 7)


class Products(TorchDispatchMode):
    """FLOPs of the matrix products that are dispatched, by their operands."""

    flops = 0

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        name = func._overloadpacket.__name__
        if name in ("mm", "addmm"):
            left, right = args[-2:]
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


class Critic(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1))


@dataclass
class Output:
    states: torch.Tensor
    name: str = "an object of the user's own"


class InObjects(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x):
        return Output(self.second(self.first(x)))


def rows():
    return torch.randn(4, 16)


def a_metric_without_no_grad(net, _):
    net(rows()).sum().backward()
    net(rows()).argmax(-1).float().mean()


def a_stopped_gradient(net, _):
    F.mse_loss(net(rows()), net(rows()).detach()).backward()


def a_skipped_batch(net, _):
    net(rows()).sum()
    net(rows()).sum().backward()


def a_critics_step(net, critic):
    critic(net(rows()).detach()).mean().backward()


def a_generators_step(net, critic):
    critic.requires_grad_(False)
    critic(net(rows())).mean().backward()
    critic.requires_grad_(True)


def a_teacher_that_is_not_frozen(net, critic):
    F.mse_loss(net(rows())[:, :1], critic(torch.randn(4, 8)).detach()).backward()


def adversarial_rows(net, _):
    x = rows().requires_grad_()
    (gradient,) = torch.autograd.grad(net(x).sum(), x)
    net((x + gradient.sign()).detach()).sum().backward()


def a_saliency_map(net, _):
    x = rows().requires_grad_()
    torch.autograd.grad(net(x).sum(), x)


def gradients_of_chosen_weights(net, _):
    net(rows()).sum().backward(inputs=[*net[2].parameters()])
    torch.autograd.grad(net(rows()).sum(), [net[0].weight])


def a_mixture_of_two_views(net, _):
    (net(rows()).sum() + net(rows()).sum()).backward()
    net(rows()).sum().backward()


def a_forward_that_runs_out_of_memory(net, _):
    def fail(*_):
        raise RuntimeError("CUDA out of memory")

    handle = net[0].register_forward_pre_hook(fail)
    with suppress(RuntimeError):
        net(rows())
    handle.remove()
    net(rows()).sum().backward()


def a_retry_while_the_error_is_handled(net, _):
    try:
        raise RuntimeError("CUDA out of memory")
    except RuntimeError:
        net(rows()).sum().backward()


def a_backward_that_fails_at_its_begin(net, _):
    def fail(_gradient):
        raise RuntimeError("CUDA out of memory")

    results = net(rows())
    results.register_hook(fail)
    with suppress(RuntimeError):
        results.sum().backward()
    net(rows()).sum().backward()


def a_frozen_trunk(net, _):
    net[0].requires_grad_(False)
    net(rows()).sum().backward()
    net[0].requires_grad_(True)
    net(rows()).sum().backward()


def another_head(net, _):
    net[2] = nn.Linear(32, 24)
    net(rows()).sum().backward()


def a_layer_less(net, _):
    if len(net) == 3:
        del net[2]
    net(rows()).sum().backward()


def a_trunk_that_is_frozen_at_first(net, _):
    net[0].requires_grad_(not net[0].weight.requires_grad)
    net(rows()).sum().backward()


LOOPS = [
    a_metric_without_no_grad, a_stopped_gradient, a_skipped_batch, a_critics_step, a_generators_step,
    a_teacher_that_is_not_frozen, adversarial_rows, a_saliency_map, gradients_of_chosen_weights, a_mixture_of_two_views,
    a_forward_that_runs_out_of_memory, a_retry_while_the_error_is_handled, a_backward_that_fails_at_its_begin,
    a_frozen_trunk, another_head, a_layer_less, a_trunk_that_is_frozen_at_first,
]  # fmt: skip


@pytest.mark.parametrize("looks_every", [1, 1000])  # steps from one look at all parameters to the next
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_is_billed_what_it_computes(loop, looks_every):
    torch.manual_seed(0)
    net, critic = Net(), Critic()
    with Products() as really:
        for _ in range(2):
            loop(net, critic)
    net, critic, windows = Net(), Critic(), []
    with Meter(net, peak=PEAK, others=[critic], log_every=1, on_window=windows.append) as meter:
        meter.looks_every = looks_every
        for _ in range(2):
            loop(net, critic)
            meter.step()
    assert sum(window.flops.total for window in windows) == really.flops > 0
    assert meter.failure is None


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(16, 8), nn.Linear(8, 4), nn.Linear(8, 6)

    def forward(self, x):
        states = self.trunk(x)
        return self.left(states), {"right": [self.right(states.detach())]}


def test_a_backward_that_comes_by_another_result_is_billed_what_it_reaches():
    net, windows, right = TwoHeads(), [], []
    with Meter(net, peak=PEAK, log_every=1, on_window=windows.append) as meter:
        meter.looks_every = 1000
        for heads in ("both", "left", "right", "right", "left", "both"):
            with Products() as really:
                left, others = net(rows())
                losses = {"left": left.sum(), "right": others["right"][0].sum()}
                sum(loss for name, loss in losses.items() if heads in (name, "both")).backward()
            right.append(really.flops)
            meter.step()
    # The first backward that comes another way is billed what the one before has reached.
    assert [window.flops.total for window in windows] == [right[0], right[0], *right[2:]]


def test_a_result_in_an_object_of_the_users_own_is_followed():
    net, windows = InObjects(), []
    with Meter(net, peak=PEAK, log_every=1, on_window=windows.append) as meter:
        net(rows())
        meter.step()
        net(rows()).states.sum().backward()
        meter.step()
    forward = 2 * 4 * (16 * 8 + 8 * 4)
    assert [window.flops.total for window in windows] == [forward, 2 * forward + 2 * 4 * 8 * 4]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_around_the_model_is_a_forward_with_a_backward(use_reentrant):
    model = tiny()
    cost, windows = trace(model), []
    with Meter(model, peak=PEAK, watch=True, log_every=1, on_window=windows.append) as meter:
        states = model.get_input_embeddings()(IDS)
        checkpoint(lambda x: model(inputs_embeds=x).logits, states, use_reentrant=use_reentrant).sum().backward()
        meter.step()
    right = cost.count(Workload([9, 9]))
    assert (windows[0].flops.total, windows[0].tokens) == (right.total, 18)
    assert windows[0].flops.recompute == (right.forward if use_reentrant else 0)  # the other one stops on its way


def checkpointing(model):
    """Switch reentrant checkpointing on, under the name that this version of transformers has for it."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": True})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": True})


@pytest.mark.parametrize("watch", [True, None])
def test_reentrant_checkpoints_within_the_model_hide_no_gradient(watch):
    model, windows = tiny().train(), []
    checkpointing(model)
    model.enable_input_require_grads()
    model.get_input_embeddings().requires_grad_(False)
    with Meter(model, peak=PEAK, watch=watch, log_every=1, on_window=windows.append) as meter:
        for _ in range(2):
            if watch is None:
                meter.count({"input_ids": IDS})
            model(input_ids=IDS).logits.sum().backward()
            meter.step()
    cost = trace(model)
    assert [window.flops for window in windows] == [cost.count(Workload([9, 9]), recompute="reentrant")] * 2


@pytest.mark.parametrize("watch", [True, None])
def test_a_step_is_billed_by_the_model_that_it_has(watch):
    model, windows, right = tiny(), [], []
    model.model.requires_grad_(False)

    def step():
        if watch is None:
            meter.count({"input_ids": IDS})
        model(input_ids=IDS).logits.sum().backward()
        meter.step()
        right.append(trace(model).count(Workload([9, 9])).total)

    with Meter(model, peak=PEAK, watch=watch, log_every=1, on_window=windows.append) as meter:
        step()
        model.model.layers[1].requires_grad_(True)  # its second layer is trained as well
        step()
        model.requires_grad_(True)
        step()
        model.zero_grad()
        model.resize_token_embeddings(320, mean_resizing=False)
        step()
        model.requires_grad_(False)
        model.lm_head.requires_grad_(True)
        step()
    assert [window.flops.total for window in windows] == right
    assert len(set(right)) == 5


def test_counts_and_forwards_in_one_order_tell_which_batch_was_skipped():
    model, windows = tiny(), []
    with Meter(model, peak=PEAK, log_every=1, on_window=windows.append) as meter:
        for length, is_skipped in ((9, False), (4, True)):
            meter.count({"input_ids": IDS[:, :length]})
            loss = model(input_ids=IDS[:, :length]).logits.sum()
            if not is_skipped:
                loss.backward()
        meter.step()
    cost = trace(model)
    assert windows[0].flops == cost.count(Workload([9, 9])) + cost.count(Workload([4, 4]), forward_only=True)
    assert windows[0].tokens == 18


@pytest.mark.parametrize("watch", [True, None])
def test_layers_that_are_left_out_at_random_cost_nothing(watch):
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "ffn_dim": 64, "num_attention_heads": 4}
    model = OPTForCausalLM(OPTConfig(vocab_size=100, word_embed_proj_dim=32, layerdrop=0.5, **sizes)).train()
    ran, windows = [], []
    for layer in model.model.decoder.layers:
        layer.register_forward_hook(lambda *_: ran.append(1))
    torch.manual_seed(0)
    with Meter(model, peak=PEAK, watch=watch, log_every=6, on_window=windows.append) as meter:
        for _ in range(6):
            if watch is None:
                meter.count({"input_ids": IDS})
            model(input_ids=IDS).logits.sum().backward()
            meter.step()
    # all layers alike: projections of width 32 by 32 four times, 32 by 64 twice, and causal pairs of two segments of 9
    layer = 3 * (2 * 18 * (4 * 32 * 32 + 2 * 32 * 64) + 2 * 4 * 32 * 45)
    assert 0 < len(ran) < 24
    assert windows[0].flops.total == len(ran) * layer + 6 * 3 * 2 * 18 * 32 * 100


def compiled_before(model):
    return torch.compile(model, backend="eager", fullgraph=True)


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


@pytest.mark.slow
@pytest.mark.parametrize("make", [compiled_before, compiled_in_place])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("is_other", [True, False])
def test_what_torch_compile_made_of_a_watched_model_is_counted(make, is_first, is_other):
    torch.compiler.reset()
    net, critic, windows = Net(), Critic(), []
    watched = critic if is_other else net
    calls = make(watched) if is_first else None
    with Meter(net, peak=PEAK, others=[critic], log_every=1, on_window=windows.append) as meter:
        calls = calls or make(watched)
        for _ in range(3):
            (net if is_other else calls)(rows()).sum().backward()
            with torch.no_grad():
                (calls if is_other else critic)(torch.randn(4, 8))
            meter.step()
        run = meter.close()
    step = 3 * 2 * 4 * (16 * 32 + 32 * 8) - 2 * 4 * 16 * 32 + 2 * 4 * (8 * 4 + 4)
    assert run.num_steps == 2
    assert run.flops.total == 2 * step


def test_a_model_is_counted_after_the_compiled_one_that_the_meter_was_given_is_gone():
    model, windows = tiny().train(), []
    options = {"peak": PEAK, "watch": True, "log_every": 1, "on_window": windows.append}
    with Meter(torch.compile(model, backend="eager"), **options) as meter:
        for frozen in (False, True):
            model.model.requires_grad_(not frozen)
            model(input_ids=IDS).logits.sum().backward()
            meter.step()
    whole = trace(tiny()).count(Workload([9, 9])).total
    assert [window.flops.total for window in windows] == [whole, trace(model).count(Workload([9, 9])).total]


@pytest.mark.slow
@pytest.mark.parametrize("is_other", [True, False])
def test_a_model_within_a_compiled_function_is_told_of(is_other):
    torch.compiler.reset()
    net, critic = Net(), Critic()
    watched = critic if is_other else net
    step = torch.compile(lambda x: watched(x).sum(), backend="eager", fullgraph=True)
    meter = Meter(net, peak=PEAK, others=[critic], log_every=1)

    def train():
        for _ in range(2):
            net(rows()).sum().backward()
            step(torch.randn(4, 8) if is_other else rows()).backward()
            meter.step()

    with pytest.warns(RuntimeWarning, match=f"{type(watched).__name__} runs inside a function that torch.compile"):
        train()
    assert isinstance(meter.failure, UsageError)
    meter.abandon()


def test_a_transform_of_torch_func_is_told_of_in_plain_words():
    net = Net()
    meter = Meter(net, peak=PEAK, log_every=1)
    weights = dict(net.named_parameters())

    def loss(weights, x):
        return torch.func.functional_call(net, weights, x).sum()

    with pytest.warns(RuntimeWarning, match=r"Net runs inside a transform of torch\.func.*Meter\.count"):
        torch.func.grad(loss)(weights, rows())
    meter.abandon()


def test_a_gradient_of_gradients_is_noted_once():
    net = Net()
    with Meter(net, peak=PEAK, log_every=1) as meter, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            x = rows().requires_grad_()
            (force,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
            force.square().sum().backward()
            meter.step()
    assert [str(w.message)[:40] for w in caught] == ["a second backward goes through a forward"]


def test_a_model_by_itself_and_a_copy_of_it():
    net, windows = Net(), []
    with Meter(net, peak=PEAK, log_every=1, on_window=windows.append) as meter:
        other = copy.deepcopy(net)
        net(rows()).sum().backward()
        other(rows()).sum().backward()
        meter.step()
    assert windows[0].flops.total == 3 * 2 * 4 * (16 * 32 + 32 * 8) - 2 * 4 * 16 * 32


def test_two_threads_lose_no_forward():
    net, windows, inside = Net(), [], threading.Barrier(2, timeout=60)
    with Meter(net, peak=PEAK, log_every=1, on_window=windows.append) as meter:

        def wait(*_):
            inside.wait()

        handle = net[1].register_forward_pre_hook(wait)
        threads = [threading.Thread(target=lambda: net(rows()).sum().backward()) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        handle.remove()
        meter.step()
    assert windows[0].flops.total == 2 * (3 * 2 * 4 * (16 * 32 + 32 * 8) - 2 * 4 * 16 * 32)


def watching(model, forwards, **options):
    """Count forwards as one step, as a trainer's integration does."""
    meter = Meter(model, peak=PEAK)
    meter.add_watch(ForwardWatch(model, meter, phase=nullcontext, **options))
    forwards()
    meter.step()
    return meter.close()


def test_a_workload_of_ones_own_is_asked_with_the_forwards_arguments():
    model = tiny()
    run = watching(
        model,
        lambda: model(IDS).logits.sum().backward(),
        workload=lambda given: Workload([int(given["input_ids"].sum())]),
    )
    assert run.tokens == 7 * 18


@pytest.mark.filterwarnings("ignore:.*generation flags are not valid:UserWarning")
def test_generation_of_a_trainer_within_a_step_is_refused():
    model = tiny()
    meter, errors = Meter(model, peak=PEAK), []
    meter.on_failure = errors.append
    meter.add_watch(ForwardWatch(model, meter, phase=nullcontext))
    model.generate(IDS, max_new_tokens=3, do_sample=False)
    assert isinstance(errors[0], WorkloadError)
    assert "it generates" in str(errors[0])


class Dispatched(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        self.names.append(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_nothing_is_dispatched_beside_what_the_model_itself_does():
    model, batch = tiny(), collate(ROWS)
    with Dispatched() as plain:
        model(**batch).loss.backward()
    model.zero_grad()
    meter = Meter(model, peak=PEAK, watch=True)
    with Dispatched() as hooked:
        model(**batch).loss.backward()
        meter.step()
    views = {"alias", "detach"}  # a tensor handed to NumPy; the data are not copied
    assert [name for name in hooked.names if name not in views] == [name for name in plain.names if name not in views]
