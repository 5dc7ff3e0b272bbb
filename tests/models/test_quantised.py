"""Bases in 4 and 8 bits: what the bytes stand for, and that products with them are those of the dequantised weights."""

import statistics

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy

from headway.count.quantised import BASES, BLOCK, matrix_bytes
from headway.errors import ConfigError
from headway.models.blocks import experts_of
from headway.models.init_weights import init_weights
from headway.models.load import load_model
from headway.models.lora import adapter_modules, add_adapters, initialise_adapters, without_adapters
from headway.models.quantised import NF4, ByteLayout, QuantisedLinear, layouts_by_name, layouts_by_size, quantise_base
from headway.models.recompute import _Policy
from headway.optim.groups import freeze
from headway.tracing import trace
from helpers.models import tiny_config, tiny_ledger

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
IDS = torch.arange(10, 40)[None]


def test_codes_are_quantiles_of_a_normal_distribution():
    # QLoRA, appendix E: 8 quantiles below 0 and 9 from 0 on, of equal shares of half a distribution each, whose ends
    # are the mean of 1/32 and 1/30 away from 0 and 1; scaled to 1.
    end = 1 - (1 / 32 + 1 / 30) / 2
    quantile = statistics.NormalDist().inv_cdf
    positive = [quantile(0.5 + (end - 0.5) * i / 8) for i in range(1, 9)]
    negative = [-quantile(0.5 + (end - 0.5) * i / 7) for i in range(7, 0, -1)]
    values = [value / positive[-1] for value in (*negative, 0.0, *positive)]
    assert list(NF4) == pytest.approx(values, abs=1e-5)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("shape", [(96, 64), (7, 9), (1, 1), (300, 200), (4, 6, 50)])
def test_bytes_stand_for_the_nearest_values(base, shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    layout = ByteLayout(base, shape)
    stored = layout.quantise(weight)
    assert stored.dtype == torch.uint8
    assert stored.shape == layout.stored_shape
    assert layouts_by_size({"weight": (stored.shape, shape)}) == {"weight": layout}
    values = layout.dequantise(stored, torch.float32)
    assert values.shape == weight.shape
    # no further off than half the widest gap between two codes, and the scale's own error
    matrices = zip(weight.view(-1, *shape[-2:]), values.view(-1, *shape[-2:]), strict=True)
    for matrix, decoded in matrices:
        if base == "int8":
            scales = matrix.abs().amax(1, keepdim=True)
            assert ((decoded - matrix).abs() <= scales / 254 * 1.001).all()
            continue
        flat = matrix.flatten()
        blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(1, keepdim=True)
        step = (scales - scales.mean()).abs().max() / 254
        gap = (torch.tensor(NF4).diff().max() / 2) * scales + step * 1.001
        error = (F.pad(decoded.flatten(), (0, -len(flat) % BLOCK)).view(-1, BLOCK) - blocks).abs()
        assert (error <= gap + 1e-6).all()


def test_the_way_that_all_sizes_fit_is_the_one_that_weights_are_held_in():
    sizes = {}
    for name, shape in {"a": (1, 37), "b": (4, 64)}.items():  # 41 bytes of the first could be either
        sizes[name] = (torch.Size(ByteLayout("int8", shape).stored_shape), torch.Size(shape))
    assert ByteLayout("nf4", (1, 37)).stored_shape == sizes["a"][0]
    assert {layout.base for layout in layouts_by_size(sizes).values()} == {"int8"}
    assert layouts_by_size({"a": (torch.Size([3]), torch.Size([4, 4]))}) == {}


def test_a_base_of_zeros_stays_zeros():
    for base in BASES:
        layout = ByteLayout(base, (4, 64))
        assert not layout.dequantise(layout.quantise(torch.zeros(4, 64)), torch.float32).any()


def test_4_bits_take_a_byte_less_than_qlora_says_at_most():
    assert 8 * matrix_bytes("nf4", 8192, 8192) / 8192**2 == pytest.approx(4 + 8 / 64 + 32 / (64 * 256), rel=1e-4)


def test_codes_are_those_of_torchao():
    torchao = pytest.importorskip("torchao.quantization")
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(1))
    theirs = torchao.NF4Tensor.from_tensor(weight, 64, 8)
    ours = ByteLayout("nf4", (128, 256)).quantise(weight)[-len(theirs.quantized_data) :]
    # its table is rounded, so that what lies half way between two codes may get the other one
    codes = [torch.stack([data >> 4, data & 15]).int() for data in (ours, theirs.quantized_data)]
    assert (codes[0] - codes[1]).abs().max() <= 1
    assert (codes[0] == codes[1]).float().mean() > 0.99


def adapted(family, base, targets=None):
    """A model with adapters on a base of bytes, and the same with the dequantised weights in their place."""
    models = []
    for held in (base, None):
        model = load_model(tiny_config(family), random_init=True, device="meta")
        ledger = freeze(model, trace(model), [])
        add_adapters(model, adapter_modules(ledger, targets), rank=4, alpha=8, dropout=0, base="base")
        if held is not None:
            quantise_base(model, trace(model), held)
        torch.manual_seed(0)
        with without_adapters(model):
            init_weights(model, "cpu")
        initialise_adapters(model, 1, "cpu")
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter.data, std=0.1)
        models.append(model)
    ours, plain = models
    layouts = layouts_by_name(ours)
    with torch.no_grad():
        for (name, parameter), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
            if name in layouts:
                before = other.clone()
                other.copy_(layouts[name].dequantise(parameter, torch.float32))
                assert not torch.equal(before, other)
            else:
                other.copy_(parameter)  # what A and B were drawn as
    return ours, plain


def gradients(model):
    model.train()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_tied", "qwen3_moe", "qwen3_vl", "gpt_oss_sinks"])
@pytest.mark.parametrize("targets", [None, ["q_proj"]])
def test_losses_and_gradients_are_those_of_the_dequantised_base(family, base, targets):
    ours, plain = adapted(family, base, targets)
    (loss, ours_by_name), (other, plain_by_name) = gradients(ours), gradients(plain)
    assert torch.equal(loss, other)
    assert ours_by_name.keys() == plain_by_name.keys()
    assert all(torch.equal(gradient, plain_by_name[name]) for name, gradient in ours_by_name.items())
    assert all(gradient.any() for name, gradient in ours_by_name.items() if "visual" not in name and "lora_B" in name)


def test_autocast_multiplies_in_bfloat16_as_with_the_dequantised_base():
    ours, plain = adapted("qwen3", "nf4")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ours(input_ids=IDS).logits, plain(input_ids=IDS).logits)


def test_only_linear_layers_and_experts_of_blocks_are_bytes():
    model, _ = adapted("qwen3_moe", "nf4")
    stored = {name for name, parameter in model.named_parameters() if not parameter.is_floating_point()}
    assert stored == layouts_by_name(model).keys()
    kinds = {name.replace(".base_layer", "").split(".")[-2] for name in stored}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "experts"}
    assert all(isinstance(model.get_submodule(name.rpartition(".")[0]), QuantisedLinear)
               for name in stored if name.rpartition(".")[0] not in experts_of(model))  # fmt: skip
    assert model.lm_head.weight.is_floating_point()


def test_backward_keeps_the_bytes_alone():
    ours, plain = adapted("qwen3", "nf4")
    sizes = []
    for model in (ours, plain):
        kept = []

        def keep(tensor, kept=kept):
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(input_ids=IDS, labels=IDS)
        held = {p.untyped_storage().data_ptr() for p in model.parameters()}
        sizes.append({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept
                      if t.untyped_storage().data_ptr() not in held})  # fmt: skip
    assert sum(sizes[0].values()) <= sum(sizes[1].values())


@pytest.mark.slow
def test_a_compiled_layer_computes_the_same_and_keeps_no_dequantised_weight():
    ours, _ = adapted("qwen3", "nf4")
    hidden = torch.randn(1, 30, 32, requires_grad=True)
    layer = ours.model.layers[0].self_attn.q_proj
    eager = layer(hidden).sum()
    (expected,) = torch.autograd.grad(eager, hidden)
    compiled = torch.compile(layer, fullgraph=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = compiled(hidden).sum()
    (gradient,) = torch.autograd.grad(out, hidden)
    torch.testing.assert_close(gradient, expected)
    weight = layer.base_layer.out_features * layer.base_layer.in_features
    assert not [t for t in kept if t.is_floating_point() and t.numel() == weight]


def test_nothing_to_hold_is_an_error():
    model = load_model(tiny_config("qwen3"), random_init=True, device="meta")
    with pytest.raises(
        ConfigError, match=r"model.base 'nf4' holds frozen linear layers .* has none. Take model.base out"
    ):
        quantise_base(model, tiny_ledger("qwen3"), "nf4")


@pytest.mark.parametrize(("sizes", "kept"), [({(32, 48)}, True), ({(48, 32)}, False), (set(), False)])
def test_recomputation_keeps_products_by_the_sizes_that_the_bytes_stand_for(sizes, kept):
    layout = ByteLayout("nf4", (48, 32))
    arguments = (torch.zeros(3, 32), torch.zeros(layout.stored_shape), None, layout.base, list(layout.shape))
    policy = _Policy(attention=False, products=frozenset(sizes))
    decision = policy(None, torch.ops.headway.quantised_linear.default, *arguments)
    assert (decision is CheckpointPolicy.MUST_SAVE) == kept
