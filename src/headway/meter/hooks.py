"""Hooks on the calls of a watched module, whether torch.compile has gone around them or not."""

import functools
import gc
import inspect
import itertools
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from headway.errors import UsageError

if TYPE_CHECKING:
    import types

    from torch import nn


_EVAL_FRAME = "torch/_dynamo/eval_frame.py"  # functions of this file call compiled code


class CallStack(threading.local):
    """The calls of watched modules under way, of each thread by itself: the outermost of them is a forward."""

    def __init__(self) -> None:
        self.stack: list[Any] = []


class ModuleHooks:
    """The hooks of a watch, on modules and on the modules that torch.compile made from them.

    Args:
        watch: a `ForwardWatch`, which is told that a module begins and ends, and that its hooks are compiled away.
        first: whether its hooks run before those that are there.
        breaks_graphs: whether they run between the parts of a function around the module that is compiled.

    Attributes:
        blocks: paths of the blocks that are hooked.
    """

    def __init__(self, watch: Any, *, first: bool, breaks_graphs: bool) -> None:
        self.breaks_graphs = breaks_graphs
        self._watch, self._first = weakref.ref(watch), first
        self._numbers: dict[int, weakref.ref[nn.Module]] = {}
        self._handles: list[Any] = []
        self._compiled: list[tuple[nn.Module, Any]] = []
        self.blocks: frozenset[str] = frozenset()

    @property
    def are_on(self) -> bool:
        """Tell whether anything is hooked."""
        return bool(self._numbers)

    def close(self) -> None:
        """Leave all modules as they were."""
        for handle in self._handles:
            handle.remove()
        for module, call in self._compiled:
            module._compiled_call_impl = call
        for number in self._numbers:
            _hooked.pop(number, None)
        self._numbers, self._handles, self._compiled, self.blocks = {}, [], [], frozenset()

    def watch(self, module: "nn.Module", original: "nn.Module | None" = None) -> None:
        """Hook a module, the module that it was compiled from, and all modules that torch.compile has made of it."""
        for model in dict.fromkeys([module, original or module, *_compiled_around(module, original or module)]):
            if not any(reference() is model for reference in self._numbers.values()):
                self._hook(model)

    def watch_compiled(self, module: "nn.Module") -> bool:
        """Hook the compiled form of a module that torch.compile is compiling; False if that form is unknown."""
        for frame in _frames():
            caller = frame.f_locals.get("self")
            if isinstance(caller, _compiled_class()):
                if caller._orig_mod is module:
                    self.watch(caller)
                if any(reference() is caller for reference in self._numbers.values()):
                    return True
        if module._compiled_call_impl is not None and not any(reference is module for reference, _ in self._compiled):
            self._hook(module)
        return any(frame.f_locals.get("self") is reference for frame in _frames() for reference, _ in self._compiled)

    def is_within_compiled(self) -> bool:
        """Tell whether the caller is a function that torch.compile has compiled, or a part of it."""
        return any(frame.f_code.co_filename.endswith(_EVAL_FRAME) for frame in _frames())

    def watch_blocks(self, model: "nn.Module") -> None:
        """Hook the blocks of a model that leaves some of them out at random."""
        from headway.tracing.build import layer_drops
        from headway.tracing.classify import checkpointable_blocks
        from headway.tracing.unwrap import plain_path

        for path in checkpointable_blocks(model) if layer_drops(model) else ():
            block = model.get_submodule(path)
            if not is_compiled(block) and block._compiled_call_impl is None:
                begins = functools.partial(_block_begins, self._number(block), plain_path(path))
                self.blocks |= {plain_path(path)}
                self._handles.append(hook(block, "forward_pre", begins))

    def _number(self, module: "nn.Module") -> int:
        number = next(_numbers)
        self._numbers[number] = weakref.ref(module)
        _hooked[number] = self._watch, weakref.ref(module)
        return number

    def _hook(self, module: "nn.Module") -> None:
        import torch

        torch.compiler.assume_constant_result(_note_compiled)  # type: ignore[no-untyped-call]  # the compiler runs it
        number = self._number(module)
        before: Callable[..., None] = functools.partial(_before, number)
        after: Callable[..., None] = functools.partial(_after, number)
        compiled = module._compiled_call_impl
        if compiled is not None:  # `module.compile()` compiles a module's hooks with it
            module._compiled_call_impl = _around(module, compiled, before, after)
            self._compiled.append((module, compiled))
            return
        if self.breaks_graphs:
            before, after = map(torch.compiler.disable, (before, after))
        self._handles += [
            hook(module, "forward_pre", before, prepend=self._first, with_kwargs=True),
            hook(module, "forward", after, always_call=True, with_kwargs=True),
        ]


class _Hooks(OrderedDict[int, Any]):
    """Hooks of a module, of which files and copies of the module have the others' alone."""

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter([item for item in self.items() if item[0] not in _unsaved])


_unsaved: set[int] = set()  # identities of the hooks that files and copies leave out


def hook(module: "nn.Module", kind: str, function: Callable[..., None], **options: bool) -> Any:
    """Hook a module so that a file of it, saved whole, opens where Headway is not installed.

    Args:
        module: any.
        kind: "forward" or "forward_pre".
        function: the hook.
        options: as torch takes them.

    Returns:
        The handle, by which to remove the hook.
    """
    for name in (f"_{kind}_hooks", f"_{kind}_hooks_with_kwargs", "_forward_hooks_always_called"):
        if vars(module).get(name) == {}:  # hooks that are there already have handles, which know their dictionary
            vars(module)[name] = _Hooks()
    handle = getattr(module, f"register_{kind}_hook")(function, **options)
    _unsaved.add(handle.id)
    return handle


def guarded(function: Callable[..., None], on_error: Callable[[Exception], None]) -> Callable[..., None]:
    """Return a hook that gives its errors to `on_error`, since what calls it is the loop's."""

    def call(*args: Any) -> None:
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001 - whatever it is, an observer ends no loop
            on_error(error)

    return call


# A hook finds its watch here by a number of its own, so that a model that is watched can be copied and pickled, and the
# copy is not counted.
_numbers = itertools.count()
_hooked: "dict[int, tuple[weakref.ref[Any], weakref.ref[nn.Module]]]" = {}


def _watch_of(number: int, module: "nn.Module") -> Any:
    watch, own = _hooked.get(number, (None, None))
    return watch() if watch is not None and own is not None and own() is module else None


def _before(number: int, module: "nn.Module", _args: Any, kwargs: Mapping[str, Any] | None = None) -> None:
    """Begin a call. A hook that is removed in the middle of a call may run once more, without its keywords."""
    import torch

    if torch.compiler.is_compiling():
        _note_compiled(number)
    elif kwargs is not None and (watch := _watch_of(number, module)) is not None:
        watch.begin(module)


def _after(number: int, module: "nn.Module", args: tuple[Any, ...], *results: Any) -> None:
    import torch

    if torch.compiler.is_compiling() or len(results) < 2:
        return
    if (watch := _watch_of(number, module)) is not None:
        watch.end(module, args, *results)


def _frames() -> "Iterator[types.FrameType]":
    frame: Any = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _note_compiled(number: int) -> None:
    """Note that a hook is being compiled: the compiler runs this once, the compiled code never."""
    import torch

    watch, own = _hooked.get(number, (None, None))
    if watch is not None and own is not None and (owner := watch()) is not None and (module := own()) is not None:
        torch.compiler.disable(owner.is_traced)(module)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _block_begins(number: int, path: str, block: "nn.Module", _args: Any) -> None:
    import torch

    if not torch.compiler.is_compiling() and (watch := _watch_of(number, block)) is not None:
        watch.block_begins(path)


def _around(
    module: "nn.Module", compiled: Callable[..., Any], before: Callable[..., None], after: Callable[..., None]
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        before(module, args, kwargs)
        results = None
        try:
            results = compiled(*args, **kwargs)
            return results
        finally:
            after(module, args, kwargs, results)

    return call


def _compiled_class() -> Any:
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")  # nothing is compiled unless somebody imported it
    return () if frames is None else frames.OptimizedModule


def is_compiled(module: "nn.Module") -> bool:
    """Say whether a module is the compiled form of another module."""
    return isinstance(module, _compiled_class())


def _compiled_around(*models: "nn.Module") -> "list[nn.Module]":
    """Find the compiled forms of models by references to their class, since models do not know them."""
    kind = _compiled_class()
    compiled = [item for item in gc.get_referrers(kind) if type(item) is kind] if kind else []
    return [item for item in compiled if any(item._orig_mod is model for model in models)]


def outermost(model: "nn.Module") -> "Iterator[nn.Module]":
    """Iterate over the outermost modules below a model: its parts, and the items of its lists."""
    from torch import nn

    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from outermost(child)
        else:
            yield child


def arguments_by_name(module: "nn.Module", args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Give arguments their names; a tuple where the forward takes them by position alone."""
    if not args:
        return dict(kwargs)
    names = _names_of(module)
    if len(args) > len(names):
        if kwargs:
            raise UsageError(f"{type(module).__name__} takes arguments by position and by name that have no name.")
        return args
    return {**dict(zip(names, args, strict=False)), **kwargs}


_names: "weakref.WeakKeyDictionary[nn.Module, tuple[Any, list[str]]]" = weakref.WeakKeyDictionary()


def _names_of(module: "nn.Module") -> list[str]:
    """Name the arguments that a module takes by position, itself left out; they are read once for each forward."""
    own = vars(module).get("forward", type(module).forward)
    forward, names = _names.get(module, (None, []))
    if forward is None or forward() is not own:
        from headway.tracing.unwrap import unwrapped

        parameters = inspect.signature(unwrapped(module).forward).parameters
        names = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        _names[module] = weakref.ref(own), names
    return names
