"""Names in a profiler's trace: the step, its phases, and modules by path, from hooks that are there while it records.

Hooks stand outside compiled regions: a compiled block is one unit, and what it holds has no names of its own. They are
plain functions that find a module's path in a table, so that a model can be copied and pickled meanwhile.
"""

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headway.meter.pauses import HostEvidence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

_TIMED = "headway: a call that is timed"  # in place of a module's path, which readers would look for in the model
_CALLS, _ROUNDS = 32, 4  # calls of a timing, and timings; the fastest counts, because nothing has interrupted it
_COMPILED = "_torchdynamo_orig_callable"  # attribute of every function that torch.compile gives back


class ProfilerCost:
    """Times small calls without the profiler, and again while it records.

    What the profiler adds to a step is many times the same: it notes each operator's name, time and shapes, and the
    hooks name each module. So the costs of one operator and of one module tell how far a step of many small operators
    is stretched, whatever else makes steps faster or slower meanwhile. Some hundred calls take under a millisecond.
    """

    def __init__(self) -> None:
        from torch import nn, ones

        self.module = nn.Identity()
        self._tensor, self._factor = ones(1, device="cpu"), ones(1, device="cpu")
        self._operator_s, self._module_s = self._times()

    def added(self) -> dict[str, float]:
        """Time the calls again, and give the difference: `operator_ns` and `module_ns` of one call each [ns]."""
        operator_s, module_s = self._times()
        return {
            "operator_ns": max(0.0, operator_s - self._operator_s) * 1e9,
            "module_ns": max(0.0, module_s - self._module_s) * 1e9,
        }

    def _times(self) -> tuple[float, float]:
        """Time of an operator of one element, and of a module that does nothing [s]."""
        import torch

        with torch.no_grad():
            return _call_s(lambda: self._tensor.mul_(self._factor)), _call_s(lambda: self.module(self._tensor))


def _call_s(call: Callable[[], Any]) -> float:
    """Time of one call in the fastest of some rounds [s]."""
    rounds = []
    for _ in range(_ROUNDS):
        begin_s = time.perf_counter()
        for _ in range(_CALLS):
            call()
        rounds.append(time.perf_counter() - begin_s)
    return min(rounds) / _CALLS


class Annotations:
    """Writes names of this process's activities into the trace that a profiler records.

    Args:
        model: whose modules are named; None for none.
    """

    def __init__(self, model: "nn.Module | None") -> None:
        self._model = model
        self._handles: list[Any] = []
        self._wrapped: list[tuple[nn.Module, Any]] = []
        self._host = HostEvidence(_enter)
        self._cost: ProfilerCost | None = None
        self._added_ns: dict[str, Any] = {}
        self._step: Any = None
        self._phase: tuple[str, Any] | None = None
        self._named: list[tuple[str, Any]] = []  # phases that the loop names and that last, the innermost last

    def prepare(self) -> None:
        """Time calls without a profiler, before it starts."""
        self._cost = ProfilerCost()

    def open(self) -> None:
        """Put the hooks in, and begin to watch the host."""
        self._host.open()
        units = [] if self._model is None else self._named_units(self._model)
        for path, module in units:
            self._hook(module, path)
        if self._cost is not None:
            if len(units) > 1:  # in a step without named modules none costs anything
                self._hook(self._cost.module, _TIMED)
            self._added_ns = self._cost.added()

    def _named_units(self, root: "nn.Module") -> "list[tuple[str, nn.Module]]":
        """List the modules to hook, by path: the model itself and the modules in it, compiled ones as one unit."""
        from headway.tracing.unwrap import unwrapped

        outside = _compiled_around()
        units = [(path, module) for path, module in _units(unwrapped(root), outside) if path]
        return [("", outside.get(id(root), root)), *units]

    def close(self) -> None:
        """Remove the hooks, and end the annotations that are open."""
        self._host.close()
        for handle in self._handles:
            handle.remove()
        for module, call in self._wrapped:
            module._compiled_call_impl = call
            _owners.pop(module, None)
        self._handles, self._wrapped = [], []
        for module in [module for module, (owner, _) in _owners.items() if owner is self]:
            del _owners[module]
        self.step(None)

    def step(self, number: int | None) -> None:
        """End the step that lasts, and begin another one."""
        self.switch(None)
        # A phase that the loop names may go on in the next step: its annotation lies within one step.
        names = [name for name, _ in self._named]
        while self._named:
            self.leave()
        if self._step is not None:
            _exit(self._step)
        self._step = None
        if number is not None:
            self._host.step(number)
            self._step = _enter(f"ProfilerStep#{number}")
            for name in names:
                self.enter(name)

    def enter(self, name: str) -> None:
        """Begin a phase that the loop names."""
        self._named.append((name, _enter(f"loop:{name}")))

    def leave(self) -> None:
        """End the innermost phase that the loop names, if there is one."""
        if self._named:
            _exit(self._named.pop()[1])

    @property
    def host(self) -> dict[str, Any]:
        """Observations of the host, JSON-ready; see `HostEvidence.facts`, and what the profile adds to a call [ns]."""
        return {**self._host.facts(), "added_ns": self._added_ns}

    def switch(self, phase: str | None) -> None:
        """End the phase that lasts, and begin another one; the same one goes on."""
        if self.phase == phase:
            return
        if self._phase is not None:
            _exit(self._phase[1])
        self._phase = None if phase is None else (phase, _enter(f"phase:{phase}"))

    @property
    def phase(self) -> str | None:
        """The phase that lasts."""
        return None if self._phase is None else self._phase[0]

    def _hook(self, module: "nn.Module", path: str) -> None:
        _owners[module] = self, path
        compiled = module._compiled_call_impl
        if compiled is not None:  # `module.compile()` compiles a module's hooks with it
            module._compiled_call_impl = _named(module, compiled)
            self._wrapped.append((module, compiled))
            return
        # First of all and last of all: the gathers of a sharded module are its own.
        self._handles.append(module.register_forward_pre_hook(_before_forward, prepend=True))
        self._handles.append(module.register_forward_hook(_after_forward, always_call=True))

    def before(self, module: "nn.Module", path: str) -> None:
        """Note that a module's forward begins in this thread."""
        if path:
            _lasting().append((module, _enter(path if path == _TIMED else f"module:{path}")))
        elif self._phase is None and module.training:
            self.switch("forward")
            _lasting().append((module, None))

    def after(self, module: "nn.Module") -> None:
        """Note that a module's forward ends, or is left by an error, and with it the forwards within."""
        lasting = _lasting()
        if all(module is not entered for entered, _ in lasting):
            return
        while lasting:
            entered, record = lasting.pop()
            if record is not None:
                _exit(record)
            elif self.phase == "forward":
                self.switch(None)
            if entered is module:
                return


# The hooks find a module's path here, and whose it is: a copy of a module has none.
_owners: "weakref.WeakKeyDictionary[nn.Module, tuple[Annotations, str]]" = weakref.WeakKeyDictionary()
_of_thread = threading.local()  # forwards that last in a thread: backward recomputes in threads of its own


def _lasting() -> list[tuple[Any, Any]]:
    if not hasattr(_of_thread, "forwards"):
        _of_thread.forwards = []
    forwards: list[tuple[Any, Any]] = _of_thread.forwards
    return forwards


def _before_forward(module: "nn.Module", _args: Any) -> None:
    import torch

    if not torch.compiler.is_compiling() and (owner := _owners.get(module)) is not None:
        owner[0].before(module, owner[1])


def _after_forward(module: "nn.Module", _args: Any, _output: Any) -> None:
    import torch

    if not torch.compiler.is_compiling() and (owner := _owners.get(module)) is not None:
        owner[0].after(module)


def _named(module: "nn.Module", compiled: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        _before_forward(module, args)
        try:
            return compiled(*args, **kwargs)
        finally:
            _after_forward(module, args, None)

    return call


def _enter(name: str) -> Any:
    from torch.profiler import record_function

    return record_function(name).__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _exit(record: Any) -> None:
    record.__exit__(None, None, None)


def _compiled_around() -> dict[int, Any]:
    """Find the modules that torch.compile made, by the original module: a model does not say that its loop compiled it.

    An object refers to its class. A list of all objects would do as well, and would hold the tuples that other threads
    are making just then, which Python ends with a SystemError ("bad argument to internal function") in those threads.
    """
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")  # nothing is compiled unless this is imported
    if dynamo is None:
        return {}
    objects = gc.get_referrers(dynamo.OptimizedModule)
    return {id(item._orig_mod): item for item in objects if type(item) is dynamo.OptimizedModule}


def _units(model: "nn.Module", outside: dict[int, Any]) -> "Iterator[tuple[str, nn.Module]]":
    """List modules by path, without modules inside a compiled one; a module with several paths has its first."""
    from headway.tracing.unwrap import WRAPPED

    visited: set[int] = set()
    stack = [("", model)]
    while stack:
        path, module = stack.pop()
        if id(module) in visited:
            continue
        visited.add(id(module))
        if (unit := outside.get(id(module), module)) is not module or _is_compiled(module):
            yield path, unit
            continue
        children = dict(module.named_children())
        if not WRAPPED.intersection(children):
            yield path, module
        below = [(path if name in WRAPPED else f"{path}.{name}".lstrip("."), children[name]) for name in children]
        stack += reversed(below)


def _is_compiled(module: Any) -> bool:
    """Tell whether a module runs as one compiled unit, around which its own hooks stand."""
    forward = module.forward
    # `compile_blocks` lays its forward over the module's.
    laid_over = getattr(vars(module).get("forward"), "__closure__", None) or ()
    return (
        module._compiled_call_impl is not None
        or hasattr(module, "_orig_mod")
        or hasattr(forward, _COMPILED)
        or any(hasattr(cell.cell_contents, _COMPILED) for cell in laid_over)
    )
