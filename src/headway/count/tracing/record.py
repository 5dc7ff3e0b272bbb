"""Record what a model dispatches: matrix products, convolutions, expert products and attention, forward and backward.

Forward operations are attributed to the module that runs them. A backward operation is attributed to the forward
operation whose autograd node it runs in, by the node's sequence number; what backward really dispatched must equal
what the operands' pasts predict, or the trace fails.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from headway.count import masks
from headway.count.tracing.phantom import Phantom, Recording, aten
from headway.count.tracing.scores import MASKING, covers
from headway.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


@dataclass(frozen=True)
class Operand:
    """What a product's input depends on: the batch (`fed`), and parameters (`sources`, bit i for parameter i)."""

    fed: bool
    sources: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Operand:
        """Read an operand's past; a real tensor has none."""
        if not isinstance(tensor, Phantom):
            return cls(True, 0)
        return cls(tensor.fed, tensor.sources if tensor.requires_grad else 0)


@dataclass
class Operation:
    """One product that forward ran.

    Attributes:
        module: path of the innermost module running.
        kind: `matmul`, `convolution`, `experts` or `attention`.
        units: how much work of the repeated kind: rows of a matrix product, output positions of a convolution, pairs.
        unit_flops: FLOPs per unit.
        products: the backward's products as (phase, FLOPs per unit, sources of the gradient's operand).
        driver: known driver, where the seam says it; else it is found by comparing workloads.
        weight: shape of the weight, () where there is none.
        backward_flops: FLOPs that backward really dispatched.
        saves_after: whether a tensor was saved for backward after it, inside its block.
        mask: of attention written by hand: the scores that count, broadcast over [..., queries, keys].
        executed_flops: FLOPs that forward dispatched, where these are more than count.
    """

    module: str
    kind: str
    units: int
    unit_flops: int
    products: tuple[tuple[str, int, int], ...]
    block: str
    driver: str = ""
    weight: tuple[int, ...] = ()
    from_input: bool = False
    backward_flops: int = 0
    saves_after: bool = False
    mask: torch.Tensor | None = None
    executed_flops: int = 0

    @property
    def forward_flops(self) -> int:
        """FLOPs of this call's forward."""
        return self.units * self.unit_flops

    @property
    def expected_backward_flops(self) -> int:
        """FLOPs that backward should dispatch, from the operands' pasts."""
        needed = sum(flops for _, flops, sources in self.products if sources)
        return (self.executed_flops or self.forward_flops) * needed // self.unit_flops

    def count_pairs(self, pairs: int, scores: int) -> None:
        """Count only the pairs that the mask allows, of the scores that each head really computes."""
        self.kind, self.executed_flops = "attention", self.forward_flops
        per_pair = self.forward_flops // scores
        self.products = tuple((phase, per_pair, sources) for phase, _, sources in self.products)
        self.units, self.unit_flops = pairs, per_pair


# operations whose kernels multiply matrices in a way that this ledger does not read; a model that dispatches one is
# refused
OPAQUE = {
    "_cdist_forward",
    "_native_multi_head_attention",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_grouped_mm",
    "_scaled_mm",
    "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell",
    "_transformer_encoder_layer_fwd",
    "_int_mm",
    "addbmm",
    "addmv",
    "addr",
    "dot",
    "gru",
    "lstm",
    "mkldnn_rnn_layer",
    "mv",
    "rnn_relu",
    "rnn_tanh",
    "vdot",
}


@dataclass
class Recorder:
    """Collects the operations of one forward and backward of `model`.

    Attributes:
        operations: in forward order.
        block_of: path of a module to the path of the checkpointable block that holds it.
    """

    model: nn.Module
    block_of: Callable[[str], str]
    operations: list[Operation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._path_of: dict[int, str] = {id(module): path for path, module in self.model.named_modules()}
        self._stack: list[str] = []
        self._by_node: dict[int, Operation] = {}
        self._mask_pairs: dict[int, tuple[torch.Tensor, int]] = {}

    @property
    def module(self) -> str:
        """Path of the innermost module that is running forward."""
        return self._stack[-1] if self._stack else ""

    def allowed(self, mask: torch.Tensor, batch: int, queries: int, keys: int) -> int:
        """Count the pairs that a boolean mask [(batch, heads,) queries, keys] allows one head, over the batch.

        Layers share a mask, so each is counted once.
        """
        if id(mask) not in self._mask_pairs:
            four = mask[(None,) * (4 - mask.dim())]
            if four.shape[1] > 1 and not bool((four == four[:, :1]).all()):
                raise TraceError(
                    f"module {self.module} masks its attention heads differently; pairs are counted for all."
                )
            pairs = int(four.expand(batch, -1, queries, keys)[:, 0].sum())
            self._mask_pairs[id(mask)] = (mask, pairs)  # holding the mask keeps its id its own
        return self._mask_pairs[id(mask)][1]

    def path_of(self, module: nn.Module) -> str:
        """Return a module's path in the model; the running module's for a stranger."""
        return self._path_of.get(id(module), self.module)

    def __enter__(self) -> Recorder:
        def enter(module: nn.Module, _args: Any) -> None:
            self._stack.append(self._path_of.get(id(module), self.module))

        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            self._stack.pop()

        self._hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
        self._saved = torch.autograd.graph.saved_tensors_hooks(self._on_save, lambda tensor: tensor)
        self._dispatch = Recording(self._on_dispatch)
        self._saved.__enter__()
        self._dispatch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._dispatch.__exit__()
        self._saved.__exit__(kind, value, traceback)
        for hook in self._hooks:
            hook.remove()

    def _on_save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Mark the block's operations so far as needed again when the block is recomputed."""
        block = self.block_of(self.module)
        if block:
            for operation in reversed(self.operations):
                if operation.block != block or operation.saves_after:
                    break
                operation.saves_after = True
        return tensor

    def add(self, operation: Operation) -> Operation:
        """Append an operation of the forward pass."""
        self.operations.append(operation)
        return operation

    def _on_dispatch(self, func: Any, args: tuple[Any, ...], out: Any) -> Operation | Literal[False] | None:
        """Record one operation; returns it if its result may be scores, False if it is another product, else None."""
        packet = func._overloadpacket
        if func.namespace != "aten" or packet.__name__ in OPAQUE:
            raise TraceError(
                f"module {self.module or '(the model)'} runs {func}, a kernel that the ledger cannot read. "
                "Its FLOPs would be missing, so the model is not counted."
            )
        node: Any = torch._C._current_autograd_node()
        if node is None:
            self._follow_scores(packet, args)
        read = _READERS.get(packet)
        if read is None:
            return None
        if node is not None:
            self._on_backward(node, func, _backward_flops(packet, args))
            return None
        operation = read(self, args, out)
        if operation is None:
            return None
        self.add(operation)
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            self._by_node[torch._C._autograd._get_sequence_nr() - 1] = operation
        if operation.kind != "matmul" or operation.weight:
            return False
        for operand in args:  # the values of attention written by hand: weighted by masked scores
            if isinstance(operand, Phantom) and operand.scores is not None and operand.scores.kind == "attention":
                self._mask_by_hand(operation, operand.scores.mask)
                return False
        return operation

    def _follow_scores(self, packet: Any, args: tuple[Any, ...]) -> None:
        """Watch attention written by hand: a mask laid over scores, and the softmax that ends them."""
        scored = next((a for a in args if isinstance(a, Phantom) and a.scores is not None), None)
        if scored is None:
            return
        operation = scored.scores
        if packet in MASKING:
            for other in args:
                if other is scored or not covers(other, scored):
                    continue
                if isinstance(other, Phantom):
                    if other.fed or other.sources:
                        continue  # a bias that is computed or learnt
                    raise TraceError(
                        f"module {self.module} lays a mask of floats over scores, whose data is not known."
                    )
                allowed = MASKING[packet](other, args)
                operation.mask = allowed if operation.mask is None else operation.mask & allowed
                if not operation.mask.any():
                    raise TraceError(
                        f"module {self.module} masks all of its attention scores: the mask was made when the model was "
                        "built, on shapes alone. Trace a real model instead of its configuration."
                    )
        elif packet is aten._softmax and operation.kind != "attention":
            if operation.mask is None:
                raise TraceError(
                    f"module {self.module or '(the model)'} multiplies and normalises attention scores by hand, under "
                    "no boolean mask that says which pairs count. Let it call its library's attention function or "
                    "F.scaled_dot_product_attention."
                )
            self._mask_by_hand(operation, operation.mask)

    def _mask_by_hand(self, operation: Operation, mask: torch.Tensor) -> None:
        """Bill a product of attention written by hand for the pairs that its mask allows in a batch of one."""
        queries, keys = mask.shape[-2:]
        pairs = self.allowed(mask, 1, queries, keys)
        operation.mask = mask
        operation.count_pairs(pairs, queries * keys)
        if queries == keys:
            window = int(mask.sum(-1).max())
            for driver, count in (
                ("pairs:causal", masks.causal_pairs([queries])),
                (f"pairs:sliding:{window}", masks.sliding_pairs([queries], window)),
            ):
                if not operation.driver and pairs == count:
                    operation.driver = driver

    def _on_backward(self, node: Any, func: Any, flops: int) -> None:
        operation = self._by_node.get(node._sequence_nr())
        if operation is not None:
            operation.backward_flops += flops
        elif flops:
            raise TraceError(f"backward runs {func} in {node.name()}, which no recorded forward operation explains.")

    def check_backward(self) -> None:
        """Compare what backward dispatched with what the operands' pasts predict.

        Raises:
            TraceError: an operation's backward is partly missing or larger than its operands explain.
        """
        for operation in self.operations:
            seen, expected = operation.backward_flops, operation.expected_backward_flops
            if seen and seen != expected:
                raise TraceError(
                    f"the backward of {operation.kind} in module {operation.module or '(the model)'} ran {seen} FLOPs "
                    f"where its operands explain {expected}: a custom gradient or a detached operand hides the rest."
                )


def _product(
    recorder: Recorder, kind: str, units: int, unit_flops: int, left: Operand, right: Operand, weight: tuple[int, ...]
) -> Operation:
    """Describe a product of two operands; the gradient of a weight is wgrad, that of an activation dgrad."""
    left_is_weight = not left.fed and right.fed
    products = (
        ("wgrad" if left_is_weight else "dgrad", unit_flops, left.sources),
        ("dgrad" if right.fed else "wgrad", unit_flops, right.sources),
    )
    activation = right if left_is_weight else left
    return Operation(
        recorder.module,
        kind,
        units,
        unit_flops,
        products,
        recorder.block_of(recorder.module),
        weight=weight if left.fed != right.fed else (),
        from_input=activation.fed and activation.sources == 0,
    )


def _matmul(recorder: Recorder, left: torch.Tensor, right: torch.Tensor) -> Operation | None:
    """Read left [..., m, k] @ right [..., k, n]; a unit is one row of activations."""
    *batch, m, k = left.shape
    n = right.shape[-1]
    a, b = Operand.of(left), Operand.of(right)
    if k == 1 and not a.sources and not b.sources:
        return None  # an outer product without parameters, such as rotary angles: elementwise work written as a product
    if not a.fed and b.fed:
        return _product(recorder, "matmul", n, 2 * math.prod(batch) * m * k, a, b, (k, m))
    return _product(recorder, "matmul", math.prod(batch) * m, 2 * k * n, a, b, (k, n))


def _convolution(recorder: Recorder, args: tuple[Any, ...], out: Any) -> Operation:
    """Read a convolution; a unit is one output position (input position when transposed)."""
    x, weight, transposed = args[0], args[1], args[6]
    positions = x if transposed else out
    units = positions.shape[0] * math.prod(positions.shape[2:])
    # weight is (out, in / groups, *kernel), or (in, out / groups, *kernel) when transposed: the work per position
    a, b = Operand.of(x), Operand.of(weight)
    return _product(recorder, "convolution", units, 2 * weight.numel(), a, b, tuple(weight.shape))


def _experts(recorder: Recorder, args: tuple[Any, ...], _out: Any) -> Operation:
    """Read rows [s, k] times their expert's matrix from [experts, k, n]; a unit is one row: one token in one expert."""
    rows, weight = args[0], args[1]
    unit_flops = 2 * rows.shape[-1] * weight.shape[-1]
    a, b = Operand.of(rows), Operand.of(weight)
    return _product(recorder, "experts", rows.shape[0], unit_flops, a, b, tuple(weight.shape))


def _mm(recorder: Recorder, args: tuple[Any, ...], _out: Any) -> Operation | None:
    return _matmul(recorder, args[0], args[1])


def _addmm(recorder: Recorder, args: tuple[Any, ...], _out: Any) -> Operation | None:
    return _matmul(recorder, args[1], args[2])


_READERS: dict[Any, Callable[[Recorder, tuple[Any, ...], Any], Operation | None]] = {
    aten.mm: _mm,
    aten.bmm: _mm,
    aten.addmm: _addmm,
    aten.baddbmm: _addmm,
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution,  # only ever reached in backward
    aten._grouped_mm: _experts,
}


def _backward_flops(packet: Any, args: tuple[Any, ...]) -> int:
    """Count what one operation of the backward dispatches."""
    if packet is aten.convolution_backward:
        grad, x, weight, transposed, needed = args[0], args[1], args[2], args[7], args[10]
        positions = x if transposed else grad
        one = 2 * positions.shape[0] * math.prod(positions.shape[2:]) * weight.numel()
        return int(one * (bool(needed[0]) + bool(needed[1])))
    left, right = (args[1], args[2]) if packet in (aten.addmm, aten.baddbmm) else (args[0], args[1])
    return int(2 * left.numel() * right.shape[-1])
