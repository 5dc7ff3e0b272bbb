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

from headway.count.tracing import scores
from headway.count.tracing.phantom import Phantom, Recording, Stays, aten
from headway.count.tracing.readers import OPAQUE, READERS, backward_flops
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
        self._mask_pairs: dict[int, tuple[torch.Tensor, int, str]] = {}

    @property
    def module(self) -> str:
        """Path of the innermost module that is running forward."""
        return self._stack[-1] if self._stack else ""

    def allowed(self, mask: torch.Tensor, batch: int, queries: int, keys: int) -> tuple[int, str]:
        """Count the pairs that a boolean mask [(batch, heads,) queries, keys] allows one head, and name its driver.

        The count is over the batch. Layers share a mask, so each is counted once.
        """
        if id(mask) not in self._mask_pairs:
            self._mask_pairs[id(mask)] = (mask, *self.count(mask, batch, queries, keys))  # held: its id stays its own
        return self._mask_pairs[id(mask)][1:]

    def count(self, mask: torch.Tensor, batch: int, queries: int, keys: int) -> tuple[int, str]:
        """Do as `allowed` does, for a mask that no other layer shares."""
        four = mask[(None,) * (4 - mask.dim())]
        if four.shape[1] > 1 and not bool((four == four[:, :1]).all()):
            raise TraceError(f"module {self.module} masks its attention heads differently; pairs are counted for all.")
        per_head = four.expand(batch, -1, queries, keys)[:, 0]
        driver = scores.name(per_head[0]) if queries == keys and len(per_head) == 1 else ""
        return int(per_head.sum()), driver

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
        self._dispatch = Recording(self._on_dispatch, self._on_result)
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
        for operand in args:
            if not isinstance(operand, Phantom) or operand.scores is None:
                continue
            if operand.scores.kind == "attention":  # the values of attention by hand: weighted by masked scores
                self._bill(operation, operand)
                return False
            operation.scored.append(operand.scores)  # scores summed over heads, as an indexer does
        return operation

    def _on_result(self, packet: Any, args: tuple[Any, ...], out: Phantom) -> Stays:
        """Follow what is hidden in a result; where scores end, bill their products for the pairs that stay."""
        stays = scores.after(packet, args, out)
        ended = args[0] if args else None
        if isinstance(ended, Phantom) and packet in (aten._softmax, aten.topk):
            scored = ended.scores is not None and ended.scores.kind != "attention"
            if scored and (packet is aten._softmax or ended.stays is not None):
                self._bill(ended.scores, ended)
        return stays

    def _bill(self, operation: Operation, ended: Phantom) -> None:
        """Bill a product of attention written by hand for the pairs that stay in its scores, in a batch of one."""
        if isinstance(ended.stays, str):
            raise TraceError(
                f"module {self.module or '(the model)'} multiplies attention scores by hand, under a mask that cannot "
                "be followed: it differs by head, or is made of floats whose data is not known. Let it call its "
                "library's attention function or F.scaled_dot_product_attention, under a boolean mask."
            )
        queries, keys = ended.shape[-2:]
        mask = ended.stays
        if mask is not None and not mask.any():
            raise TraceError(f"module {self.module} masks all of its attention scores.")
        pairs = queries * keys if mask is None else int(mask.sum())
        for product in (operation, *operation.scored):
            product.count_pairs(pairs, queries * keys)
            product.driver = "" if mask is None or queries != keys else scores.name(mask)

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
