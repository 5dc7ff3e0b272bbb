"""The experts implementation "headway_experts" against transformers' own loop over experts."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from headway.errors import ConfigError
from headway.models.blocks import experts_of
from headway.models.experts import NAME, register_experts, use_experts
from headway.models.products import grouped_linear, permute_rows
from helpers.models import tiny_config

FAMILIES = (
    "qwen3_moe", "qwen3_vl_moe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss_sinks", "qwen3_next", "kimi_linear",
    "jamba", "granitemoehybrid", "nemotron_h", "minimax",
)  # fmt: skip


def build(family, dtype=torch.float64):
    config = tiny_config(family)
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = auto.from_config(config, dtype=dtype, attn_implementation="eager").train()
    for parameter in model.parameters():  # biases and routers that begin at zero would hide what they do
        if not parameter.any():
            nn.init.normal_(parameter, std=0.2)
    return model


def loss_and_gradients(model, tokens):
    model.zero_grad()
    logits = model(input_ids=tokens, use_cache=False).logits
    loss = nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_has_the_loss_and_gradients_of_its_own_loop_over_experts(family):
    model = build(family)
    assert experts_of(model)
    tokens = torch.randint(10, 160, (1, 37))
    use_experts(model, "eager")
    loss, gradients = loss_and_gradients(model, tokens)
    use_experts(model)
    ours, our_gradients = loss_and_gradients(model, tokens)
    exact = loss.dtype == torch.float64  # Nemotron-H computes its recurrence and logits in single precision
    torch.testing.assert_close(ours, loss, rtol=1e-12 if exact else 1e-6, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            our_gradients[name], gradient, rtol=1e-6, atol=1e-12 if exact else 1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    new = {name: grad for name, grad in our_gradients.items() if name not in gradients}
    assert not any(grad.any() for grad in new.values())  # of experts that the loop did not come by


@pytest.mark.parametrize("copies", [1, 3])
def test_rows_that_are_cast_before_they_are_copied_are_those_cast_afterwards_to_the_bit(copies):
    x_TD = torch.randn(20, 8)
    order_S = torch.randperm(20 * copies)
    weights_SD = torch.randn(20 * copies, 8).bfloat16()

    def rows_and_gradient(*dtype):
        x = x_TD.clone().requires_grad_()
        rows_SD = permute_rows(x, order_S, order_S.argsort(), copies, *dtype).bfloat16()
        (rows_SD * weights_SD).sum().backward()
        return rows_SD, x.grad

    torch.testing.assert_close(rows_and_gradient(torch.bfloat16), rows_and_gradient(), rtol=0, atol=0)


@pytest.fixture
def layer():
    register_experts()
    config = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=24, num_experts=5, experts_implementation=NAME)
    experts = Qwen3MoeExperts(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.2)
    return experts


def routing(chosen):
    weights = torch.rand(len(chosen), len(chosen[0]), requires_grad=True)
    return torch.randn(len(chosen), 32, requires_grad=True), torch.tensor(chosen), weights


def derived(experts, rows, chosen, weights):
    """Each slot by itself: the weighted sum of gated linear units."""
    out = []
    for row, ids, shares in zip(rows, chosen.tolist(), weights, strict=True):
        terms = []
        for expert, share in zip(ids, shares, strict=True):
            gate, up = (experts.gate_up_proj[expert] @ row).chunk(2)
            terms.append(share * (experts.down_proj[expert] @ (nn.functional.silu(gate) * up)))
        out.append(sum(terms))
    return torch.stack(out)


@pytest.mark.parametrize(
    "chosen",
    [[[0, 1], [4, 2], [1, 0]], [[3, 3], [3, 3]], [[4, 0]], [[2], [2], [0]]],
    ids=["mixed", "one", "slot", "k=1"],
)
def test_a_layer_is_the_weighted_sum_of_its_experts(layer, chosen):
    rows, ids, weights = routing(chosen)
    out = layer(rows, ids, weights)
    expected = derived(layer, rows, ids, weights)
    torch.testing.assert_close(out, expected)
    wanted = torch.autograd.grad(expected.square().sum(), [rows, weights, *layer.parameters()])
    found = torch.autograd.grad(out.square().sum(), [rows, weights, *layer.parameters()])
    torch.testing.assert_close(found, wanted)


def test_frozen_experts_pass_gradients_on_and_have_none(layer):
    rows, ids, weights = routing([[0, 1], [4, 2]])
    expected = torch.autograd.grad(derived(layer, rows, ids, weights).sum(), rows)[0]
    layer.requires_grad_(requires_grad=False)
    layer(rows, ids, weights).sum().backward()
    torch.testing.assert_close(rows.grad, expected)
    assert layer.down_proj.grad is None


def test_experts_learn_where_what_they_see_does_not(layer):
    rows, ids, weights = routing([[0, 1], [4, 2]])
    layer(rows.detach(), ids, weights).sum().backward()
    assert layer.gate_up_proj.grad[0].any()
    assert not layer.gate_up_proj.grad[3].any()


def test_autocast_runs_the_products_in_its_type(layer):
    rows, ids, weights = routing([[0, 1], [4, 2], [1, 3]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(rows, ids, weights)
    assert out.dtype == rows.dtype
    exact = layer(rows, ids, weights)
    torch.testing.assert_close(out, exact, rtol=0.05, atol=0.05)
    assert not torch.equal(out, exact)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracing does it
def test_a_compiled_layer_is_the_same_in_forward_and_backward(layer):
    rows, ids, weights = routing([[0, 1], [4, 2], [1, 3]])
    inputs = [rows, weights, *layer.parameters()]
    expected = layer(rows, ids, weights)
    wanted = torch.autograd.grad(expected.square().sum(), inputs)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out = compiled(rows, ids, weights)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), inputs), wanted)


def test_the_products_are_operators_as_torch_wants_them():
    rows, weight = torch.randn(7, 6, requires_grad=True), torch.randn(3, 5, 6, requires_grad=True)
    ends = torch.tensor([4, 4, 7], dtype=torch.int32)
    torch.library.opcheck(torch.ops.headway.grouped_linear.default, (rows, weight, ends, False))
    torch.library.opcheck(torch.ops.headway.grouped_linear.default, (rows, weight.mT.detach(), ends, True))


def test_no_rows_at_all_give_zero_gradients():
    rows, weight = torch.randn(0, 6, requires_grad=True), torch.randn(3, 5, 6, requires_grad=True)
    out = grouped_linear(rows, weight, torch.zeros(3, dtype=torch.int32), is_transposed=False)
    assert out.shape == (0, 5)
    out.sum().backward()
    assert not weight.grad.any()


@pytest.mark.gpu
@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_kernel_of_the_device_is_the_loop(is_transposed):
    sizes = (4, 64, 96) if is_transposed else (4, 96, 64)
    rows = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(sizes, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([100, 100, 117, 300], dtype=torch.int32, device="cuda")
    out = grouped_linear(rows, weight, ends, is_transposed=is_transposed)
    found = torch.autograd.grad(out.square().sum(), [rows, weight])
    wide, matrices = rows.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = grouped_linear(wide, matrices, ends, is_transposed=is_transposed)
    wanted = torch.autograd.grad(expected.square().sum(), [wide, matrices])
    for mine, theirs in zip([out, *found], [expected, *wanted], strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=0.02, atol=0.02 * theirs.abs().max().item())


@pytest.mark.parametrize("is_transposed", [False, True])
def test_where_the_kernel_leaves_garbage_for_experts_without_rows_their_gradient_is_zero(is_transposed, monkeypatch):
    """A stand-in for the kernel of devices that no test machine has: right but for those gradients."""
    rows, ends = torch.randn(7, 6), torch.tensor([4, 4, 7], dtype=torch.int32)
    weight = torch.randn(3, 6, 6, requires_grad=True)
    expected = grouped_linear(rows, weight, ends, is_transposed=is_transposed)
    (wanted,) = torch.autograd.grad(expected.square().sum(), weight)

    def grouped_mm(rows, weight, offs):
        weight = weight.view_as(weight)  # a hook on the parameter itself would stay
        weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor([1]), torch.nan))
        return torch.ops.headway.grouped_linear(rows, weight, offs, True)

    monkeypatch.setattr("headway.models.products._has_kernel", lambda *_: True)
    monkeypatch.setattr("torch.nn.functional.grouped_mm", grouped_mm)
    for capability, is_garbage in (((9, 0), True), ((10, 0), False), ((12, 0), False)):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda _, found=capability: found)
        out = grouped_linear(rows, weight, ends, is_transposed=is_transposed)
        (found,) = torch.autograd.grad(out.square().sum(), weight)
        torch.testing.assert_close(out, expected)
        assert found[1].isnan().all() == is_garbage
        if not is_garbage:
            torch.testing.assert_close(found, wanted)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(
        ConfigError, match=r"There is no experts implementation 'fast'\. Known are: eager, .*grouped_mm"
    ):
        use_experts(build("qwen3_moe"), "fast")


def test_a_model_without_experts_stays_as_it_is():
    model = build("qwen3")
    before = model.config._experts_implementation
    use_experts(model)
    assert model.config._experts_implementation == before
    assert not experts_of(model)
