"""Record a model's operations: matrix products, convolutions, expert products, attention; forward and backward.

Forward operations are attributed to the module that runs them. A backward operation is attributed to the forward
operation whose autograd node it runs in, by the node's sequence number; what backward really dispatched must equal
what the operands' pasts predict, or the trace fails.
"""

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from headway.errors import TraceError
from headway.tracing import scores
from headway.tracing.arguments import phantoms
from headway.tracing.operation import OPAQUE, READERS, Operation, backward_flops
from headway.tracing.phantom import PRODUCTS, Phantom, Recording, Stays, aten, elementwise_operands, root
from headway.tracing.unwrap import lies_within

_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]  # a class method


@dataclass(frozen=True)
class Choice:
    """One choice of places in rows of floats."""

    rows: int  # rows that it was made for
    options: int  # places of each row
    picks: int  # places chosen in each row; 0 where that is decided later, as after a sort

    @classmethod
    def of(cls, packet: Any, args: tuple[Any, ...]) -> "Choice":
        """Read the choice that an operation makes."""
        values, *more = args
        picks = 0
        if packet is aten.topk:
            picks, *more = more
        elif packet in (aten.argmax, aten.max) and more and isinstance(more[0], int):
            picks = 1
        dim = more[0] if more and isinstance(more[0], int) else -1
        options = values.shape[dim] if values.dim() else 1
        return cls(values.numel() // max(options, 1), options, picks)


# operations that choose places in rows of floats
_CHOICES = {aten.topk, aten.sort, aten.argsort, aten.argmax, aten.max, aten.multinomial}


def _custom_function() -> str | None:
    """Name the custom `autograd.Function` whose forward is running, if one is; it runs with gradients off."""
    frame = None if torch.is_grad_enabled() else sys._getframe()
    while frame is not None:
        if frame.f_code is _APPLY:
            return str(frame.f_locals["cls"].__name__)
        frame = frame.f_back
    return None


@dataclass
class Recorder:
    """Collects the operations of one forward and backward of `model`."""

    model: nn.Module
    block_of: Callable[[str], str]  # path of a module to the path of the checkpointable block that holds it
    operations: list[Operation] = field(default_factory=list)  # in forward order
    # paths of the modules that ran, each with whether it was handed picked rows every time
    handed: dict[str, bool] = field(default_factory=dict)
    # by the path of the module that made them, choices of places in rows of floats without data, by a top-k and the
    # like
    choices: defaultdict[str, list[Choice]] = field(default_factory=lambda: defaultdict(list))
    # paths of the modules that select rows by comparing floats, in order: how many these are, a trace cannot know
    selecting: dict[str, None] = field(default_factory=dict)
    parameters_read: int = 0  # source bits of all parameters that forward read
    met_nothing: int = 0  # source bits of the parameters that were applied to no row
    beyond: int = 0  # source bit of tensors that ask for a gradient and are no parameters
    # elementwise products of activations by module path, and by whether one is spread over the other
    multiplied: Counter[tuple[str, bool]] = field(default_factory=Counter)
    # by module path, after how many elementwise products and sums, one after another, its own began and ended
    chains: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._path_of: dict[int, str] = {id(module): path for path, module in self.model.named_modules()}
        self._stack: list[str] = []
        find = self.block_of

        def running_block(path: str) -> str:
            """Find the block that runs: a part of it that is called once it has ended is no work of a checkpoint."""
            block = find(path)
            return "" if block in self.handed and block not in self._stack else block

        self.block_of = running_block
        self._by_node: dict[int, Operation] = {}
        # past of each node, by the sequence number after its own: its module, whether it depends on the batch, and the
        # parameters that it depends on
        self._node: dict[int, tuple[str, bool, int]] = {}
        self._cache: dict[tuple[int, Sequence[int | str]], tuple[Any, Any]] = {}
        self.failure: tuple[BaseException, str, str] | None = None  # the last error, its module and operation

    @property
    def module(self) -> str:
        """Path of the innermost module that is running forward."""
        return self._stack[-1] if self._stack else ""

    def allowed(self, mask: torch.Tensor, rows: Sequence[int], queries: int, keys: int) -> tuple[int, int, str]:
        """Count the pairs that a boolean mask allows, as `count`; layers share a mask, so each is counted once."""
        counts: tuple[int, int, str] = self.cached(
            mask, ("allowed", *rows, queries, keys), lambda: self.count(mask, rows, queries, keys)
        )
        return counts

    def count(self, mask: torch.Tensor, rows: Sequence[int], queries: int, keys: int) -> tuple[int, int, str]:
        """Count the pairs that a boolean mask allows, and name its driver.

        Args:
            mask: of any shape that broadcasts to (*rows, queries, keys).
            rows: axes of the queries before their own, the last of which are heads.
            queries: number of queries.
            keys: number of keys.

        Returns:
            Pairs, summed over the batch; of how many heads each; and the driver, "" for an unknown one. Where heads
            see different pairs, the sum is over them too, as of a single head.
        """
        mask = mask[(None,) * (len(rows) + 2 - mask.dim())]
        if mask.dim() > len(rows) + 2 or any(size not in (1, own) for size, own in zip(mask.shape, rows, strict=False)):
            raise TraceError(
                f"module {self.module or '(the model)'} lays a mask of shape {tuple(mask.shape)} over scores of "
                f"shape {(*rows, queries, keys)}, but one mask would cover several of these. Repeat the queries to "
                "the mask's shape."
            )
        planes = mask.expand(*mask.shape[:-2], queries, keys)
        counts = np.count_nonzero(planes.reshape(-1, queries * keys).numpy(), axis=-1).reshape(planes.shape[:-2])
        pairs = np.broadcast_to(counts, tuple(rows))
        if rows[-1] and (pairs != pairs[..., :1]).any():
            return int(pairs.sum()), 1, ""
        plane = planes[(0,) * len(rows)] if math.prod(rows[:-1]) == 1 else None
        return int(pairs[..., 0].sum()), rows[-1], "" if plane is None else scores.mask_driver(plane)

    def cached(self, thing: Any, sizes: Sequence[int | str], find: Callable[[], Any]) -> Any:
        """Return `find()` for an object that layers share, such as a block mask; computed once for scores alike."""
        shared = (id(thing), tuple(sizes))
        if shared not in self._cache:
            self._cache[shared] = (thing, find())  # holding the object keeps its id its own
        return self._cache[shared][1]

    def note_failure(self, error: BaseException, operation: str = "") -> None:
        """Note where an error was raised: in which module, and in which operation of PyTorch's if in one."""
        if self.failure is None or self.failure[0] is not error:
            self.failure = (error, self.module, operation)

    def path_of(self, module: nn.Module) -> str:
        """Return a module's path in the model; the running module's for a stranger."""
        return self._path_of.get(id(module), self.module)

    def __enter__(self) -> "Recorder":
        def enter(module: nn.Module, args: Any) -> None:
            path = self._path_of.get(id(module), self.module)
            picked = any(isinstance(a, Phantom) and a.picked for a in args)
            self.handed[path] = picked and self.handed.get(path, True)
            self._stack.append(path)

        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            if (error := sys.exc_info()[1]) is not None:
                self.note_failure(error)
            self._stack.pop()

        self._hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
        self._saved = torch.autograd.graph.saved_tensors_hooks(self._on_save, lambda tensor: tensor)
        self._dispatch = Recording(self.model, self._on_dispatch, self._on_result)
        self._saved.__enter__()
        self._dispatch.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._dispatch.__exit__()
        self._saved.__exit__(*exception)
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

    def attends(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the queries, keys and values as the attention kernel takes them: here as they come."""
        return operands

    def attended(self, out: torch.Tensor) -> None:
        """Note the output of an attention kernel: here nothing."""

    def _on_dispatch(self, func: Any, args: tuple[Any, ...], out: Any) -> Operation | Literal[False] | None:
        """Record one operation; returns it if its result may be scores, False if it is another product, else None."""
        packet = func._overloadpacket
        if func.namespace != "aten" or packet.__name__ in OPAQUE:
            raise TraceError(
                f"module {self.module or '(the model)'} runs {func}, a kernel that Headway cannot read. Its FLOPs "
                "would be missing, so the model is not counted."
            )

        # in backward, an operation is held against the product whose node runs it
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            self._on_backward(node, func, backward_flops(packet, args, out, node))
            return None
        self._note(packet, args, out)

        # in forward, a product becomes a row of the record; its autograd node is known by its number
        reader = READERS.get(packet)
        operation = None if reader is None else reader(self, args, out)
        if operation is None:
            return None
        self._refuse(packet, args, operation)
        if operation.stacked > 1:
            self._pick(operation)
        self.add(operation)
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            self._by_node[torch._C._autograd._get_sequence_nr() - 1] = operation

        # a product of two activations may be scores of attention written by hand, or its values, which end them
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

    def _refuse(self, packet: Any, args: tuple[Any, ...], operation: Operation) -> None:
        """Refuse a product of which the ledger cannot tell how much it computes."""
        place = f"module {self.module or '(the model)'}"
        if operation.fed and (function := _custom_function()):
            raise TraceError(
                f"{place} multiplies matrices inside {function}, a function with its own backward, so Headway cannot "
                "tell which products are already gradients (as in fused losses). Trace the model without this "
                "kernel, or before the kernel is applied. The FLOPs stay the same."
            )
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if any(isinstance(tensor, Phantom) and root(tensor).is_sparse_matrix for tensor in tensors):
            raise TraceError(
                f"{place} runs {packet} on a sparse matrix, so Headway cannot tell how much of the matrix is "
                "multiplied. Trace the model with a full matrix in its place."
            )
        if any(tensor.is_complex() for tensor in tensors):
            raise TraceError(
                f"{place} runs {packet} on complex numbers, but Headway counts only real ones. Trace the model with "
                "separate real and imaginary parts."
            )

    def _pick(self, operation: Operation) -> None:
        """Bill a product of a stack of experts for the rows that its router picked, where code runs all on every row.

        The rest are rows of zeros, or are multiplied by zero afterwards: an implementation's, not the model's.
        """
        mixture = operation.module.rpartition(".")[0]
        choices = [
            choice for path, of_module in self.choices.items() if lies_within(path, [mixture]) for choice in of_module
        ]
        choice = next((c for c in reversed(choices) if c.options == operation.stacked and c.picks), None)
        if choice is None:
            return
        rows = operation.forward_flops // (2 * math.prod(operation.weight) * operation.stacked)
        if rows != choice.rows:
            raise TraceError(
                f"module {operation.module or '(the model)'} runs each of {operation.stacked} experts on {rows} "
                f"rows, but its router chose for {choice.rows}, so Headway cannot tell which rows count."
            )
        operation.count_picked(choice.picks)

    def _note(self, packet: Any, args: tuple[Any, ...], out: Any) -> None:
        """Note the parameters that an operation reads, what its autograd node depends on, and choices of places."""
        number = torch._C._autograd._get_sequence_nr()
        _, fed, sources = self._node.get(number, ("", False, 0))  # operations of a custom function share its node
        for tensor in phantoms(args):
            fed, sources = fed or tensor.fed, sources | tensor.sources
            self.parameters_read |= tensor.sources
            if not tensor.fed and isinstance(out, torch.Tensor) and not out.numel():
                self.met_nothing |= tensor.sources
        self._node[number] = (self.module, fed, sources)
        if len(operands := elementwise_operands(packet, args)) > 1:
            after = max(root(operand).steps for operand in operands)
            first, last = self.chains.get(self.module, (after, after))
            self.chains[self.module] = (min(first, after), max(last, after))
            if packet in PRODUCTS:
                self.multiplied[self.module, out.numel() > min(operand.numel() for operand in operands)] += 1
        if packet in _CHOICES:
            self.choices[self.module].append(Choice.of(packet, args))

    def _on_result(self, packet: Any, args: tuple[Any, ...], out: Phantom) -> Stays:
        """Follow the hidden pairs of a result; where scores end, bill their products for the pairs that stay."""
        if packet is aten.topk and args[0].forced is None and isinstance(args[0].stays, str):
            raise TraceError(
                f"module {self.module or '(the model)'} selects by numbers that it wrote itself, so Headway cannot "
                "tell what it selects."
            )
        stays = scores.remaining_pairs(packet, args, out)
        for ended in args[:2]:
            if not isinstance(ended, Phantom) or ended.scores is None or ended.scores.kind == "attention":
                continue
            is_masked = out.scores is None and isinstance(ended.stays, torch.Tensor)
            if packet in (aten._softmax, aten.topk) or is_masked:
                self._bill(ended.scores, ended, normalised=packet is aten._softmax)
        return stays

    def _bill(self, operation: Operation, ended: Phantom, *, normalised: bool = True) -> None:
        """Bill a product of attention written by hand for the pairs that stay in its scores, in a batch of one.

        An indexer's scores are not normalised; it sees every key, and no window of its own needs to be looked for.
        """
        if isinstance(ended.stays, str):
            raise TraceError(
                f"module {self.module or '(the model)'} multiplies attention scores by hand, under a mask of floats "
                "without data, so Headway cannot follow the mask. Let it call its library's attention function or "
                "F.scaled_dot_product_attention, under a boolean mask."
            )
        mask = ended.stays
        scored = math.prod(ended.shape[-2:]) if mask is None else mask.numel()
        pairs = scored if mask is None else int(torch.count_nonzero(mask))
        if not pairs:
            raise TraceError(f"module {self.module or '(the model)'} masks all of its attention scores.")
        driver = "" if mask is None or mask.dim() > 2 else scores.mask_driver(mask)
        for product in (operation, *operation.scored):
            product.count_pairs(pairs, scored)
            product.driver, product.by_hand = driver, normalised

    def module_of(self, number: int) -> str:
        """Path of the module whose forward made the autograd node of a number; "" for none."""
        return self._node.get(number + 1, ("", True, 0))[0]

    def _on_backward(self, node: Any, func: Any, flops: int | None) -> None:
        if flops is None:
            return
        number = node._sequence_nr()
        module, fed, sources = self._node.get(number + 1, ("", True, 0))
        if flops and number not in self._by_node:
            if fed:
                raise TraceError(
                    f"module {module or '(the model)'}: its backward runs {func} in {node.name()}, which no product of "
                    "its forward explains. Trace the model without this operation."
                )
            # on weights alone, as peft's rotations are solved for: a gradient of what forward did without a product
            self._by_node[number] = Operation(
                module, "matmul", 1, 0, (("wgrad", 0, sources),), self.block_of(module), fed=False
            )
            self.add(self._by_node[number])
        operation = self._by_node.get(number)
        if operation is not None:
            operation.backward_flops += flops
            if not operation.unit_flops and operation.kind == "matmul":
                operation.products = (("wgrad", operation.backward_flops, sources),)

    def check_backward(self) -> None:
        """Compare what backward dispatched with what the operands' pasts predict.

        Raises:
            TraceError: an operation's backward is partly missing or larger than its operands explain.
        """
        for operation in self.operations:
            flops, expected = operation.backward_flops, operation.expected_backward_flops
            if flops and flops != expected:
                raise TraceError(
                    f"the backward of {operation.kind} in module {operation.module or '(the model)'} ran {flops} "
                    f"FLOPs, but its operands explain {expected}. A custom gradient or a detached operand hides the "
                    "rest."
                )
