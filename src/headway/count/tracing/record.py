"""Record what a model dispatches: matrix products, convolutions, expert products and attention, forward and backward.

Forward operations are attributed to the module that runs them. A backward operation is attributed to the forward
operation whose autograd node it runs in, by the node's sequence number; what backward really dispatched must equal
what the operands' pasts predict, or the trace fails.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from headway.count import masks
from headway.count.tracing.phantom import Phantom, Recording, aten
from headway.count.tracing.readers import OPAQUE, READERS, backward_flops
from headway.count.tracing.scores import MASKING, covers
from headway.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from headway.count.tracing.operation import Operation


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
        self._found: dict[int, tuple[Any, Any]] = {}

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

    def once(self, thing: Any, find: Callable[[], Any]) -> Any:
        """Return what `find` finds out about an object that layers share; it is asked once."""
        if id(thing) not in self._found:
            self._found[id(thing)] = (thing, find())  # holding the object keeps its id its own
        return self._found[id(thing)][1]

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
        read = READERS.get(packet)
        if read is None:
            return None
        if node is not None:
            self._on_backward(node, func, backward_flops(packet, args))
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
