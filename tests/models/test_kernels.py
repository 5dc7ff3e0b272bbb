"""Modules are given to a kernel only where they compute what it computes."""

import copy
import importlib.util
import re
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import transformers
from torch.nn.attention import current_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from headway.errors import ConfigError
from headway.models import kernels
from headway.models.attention.cuda_kernel import choose_kernel, cuda_kernel, flash_kernel
from headway.models.attention.ragged import varlen_attention
from headway.models.attention.segments import segment_attention
from headway.models.blocks import blocks
from headway.models.head import model_with_loss
from headway.models.kernels import gated_mlps, rms_norms, rotary_functions, use_kernels
from headway.tracing import trace
from helpers.models import tiny_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def build(family):
    torch.manual_seed(0)
    config = tiny_config(family)
    kind = transformers.AutoModelForImageTextToText if "vision_config" in config else transformers.AutoModelForCausalLM
    return kind.from_config(config)


# Norms: two a layer, one at the end; of Qwen3 two more a layer, of queries and keys; of Gemma 2 four a layer.
@pytest.mark.parametrize(
    ("family", "num_norms", "casting", "num_mlps"),
    [
        ("llama", 5, "llama", 2),
        ("qwen3", 9, "llama", 2),
        ("gemma2_softcap", 9, "gemma", 0),  # its MLPs have GELU
        ("qwen3_moe", 9, "llama", 0),  # experts are no MLP modules
        ("gpt2", 0, None, 0),  # LayerNorm, and no gate
        ("qwen3_vl", 9, "llama", 2),  # the vision tower has LayerNorm and no gate
        (
            "qwen2_5_vl",
            5 + 2 * 3 + 1,
            "llama",
            2 + 3,
        ),  # the tower: two norms a block, one in the merger; its MLPs have biases
    ],
)
def test_norms_and_gated_mlps_are_found_by_what_they_compute(family, num_norms, casting, num_mlps):
    model = build(family)
    norms = rms_norms(model)
    assert len(norms) == num_norms
    assert {norm.casting for norm in norms.values()} == ({casting} if casting else set())
    assert len(gated_mlps(model)) == num_mlps


def test_what_looks_like_a_norm_or_an_mlp_and_is_none_is_left_alone():
    model = build("llama")
    kind = type(model.model.norm)

    class Clipped(kind):
        def forward(self, hidden_states):
            return super().forward(hidden_states).clamp(-1.0, 1.0)

    model.model.norm.__class__ = Clipped
    model.model.layers[0].mlp.act_fn = torch.nn.GELU()
    assert model.model.norm not in rms_norms(model)
    assert len(rms_norms(model)) == 4
    assert gated_mlps(model) == (model.model.layers[1].mlp,)


def test_finding_leaves_a_model_as_it_was_even_without_weights():
    model = build("qwen3")
    before = copy.deepcopy(model.state_dict())
    rms_norms(model), gated_mlps(model), rotary_functions(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(tiny_config("qwen3"))
    assert len(rms_norms(empty)) == len(rms_norms(model)) == 9
    assert len(gated_mlps(empty)) == 2


@pytest.mark.parametrize(
    ("family", "functions"),
    [
        ("qwen3", {"apply_rotary_pos_emb"}),
        ("qwen3_vl", {"apply_rotary_pos_emb", "apply_rotary_pos_emb_vision"}),
        ("gpt_oss_sinks", set()),  # angles of half the width
        ("gpt2", set()),
    ],
)
def test_standard_rotary_functions_are_found(family, functions):
    assert {name for name, _ in rotary_functions(build(family)).values()} == functions


def test_liger_without_cuda_or_package_is_refused(monkeypatch):
    model = build("qwen3")
    with pytest.raises(ConfigError, match=r"speed\.kernels is 'liger', which runs on CUDA only.*on cpu.*=torch"):
        use_kernels(model, "liger", CPU)
    real = importlib.util.find_spec
    monkeypatch.setattr(kernels, "find_spec", lambda name: None if name == "liger_kernel" else real(name))
    with pytest.raises(ConfigError, match="pip install liger-kernel"):
        use_kernels(model, "liger", CUDA)
    assert use_kernels(model, "torch", CPU) == ()


@pytest.fixture
def _liger(monkeypatch):
    """Liger's package, none of whose kernels may run: there is no CUDA here."""

    def on_cuda_only(*_tensors):
        raise AssertionError("a kernel was called for tensors that are not on CUDA")

    function = SimpleNamespace(apply=on_cuda_only)
    rope = {"liger_rotary_pos_emb": on_cuda_only, "liger_rotary_pos_emb_vision": on_cuda_only}
    contents = {
        "liger_kernel": {},
        "liger_kernel.ops": {"LigerRMSNormFunction": function, "LigerSiLUMulFunction": function},
        "liger_kernel.transformers": {},
        "liger_kernel.transformers.rope": rope,
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(kernels, "find_spec", lambda _: object())
    yield
    kernels.put_back_functions()


@pytest.mark.usefixtures("_liger")
def test_off_cuda_a_model_with_liger_computes_and_is_traced_as_without():
    model = build("qwen3_vl")
    other = copy.deepcopy(model)
    use_kernels(model, "torch", CUDA)
    (line,) = use_kernels(other, "liger", CUDA)
    assert line == "Liger kernels: 9 RMSNorms, 2 gated MLPs, 2 rotary functions"
    ids = torch.randint(7, 160, (1, 12))
    assert torch.equal(other(input_ids=ids).logits, model(input_ids=ids).logits)
    assert trace(other) == trace(model)


@pytest.mark.usefixtures("_liger")
def test_rotary_functions_are_transformers_own_again_for_the_next_model():
    model = build("qwen3_vl")
    own = rotary_functions(model)
    for _ in range(2):
        use_kernels(model, "liger", CUDA)
        assert all(rotary_functions(model)[name] != function for name, function in own.items())
    use_kernels(build("qwen3"), "torch", CUDA)
    assert rotary_functions(model) == own


@pytest.mark.usefixtures("_liger")
def test_blocks_that_will_be_compiled_keep_their_own():
    model = build("qwen3")
    (line,) = use_kernels(model, "liger", CUDA, [block.module for block in blocks(model)])
    where = "outside of compiled blocks, which fuse their own"
    assert line == f"Liger kernels: 1 RMSNorms, 0 gated MLPs, 0 rotary functions {where}"
    replaced = {name for name, module in model.named_modules() if "forward" in vars(module)}
    assert replaced == {"model.norm"}


def test_flash_attn_without_cuda_or_package_is_refused(monkeypatch):
    for name in ("flash-attn", "fa3", "cudnn"):
        with pytest.raises(ConfigError, match=rf"speed\.attention is '{name}'.*on CUDA only.*speed\.attention=auto"):
            choose_kernel(name, CPU)
    monkeypatch.setattr("headway.models.attention.cuda_kernel.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install flash-attn.*speed\.attention=auto"):
        choose_kernel("flash-attn", CUDA)
    assert cuda_kernel() is varlen_attention


def test_flash_attn_is_given_windows_scale_and_padded_heads_as_it_expects_them(monkeypatch):
    """A stand-in for the package (no GPU here) that keeps its contract: a window counts the keys before the query."""

    def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, *, softmax_scale, causal, window_size):
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] == 16  # 12 and 10 channels, in multiples of 8
        assert (cu_q.dtype, max_q, max_k) == (torch.int32, 7, 7)
        window = None if window_size == (-1, -1) else window_size[0] + 1
        return segment_attention(q, k, v, cu_q, causal, window, softmax_scale, None), "log-sums"

    package = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setattr(
        "headway.models.attention.cuda_kernel.find_spec", lambda name: object() if name == "flash_attn" else None
    )
    monkeypatch.setattr("headway.models.attention.cuda_kernel.import_module", {"flash_attn": package}.__getitem__)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(12, heads, 12, generator=generator) for heads in (4, 2))
    v = torch.randn(12, 2, 10, generator=generator)
    cu = torch.tensor([0, 5, 12])
    try:
        choose_kernel("flash-attn", CUDA)
        for window in (None, 3):
            got = cuda_kernel()(q, k, v, cu, 7, True, window, 0.3, None)
            wanted = segment_attention(q, k, v, cu.int(), True, window, 0.3, None)
            torch.testing.assert_close(got, wanted)
        with pytest.raises(ConfigError, match="attention sinks"):
            cuda_kernel()(q, k, v, cu, 7, True, None, 0.3, torch.zeros(4))
    finally:
        assert choose_kernel("torch", CUDA) == (FA2_LINE,)
    assert cuda_kernel() is varlen_attention


FA2_LINE = "Attention on CUDA: PyTorch's variable-length FlashAttention-2"


@pytest.fixture
def _fa3(monkeypatch):
    """FlashAttention-3's package as PyTorch looks for it, and a Hopper device: no kernels, as nothing is computed."""
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    monkeypatch.setattr(
        "headway.models.attention.cuda_kernel.find_spec",
        lambda name: object() if name == "flash_attn_interface" else None,
    )
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    # one that is only dropped leaves names behind that lead nowhere: torch 2.11's inductor looks at all of them
    with torch.library._scoped_library("flash_attn_3", "FRAGMENT") as library:
        for name in ("fwd", "bwd"):
            library.define(f"{name}(Tensor x) -> Tensor")
        yield
        choose_kernel("auto", CPU)
    assert current_flash_attention_impl() is None


@pytest.mark.usefixtures("_fa3")
def test_auto_takes_flash_attention_3_where_it_runs_and_says_so():
    for name in ("auto", "fa3"):
        assert choose_kernel(name, CUDA) == ("Attention on CUDA: FlashAttention-3 (flash_attn_interface)",)
        assert current_flash_attention_impl() == "FA3"
        assert cuda_kernel() is varlen_attention
        assert choose_kernel("torch", CUDA) == (FA2_LINE,)
        assert current_flash_attention_impl() is None


@pytest.mark.usefixtures("_fa3")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("torch.cuda.get_device_capability", lambda _: (8, 0)), r"capability 9\.x \(H100, H200\), but cuda has 8\.0"),
        (("headway.models.attention.cuda_kernel.find_spec", lambda _: None), "flash_attn_interface is not installed"),
        (
            ("torch.nn.attention._fa3._fa3_import_module", Mock(side_effect=RuntimeError("no backward"))),
            "cannot use the installed flash_attn_interface: no backward",
        ),
    ],
)
def test_without_flash_attention_3_auto_says_why_and_its_name_is_refused(change, why, monkeypatch):
    monkeypatch.setattr(*change)
    (line,) = choose_kernel("auto", CUDA)
    assert re.match(rf"{FA2_LINE}; FlashAttention-3 is not used, because .*{why}", line)
    with pytest.raises(ConfigError, match=rf"'fa3' \(FlashAttention-3\), but .*{why}.*speed\.attention=auto"):
        choose_kernel("fa3", CUDA)
    assert current_flash_attention_impl() is None


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3", "gemma2_softcap", "qwen3_vl", "qwen2_5_vl"])
def test_liger_computes_the_same_losses_and_gradients_on_cuda(family):
    pytest.importorskip("liger_kernel")
    model = build(family).cuda()
    other = copy.deepcopy(model)
    ids = torch.randint(7, 160, (1, 64), device="cuda")
    plain = model_with_loss(model, chunk=16)({"input_ids": ids}, ids[0], per=64, judge=True)
    lines = use_kernels(other, "liger", CUDA)
    found = model_with_loss(other, chunk=16, liger=True)({"input_ids": ids}, ids[0], per=64, judge=True)
    assert lines
    torch.testing.assert_close(found.loss_T, plain.loss_T, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.right_T, plain.right_T)
    plain.total.backward(), found.total.backward()
    for (name, wanted), got in zip(model.named_parameters(), other.parameters(), strict=True):
        if wanted.grad is not None:
            assert (got.grad - wanted.grad).norm() <= 1e-3 * wanted.grad.norm() + 1e-6, name


@pytest.mark.gpu
def test_flash_attn_equals_torch_on_cuda():
    package = pytest.importorskip("flash_attn")
    q, k, v = (torch.randn(300, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    cu = torch.tensor([0, 100, 300], device="cuda", dtype=torch.int32)
    ours = flash_kernel(package.flash_attn_varlen_func)(q, k, v, cu, 200, True, None, 0.125, None)
    wanted = varlen_attn(q, k, v, cu, cu, 200, 200, scale=0.125, window_size=(-1, 0))
    torch.testing.assert_close(ours, wanted, rtol=2e-2, atol=2e-2)
