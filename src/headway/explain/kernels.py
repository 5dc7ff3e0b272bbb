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
    r"trilinear|q?conv(olution|[123]d)?|attention|attn|rnn|lstm|gru"
)
# Words of operators that prepare, resize or finish, and compute no product: `conv2d_prepack`, `upsample_bilinear2d`.
# `_thnn_fused_lstm_cell` is given what the products of its gates came to.
_NO_PRODUCTS = re.compile(
    r"prepack|unpack|pack|reorder|convert|flatten|quantize|upsample|thnn|available|search|combination|vander|get|"
    r"padding|stride|dilation|groups"
)
_PRODUCT_NAMES = re.compile(r"inner|_?thnn_conv.*")  # products by their names as a whole
_MATMUL_KERNELS = re.compile(
    r"gemm|gemv|scudnn|xdlops|cijk_|cutlass|xmma|nvjet|cublas|(?<![a-z])conv|wgrad|dgrad|fprop|implicit|winograd|fmha|flash|"
    r"attn|attention|triton_tem|_mm_|mfma|bmm_kernel",
    flags=re.IGNORECASE,
)
_COMMUNICATION_KERNELS = re.compile(
    r"nccl|rccl|mscclpp|nvshmem|rocshmem|deep_?ep|cross_device_reduce|symm_mem|multimem_|one_shot_all_?reduce|"
    r"two_shot_all_?reduce|oneccl",
    flags=re.IGNORECASE,
)
_MEMORY_KERNELS = re.compile(
    r"at::native|at_cuda_detail|cub::|thrust|rocprim|hipcub|triton_(poi|red|per|for|mm_?plus)|multi_tensor_apply|elementwise|"
    r"reduce|norm|transpose|softmax|embedding|dropout|copy|fill|cast|scatter|gather|rope|swiglu|gelu|silu|bn_|pooling|"
    r"subtensorop|permute|adam|sgd",
    flags=re.IGNORECASE,
)
_ATTENTION = re.compile(r"attention|attn|flash|fmha", flags=re.IGNORECASE)
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
        return Work.MEMORY  # its matrix products stand inside as operators, its fused loops are its own time
    return Work.HOST if _ENGINE.match(name) else Work.UNKNOWN


@cache
def is_attention(name: str) -> bool:
    """Tell whether an operator, or a kernel without one, is a fused one of attention."""
    return _ATTENTION.search(name) is not None


@cache
def is_compiled(name: str) -> bool:
    """Tell whether an operator or an annotation is what torch.compile made of a function, or its backward."""
    return _COMPILED.match(name) is not None


@cache
def _by_both(name: str, operator: str) -> Work:
    if _COMMUNICATION_KERNELS.search(name):
        return Work.COMMUNICATION
    return _by_operator(operator) or _by_kernel(name)


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
    if _COMMUNICATION_KERNELS.search(name):
        return Work.COMMUNICATION
    if _MATMUL_KERNELS.search(name.partition("(")[0]) and "at::native" not in name:
        return Work.MATMUL
    return Work.MEMORY if _MEMORY_KERNELS.search(name) else Work.UNKNOWN
