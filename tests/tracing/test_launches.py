"""Operators that a model launches: counted on shapes as PyTorch's profiler counts them in a step that runs."""

import functools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from headway.config import OptimConfig
from headway.count import Workload
from headway.devices import cpu_products
from headway.models import load_model
from headway.models.losses import AfterHead, Task, labelled_slots, linear_losses
from headway.models.parallel.mesh import clipping_factor, gradient_norm
from headway.models.recompute import recompute_blocks
from headway.models.recurrent import running_code
from headway.optim.optimizer import make_optimizer, take_step
from headway.predict.recipe import State
from headway.predict.speeds import Cases, Speeds
from headway.predict.step_time import LOSS_LAUNCHES, StepTimes, StepWork
from headway.tracing import trace
from headway.tracing.activations import saved_by_block
from headway.tracing.build import model_on_shapes
from headway.tracing.launches import RunningCode
from helpers.models import tiny_config

# names in a profile that launch nothing on any device
NOTHING = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "_unsafe_view",
    "_reshape_alias", "lift_fresh", "is_same_size", "_local_scalar_dense", "set_", "resolve_conj", "resolve_neg",
    "resize_", "as_strided_",
    "item",
}  # fmt: skip

WITHOUT_PACKS = ("mamba", "mamba2", "rwkv")  # recurrences that would run on from sample to sample


@pytest.fixture(autouse=True)
def _pytorchs_own_products(monkeypatch):
    """A product that oneDNN computes on some processors is no operator of PyTorch's in a profile."""
    monkeypatch.setattr(cpu_products, "_ONEDNN_IS_FASTER", False)


def has_kernel(schema):
    """Tell whether an operator has a kernel of its own on a CPU, not one in terms of other operators."""
    name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    try:
        return has(name, "CPU") and not has(name, "CompositeImplicitAutograd")
    except RuntimeError:  # an overload of TorchScript alone
        return False


@functools.cache
def kind_of(name):
    """Kind of an event: "none" launches nothing, "kernel" has a kernel of its own, "parts" is written in others."""
    if not name.startswith("aten::"):
        return "parts"
    if name.startswith("aten::_foreach_"):  # a device has a kernel for lists; a CPU works on tensor after tensor
        return "kernel"
    overloads = torch._C._jit_get_schemas_for_operator(name)
    functions = [getattr(getattr(torch.ops.aten, name[6:]), o.overload_name or "default", None) for o in overloads]
    if name[6:] in NOTHING or any(function is not None and function.is_view for function in functions):
        return "none"
    return "kernel" if any(map(has_kernel, overloads)) else "parts"


def launches_in(event):
    kind = kind_of(event.name)
    if kind in ("none", "kernel"):
        return int(kind == "kernel")
    below = sum(map(launches_in, event.cpu_children))
    return below or int(event.name.startswith("aten::"))


def profiled(family, lengths):
    """Launches of forward and backward of a packed model, by PyTorch's profiler."""
    model, tokens = load_model(tiny_config(family), random_init=True).train(), sum(lengths)
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    bounds = {"pack_cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(), "pack_max_seqlen": max(lengths)}
    pack = {} if family in WITHOUT_PACKS else {"position_ids": places, **bounds}

    def step():
        ids = torch.arange(tokens)[None] % 150 + 7
        logits = model(input_ids=ids, use_cache=False, **pack).logits
        logits.backward(torch.ones_like(logits))

    step()  # the first finds tables and the like
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU]) as run:
        step()
    return sum(launches_in(event) for event in run.events() if event.cpu_parent is None)


def planned(family, lengths, packages=frozenset(), code=running_code):
    saved = saved_by_block(model_on_shapes(tiny_config(family), torch.float32), code=code(packages))
    blocks, slots = saved.blocks.values(), sum(lengths)
    return sum(
        block.num_launches(phase, slots, len(lengths), fused=False)
        for block in blocks
        for phase in ("forward", "backward")
    )


def test_a_chunk_of_the_loss_launches_as_many_operators_as_a_plan_says():
    layer, hidden, labels = torch.nn.Linear(8, 16, bias=False), torch.randn(24, 8), torch.arange(24) % 16
    counts = []
    for chunk in (24, 12):
        compute = linear_losses(layer, Task(labels, labelled_slots(labels), 1, chunk, AfterHead(), False))
        with profile(activities=[ProfilerActivity.CPU]) as run:
            compute(hidden, True, (True,))
        counts.append(sum(launches_in(event) for event in run.events() if event.cpu_parent is None))
    assert counts[1] - counts[0] == LOSS_LAUNCHES


@pytest.mark.parametrize(
    ("family", "lengths"),
    [
        ("llama", [64]), ("gpt2", [64]), ("qwen3_moe", [64]), ("qwen3_5", [256]), ("qwen3_5", [16] * 16),
        ("qwen3_5", [4] * 64), ("qwen3_next", [16] * 16), ("lfm2", [16] * 16), ("kimi_linear", [64] * 8),
        *((family, [64]) for family in WITHOUT_PACKS),
    ],
)  # fmt: skip
def test_launches_are_those_that_the_profiler_counts(family, lengths):
    assert planned(family, lengths) == pytest.approx(profiled(family, lengths), rel=0.1)


def step_in_float32(family, packs, recompute, rule):
    """Launches of a step of packs with its update: by PyTorch's profiler, and by the plan."""
    model, tokens = load_model(tiny_config(family), random_init=True).train(), 48
    cost_model = trace(model)
    saved = saved_by_block(model, code=running_code(frozenset()))
    recompute_blocks(model, recompute, cost_model.block_towers, cost_model.rows)
    optimizer = make_optimizer(model, OptimConfig(steps=2, lr=1e-3, name=rule), cost_model)
    inputs = {"input_ids": torch.arange(tokens)[None] % 150 + 7, "position_ids": torch.arange(tokens)[None]}
    inputs |= {"pack_cu_seqlens": torch.tensor([0, tokens]).int(), "pack_max_seqlen": tokens, "use_cache": False}

    def step():
        for _ in range(packs):
            logits = model(**inputs).logits
            logits.backward(torch.ones_like(logits))
        norm = gradient_norm(model.parameters())
        take_step(optimizer, norm[None], factor=clipping_factor(norm, 1.0), skips=False)
        optimizer.zero_grad(set_to_none=True)

    step()
    with profile(activities=[ProfilerActivity.CPU]) as run:
        step()
    counted = sum(launches_in(event) for event in run.events() if event.cpu_parent is None)
    pack = Workload([tokens])
    work = StepWork(cost_model.count(pack), pack, packs=packs, tokens=tokens)
    state = State(compute_bytes=4, rule=rule, recompute=recompute)
    times = StepTimes(cost_model, saved, Speeds("mine", 100.0, Cases.exact(10.0), ""))
    return counted, times.step_launches(work, state) - packs * LOSS_LAUNCHES


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_5", "lfm2"])
@pytest.mark.parametrize("packs", [1, 4])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_with_its_update_launches_what_the_profiler_counts(family, packs, recompute):
    counted, planned = step_in_float32(family, packs, recompute, "adamw")
    assert planned == pytest.approx(counted, rel=0.1)


def test_muon_launches_what_the_profiler_counts():
    counted, planned = step_in_float32("llama", 1, "none", "muon")
    assert planned == pytest.approx(counted, rel=0.1)


def test_a_package_of_kernels_takes_the_launches_of_a_recurrence_away_whatever_the_length():
    without = [planned("qwen3_5", [tokens]) for tokens in (1024, 8192)]
    kernels = [planned("qwen3_5", [tokens], frozenset({"fla", "causal_conv1d"})) for tokens in (1024, 8192)]
    assert without[1] > 3 * without[0] > 6 * kernels[0]
    assert kernels[0] == kernels[1]


def test_compiled_blocks_launch_less_and_at_least_their_products():
    saved = saved_by_block(model_on_shapes(tiny_config("llama"), torch.bfloat16), code=RunningCode())
    for name, block in saved.blocks.items():
        for phase, products in (("forward", 7), ("backward", 14)) if name else ():
            fused, plain = (block.num_launches(phase, 64, 1, fused=fused) for fused in (True, False))
            assert products < fused < plain / 2
