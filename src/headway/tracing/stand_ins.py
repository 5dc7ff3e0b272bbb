"""Replace the functions that run recurrences, experts or windows by stand-ins while a model is recorded or watched."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import nn

from headway.errors import TraceError
from headway.tracing.families import attention, surplus
from headway.tracing.families.attention import unpadded_settings
from headway.tracing.families.recurrences import FUNCTIONS, KERNELS, METHODS, written_out
from headway.tracing.record import Recorder
from headway.tracing.seams import Seams
from headway.tracing.unwrap import plain_checkpoints, replaced


@contextmanager
def recording(
    model: nn.Module, recorder: Recorder, around: Callable[[str, Any, Any], Any] | None = None
) -> Iterator[None]:
    """Record a model's work: operations, attention at its seams, recurrences as such, checkpointed parts once.

    Args:
        model: which runs.
        recorder: of its work.
        around: called with the name of each known function, the function and its stand-in, for what runs instead.
    """
    originals = [] if around is None else [(*holder, holder[0][holder[1]]) for holder in _holders(model)]
    with recorder, Seams(recorder), stand_ins(model, recorder), plain_checkpoints():
        changes = [
            (namespace, name, around(name, original, namespace[name]))
            for namespace, name, original in originals
            if around is not None
        ]
        with replaced(changes):
            yield


@contextmanager
def stand_ins(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Put stand-ins for recurrences, experts and windows of `model`, and for kernels of convolutions, in their places.

    Raises:
        TraceError: a Triton kernel is launched: one that is not known here would meet tensors without data.
    """
    holders = [*_holders(model)]
    changes = [*_recurrences(model, holders, lambda _original, stand_in: partial(stand_in, recorder))]
    for namespace, name in holders:
        if name in KERNELS and (in_pytorch := written_out(namespace[name])) is not None:
            changes.append((namespace, name, in_pytorch))
    methods = surplus.METHODS | attention.METHODS
    changes += _methods(model, methods, lambda _original, stand_in: partial(stand_in, recorder))
    changes += unpadded_settings(model)
    with replaced(changes), _refused_triton(recorder):
        yield


def watched(model: nn.Module, around: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """Put `around(function)` in the place of every function or method of `model` that runs a recurrence."""
    return replaced([*_recurrences(model, _holders(model), lambda original, _stand_in: around(original))])


@contextmanager
def _refused_triton(recorder: Recorder) -> Iterator[None]:
    """Name the kernel and the module where Triton is launched; where nobody imported it, nothing is."""
    triton: Any = sys.modules.get("triton.runtime.jit")
    if triton is None:
        yield
        return
    launch = triton.KernelInterface.__getitem__

    def refuse(kernel: Any, _grid: Any) -> Any:
        while not hasattr(kernel, "__name__"):  # autotuned, with heuristics: the function is inside
            kernel = kernel.fn
        raise TraceError(
            f"module {recorder.module or '(the model)'} launches the Triton kernel {kernel.__name__}, which Headway "
            "cannot read. Trace the model with PyTorch's own operations in its place."
        )

    triton.KernelInterface.__getitem__ = refuse
    try:
        yield
    finally:
        triton.KernelInterface.__getitem__ = launch


def _recurrences(
    model: nn.Module, holders: Iterable[tuple[dict[str, Any], str]], make: Callable[[Any, Any], Any]
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Find functions and methods that run a recurrence, as (holder, name, `make(original, stand_in)`)."""
    for namespace, name in holders:
        if name in FUNCTIONS:
            yield namespace, name, make(namespace[name], FUNCTIONS[name])
    yield from _methods(model, METHODS, make)


def _methods(
    model: nn.Module, methods: dict[tuple[str, str], Any], make: Callable[[Any, Any], Any]
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Find the known methods of a model's modules, as (holder, name, `make(original, stand_in)`)."""
    for module in model.modules():
        for base in type(module).__mro__:
            for (owner, method), stand_in in methods.items():
                if base.__name__ == owner:
                    yield vars(module), method, make(getattr(module, method), partial(stand_in, module))


_NAMES = dict.fromkeys((*FUNCTIONS, *KERNELS))  # in this order
_without: dict[str, tuple[int, int]] = {}  # modules that hold none of these names: which dictionary, and its length


def _holders(model: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Find the known functions among the globals of loaded modules and the attributes of the model's modules."""
    for namespace in (*_globals_that_hold(), *map(vars, model.modules())):
        if namespace.keys().isdisjoint(_NAMES):
            continue
        for name in _NAMES:
            if callable(namespace.get(name)):
                yield namespace, name


def _globals_that_hold() -> list[dict[str, Any]]:
    """Find the loaded modules that define a known name.

    There are thousands and hardly any does, so those that do not are looked into again only where they have changed.
    """
    holders = []
    for path, module in [*sys.modules.items()]:
        namespace = getattr(module, "__dict__", {})
        state = (id(namespace), len(namespace))
        if _without.get(path) == state:
            continue
        if namespace.keys().isdisjoint(_NAMES):
            _without[path] = state
        else:
            holders.append(namespace)
    return holders
