"""Weights that do not learn, held in the dtype of their products, or in 4 or 8 bits (QLoRA): `model.base`.

Autocast casts a weight for its product and keeps master weights of float32 for what learns. Of a weight that only
products read, and that does not learn, nothing needs more than the copy: it is held in that dtype, the same numbers at
half the bytes. What else reads a weight (an embedding that looks rows up, a norm) keeps its dtype on one process. FSDP2
gathers all weights in the dtype of the products, so among several processes all that do not learn are held in it.

In 4 or 8 bits a weight becomes one tensor of bytes under its own name: codes, their scales, and the scales' factors.
Products read the weight that the bytes stand for, in their own dtype; it is made for the product and let go of, and
made again in backward, which needs it once more. So outputs and gradients are those of a model whose weights are the
dequantised ones, bit for bit, and between products only the bytes are held.

Why not a library's tensor: torchao's NF4 (0.18, a prototype whose place moves) takes matrices alone, no stack of
experts, shards only rows that divide evenly, and is closed to torch.compile; bitsandbytes' cannot be sharded by FSDP2,
which gathers its bytes without what describes them. Plain bytes need nothing of FSDP2, checkpoints or the compiler.
The codes are bitsandbytes' to the bit.

Tensor letters: O rows of a weight, I columns, E experts, B blocks of 64 values, F factors, S rows sorted by expert.

Source: Dettmers et al. 2023, QLoRA (arXiv:2305.14314), section 3 and appendix E. The scales' codes are whole numbers,
127 for the largest of 256 scales less the mean, where the paper takes floats of 8 bits.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from headway.count import CostModel
from headway.count.quantised import AT_ONCE, BASES, BLOCK, SCALES, Base, matrix_bytes, quantised_parameters
from headway.count.units import product_weights
from headway.devices.cpu_products import linear, product
from headway.errors import ConfigError
from headway.models.blocks import experts_of
from headway.models.products import grouped_linear, product_dtype

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Values of the 16 codes: quantiles of a normal distribution, scaled to -1 and 1. Source: QLoRA, appendix E."""

_LARGEST = 127  # code of 8 bits


@dataclass(frozen=True)
class ByteLayout:
    """Layout of the bytes of a weight.

    Attributes:
        base: coding of the bytes.
        shape: of the weight: (O, I), or (E, ...) of experts, whose bytes are a row for each.
    """

    base: Base
    shape: tuple[int, ...]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the tensor of bytes."""
        *stack, rows, columns = self.shape
        return (*stack, matrix_bytes(self.base, rows, columns))

    def quantise(self, weight: torch.Tensor) -> torch.Tensor:
        """Make the bytes of a weight; shapes as `shape` and `stored_shape` say."""
        matrices = weight.detach().reshape(-1, *self.shape[-2:])
        code = _to_int8 if self.base == "int8" else _to_nf4
        return torch.stack([code(matrix.float()) for matrix in matrices]).view(self.stored_shape)

    def dequantise(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Make the weight that bytes stand for; worked out in float32 and rounded once."""
        num_bytes, values = stored.shape[-1], math.prod(self.shape[-2:])
        rows = stored.reshape(-1, num_bytes)
        flat = _from_int8(rows, self.shape[-2], dtype) if self.base == "int8" else _from_nf4(rows, values, dtype)
        return flat.view(-1, *self.shape[1:]) if len(self.shape) > 2 else flat.view(self.shape)


def layouts_by_size(sizes: Mapping[str, tuple[torch.Size, torch.Size]]) -> dict[str, ByteLayout]:
    """Find how tensors of bytes hold weights, all in one way, by the shapes of both; nothing if no way fits."""
    for base in BASES:
        layouts = {name: ByteLayout(cast(Base, base), tuple(shape)) for name, (_, shape) in sizes.items()}
        if all(layouts[name].stored_shape == tuple(stored) for name, (stored, _) in sizes.items()):
            return layouts
    return {}


def layouts_of(module: nn.Module) -> dict[str, ByteLayout]:
    """Layouts of a module's own weights that are held in bytes, by name."""
    layouts: dict[str, ByteLayout] = vars(module).get("quantised", {})
    return layouts


def layouts_by_name(model: nn.Module) -> dict[str, ByteLayout]:
    """The same of a whole model, by the full names of its parameters."""
    return {
        f"{path}.{name}": layout
        for path, module in model.named_modules()
        for name, layout in layouts_of(module).items()
    }


class QuantisedLinear(nn.Linear):
    """A linear layer whose frozen weight is held in bytes."""

    quantised: dict[str, ByteLayout]

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  the name that torch gives it
        """Multiply as a plain layer does whose weight is the dequantised one."""
        dtype, layout = product_dtype(input, input), self.quantised["weight"]
        bias: nn.Parameter | None = self.bias  # torch's annotation leaves None out
        bias_O = None if bias is None else bias.to(dtype)
        multiply: Any = _Product.apply  # torch leaves it untyped
        x_TI = input.to(dtype).flatten(0, -2)
        out_TO = multiply("linear", x_TI, self.weight, bias_O, layout.base, layout.shape, False)
        return cast(torch.Tensor, out_TO.view(*input.shape[:-1], self.out_features))


def multiply_rows(
    rows_SD: torch.Tensor, stored: torch.Tensor, ends_E: torch.Tensor, layout: ByteLayout, *, is_transposed: bool
) -> torch.Tensor:
    """Multiply every row by its expert's matrix, as `grouped_linear` does with the dequantised ones.

    `stored` has the bytes of the matrices of this process's experts, a row for each.
    """
    multiply: Any = _Product.apply  # torch leaves it untyped
    result: torch.Tensor = multiply("grouped", rows_SD, stored, ends_E, layout.base, layout.shape, is_transposed)
    return result


def hold(model: nn.Module, layouts: dict[str, ByteLayout]) -> None:
    """Give parameters without values memory for bytes, by name."""
    for name, layout in layouts.items():
        path, _, own = name.rpartition(".")
        module: Any = model.get_submodule(path)
        stored = torch.empty(layout.stored_shape, dtype=torch.uint8, device="meta")
        module.register_parameter(own, nn.Parameter(stored, requires_grad=False))
        module.quantised = layouts_of(module) | {own: layout}
        if type(module) is nn.Linear:
            module.__class__ = QuantisedLinear


def hold_frozen(
    model: nn.Module, cost_model: CostModel, learning: torch.dtype, compute: torch.dtype, *, gathers: bool
) -> None:
    """Give weights that do not learn the dtype of the products, in place.

    Args:
        model: on the meta device, with adapters in place.
        cost_model: traced from it.
        learning: dtype of weights that learn.
        compute: of the products.
        gathers: whether FSDP2 gathers the weights.
    """
    names = product_weights(cost_model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and parameter.dtype == learning and (gathers or name in names):
            parameter.data = parameter.data.to(compute)


def quantise_base(model: nn.Module, cost_model: CostModel, base: Base) -> tuple[str, ...]:
    """Replace the weights of frozen linear layers and experts by bytes, in place and under the same names.

    Args:
        model: on the meta device, with adapters in place.
        cost_model: traced from it; names the weights by what reads them.
        base: how they are held.

    Returns:
        A note for the start of the run.

    Raises:
        ConfigError: there is nothing to hold so.
    """
    names = quantised_parameters(cost_model)
    layouts = {name: ByteLayout(base, tuple(parameter.shape)) for name, parameter in _holdable(model) if name in names}
    if not layouts:
        raise ConfigError(
            f"model.base {base!r} holds frozen linear layers of repeated blocks, but {type(model).__name__} has "
            "none. Take model.base out."
        )
    hold(model, layouts)
    values = sum(math.prod(layout.shape) for layout in layouts.values())
    num_bytes = sum(math.prod(layout.stored_shape) for layout in layouts.values())
    return (
        f"{len(layouts)} frozen weights of {values / 1e6:.2f} M parameters are held as {base}, in "
        f"{8 * num_bytes / values:.2f} bits each",
    )


def _holdable(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Weights of plain linear layers, and what experts multiply by; those that two modules share are left out."""
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    experts = experts_of(model)
    holders = {path: module for path, module in model.named_modules() if type(module) is nn.Linear or path in experts}
    return [
        (f"{path}.{name}", parameter)
        for path, module in holders.items()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim > 1 and uses[id(parameter)] == 1
    ]


def _to_nf4(matrix: torch.Tensor) -> torch.Tensor:
    """Code a matrix: the mean of its scales and the factors of their codes, the scales' codes, two codes to a byte."""
    values = matrix.flatten()
    blocks_B64 = F.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales_B = blocks_B64.abs().amax(1)
    # the nearest of the 16 values, by what lies half way between them
    table = torch.tensor(NF4, device=matrix.device)
    codes = torch.bucketize(blocks_B64 / _divisor(scales_B)[:, None], (table[1:] + table[:-1]) / 2, out_int32=True)
    # scales once more: their distances from the mean, in whole numbers
    mean = scales_B.mean()
    distances = F.pad(scales_B - mean, (0, -len(scales_B) % SCALES)).view(-1, SCALES)
    factors_F = distances.abs().amax(1) / _LARGEST
    scale_codes = (distances / _divisor(factors_F)[:, None]).round().to(torch.int8).flatten()[: len(scales_B)]
    head = torch.cat([mean[None], factors_F]).view(torch.uint8)
    pairs = codes.to(torch.uint8).view(-1, 2)
    return torch.cat([head, scale_codes.view(torch.uint8), pairs[:, 0] << 4 | pairs[:, 1]])


def _from_nf4(stored: torch.Tensor, values: int, dtype: torch.dtype) -> torch.Tensor:
    """Decode matrices of so many values each, a row of bytes for each; shape (E, values)."""
    stack, blocks = len(stored), -(-values // BLOCK)
    factors = -(-blocks // SCALES)
    # a copy, because floats may not begin where the bytes lie
    head = stored[:, : 4 * (1 + factors)].clone(memory_format=torch.contiguous_format).view(torch.float32)
    scale_codes = stored[:, 4 * (1 + factors) :][:, :blocks].contiguous().view(torch.int8)
    factors_B = head[:, 1:].repeat_interleave(SCALES, 1)[:, :blocks]
    scales = (scale_codes * factors_B).add_(head[:, :1]).flatten()
    codes = stored[:, 4 * (1 + factors) + blocks :].reshape(stack * blocks, BLOCK // 2)
    # a number of blocks at a time that keeps the work space small
    table, step = _pairs(codes.device), max(1, AT_ONCE // BLOCK)
    out = torch.empty(stack * blocks, BLOCK, dtype=dtype, device=stored.device)
    for start in range(0, len(codes), step):
        part = slice(start, start + step)
        decoded = F.embedding(codes[part].int(), table).flatten(1)
        out[part] = decoded.mul_(scales[part, None])
    return out.view(stack, -1)[:, :values].reshape(stack, values)


@functools.cache
def _pairs(device: torch.device) -> torch.Tensor:
    table = torch.tensor(NF4, device=device)
    return torch.stack([table.repeat_interleave(16), table.repeat(16)], 1)


def _to_int8(matrix: torch.Tensor) -> torch.Tensor:
    """Code a matrix: a scale for each row, then a code for each value."""
    scales_O = matrix.abs().amax(1) / _LARGEST
    codes = (matrix / _divisor(scales_O)[:, None]).round().to(torch.int8)
    return torch.cat([scales_O.view(torch.uint8), codes.view(torch.uint8).flatten()])


def _from_int8(stored: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Decode matrices of so many rows each; shape (E, values)."""
    scales = stored[:, : 4 * rows].clone(memory_format=torch.contiguous_format).view(torch.float32).flatten()
    codes = stored[:, 4 * rows :].view(torch.int8).reshape(len(scales), -1)
    out = torch.empty(codes.shape, dtype=dtype, device=stored.device)
    step = max(1, AT_ONCE // codes.shape[1])
    for start in range(0, len(codes), step):
        part = slice(start, start + step)
        out[part] = codes[part].float().mul_(scales[part, None])
    return out.view(len(stored), -1)


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    """Scales to divide by; that of values that are all zero is 1."""
    return torch.where(scales == 0, 1.0, scales)


class _Product(torch.autograd.Function):
    """Rows times a weight, or their experts' matrices, held in bytes; only the bytes are kept for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        rows: torch.Tensor,
        stored: torch.Tensor,
        other: torch.Tensor | None,
        base: Base,
        shape: Any,
        turned: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(stored, other if name == "grouped" else None)  # a bias plays no part in backward
        ctx.settings = name, base, shape, turned
        return _run(name, rows, stored, other, base, shape, turned)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (stored, ends_E), (name, base, shape, turned) = ctx.saved_tensors, ctx.settings
        grad_rows = _run(name, grad, stored, ends_E, base, shape, not turned) if ctx.needs_input_grad[1] else None
        return None, grad_rows, None, None, None, None, None


def _run(name: str, *arguments: Any) -> torch.Tensor:
    """Multiply; for the compiler in one operation, which it cannot take apart to keep dequantised weights."""
    run: Any = getattr(torch.ops.headway, f"quantised_{name}") if torch.compiler.is_compiling() else _PRODUCTS[name]
    result: torch.Tensor = run(*arguments)
    return result


def _linear(
    rows: torch.Tensor, stored: torch.Tensor, bias_O: torch.Tensor | None, base: Base, shape: Any, turned: bool
) -> torch.Tensor:
    weight_OI = ByteLayout(base, tuple(shape)).dequantise(stored, rows.dtype)
    return product(rows, weight_OI) if turned else linear(rows, weight_OI, bias_O)


def _grouped(
    rows: torch.Tensor, stored: torch.Tensor, ends_E: torch.Tensor, base: Base, shape: Any, turned: bool
) -> torch.Tensor:
    weight = ByteLayout(base, tuple(shape)).dequantise(stored, rows.dtype)
    return grouped_linear(rows.contiguous(), weight, ends_E, is_transposed=turned)


def _shapes(
    rows: torch.Tensor, _stored: torch.Tensor, _other: Any, _base: str, shape: Any, turned: bool
) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], shape[-1 if turned else -2])


_PRODUCTS: dict[str, Callable[..., torch.Tensor]] = {"linear": _linear, "grouped": _grouped}
for _name, _function in _PRODUCTS.items():
    torch.library.define(
        f"headway::quantised_{_name}",
        "(Tensor rows, Tensor stored, Tensor? other, str base, int[] shape, bool turned) -> Tensor",
    )
    torch.library.impl(f"headway::quantised_{_name}", ("CPU", "CUDA"), _function)
    torch.library.register_fake(f"headway::quantised_{_name}", _shapes)
