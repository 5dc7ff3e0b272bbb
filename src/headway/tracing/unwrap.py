"""Strip a model of what runs it: wrappers, shards, activation checkpointing, hooks that only watch.

Data parallelism, sharding and activation checkpointing change where and how often a model's operations run, not what
one step must compute. All of them leave marks on the modules (wrappers, subclasses, hooks, sharded parameters), which
a twin does without. So do hooks by which others watch the model. The model itself is not touched.
"""

import copy
import dis
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from headway.errors import TraceError

_COMPOSABLE_STATE = "__composable_api_state_key"  # under such keys fully_shard keeps its state in a module's __dict__
# Names under which a wrapper holds a module whose path is the wrapper's own.
# Source: torch.compile; torch's checkpoint_wrapper; FullyShardedDataParallel (PyTorch 2.11).
WRAPPED = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers around all of it."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel) or _is_flat(model):
        inner: nn.Module = model.module  # type: ignore[assignment]  # torch types attributes as tensors too
        return unwrapped(inner)
    if _is_compiled(model):
        return unwrapped(model._orig_mod)  # type: ignore[arg-type]  # a module
    peft = sys.modules.get("peft")  # a peft model cannot exist where peft was not imported
    if peft is not None and isinstance(model, peft.PeftModel) and not model.active_peft_config.is_prompt_learning:
        return unwrapped(model.get_base_model())
    return model


def plain_path(path: str) -> str:
    """Return a path within a model without the wrappers on its way."""
    return ".".join(part for part in path.split(".") if part not in WRAPPED)


def lies_within(path: str, roots: Iterable[str]) -> bool:
    """Say whether a module's path is one of some roots or lies below one."""
    return any(path == root or path.startswith(f"{root}.") or not root for root in roots)


def refuse_flat(model: nn.Module) -> None:
    """Refuse a model that FSDP1 wraps.

    Raises:
        TraceError: a wrapper keeps the parameters in a form that no longer shows their shapes.
    """
    for path, module in model.named_modules():
        if _is_flat(module):
            raise TraceError(
                f"{path or 'the model'} is wrapped by FullyShardedDataParallel, which keeps flat pieces of "
                "parameters without their shapes. Trace the model before wrapping, or shard it with "
                "torch.distributed.fsdp.fully_shard."
            )


def is_sharded(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is a DTensor; torch.distributed is not loaded for it."""
    dtensor: Any = sys.modules.get("torch.distributed.tensor")  # no tensor is sharded where nobody imported the module
    return dtensor is not None and isinstance(tensor, dtensor.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor; a tensor that is not sharded is all its own."""
    part: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]  # a DTensor
    return part


def unsharded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the whole's shape for one rank's shard: without data if of floats, else with all its data.

    Raises:
        TraceError: integers are sharded, so that no rank alone holds what drives the model's Python.
    """
    if not is_sharded(tensor):
        return tensor
    if not tensor.is_floating_point():
        placements: Any = tensor.placements  # type: ignore[attr-defined]  # a DTensor
        if any(not placement.is_replicate() for placement in placements):
            raise TraceError(
                f"a buffer of {tensor.dtype} and shape {tuple(tensor.shape)} is sharded over ranks, but its values "
                "may change what the model runs. Trace the model before sharding."
            )
        return local(tensor)
    full_tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(full_tensor, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else full_tensor


def copy_modules(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a model's modules without the marks of sharding and checkpointing, and without hooks that only watch.

    Args:
        model: its parameters and buffers are all in `memo`.
        memo: as `copy.deepcopy` takes it.
    """
    # hooks by which others watch the model: deepcopy leaves them alone, as they may hold anything, and the twin goes
    # without them
    own = set(model.modules())
    packages = {_package(type(module)) for module in own} - {"__main__"}  # a script may hold a model and its monitor
    watching = {id(hook): hook for module in own for hook in _hooks(module) if _only_watches(hook, own, packages)}
    memo |= watching

    # an empty module of the original class for each one that sharding or checkpointing altered
    shells: list[tuple[nn.Module, nn.Module]] = []
    for module in model.modules():
        cls: Any = _own_class(module)
        laid_over = [module.__dict__.get("forward"), *_hooks(module)]
        altered = cls is not type(module) or any(_is_parallel(function) for function in laid_over)
        if altered and not _is_compiled(module):
            shells.append((module, cls.__new__(cls)))
            memo[id(module)] = shells[-1][1]

    # compiled modules are copied as what they were compiled from, inner ones first
    for module in reversed([*model.modules()]):
        if _is_compiled(module):
            memo[id(module)] = copy.deepcopy(module._orig_mod, memo)

    # the shells' attributes, each by itself: fully_shard refuses to be copied, and hooks hold process groups
    for module, shell in shells:
        state = {key: value for key, value in module.__dict__.items() if not key.startswith(_COMPOSABLE_STATE)}
        if _is_parallel(state.get("forward")):  # transformers lays its own over a module's
            del state["forward"]
        for name in _HOOKS:
            state[name] = type(state[name])((key, h) for key, h in state[name].items() if not _is_parallel(h))
        shell.__dict__.update(copy.deepcopy(state, memo))

    # the rest of the model, without what the copies took over of wrappers, watchers and the original
    twin = _bare(copy.deepcopy(model, memo))
    for module in twin.modules():
        for name in _HOOKS:
            hooks = getattr(module, name)
            for key in [key for key, hook in hooks.items() if id(hook) in watching]:
                del hooks[key]
        _let_go(module, memo)
    return twin


def _hooks(module: nn.Module) -> Iterator[Any]:
    return itertools.chain.from_iterable(getattr(module, name).values() for name in _HOOKS)


def _only_watches(hook: Any, own: set[nn.Module], packages: set[str]) -> bool:
    """Say whether a hook is laid on a model from outside and changes nothing that it computes.

    A hook is the model's own if it is a method of one of its modules, or comes from the package of one of them: PyTorch
    lays hooks on for normalised weights, transformers to collect hidden states. A function that returns something else
    than None changes what the module takes or gives; of a lambda, which returns whatever it calls, nobody can say, and
    it is taken to watch.
    """
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    if isinstance(owner, nn.Module) and owner in own:
        return False
    classes = type(hook).__mro__[:-1] if owner is None else type(owner).__mro__[:-1]
    if any(_package(thing) in packages for thing in (hook, *classes)):
        return False
    function = getattr(hook, "__func__", hook)
    called = function if isinstance(function, types.FunctionType) else type(hook).__call__
    code = getattr(called, "__code__", None)
    if code is None:
        return False
    return code.co_name == "<lambda>" or not _returns_something(code)


def _package(thing: Any) -> str:
    return str(getattr(thing, "__module__", "")).partition(".")[0]


def _returns_something(code: types.CodeType) -> bool:
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "NOP", "RESUME")]
    for before, step in itertools.pairwise(steps):
        if step.opname == "RETURN_VALUE" and not (before.opname == "LOAD_CONST" and before.argval is None):
            return True
    return any(step.opname == "RETURN_CONST" and step.argval is not None for step in steps)


def _let_go(module: nn.Module, memo: dict[int, Any]) -> None:
    """Take from a copied module its references to the original, and its checkpointing."""
    for name, value in vars(module).items():
        if hasattr(value, "_torchdynamo_orig_callable"):  # a method compiled by itself is bound to the original
            setattr(module, name, copy.deepcopy(value._torchdynamo_orig_callable, memo))
        elif isinstance(value, types.FunctionType) and value.__closure__:  # a lambda over another module
            setattr(module, name, _rebound(value, memo))
    if getattr(module, "gradient_checkpointing", False):
        module.gradient_checkpointing = False  # type: ignore[assignment]  # torch types attributes as modules
    if "forward" in vars(module):  # laid over by a trainer
        module.forward = _rebound(vars(module)["forward"], memo)


@contextmanager
def replaced(changes: Iterable[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Put other values in the places of some for a while, each given as (namespace, name, value)."""
    missing, before = object(), list[tuple[dict[str, Any], str, Any]]()
    try:
        for namespace, name, value in changes:
            before.append((namespace, name, namespace.get(name, missing)))
            namespace[name] = value
        yield
    finally:
        for namespace, name, original in reversed(before):
            if original is missing:
                del namespace[name]
            else:
                namespace[name] = original


def plain_checkpoints() -> AbstractContextManager[None]:
    """Run functions that a model's own code hands to `torch.utils.checkpoint.checkpoint` plainly, once."""
    stand_ins = {"CheckpointFunction": _Plain, "_checkpoint_without_reentrant_generator": _around_nothing}
    return replaced((vars(torch.utils.checkpoint), name, stand_in) for name, stand_in in stand_ins.items())


class _Plain:
    """Stands in for the autograd function of reentrant checkpoints."""

    @staticmethod
    def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        return function(*args)


def _around_nothing(*_args: Any, **_options: Any) -> Iterator[None]:
    """Stand in for a checkpoint's work before its function and after."""
    yield


def _bare(module: nn.Module) -> nn.Module:
    """Take checkpoint wrappers out of a copied model, so that names are the plain model's."""
    if isinstance(module, CheckpointWrapper):
        inner: nn.Module = module._checkpoint_wrapped_module
        return _bare(inner)
    for name, child in module.named_children():
        module._modules[name] = _bare(child)
    return module


def _rebound(thing: Any, memo: dict[int, Any]) -> Any:
    """Copy a function so that what it holds of the original model is the twin's; anything else stays as it is.

    It holds what it closes over and what its arguments default to.

    `copy.deepcopy` follows bound methods and leaves functions, with all that they close over, alone.
    """
    if id(thing) in memo:
        return memo[id(thing)]
    copied = thing
    if isinstance(thing, types.MethodType):
        copied = types.MethodType(_rebound(thing.__func__, memo), _rebound(thing.__self__, memo))
    elif isinstance(thing, functools.partial):
        bound = [_rebound(argument, memo) for argument in thing.args]
        keywords = {name: _rebound(argument, memo) for name, argument in thing.keywords.items()}
        copied = functools.partial(_rebound(thing.func, memo), *bound, **keywords)
    elif isinstance(thing, types.FunctionType) and (thing.__closure__ or thing.__defaults__ or thing.__kwdefaults__):
        cells = None if thing.__closure__ is None else tuple(types.CellType() for _ in thing.__closure__)
        copied = types.FunctionType(thing.__code__, thing.__globals__, thing.__name__, None, cells)
        memo[id(thing)] = functools.update_wrapper(copied, thing)  # before it is followed: it may close over itself
        for cell, original in zip(cells or (), thing.__closure__ or (), strict=True):
            with suppress(ValueError):  # a cell that is empty stays so
                cell.cell_contents = _rebound(original.cell_contents, memo)
        copied.__defaults__ = tuple(_rebound(value, memo) for value in thing.__defaults__ or ()) or None
        copied.__kwdefaults__ = {key: _rebound(value, memo) for key, value in (thing.__kwdefaults__ or {}).items()}
        if not _differs(copied, thing):  # holds nothing of the model: seams know a function by itself
            copied = memo[id(thing)] = thing
    elif hasattr(thing, "__wrapped__") and not isinstance(thing, types.FunctionType):
        copied = object.__new__(type(thing))  # an object that stands for a function, as accelerate's mixed precision
        copied.__dict__.update({key: _rebound(value, memo) for key, value in vars(thing).items()})
    return copied


def _differs(copied: types.FunctionType, function: types.FunctionType) -> bool:
    """Tell whether a copied function holds other things than the function does, itself left aside."""

    def held(of: types.FunctionType) -> Iterator[Any]:
        for cell in of.__closure__ or ():
            with suppress(ValueError):
                yield cell.cell_contents
        yield from of.__defaults__ or ()
        yield from (of.__kwdefaults__ or {}).values()

    pairs = zip(held(copied), held(function), strict=True)
    return any(new is not old and not (new is copied and old is function) for new, old in pairs)


def _is_compiled(module: nn.Module) -> bool:
    dynamo: Any = sys.modules.get("torch._dynamo")  # no module is compiled where nobody imported dynamo
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def _is_flat(module: nn.Module) -> bool:
    return any(base.__name__ == "FullyShardedDataParallel" for base in type(module).__mro__)


def _own_class(module: nn.Module) -> type[nn.Module]:
    """Return a module's class before `fully_shard` made a subclass of it and of its own mixin."""
    cls = type(module)
    while any(_is_parallel(base) and not issubclass(base, nn.Module) for base in cls.__bases__):
        cls = next(base for base in cls.__bases__ if issubclass(base, nn.Module))
    return cls


def _is_parallel(thing: Any) -> bool:
    """Say whether a class, hook or forward belongs to the distributed package of PyTorch or transformers."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    return str(getattr(thing, "__module__", "")).startswith(("torch.distributed.", "transformers.distributed."))
