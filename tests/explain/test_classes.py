import pytest

from headway.explain.classes import Work, work_of_kernel, work_of_operator

FLASH = "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128>>(Params)"
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
