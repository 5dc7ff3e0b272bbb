"""Kinds of kernels' work: by the operator that launched a kernel, and only where that says nothing by its own name.

An operator's name is an interface (`aten::addmm` is a matrix product in every release and on every device); a kernel's
name is an implementation, of which each library and device has thousands.
"""

import re
from enum import StrEnum
from functools import cache


class Work(StrEnum):
    """Kind of work of a kernel or of an operator of the host."""

    MATMUL = "matmul"  # matrix products, convolutions and attention: what FLOPs are counted of
    MEMORY = "memory-bound"  # everything else that computes
    COMMUNICATION = "communication"
    COPY = "copy"
    HOST = "host"  # on the host, and no operator: Python, autograd's engine
    UNKNOWN = "unknown"


# Words of an operator's name, between underscores: `_weight_int4pack_mm_for_cpu`, `mkldnn_rnn_layer_backward`.
_PRODUCTS = re.compile(
    r"(add|b|addb|baddb|s|hsp|sspadd)?mm|(add)?mv|v?dot|vecdot|addr|matmul|einsum|tensordot|q?linear|bilinear|"
    r"trilinear|q?conv(olution|[123]d)?|attention|attn|sdpa|rnn|lstm|gru"
)
# Words of operators that prepare, resize or finish, and compute no product: `conv2d_prepack`, `upsample_bilinear2d`.
# `_thnn_fused_lstm_cell` is given what the products of its gates came to.
_NO_PRODUCTS = re.compile(
    r"prepack|unpack|pack|reorder|convert|flatten|quantize|upsample|thnn|available|search|combination|vander|get|"
    r"padding|stride|dilation|groups"
)
_PRODUCT_NAMES = re.compile(r"inner|_?thnn_conv.*")  # products by their names as a whole
# Names of kernels, for those that no operator of PyTorch launches: in the order of this table, the first that matches.
# A word of a name that also holds a product's (`reshape_and_cache_flash`, `flash_bwd_convert_dq`) stands before it.
# Names are in lower case here, with one underscore before, between and behind their words.
#
# Sources of the names, of July to November 2026: Inductor (torch 2.0 and 2.13, torch/_inductor); Triton's tutorials 01
# to 10; Liger-Kernel ead96b61; Unsloth 015bdef0; flash-linear-attention bc3b101d; Mamba e9594ce; bitsandbytes 95f9af30;
# gpt-oss 7b58334 and its triton_kernels; megablocks 78eea65; FlashAttention 0251105a; FlashInfer fb28d724, which holds
# TensorRT-LLM's; SGLang 0.5.2; vLLM's in traces of TraceLens 171dd74; DeepGEMM 54e2261; SageAttention d1a57a5; AITER
# e4048607; MIOpen 2d1fd997; cuBLAS, cuDNN, CUTLASS, hipBLASLt and ATen in the public traces that the tests name.
_NAMES_OF_KERNELS: tuple[tuple[Work, str], ...] = (
    # Inductor names a kernel after the operators that it fuses, so its own word comes first: pointwise, reduction, ...
    (Work.MEMORY, r"^_triton_(poi|per|red|for|spl|coo|unk)_|^_triton_\d"),
    (Work.MATMUL, r"^_triton_(tem|mm|bmm|convolution|flex|scaled)"),
    (
        Work.COMMUNICATION,
        r"nccl|rccl|mscclpp|msccl|nvshmem|rocshmem|deep_?ep_(intra|inter)node|cross_device_reduce|symm_mem|multimem_|"
        r"all_?reduce|reduce_?scatter|all_?gather|all_?to_?all|moe_a2_?a|lamport|oneccl|quickreduce|send_?recv",
    ),
    # Kernels that prepare a product or finish it.
    (
        Work.MEMORY,
        r"quant|_args_$|src2dst|reorder|permute|transpose|(?<!auto)convert|im2col|col2_?im|preprocess|swizzle|interleave|repack|"
        r"combine|merge_(attn|state)|(attention|attn|packed|evict)_mask|and_cache|(store|set|copy)\w*_kv_?(cache|buffer)|causal_conv1d|padded_copy|attn_?res_|"
        r"dot_do_o|_stage[23]|clear_",
    ),
    # Products by what no other kernel is called: libraries of matrix products, attention, mixtures of experts, LoRA.
    (
        Work.MATMUL,
        r"gemm|gemv|scudnn|mat_?mul|_b?mm_|bmm_|cijk_|nvjet|xmma|cublas|tensorop|mfma|wgmma|xdlops|split_?k_?|fmha|marlin|"
        r"(up|down|gate)_proj_|lora_(a|b|expand|shrink)_|[bs]gmv|_(sdd|dsd|dds)_|mqa_logits|sdpa|_fwd_grouped_kernel|"
        r"(prefill|decode)_with_\w*kv_?cache|scaled_dot_kkt",
    ),
    # Element by element, by rows, or by places: whatever they are part of.
    (
        Work.MEMORY,
        r"element|reduc|norm|soft_?max|rope_|rotary|embedding|embs_|dropout|copy|fill|memset|cast|scatter|gather|pool|"
        r"bn_|adam|sgd|lamb|lion_|adagrad|optimizer|multi_tensor|act_and_mul|activ|silu|swish|gelu|glu_|relu|sigmoid|"
        r"tanh|cross_entropy|loss|jsd|kl_?div|cumsum|segsum|top_?k|sort|argmax|sampling|philox|align|routing|router|"
        r"histogram|prefix_sum|split_embedding|sparsemax|log_?sum_?exp|grpo|solve_tril|compute_grad_input|part_grad_gamma|"
        r"bit_?(mask|matrix)|_mask(ed)?_|_gate_|gating|token_shift|finalize|expand_input|offsets|"
        r"_(add|mul|addcmul|sum|mean|bias|index|range|indices|residual|update|concat|cat|reshape|pad|mhc|dyt|ce)_|"
        r"tensor_op|op\d?d?_?tensor|state_passing|selective|recurrent|rwkv\d?_mix|seq_mix|distance|nchw_?to|nhwc_?to|"
        r"kv_indices|token_pool|^_(exact|approx)_(forward|backward)_kernel|_d?fg_|lstm|gru_|cub_|thrust|rocprim|hipcub",
    ),
    # Attention, linear attention, convolutions and experts, by words that the kernels around them have as well.
    (
        Work.MATMUL,
        r"attn|attention|neighborhood|flash|mha|_mla_|_sage_fwd|^_(fwd|bwd)(_grouped)?_kernel|^_bwd_d(q|kv|kdv)|"
        r"_conv(?!ert)|convol|winograd|dgrad|wgrad|fprop|implicit|moe|"
        r"chunk\w*_(fwd|bwd)|chunk_(scan|state)|parallel_\w+_(fwd|bwd)|_(forward|backward)_chunk_out|(recompute_w_u|_wu)_fwd|"
        r"wy_repr|inverse_kernel|mamba3_siso_(fwd|bwd_kernel_dqkv)",
    ),
)
_KERNEL_CLASSES = tuple((work, re.compile(pattern)) for work, pattern in _NAMES_OF_KERNELS)
# In template arguments a product's words come first: they tell of its conversions and layouts as well.
_CLASSES_BY_ARGUMENTS = (*_KERNEL_CLASSES[:3], _KERNEL_CLASSES[4], _KERNEL_CLASSES[3], *_KERNEL_CLASSES[5:])
_ELEMENTWISE_LIBRARIES = re.compile(r"at::native|at_cuda_detail|\bcub::|thrust::|rocprim|hipcub|fbgemm_gpu::")
# Kernels that only call what their first template argument is.
_WRAPPERS = re.compile(r"(cutlass::\w*|cutlass\w*::|enable_\w+::)?(device_kernel|Kernel2?|kernel)")
_INDUCTOR = re.compile(r"triton_(poi|per|red|for)_")
# Kernels of PyTorch's own convolutions that move data.
_UNFOLDING = re.compile(r"(vol|im)2(col|im)|col2(vol|im)", re.IGNORECASE)
_ATTENTION = re.compile(r"attention|attn|flash|fmha|sdpa", flags=re.IGNORECASE)
# Inductor's kernels, named after all operators that a kernel fuses.
_FUSED_NAMES = re.compile(r"triton_[a-z]{3}_fused_")
_COMPILED = re.compile(r"Torch-Compiled Region|CompiledFunction|## Call CompiledFxGraph|graph_\d+_\w*fused")
_ENGINE = re.compile(
    r"autograd::engine::|\w*Backward\d*$|torch::autograd::|TorchDynamo|Pregraph bytecode|AOTDispatcher|profiler::|"
    r"ProfilerStep|headway::"  # Headway's operators are Python that runs others
)
_COMMUNICATION_OPERATORS = re.compile(r"(c10d|_c10d_functional\w*|record_param_comms|nccl|gloo|mpi|ucc|xccl)(::?.*)?$")


def work_of_kernel(name: str, operator: str | None) -> Work:
    """Class a kernel.

    Args:
        name: of the kernel.
        operator: innermost operator around its launch; None where the trace has no launch, or no operator around it.

    >>> work_of_kernel("ampere_fp16_s16816gemm_fp16_128x128", None), work_of_kernel("splitKreduce_kernel", "aten::mm")
    (<Work.MATMUL: 'matmul'>, <Work.MATMUL: 'matmul'>)
    >>> work_of_kernel("my_kernel", None)
    <Work.UNKNOWN: 'unknown'>
    """
    return _by_kernel(name) if operator is None else _by_both(name, operator)


def work_of_operator(name: str) -> Work:
    """Class an operator that the host runs itself, in a trace without a device.

    >>> work_of_operator("aten::addmm"), work_of_operator("aten::copy_"), work_of_operator("AddmmBackward0")
    (<Work.MATMUL: 'matmul'>, <Work.MEMORY: 'memory-bound'>, <Work.HOST: 'host'>)
    """
    if _COMMUNICATION_OPERATORS.match(name):
        return Work.COMMUNICATION
    work = _by_operator(name)
    if work is not None:
        return work
    if is_compiled(name):
        return Work.MEMORY  # fused loops are the region's own time, matrix products stand inside as operators
    return Work.HOST if _ENGINE.match(name) else Work.UNKNOWN


@cache
def is_attention(name: str) -> bool:
    """Tell whether an operator, or a kernel without one, is a fused one of attention.

    >>> is_attention("torch_attn::_varlen_attn"), is_attention("triton_tem_fused__varlen_attn_backward_mm_3")
    (True, False)
    """
    if _FUSED_NAMES.match(name):
        return "flex_attention" in name
    return _ATTENTION.search(name) is not None


@cache
def is_compiled(name: str) -> bool:
    """Tell whether an operator or an annotation is a compiled function of torch.compile, or its backward."""
    return _COMPILED.match(name) is not None


@cache
def _by_both(name: str, operator: str) -> Work:
    by_name = _by_kernel(name)
    if by_name is Work.COMMUNICATION or _INDUCTOR.match(name) or _UNFOLDING.search(_identifier(name)):
        return by_name
    return _by_operator(operator) or by_name


@cache
def _by_operator(name: str) -> Work | None:
    """Class an operator by its name; one of another library than PyTorch only where the name is that of a product."""
    namespace, _, operator = name.rpartition("::")
    if _is_product(operator):
        return Work.MATMUL
    is_of_torch = namespace in ("aten", "fbgemm", "prims", "torchvision", "fsdp") or name in ("detach", "detach_")
    return Work.MEMORY if is_of_torch else None


def _is_product(operator: str) -> bool:
    words = [word for word in operator.split("_") if word]
    if _PRODUCT_NAMES.fullmatch(operator):
        return True
    return any(map(_PRODUCTS.fullmatch, words)) and not any(map(_NO_PRODUCTS.fullmatch, words))


@cache
def _by_kernel(name: str) -> Work:
    """Class a kernel by its own name, or where that says nothing by its template arguments and its library."""
    for text, classes in ((_identifier(name), _KERNEL_CLASSES), (name, _CLASSES_BY_ARGUMENTS)):
        words = _as_words(text)
        for work, pattern in classes:
            if pattern.search(words):
                return work
        if _ELEMENTWISE_LIBRARIES.search(name):
            return Work.MEMORY
    return Work.UNKNOWN


def _as_words(name: str) -> str:
    """Write an identifier in lower case with an underscore before, between and behind its words."""
    separated = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|\W+", "_", f"_{name}_")
    return re.sub("_+", "_", separated).lower()


def _identifier(name: str) -> str:
    """The function's own name of a kernel's signature: no result, namespace, template arguments nor parameters.

    >>> _identifier("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float>(float*, int)")
    'cunn_SoftMaxForward'
    >>> _identifier("void cutlass::device_kernel<flash::FlashAttnFwdSm90<64> >(flash::Params)")
    'FlashAttnFwdSm90'
    >>> _identifier("_ZN5aiter24add_rmsnorm_quant_kernelIDF16bEEvPT0_")
    'add_rmsnorm_quant_kernel'
    """
    if name.startswith("_ZN"):
        return _mangled_identifier(name)
    signature = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    function, has_arguments, arguments = signature.partition("<")
    function = function.partition("(")[0]
    if has_arguments and _WRAPPERS.fullmatch(function):
        return _identifier(arguments)
    return function.rpartition("::")[2]


def _mangled_identifier(name: str) -> str:
    """The last part of a nested name as Itanium's C++ ABI mangles it, which writes a length before each part."""
    at, part = len("_ZN"), ""
    while match := re.compile(r"\d+").match(name, at):
        begin = match.end()
        at = begin + int(match[0])
        part = name[begin:at]
    return part


# Repeated parts, numbers and types that hold digits (`S5_`, `Li128E`, `DF16b`), which are no lengths; else a length.
_MANGLED = re.compile(r"S[0-9A-Z]*_|T\d*_|L[a-z]n?\d+E|DF\d+b?|(\d+)")


def readable_name(name: str) -> str:
    """Shorten a kernel's signature to the parts that distinguish it from other kernels.

    Left out are its result, namespaces and parameters, the lengths of lists, and numbers that begin its arguments.

    >>> readable_name("void at::native::elementwise_kernel<4, at::native::AddFunctor<float> >(int, char*)")
    'elementwise_kernel<AddFunctor<float>>'
    >>> readable_name("void multi_tensor_apply_kernel<TensorListMetadata<2>, at::Copy<float, 2> >(int)")
    'multi_tensor_apply_kernel<Copy<float,2>>'
    >>> readable_name("_ZN7cutlass13device_kernelINS_4gemm13GemmUniversalINS5_17GroupProblemShapeE")
    'device_kernel<GemmUniversal,GroupProblemShape>'
    """
    if name.startswith("_ZN"):
        function, *others = [part for part in _mangled_parts(name) if part != part.lower() or "_kernel" in part]
        return f"{function}<{','.join(dict.fromkeys(others))}>" if others else function
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    plain = re.sub(r"\w*TensorListMetadata<\d+>, |(?<![\w>)])(?:\w+::)+|(?<=>) (?=>)|(?<=,) ", "", plain)
    plain = re.sub(r"^(\w+<)(?:(?:-?\d+|(?:unsigned )?int|true|false),)+", r"\1", plain)
    depth = 0
    for at, letter in enumerate(plain):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0 and at:
            return plain[:at]
    return plain


def _mangled_parts(name: str) -> list[str]:
    """All names in one that Itanium's C++ ABI mangles, in order: each has its length before it."""
    parts: list[str] = []
    at = 0
    while match := _MANGLED.search(name, at):
        length = int(match[1] or 0)
        at = match.end() + length
        parts += [name[match.end() : at]] if length > 1 else []
    return parts
