"""Liger Kernel's norms, gated MLPs and rotary embeddings, for modules by their computation and not by name.

Each module of a kind (RMSNorm, gated MLP) is tried on a few random numbers on the CPU, with small random weights in
place of its own; where its result is what the kernel computes, this instance's forward becomes the kernel. So any
architecture is served whose modules compute the standard thing, and one that does not keeps its own. Rotary embeddings
are functions of transformers' modelling files: there the function is replaced, for CUDA tensors, if it is the standard
one. The fused linear cross-entropy is in `losses`.

Liger's own per-architecture patches were looked at (0.8.5): they replace the classes and functions of a whole process,
leave the gated MLPs of some models as they are (Qwen3-VL's), and know a list of architectures. Here rotary functions
alone are replaced for the whole process; each call of `use_kernels` first restores transformers' own, so that the model
that was built last decides.

With any kernels, products take the form and the widths that hardware is fast at. A vision tower whose processor cuts
the patches begins with a convolution over inputs just as large as its kernel, so it has one position and is a linear
layer with its weight written in more dimensions. Convolution libraries have no good algorithm for that: on two cores of
a CPU it took 7 % of a step for 2 % of its FLOPs, on an H100 in bfloat16 seconds a call were reported
(sgl-project/sglang-omni#539, huggingface/transformers#45750). And cuBLAS needs rows of 16 bytes or a multiple of it for
its fast kernels, which in bfloat16 is a width that 8 divides; Qwen2.5-VL's tower has 3,420. Zero rows of the gate and
of what it gates give zeros, silu(0) * 0, which zero columns of the closing projection take: results and gradients stay
the same, and so do the parameters, as the zeros are put on in each forward.
"""

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from headway.devices.cpu_products import use_fast_products
from headway.errors import ConfigError
from headway.models.products import product_dtype

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Of a gated MLP: gate, what it gates, and back."""
_ROW_BYTES = 16
_ROTARY = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_vision")
_replaced: dict[str, Callable[..., Any]] = {}  # transformers' own rotary functions while Liger's stand in, by full name


@dataclass(frozen=True)
class Norm:
    """An RMSNorm as Liger describes it.

    Attributes:
        eps: added to the mean square.
        offset: added to the weight.
        casting: "llama" rounds before the weight is applied, "gemma" after.
    """

    eps: float
    offset: float
    casting: str

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Compute it in plain operations."""
        normal = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        if self.casting == "llama":
            return (self.offset + weight) * normal.to(x.dtype)
        return ((self.offset + weight.float()) * normal).to(x.dtype)


def check_liger(device: torch.device) -> None:
    """Make sure that Liger's kernels can run.

    Raises:
        ConfigError: the device is not CUDA, or the package is not installed.
    """
    if device.type != "cuda":
        raise ConfigError(
            f"speed.kernels is 'liger', which runs on CUDA only, but the run is on {device}. Set "
            "speed.kernels=torch, which computes the loss in chunks too."
        )
    if find_spec("liger_kernel") is None:
        raise ConfigError(
            "speed.kernels is 'liger', but the package is not installed. Install it with `pip install liger-kernel`, "
            "or set speed.kernels=torch."
        )


def use_kernels(
    model: PreTrainedModel, name: str, device: torch.device, compiled: Iterable[nn.Module] = ()
) -> tuple[str, ...]:
    """Put the kernels that `speed.kernels` names into a model; with any, patch embeddings become matrix products.

    Compiled blocks keep their own: the compiler fuses norms, MLPs and rotary embeddings with what stands around them,
    and torch 2.11 does not compile Liger's norms in every model (in Qwen3-VL on an H200 it failed).

    Args:
        model: changed in place; its parameters keep their names.
        name: "torch", which keeps norms, MLPs and rotary embeddings as they are, or "liger".
        device: where it will run.
        compiled: its blocks that will be compiled.

    Returns:
        What of Liger's was put in, a line each.

    Raises:
        ConfigError: the kernels cannot run here, or the model has nothing for them.
    """
    put_back_functions()
    project_patches(model)
    if device.type == "cpu":
        use_fast_products(model, but=model.get_output_embeddings())  # type: ignore[no-untyped-call]  # untyped there
    if name == "torch":
        return ()
    check_liger(device)
    within = {module for block in compiled for module in block.modules()}
    norms = {module: norm for module, norm in rms_norms(model).items() if module not in within}
    mlps = tuple(module for module in gated_mlps(model) if module not in within)
    rotaries = {} if within else rotary_functions(model)  # the blocks call them
    if not (norms or mlps or rotaries or within):
        raise ConfigError(
            f"speed.kernels is 'liger', but {type(model).__name__} has no RMSNorm, no gated MLP with SiLU and no "
            "rotary embedding that its kernels compute. Set speed.kernels=torch."
        )
    _put_in(norms, mlps, rotaries)
    where = " outside of compiled blocks, which fuse their own" if within else ""
    return (f"Liger kernels: {len(norms)} RMSNorms, {len(mlps)} gated MLPs, {len(rotaries)} rotary functions{where}",)


def put_back_functions() -> None:
    """Give transformers its own rotary functions again, for all models of the process."""
    while _replaced:
        full_name, function = _replaced.popitem()
        file, _, name = full_name.rpartition(".")
        setattr(sys.modules[file], name, function)


def rms_norms(model: nn.Module) -> dict[nn.Module, Norm]:
    """Find the modules that compute an RMSNorm, by trying them."""
    return {module: norm for module in model.modules() if (norm := _as_norm(module)) is not None}


def gated_mlps(model: nn.Module) -> tuple[nn.Module, ...]:
    """Find the modules that compute `down_proj(silu(gate_proj(x)) * up_proj(x))`."""
    return tuple(module for module in model.modules() if _is_gated_mlp(module))


def rotary_functions(model: nn.Module) -> dict[str, tuple[str, Callable[..., Any]]]:
    """Find the standard rotary functions of the files that the model's modules come from.

    Returns:
        By full name: the name within its module, and the function.
    """
    functions = {}
    for file in {type(module).__module__ for module in model.modules()}:
        for name in _ROTARY:
            function = getattr(sys.modules[file], name, None)
            if function is not None and _is_standard_rotary(function, of_vision=name.endswith("vision")):
                functions[f"{file}.{name}"] = (name, function)
    return functions


def _as_norm(module: nn.Module) -> Norm | None:
    weight = module._parameters.get("weight")
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    is_alone = set(module._parameters) == {"weight"} and not module._modules and not module._buffers
    if not is_alone or weight is None or weight.ndim != 1 or not isinstance(eps, float) or not _takes_one(module):
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, len(weight), generator=generator)
    weight_H = torch.randn(len(weight), generator=generator)
    tried = copy.copy(module)

    def computed(x: torch.Tensor, weight_H: torch.Tensor) -> torch.Tensor:
        tried._parameters = {"weight": nn.Parameter(weight_H, requires_grad=False)}
        result: torch.Tensor = tried(x)
        return result

    exact, rounded = computed(x, weight_H), computed(x.bfloat16(), weight_H.bfloat16())
    for norm in (Norm(eps, 0.0, "llama"), Norm(eps, 1.0, "gemma"), Norm(eps, 0.0, "gemma")):
        is_same = torch.allclose(exact, norm(x, weight_H), rtol=1e-5, atol=1e-6)
        if is_same and torch.equal(rounded, norm(x.bfloat16(), weight_H.bfloat16())):
            return norm
    return None


def _is_gated_mlp(module: nn.Module) -> bool:
    if not set(PROJECTIONS) <= set(module._modules) or module._parameters or not _takes_one(module):
        return False
    generator = torch.Generator().manual_seed(0)
    small = {
        name: nn.Linear(*sizes, bias=False) for name, sizes in zip(PROJECTIONS, [(4, 6), (4, 6), (6, 4)], strict=True)
    }
    for layer in small.values():
        nn.init.normal_(layer.weight, generator=generator)
    tried = copy.copy(module)
    tried._modules = {**module._modules, **small}
    x = torch.randn(3, 4, generator=generator)
    with torch.no_grad():
        wanted = small["down_proj"](F.silu(small["gate_proj"](x)) * small["up_proj"](x))
        return torch.allclose(tried(x), wanted, rtol=1e-5, atol=1e-6)


def _takes_one(module: nn.Module) -> bool:
    return len(inspect.signature(module.forward).parameters) == 1


def _is_standard_rotary(function: Callable[..., Any], *, of_vision: bool) -> bool:
    """Try whether a function rotates the halves of each head by angles that are the same for all heads."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 5, 8, generator=generator) for heads in (4, 2))  # batch, heads, slots, channels
    angles = torch.randn(1, 5, 4, generator=generator).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]

    if len(inspect.signature(function).parameters) < 4:
        return False
    try:
        if of_vision:  # slots, heads, channels
            outputs = function(q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0])
            outputs = tuple(x.transpose(0, 1)[None] for x in outputs)
        else:
            outputs = function(q, k, cos, sin)
    except RuntimeError:  # the model's angles have another shape, as GPT-OSS's have
        return False
    return all(torch.allclose(x, rotated(y), rtol=1e-5, atol=1e-6) for x, y in zip(outputs, (q, k), strict=True))


def _put_in(
    norms: dict[nn.Module, Norm],
    mlps: tuple[nn.Module, ...],
    rotaries: dict[str, tuple[str, Callable[..., Any]]],
) -> None:
    from liger_kernel.ops import LigerRMSNormFunction, LigerSiLUMulFunction
    from liger_kernel.transformers.rope import liger_rotary_pos_emb, liger_rotary_pos_emb_vision

    for module, norm in norms.items():

        def normalise(
            x: torch.Tensor, module: nn.Module = module, norm: Norm = norm, plain: Any = module.forward
        ) -> Any:
            if not x.is_cuda:  # whoever traces the model on shapes
                return plain(x)
            # The result is a new tensor, because the operation behind a norm may still need its own gradient.
            return LigerRMSNormFunction.apply(x, module.weight, norm.eps, norm.offset, norm.casting, False, None)

        module.forward = normalise
    for module in mlps:

        def gate(x: torch.Tensor, module: Any = module, plain: Any = module.forward) -> Any:
            if not x.is_cuda:
                return plain(x)
            return module.down_proj(LigerSiLUMulFunction.apply(module.gate_proj(x), module.up_proj(x), 1.0, 1.0))

        module.forward = gate
    for full_name, (name, function) in rotaries.items():
        kernel = liger_rotary_pos_emb_vision if name.endswith("vision") else liger_rotary_pos_emb
        setattr(sys.modules[full_name.removesuffix(f".{name}")], name, _on_cuda(function, kernel))
        _replaced[full_name] = function


def _on_cuda(function: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def rotate(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if q.is_cuda and not args and not kwargs:
            return kernel(q, k, cos, sin)
        return function(q, k, cos, sin, *args, **kwargs)

    return rotate


class _Patches(nn.Module):
    """A convolution that multiplies where its input is one position of the kernel."""

    def forward(self, input: torch.Tensor) -> Any:  # noqa: A002  the name that torch gives it
        conv: Any = self
        if input.shape[2:] != conv.kernel_size:
            return super().forward(input)
        rows_PE = F.linear(input.flatten(1), conv.weight.flatten(1), conv.bias)
        return rows_PE.view(*rows_PE.shape, *(1 for _ in conv.kernel_size))


class _PatchConv2d(_Patches, nn.Conv2d):
    pass


class _PatchConv3d(_Patches, nn.Conv3d):
    pass


_MULTIPLYING: dict[type[nn.Module], Any] = {nn.Conv2d: _PatchConv2d, nn.Conv3d: _PatchConv3d}


def project_patches(model: nn.Module) -> list[str]:
    """Let convolutions run as matrix products where their input is a single patch; weights keep their shapes.

    Returns:
        Names of the modules that may do so.
    """
    names = []
    for name, module in model.named_modules():
        if type(module) not in _MULTIPLYING:
            continue
        assert isinstance(module, (nn.Conv2d, nn.Conv3d))
        if module.groups == 1 and not any(module.padding) and set(module.dilation) == {1}:
            module.__class__ = _MULTIPLYING[type(module)]
            names.append(name)
    return names


def align_widths(mlps: Iterable[nn.Module], dtype: torch.dtype) -> tuple[str, ...]:
    """Have gated MLPs compute in the next width whose rows are multiples of 16 bytes.

    MLPs whose projections are anything but plain linear layers (adapters, float8) are left as they are.

    Args:
        mlps: as `gated_mlps` finds them; changed in place. Their parameters stay as they are, and each layer has the
            features in and out of its product as `multiplied`.
        dtype: of the products.

    Returns:
        What was changed, a line for each width.
    """
    multiple = _ROW_BYTES // dtype.itemsize
    changed: dict[tuple[int, int], int] = {}
    for module in mlps:
        gate, up, down = (getattr(module, name) for name in PROJECTIONS)
        more = -down.in_features % multiple
        if more and all(type(layer) is nn.Linear for layer in (gate, up, down)):
            widths = (down.in_features, down.in_features + more)
            for layer, forward in ((gate, _more_outputs), (up, _more_outputs), (down, _more_inputs)):
                layer.forward = functools.partial(forward, layer, more)
            gate.multiplied = up.multiplied = (gate.in_features, widths[1])
            down.multiplied = (widths[1], down.out_features)
            changed[widths] = changed.get(widths, 0) + 1
    return tuple(
        f"{count} gated MLPs compute {wider:,} channels for {width:,} and fill the rest with zeros, because rows "
        "must be multiples of 16 bytes"
        for (width, wider), count in changed.items()
    )


def _more_outputs(layer: nn.Linear, more: int, x: torch.Tensor) -> torch.Tensor:
    dtype = product_dtype(x, layer.weight)
    bias: nn.Parameter | None = layer.bias  # torch's annotation leaves None out
    return F.linear(x, F.pad(layer.weight.to(dtype), (0, 0, 0, more)), None if bias is None else F.pad(bias, (0, more)))


def _more_inputs(layer: nn.Linear, more: int, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, F.pad(layer.weight.to(product_dtype(x, layer.weight)), (0, more)), layer.bias)
