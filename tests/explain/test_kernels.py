import csv
import re
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from headway.explain.kernels import Work, is_attention, work_of_kernel, work_of_operator

FLASH = "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128>>(Params)"
CUDNN = "cudnn_generated_fort_native_sdpa"
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"


@pytest.mark.parametrize(
    ("kernel", "operator", "work"),
    [
        ("anything", "aten::addmm", Work.MATMUL),
        ("batched_transpose_16x32_half", "aten::miopen_convolution", Work.MATMUL),
        ("anything", "aten::convolution_backward", Work.MATMUL),
        ("anything", "aten::_scaled_dot_product_flash_attention_backward", Work.MATMUL),
        ("anything", "flash_attn::_flash_attn_varlen_forward", Work.MATMUL),
        ("anything", "aten::_grouped_mm", Work.MATMUL),
        ("cudnn::fusion::compute_dot_do_o_specialized", "cudnn::sdpa_bwd", Work.MATMUL),
        ("anything", "aten::bmm_", Work.MATMUL),
        ("ampere_sgemm", "aten::copy_", Work.MEMORY),
        ("anything", "aten::addcmul_", Work.MEMORY),
        ("anything", "aten::linalg_vector_norm", Work.MEMORY),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "aten::mm", Work.COMMUNICATION),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", None, Work.COMMUNICATION),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", None, Work.MATMUL),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV", None, Work.MATMUL),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_TNT", None, Work.MATMUL),
        ("cudnn_infer_volta_scudnn_128x64_relu_medium_nn_v1", None, Work.MATMUL),
        (FLASH, None, Work.MATMUL),
        (f"{CUDNN}_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x", None, Work.MATMUL),
        (f"{CUDNN}_sm80_flash_fprop_wmma_f16_knob_3_64x64x128_4x1x1", None, Work.MATMUL),
        (ELEMENTWISE, None, Work.MEMORY),
        ("void at::native::im2col_conv_kernel<float>(int)", None, Work.MEMORY),
        ("triton_red_fused_add_mean_mul_pow_rsqrt_0", "CompiledFunction", Work.MEMORY),
        ("triton_tem_fused_mm_3", "CompiledFunction", Work.MATMUL),
        ("my_kernel", "mylib::something", Work.UNKNOWN),
        ("my_kernel", None, Work.UNKNOWN),
    ],
)
def test_a_kernel_is_what_its_operator_is_and_only_then_what_its_name_says(kernel, operator, work):
    assert work_of_kernel(kernel, operator) is work


def test_kernels_that_no_operator_launches_are_classed_by_their_names():
    """Names as their public sources have them; a kernel of Triton is a product where its body has `tl.dot`."""
    with Path(__file__).with_name("kernel_names.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert len({row["name"] for row in rows}) > 250
    assert len({row["source"].partition(",")[0] for row in rows}) > 15
    wrong = [(row["name"], work) for row in rows if (work := work_of_kernel(row["name"], None)) != row["work"]]
    assert wrong == []


# Numbers that a library's name is written with: its stages, tiles, warps, alignments and version.
NUMBERS = re.compile(r"(?<=stage)\d|(?<=stages_)\d+|\d+(?=x\d)|(?<=\dx)\d+|(?<=align)\d|(?<=sm)\d\d|(?<=_g)\d\b")
LIBRARIES = re.compile(r"xmma|cutlass|cudnn|cublas|gemm|Cijk|nvjet|Conv|mma|tilesize|stages_|^bmm_|fmha")


@pytest.mark.parametrize("stage", range(1, 7))
@pytest.mark.parametrize("tile", [8, 16, 24, 32, 64, 96, 128, 192, 256])
def test_numbers_of_stages_and_tiles_decide_nothing(stage, tile):
    """Every name of a library in the table, with each number of stages and each tile in place of its own."""
    with Path(__file__).with_name("kernel_names.tsv").open() as file:
        rows = [
            row for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if LIBRARIES.search(row["name"])
        ]
    assert len(rows) > 60
    wrong = []
    for row in rows:
        name = NUMBERS.sub(lambda number: str(stage if len(number[0]) == 1 else tile), row["name"])
        wrong += [name] if work_of_kernel(name, None) != row["work"] else []
    assert wrong == []


@pytest.mark.parametrize(
    ("name", "attends"),
    [
        ("torch_attn::_varlen_attn_backward", True),
        ("cudnn::sdpa_bwd", True),
        ("headway::ragged_attention", True),
        ("aten::_scaled_dot_product_cudnn_attention", True),
        (f"{CUDNN}_sm90_fprop_wgmma_f16", True),
        ("triton_tem_fused_flex_attention_0", True),
        ("triton_tem_fused__varlen_attn_backward_mm_3", False),  # a product, fused with what prepares its operands
        ("aten::mm", False),
    ],
)
def test_attention_is_what_an_operator_is_called_and_not_what_is_fused_beside_it(name, attends):
    assert is_attention(name) == attends


@pytest.mark.parametrize("kernel", ["vol2col", "vol2im", "im2col", "col2im"])  # aten/src/ATen/native/cuda/*.cuh
def test_a_picture_that_is_unfolded_for_a_convolution_is_moved(kernel):
    name = f"void at::native::(anonymous namespace)::{kernel}_kernel<c10::BFloat16>(long, c10::BFloat16 const*, int)"
    for operator in ("aten::slow_conv_dilated3d", "aten::slow_conv_transpose2d", None):
        assert work_of_kernel(name, operator) == Work.MEMORY


def test_inductors_own_word_comes_before_the_operators_that_its_kernel_fuses():
    for operator in ("mm", "convolution", "_softmax_attention", "all_reduce"):
        for kind in ("poi", "per", "red", "for"):
            name = f"triton_{kind}_fused_{operator}_0"
            assert {work_of_kernel(name, around) for around in (None, "CompiledFunction", "vllm::moe")} == {Work.MEMORY}
    assert work_of_kernel("triton_tem_fused_mm_1", "Torch-Compiled Region: 0/0") is Work.MATMUL


@pytest.mark.parametrize(
    ("operator", "work"),
    [
        ("aten::_scaled_dot_product_flash_attention_for_cpu", Work.MATMUL),
        ("mkldnn::_linear_pointwise", Work.MATMUL),
        ("aten::native_layer_norm", Work.MEMORY),
        ("Torch-Compiled Region: 0/0", Work.MEMORY),
        ("c10d::allreduce_", Work.COMMUNICATION),
        ("gloo:all_reduce", Work.COMMUNICATION),
        ("autograd::engine::evaluate_function: AddmmBackward0", Work.HOST),
        ("MyFunction", Work.UNKNOWN),
    ],
)
def test_an_operator_of_the_host_has_a_class(operator, work):
    assert work_of_operator(operator) is work


def test_every_operator_that_torch_counts_flops_of_is_a_product():
    counted = {str(operator) for operator in flop_registry if str(operator).startswith("aten.")}
    assert len(counted) > 15
    assert {name for name in counted if work_of_operator(name.replace(".", "::")) is not Work.MATMUL} == set()


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("own_kernel", [True, False])
def test_recurrent_layers_spend_their_products_as_products(layer, own_kernel):
    """What oneDNN runs as one operator, and ATen as products of its own, has the same class."""

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
            names.add(function._schema.name)
            return function(*args, **(kwargs or {}))

    names = set()
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(own_kernel and enabled)
    with ExitStack() as stack:
        stack.callback(torch._C._set_mkldnn_enabled, enabled)
        stack.enter_context(Dispatched())
        layer(8, 12, 2)(torch.randn(5, 3, 8))[0].sum().backward()
    products = {name for name in names if work_of_operator(name) is Work.MATMUL}
    whole = {"aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward"}
    assert products >= (whole if layer is nn.LSTM and own_kernel else {"aten::addmm", "aten::mm"} & names)
    assert not {name for name in products if not re.search(r"mm$|rnn|linear", name)}


@pytest.mark.parametrize(
    ("operator", "work"),
    [
        ("aten::_cudnn_rnn_backward", Work.MATMUL),
        ("aten::miopen_rnn", Work.MATMUL),
        ("aten::_cudnn_rnn_flatten_weight", Work.MEMORY),
        ("aten::_thnn_fused_lstm_cell", Work.MEMORY),  # it is given what the products of its gates came to
        ("aten::_weight_int4pack_mm_for_cpu", Work.MATMUL),
        ("aten::_convert_weight_to_int4pack", Work.MEMORY),
        ("aten::_sparse_semi_structured_linear", Work.MATMUL),
        ("onednn::qlinear_pointwise", Work.MATMUL),
        ("quantized::conv2d_prepack", Work.UNKNOWN),
        ("aten::upsample_bilinear2d_backward", Work.MEMORY),
        ("aten::tensordot", Work.MATMUL),
    ],
)
def test_words_of_a_name_tell_products_from_what_prepares_them(operator, work):
    assert work_of_operator(operator) is work
