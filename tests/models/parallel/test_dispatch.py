"""Slots on their way to spread experts: once to each process, beside shared experts, and with one wait of the host."""

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from fake_cuda.backward import backward
from fake_cuda.device import pretend_cuda
from fake_cuda.watch import Watch
from headway.models.blocks import experts_of
from headway.models.experts import use_experts
from headway.models.parallel import experts as dispatch
from headway.models.parallel.experts import SharedPath, shared_path_of, spread_experts
from helpers.models import tiny_config
from helpers.processes import run_processes


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_values_and_gradients_are_those_of_one_process_and_a_slot_goes_once_to_a_process(processes):
    run_processes([sys.executable, Path(__file__).with_name("dispatch_process.py")], processes)


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def build(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32).train()
    use_experts(model)
    return model


def block_of(model):
    return model.get_submodule(next(iter(experts_of(model))).rpartition(".")[0])


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("deepseek_v2", "shared_experts"),
        ("deepseek_v3", "shared_experts"),
        ("nemotron_h", "shared_experts"),
        ("qwen3_next", None),  # called before the router
        ("qwen3_moe", None),
        ("gpt_oss_sinks", None),
    ],
)
def test_the_path_that_can_run_beside_is_found_by_a_try(family, name):
    block = block_of(build(family))
    expected = None if name is None else block.get_submodule(name)
    assert shared_path_of(block, block.experts) is expected
    assert not hasattr(block.experts, "run_spread")


def test_shared_experts_compute_between_sending_and_waiting_in_both_directions(mesh):
    model = build("deepseek_v3")
    block, seen = block_of(model), []
    hidden = torch.randn(1, 9, 32, requires_grad=True)
    expected = block(hidden)
    (expected_gradient,) = torch.autograd.grad(expected.square().sum(), hidden)
    spread_experts(model, mesh)

    class Work:
        def __init__(self, work):
            self.work = work

        def wait(self):
            seen.append("wait")
            self.work.wait()

    all_to_all = dispatch.all_to_all

    def sending(out, rows, *given):
        seen.append("send")
        return Work(all_to_all(out, rows, *given))

    def shared(_module, _args, out):
        seen.append("shared")
        out.register_hook(lambda _: seen.append("shared"))

    block.shared_experts.down_proj.register_forward_hook(shared)
    with patch.object(dispatch, "all_to_all", sending):
        out = block(hidden)
        # rows, weights and codes go; then the sums come back
        assert seen == ["send"] * 3 + ["shared"] + ["wait"] * 3 + ["send", "wait"]
        seen.clear()
        (gradient,) = torch.autograd.grad(out.square().sum(), hidden)
        # gradients of the sums come; then those of rows and weights go back
        assert seen == ["send", "wait", "send", "send", "shared", "wait", "wait"]
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradient, expected_gradient)


def test_a_path_that_is_given_something_else_computes_that(mesh):
    model = build("deepseek_v3")
    block = block_of(model)
    other = torch.randn(1, 4, 32)
    expected = block.shared_experts(other)
    spread_experts(model, mesh)
    block.experts.shared_path.compute_ahead(torch.randn(4, 32))
    assert torch.equal(block.shared_experts(other), expected)


def test_the_host_waits_once_for_a_layer_and_not_in_its_backward():
    mesh = SimpleNamespace(size=lambda: 2, get_group=lambda: None)
    module = SimpleNamespace(
        down_proj=SimpleNamespace(device_mesh=mesh, shape=(4, 8, 8)), shared_path=None, training=True
    )
    done = SimpleNamespace(wait=lambda: None)
    with (
        pretend_cuda(),
        Watch() as watch,
        watch.at("test"),
        patch.object(dispatch, "apply_experts", lambda _, rows, *__: rows * 2),
        patch.object(dispatch.dist, "all_to_all_single", lambda out, given, *_, **__: out.copy_(given)),
        patch.object(dispatch, "all_to_all", lambda out, rows, *_: (out.copy_(rows), done)[1]),
    ):
        with torch.no_grad():
            chosen = torch.tensor([[0, 1], [1, 3], [2, 3], [0, 2]]).to("cuda:0")
            module.router_load = torch.zeros(4, dtype=torch.int64).to("cuda:0")
        hidden = torch.empty(4, 8, device="cuda:0", requires_grad=True)
        weights = torch.empty(4, 2, device="cuda:0", requires_grad=True)
        watch.waits.clear()
        out = dispatch.run_spread_experts(module, hidden, chosen, weights)
        assert [wait.what for wait in watch.waits] == ["tolist"]
        assert module.router_load.tolist() == [2, 2, 2, 2]
        watch.waits.clear()
        backward(out.sum(), watch)
        assert not watch.waits
        assert hidden.grad.shape == hidden.shape
        assert weights.grad.shape == weights.shape


def test_a_compiled_block_takes_what_its_shared_experts_computed_ahead(mesh):
    model = build("deepseek_v3")
    tokens = torch.randint(10, 160, (1, 11))
    expected = model(input_ids=tokens, use_cache=False).logits
    spread_experts(model, mesh)
    calls = []
    compute = SharedPath._compute
    model.model.layers[1].compile(backend="aot_eager")
    with patch.object(SharedPath, "_compute", lambda path, x: (calls.append(x.shape), compute(path, x))[1]):
        found = model(input_ids=tokens, use_cache=False).logits
    assert calls == [(11, 32)]  # ahead, and not again
    torch.testing.assert_close(found, expected)
