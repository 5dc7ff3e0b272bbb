"""What a model's code does with each of its parameters, as Python calls it: a second pair of eyes beside the trace.

Nothing here reads what the trace recorded. Calls of PyTorch's functions are watched before they are dispatched, each
tensor made of parameters alone (a cast, view, slice or join of some) is followed to them, and a product's FLOPs are
computed from the shapes of its two operands.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

# functions that multiply matrices, with the places of the two operands
_EITHER = {  # either operand may be a weight
    **dict.fromkeys(["matmul", "__matmul__", "mm", "bmm", "mv", "dot", "vdot", "inner", "cdist"], (0, 1)),
    "__rmatmul__": (1, 0),
    **dict.fromkeys(["addmm", "baddbmm", "addmv", "addmm_", "baddbmm_", "addmv_"], (1, 2)),
}
_CONVOLUTIONS = [f"conv{transposed}{n}d" for transposed in ("", "_transpose") for n in (1, 2, 3)]
# the second operand is the weight, whatever the first one is
_SECOND = dict.fromkeys(["linear", *_CONVOLUTIONS, "_grouped_mm", "grouped_mm"], (0, 1))
_CELLS = {"lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}
# functions that multiply weights in ways for which no FLOPs are computed here
_UNCOUNTED = _CELLS | {"bilinear", "tensordot", "chain_matmul", "addbmm"}
_LOOKUPS = {"embedding", "embedding_bag", "index_select", "gather", "take_along_dim", "grid_sample", "interpolate"}
_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)
_NAMES = {"linear": ("input", "weight"), "grouped_mm": ("mat_a", "mat_b")}


class Uses(TorchFunctionMode):
    """While entered, notes what becomes of a model's parameters.

    Args:
        model: its parameters are watched.

    Attributes:
        roles: of each parameter that is used: `weight` of a product, `input` of one (learnt queries), `table` that rows
            are looked up in, `elementwise` (added to, multiplied with or joined to activations).
        executed: forward FLOPs of the products of each set of parameters that is one operand; None where this does not
            know how a function computes.
        choices: how often the largest of some numbers were chosen, by (options, picks).

    >>> from torch import nn, zeros
    >>> layer = nn.Linear(8, 32, bias=False)
    >>> with Uses(layer) as uses:
    ...     _ = layer(zeros(5, 8))
    >>> uses.roles["weight"], uses.executed[frozenset({"weight"})]
    ({'weight'}, 2560)
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.roles: defaultdict[str, set[str]] = defaultdict(set)
        self.executed: dict[frozenset[str], int | None] = {}
        self.choices: Counter[tuple[int, int]] = Counter()
        # tensors made of parameters alone; held, so that each keeps its id
        self._made_of: dict[int, tuple[torch.Tensor, frozenset[str]]] = {
            id(p): (p, frozenset({name})) for name, p in model.named_parameters()
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "").removesuffix(".default")
        tensors = [*_tensors(args), *_tensors(tuple(kwargs.values()))]
        if name in ("topk", "argmax", "max"):
            self._choose(name, args, kwargs)
        if any(id(t) in self._made_of for t in tensors):
            self._note(name, args, kwargs, tensors, out)
        return out

    def _names(self, tensor: Any) -> frozenset[str]:
        return self._made_of[id(tensor)][1] if id(tensor) in self._made_of else frozenset()

    def _note(self, name: str, args: Any, kwargs: Any, tensors: list[torch.Tensor], out: Any) -> None:
        if name == "multi_head_attention_forward":
            self._multi_head(args, kwargs)
        elif name == "einsum":
            self._einsum(args)
        elif name in _UNCOUNTED:
            for tensor in tensors:
                self._product(tensor, None)
        elif name in _EITHER or name in _SECOND:
            self._matrices(name, args, kwargs, out)
        elif name in _LOOKUPS or (name == "__getitem__" and any(t.dim() for t in _tensors(args[1:]))):
            for tensor in tensors:
                self._mark(tensor, "table")
                if tensor.dim() > 2 or name == "interpolate":  # matrices picked from a stack, or a table resized
                    self._follow(tensor, out)
        else:
            self._elementwise(tensors, out)

    def _elementwise(self, tensors: list[torch.Tensor], out: Any) -> None:
        """Follow what is made of parameters alone; where activations take part, a parameter's way ends."""
        floats = [t for t in tensors if t.is_floating_point()]
        if all(id(t) in self._made_of for t in floats):
            made = frozenset().union(*(self._names(t) for t in floats))
            for tensor in _tensors((out,)):
                if tensor.is_floating_point() and id(tensor) not in self._made_of:
                    self._made_of[id(tensor)] = (tensor, made)
            return
        for tensor in floats:
            self._mark(tensor, "elementwise")

    def _mark(self, tensor: Any, role: str) -> None:
        for name in self._names(tensor):
            self.roles[name].add(role)

    def _follow(self, source: torch.Tensor, out: Any) -> None:
        if source_names := self._names(source):
            self._made_of[id(out)] = (out, source_names)

    def _product(self, weight: Any, flops: int | None) -> None:
        """Note one product by `weight`, which is made of parameters alone; `flops` is None where they are not known."""
        names = self._names(weight)
        if not names:
            return
        self._mark(weight, "weight")
        before = self.executed.get(names, 0)
        self.executed[names] = None if flops is None or before is None else before + flops

    def _matrices(self, name: str, args: Any, kwargs: Any, out: torch.Tensor) -> None:
        places = _EITHER.get(name) or _SECOND[name]
        left, right = (
            args[place] if place < len(args) else kwargs[_NAMES.get(name, ("input", "weight"))[i]]
            for i, place in enumerate(places)
        )
        if name == "linear":
            flops = 2 * left.numel() * (right.numel() // right.shape[-1])
        elif name.startswith("conv"):  # per output position; per input position where it is transposed
            flops = 2 * (left if "transpose" in name else out).numel() * (right.numel() // right.shape[0])
        elif name in _SECOND:  # rows, each times one matrix of a stack
            flops = 2 * left.numel() * right.shape[-1]
        else:
            flops = 2 * out.numel() * left.shape[-1]
        self._product(right, flops)
        if name in _EITHER:
            self._product(left, flops)
        else:
            self._mark(left, "input")
        for other in (*_tensors(args), *_tensors(tuple(kwargs.values()))):
            if other is not left and other is not right:  # a bias
                self._mark(other, "elementwise")

    def _einsum(self, args: Any) -> None:
        """Count a product of two tensors over all of their indices; with more of them, the order decides."""
        equation, *operands = args
        operands = list(_tensors(tuple(operands)))
        flops = None
        if len(operands) == 2 and isinstance(equation, str) and "." not in equation:
            indices = equation.replace(" ", "").partition("->")[0].split(",")
            sizes = dict(zip("".join(indices), (n for t in operands for n in t.shape), strict=True))
            flops = 2 * math.prod(sizes.values())
        for operand in operands:
            self._product(operand, flops)

    def _multi_head(self, args: Any, kwargs: Any) -> None:
        """Count the projections of `nn.MultiheadAttention`: those of queries, keys and values, and the closing one."""
        given = _MULTI_HEAD.bind(*args, **kwargs).arguments
        inputs = [given[name] for name in ("query", "key", "value")]
        rows = [tensor.numel() // tensor.shape[-1] for tensor in inputs]
        for tensor in inputs:
            self._mark(tensor, "input")
        if (joint := given.get("in_proj_weight")) is not None:
            self._product(joint, 2 * sum(rows) * joint.numel() // 3)
        for name, number in zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), rows, strict=True):
            if (weight := given.get(name)) is not None:
                self._product(weight, 2 * number * weight.numel())
        self._product(given["out_proj_weight"], 2 * rows[0] * given["out_proj_weight"].numel())

    def _choose(self, name: str, args: Any, kwargs: Any) -> None:
        values = args[0]
        picks = 1
        if name == "topk":
            picks = args[1] if len(args) > 1 else kwargs["k"]
        dim = kwargs.get("dim", args[2] if name == "topk" and len(args) > 2 else -1)
        if isinstance(values, torch.Tensor) and values.dim():
            self.choices[values.shape[dim], int(picks)] += 1


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors among arguments, and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
