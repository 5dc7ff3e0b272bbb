"""A model's parameters as leaves of autograd's graphs: which are trained, and which a forward's backward reaches."""

import functools
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.utils._python_dispatch import _disable_current_modes

from headway.count import CostModel
from headway.meter.clock import sharded_groups
from headway.meter.step_phases import NamedPhase
from headway.tracing.unwrap import plain_path, unwrapped

_FEW = 32  # parameters of which a function of C++ finds the nodes faster
_MOST = 4096  # most entries remembered about one module


class Leaves:
    """The parameters of a module, each a bit of one number by its place.

    Autograd's plan of a backward tells which leaves it will reach (`torch._C._will_engine_execute_node`). A backward
    within a backward, as that of reentrant checkpointing, is in no such plan: the leaves that are missing then get a
    hook each.

    Args:
        module: whose parameters they are; wrappers may be around it, and it is not kept alive.

    Attributes:
        names: of the parameters, as a trace of the module names them.
        step: in which the parameters were looked at last; below 0 if some have come since.
        version: number of the names and shapes that the parameters have had.
        arrived: bits of parameters with a hook whose gradients have come since this was cleared.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._inner = weakref.ref(unwrapped(module))
        self.arrived = 0
        self.step = -1
        self.version = 0
        self._signature: tuple[tuple[str, ...], list[Any]] = (), []
        self._is_doubtful = False  # whether a backward has reached less than what is trained, for the first time so
        self._bits: dict[tuple[bool, ...], int] = {}
        self._masks: dict[int, tuple[CostModel, dict[int, int | None]]] = {}  # by the identity of a ledger
        # Keys: the parameters that are trained, and those that the plan reaches.
        self._has_nested: dict[tuple[int, int], bool] = {}
        self._hooked: dict[int, Any] = {}  # handles of hooks, by place
        self._list()
        _listen_to_parts(self)

    def _list(self) -> None:
        inner = self._inner()
        parameters = {} if inner is None else {plain_path(name): p for name, p in inner.named_parameters()}
        self.names, self._parameters = tuple(parameters), [*parameters.values()]
        parts = [] if inner is None else [*inner.modules()]
        self._parts = {id(part) for part in parts}
        self._groups = [*dict.fromkeys(group for part in parts for group in sharded_groups(part))]
        self._states = [vars(part) for part in parts if hasattr(part, "gradient_checkpointing")]
        self._num_wrapped = sum(type(part).__name__ == "CheckpointWrapper" for part in parts)
        self._tree = [
            (container, [*container.values()])
            for part in parts
            for container in (part._modules, part._parameters)
            if container
        ]

    def close(self) -> None:
        """Leave the parameters and torch as they were."""
        self._unhook()
        _leaves.discard(self)
        _listen_to_parts()

    def _unhook(self) -> None:
        for handle in self._hooked.values():
            handle.remove()
        self._hooked = {}

    def note_part(self, module: nn.Module) -> None:
        """Note that a module gets a part or a parameter: if it is one of these, they are to be looked at again."""
        if id(module) in self._parts:
            self.step = -1

    def signature(self) -> tuple[tuple[str, ...], list[Any]]:
        """Give the names and shapes of the parameters that the module has now."""
        if self._is_doubtful or not all(
            len(container) == len(items) and all(map(operator.is_, container.values(), items))
            for container, items in self._tree
        ):
            self._unhook()
            self._list()
            self._is_doubtful = False
        signature = self.names, [parameter.shape for parameter in self._parameters]
        if signature != self._signature:
            self._signature, self.version = signature, self.version + 1
        return signature

    @property
    def checkpointed(self) -> tuple[int, list[Any]]:
        """State of activation checkpointing, as the module had it at the last `signature`."""
        return self._num_wrapped, [state.get("gradient_checkpointing", False) for state in self._states]

    @property
    def trained(self) -> int:
        """Bits of the parameters that require a gradient now."""
        return self._number(tuple([parameter.requires_grad for parameter in self._parameters]))

    def _number(self, flags: tuple[bool, ...]) -> int:
        bits = self._bits.get(flags)
        if bits is None:
            if len(self._bits) >= _MOST:
                self._bits.clear()
            bits = self._bits[flags] = int("".join("01"[flag] for flag in reversed(flags)) or "0", 2)
        return bits

    def outside(self, bits: int, blocks: Iterable[str]) -> int:
        """Return bits without the parameters in some blocks."""
        for block in blocks:
            bits &= ~self._number(tuple([name.startswith(f"{block}.") for name in self.names]))
        return bits

    def nodes(self, trained: int) -> list[Any]:
        """Look up the nodes in which the gradients of trained parameters arrive; None for other parameters.

        They belong to a forward, after which they are asked for: a parameter may be given another shape, and its node
        must then go.
        """
        gathered = self._gathered()
        leaves = [gathered.get(id(parameter), parameter) for parameter in self._parameters]
        places = [i for i, leaf in enumerate(leaves) if trained >> i & 1 and leaf is not None and leaf.requires_grad]
        nodes: list[Any] = [None] * len(leaves)
        if places:
            with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext():
                edges = _edges([leaves[i] for i in places])
            for i, (node, _) in zip(places, edges, strict=True):
                nodes[i] = node
        return nodes

    def _gathered(self) -> dict[int, Any]:
        """Find the gathered parameters by the shards of `fully_shard`; None where nothing was gathered yet."""
        return {
            id(parameter.sharded_param): getattr(parameter, "_unsharded_param", None)
            for group in self._groups
            for parameter in group.fsdp_params
        }

    def reached(self, trained: int, nodes: Sequence[Any]) -> int:
        """Bits of the parameters that the backward which runs now will give a gradient, as far as its plan shows."""
        bits = self._planned(nodes)
        missing = trained & ~bits
        if not missing:
            return bits
        if (trained, bits) not in self._has_nested and len(self._has_nested) < _MOST:
            self._has_nested[trained, bits] = _has_functions()
            self._is_doubtful = True  # the first of this kind: the module may have other parameters by now
        for place in range(len(nodes)) if self._has_nested.get((trained, bits)) else ():
            if missing >> place & 1 and place not in self._hooked:
                hook = functools.partial(_note_gradient, weakref.ref(self), 1 << place)
                hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # a tensor with it may be written
                self._hooked[place] = self._parameters[place].register_hook(hook)  # type: ignore[no-untyped-call]
        return bits

    def _planned(self, nodes: Sequence[Any]) -> int:
        runs = torch._C._will_engine_execute_node
        try:
            flags = tuple([node is not None and runs(node) for node in nodes])
        except RuntimeError:  # some of them are what `autograd.grad` is asked for
            flags = tuple([node is not None and will_run(node) for node in nodes])
        return self._number(flags)

    def mask(self, cost_model: CostModel, bits: int) -> int | None:
        """Translate bits of these parameters into bits of a ledger; None if the ledger has other parameters."""
        entry = self._masks.get(id(cost_model))
        if entry is None or entry[0] is not cost_model:
            if len(self._masks) >= _MOST:
                self._masks.clear()
            entry = self._masks[id(cost_model)] = cost_model, {}
        masks = entry[1]
        if bits not in masks:
            if len(masks) >= _MOST:
                masks.clear()
            masks[bits] = self._translated(cost_model, bits)
        return masks[bits]

    def _translated(self, cost_model: CostModel, bits: int) -> int | None:
        names = [parameter.name for parameter in cost_model.parameters]
        if (*names,) == self.names:
            return bits
        places = {name: place for place, name in enumerate(self.names)}
        if any(parameter.trainable and parameter.name not in places for parameter in cost_model.parameters):
            return None
        return sum(1 << i for i, name in enumerate(names) if name in places and bits >> places[name] & 1)


class Reach:
    """The reach of backwards through forwards of one kind; a forward of another kind makes another graph.

    Attributes:
        reached: bits of the parameters that the last backward reached; None before any.
        results: bits of the results that it came through; of many, those within objects are left out.
        varies: whether backwards come through other results than the ones before: then each is asked what it reaches.
        is_at_top: whether the last came first through a result that is in no object, where there are many in objects.
        bill: what the last of them was billed, behind all that decides the bill; None before.
    """

    __slots__ = ("bill", "is_at_top", "reached", "results", "varies")

    def __init__(self) -> None:
        self.reached: int | None = None
        self.results = 0
        self.varies = self.is_at_top = False
        self.bill: tuple[Any, Any] | None = None


class WatchedForward:
    """One forward of a watched module, and the work of its backwards until now.

    Args:
        module: that runs.
        leaves: its parameters.
        phase: the phase in which it runs.
        has_gradients: whether gradients are on.
        is_again: whether a backward runs it once more.
    """

    # Most forwards keep these, and a class makes them at no cost.
    has_rerun = False  # whether a backward has run it once more, to its end
    is_known = False  # whether silence means that no backward has come
    is_counted = False
    ran: frozenset[str] = frozenset()  # blocks that have begun, of those that may be left out
    dropped: frozenset[str] = frozenset()  # blocks that it left out
    trained = 0  # bits of the parameters that required a gradient
    inputs: tuple[Any, ...] = ()  # names or places of its arguments that did
    cost_model: CostModel | None = None  # ledger that counts the forward; None if its shapes are traced
    batch: Any = None  # a result of `read_or_copy`, or arguments without data; None where their shapes are known
    plan: Reach | None = None  # None without gradients
    results = 0  # bits of the results that a backward has come through, as in its plan
    key: Any = None  # parameters and shapes that decide a trace; None where more than shapes does
    shapes: Any = None  # shapes of its arguments, if gradients are off
    reached: int | None = None  # bits of the parameters that backwards gave a gradient; None before any came
    answered: frozenset[Any] = frozenset()  # names or places among `inputs` that backwards gave a gradient

    def __init__(
        self, module: nn.Module, leaves: Leaves, phase: NamedPhase | None, *, has_gradients: bool, is_again: bool
    ) -> None:
        self.module, self.leaves = weakref.ref(module), leaves
        self.phase, self.has_gradients, self.is_again = phase, has_gradients, is_again
        self.exception = sys.exception()  # the exception that is handled around it
        self.nodes_before = torch._C._autograd._get_sequence_nr()  # nodes that this thread has made in graphs

    @property
    def has_backward(self) -> bool:
        """Tell whether a backward came, or may have come where nobody could tell."""
        return self.has_gradients and not self.is_known if self.reached is None else True

    @property
    def differentiated(self) -> tuple[Any, ...]:
        """Names or places of the arguments that were given a gradient."""
        return tuple(name for name in self.inputs if self.reached is None or name in self.answered)

    def trained_of(self, cost_model: CostModel) -> int | None:
        """Bits of a ledger's parameters that were given a gradient; None if the module's parameters are others."""
        return self.leaves.mask(cost_model, self.trained if self.reached is None else self.reached)


def node_of(tensor: Any) -> Any:
    """Return the node of autograd's graph from which a tensor's gradient comes; of a leaf the one that keeps it."""
    if tensor.grad_fn is not None:
        return tensor.grad_fn
    with torch.enable_grad():
        return tensor.view_as(tensor).grad_fn.next_functions[0][0]


@functools.cache
def _together() -> Any:
    """Make the function that stands in front of several tensors, once: torch makes a second class for each."""

    class Together(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, *_tensors: Any) -> Any:
            return torch.empty(0)

    return Together


def _edges(tensors: Sequence[Any]) -> Any:
    """Return the nodes of several tensors, and the places of their results, by one function in front of them all."""
    if len(tensors) < _FEW and all(type(tensor) is torch.nn.Parameter for tensor in tensors):
        function: Any = torch._C._functions.DelayedError("", len(tensors))
        return function(*tensors)[0].grad_fn.next_functions
    with torch.enable_grad():
        return _together().apply(*tensors).grad_fn.next_functions


def will_run(node: Any) -> bool:
    """Say whether the backward that runs now computes the gradient of a node; to be asked within a backward."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch's answer for a leaf whose gradient `autograd.grad` returns
        return True


def _has_functions() -> bool:
    """Say whether a graph has functions written in Python, in which backwards of their own may run."""
    node: Any = torch._C._current_autograd_node()
    waiting, visited = [node], {node}
    while waiting:
        node = waiting.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        for following, _ in node.next_functions:
            if following is not None and following not in visited:
                visited.add(following)
                waiting.append(following)
    return False


def _note_gradient(leaves: "Callable[[], Leaves | None]", bit: int, _gradient: Any) -> None:
    if (owner := leaves()) is not None:
        owner.arrived |= bit


_leaves: "weakref.WeakSet[Leaves]" = weakref.WeakSet()
_handles: list[Any] = []


def _listen_to_parts(leaves: Leaves | None = None) -> None:
    """Hear of each module and parameter that any module gets, as long as there are leaves."""
    if leaves is not None:
        _leaves.add(leaves)
    if _leaves and not _handles:
        _handles.append(torch_modules.register_module_module_registration_hook(_note_part))
        _handles.append(torch_modules.register_module_parameter_registration_hook(_note_part))
    while _handles and not _leaves:
        _handles.pop().remove()


def _note_part(module: nn.Module, _name: str, _part: Any) -> None:
    if not torch.compiler.is_compiling():
        for leaves in tuple(_leaves):
            leaves.note_part(module)


def _values_in(results: Any) -> Iterable[Any]:
    """List what a mapping, a sequence or any object holds."""
    if isinstance(results, torch.Tensor):
        return (results,)
    if isinstance(results, list | tuple):
        return results
    if isinstance(results, str | bytes):
        return ()
    if callable(values := getattr(results, "values", None)):
        return values()  # type: ignore[no-any-return]  # of a mapping
    return vars(results).values() if hasattr(results, "__dict__") else ()


def tensors_at_top(results: Any) -> list[Any]:
    """List the tensors among a forward's results that no object there holds."""
    return [value for value in _values_in(results) if isinstance(value, torch.Tensor)]


def tensors_in(results: Any, depth: int = 0) -> Sequence[Any]:
    """List the tensors among a forward's results, within mappings, sequences, and at last any object."""
    if isinstance(results, torch.Tensor):
        return [results]
    return [] if depth > 3 else [t for value in _values_in(results) for t in tensors_in(value, depth + 1)]
