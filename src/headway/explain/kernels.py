"""Kinds of kernels' work: by the operator that launched a kernel, and only where that says nothing by its own name.

An operator's name is an interface (`aten::addmm` is a matrix product in every release and on every device); a kernel's
name is an implementation, of which each library and device has thousands.
"""

import re
import tomllib
from collections.abc import Iterable
from enum import StrEnum
from functools import cache
from pathlib import Path


class Work(StrEnum):
    """Kind of work of a kernel or of an operator of the host."""

    MATMUL = "matmul"  # matrix products, convolutions and attention: what FLOPs are counted of
    MEMORY = "memory-bound"  # everything else that computes
    COMMUNICATION = "communication"
    COPY = "copy"
    HOST = "host"  # on the host, and no operator: Python, autograd's engine
    UNKNOWN = "unknown"


def _words(words: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(words))


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_PRODUCTS, _NO_PRODUCTS, _PRODUCT_NAMES = (
    _words(_TABLE["operators"][name]) for name in ("products", "no_products", "product_names")
)
_KERNEL_CLASSES = tuple((Work(row["work"]), _words(row["words"])) for row in _TABLE["kernels"])
# In template arguments a product's words come first: they tell of its conversions and layouts as well.
_CLASSES_BY_ARGUMENTS = (*_KERNEL_CLASSES[:4], _KERNEL_CLASSES[5], _KERNEL_CLASSES[4], *_KERNEL_CLASSES[6:])
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
