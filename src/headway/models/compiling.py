"""Compile a model's repeated blocks, each kind once for packs of every size, and notice when one compiles again.

A block's own forward is compiled and laid over the module as `forward`: hooks, those of FSDP among them, and names of
parameters stay as they are, and the blocks of a tower share one compilation, as their parameters are its inputs. The
sizes that differ from pack to pack (slots, patches, segments, the longest of them) are marked as dynamic before the
first compilation, so that one is enough. A block's first forwards in training, and in evaluation, are its warm-up;
whatever compiles later does so because a guard failed, and is a recompilation.
"""

import inspect
import re
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.fx.experimental._config as symbolic_shapes_config
from torch import nn
from transformers import PreTrainedModel

from headway.errors import TrainingError
from headway.models.blocks import blocks
from headway.models.recompute import is_recomputed

# Numbers of Python among blocks' arguments that differ from pack to pack: the longest segment, by all its names, and
# the slots of a pack that several processes share.
_DYNAMIC_NUMBERS = r"L\['(kwargs'\]\[')?((pack_)?max_(seqlen|length)(_[qk])?'\]|pack_split'\]\.slots)"
_OF_TOWERS = ("image_", "video_")


class Compilations(NamedTuple):
    """Compilations by torch.compile since the last look.

    Attributes:
        happened: whether it compiled anything.
        guards: of each recompilation, the function and the guard that failed.
        news: those of `guards` that no earlier answer named, numbers aside.
    """

    happened: bool
    guards: tuple[str, ...]
    news: tuple[str, ...]


class CompileWatch:
    """Tells compilations that were to be expected from recompilations, in this process.

    Args:
        is_strict: whether a recompilation is an error.
    """

    def __init__(self, *, is_strict: bool = False) -> None:
        self._is_strict = is_strict
        self._happened = False
        self._guards: list[str] = []
        self._reported_kinds: set[str] = set()
        self._last: Any = None
        self._num_failed: dict[types.CodeType, int] = {}
        self._look(expected=True)  # forgets what this process compiled before
        self._happened, self._guards = False, []

    def since(self) -> Compilations:
        """Compilations since the last call.

        Raises:
            TrainingError: something compiled again, and that is an error.
        """
        self._look(expected=False)
        guards, happened = tuple(self._guards), self._happened
        self._guards, self._happened = [], False
        kinds = {re.sub(r"\d+", "#", guard): guard for guard in guards}
        news = tuple(guard for kind, guard in kinds.items() if kind not in self._reported_kinds)
        self._reported_kinds |= kinds.keys()
        if guards and self._is_strict:
            raise TrainingError(
                f"{len(guards)} recompilations after the warm-up, but speed.recompiles=error forbids them: "
                f"{'; '.join(news or guards)}. The compiler takes a size or setting as constant, but it differs from "
                "pack to pack. Set speed.recompiles=warn to go on, or speed.compile=false."
            )
        return Compilations(happened, guards, news)

    def warm_up(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a forward that is expected to compile."""
        self._look(expected=False)
        out = forward(*args, **kwargs)
        self._look(expected=True)
        return out

    def _look(self, *, expected: bool) -> None:
        failed = self._failed()
        for metrics in self._newest():  # a first compilation has no `recompile_reason`
            self._happened = True
            gives_up = "recompile limit" in (metrics.fail_reason or "")  # from then on this function runs uncompiled
            if metrics.recompile_reason is None or (expected and not gives_up):
                continue
            # One guard failed of each compilation that there was; torch's own record names that of one of them.
            function = f"{metrics.compile_id}".partition("/")[0] + "/"
            reasons = [reason for reason in failed if reason.startswith(function)] or [metrics.recompile_reason]
            guards = " and ".join(dict.fromkeys(map(_guard, reasons)))
            limit = ", and it now runs uncompiled, because torch's recompile limit is reached" if gives_up else ""
            self._guards.append(f"{metrics.co_name}: {guards}{limit}")

    def _failed(self) -> list[str]:
        """List the guards that failed since the last call: why compiled code could not be reused."""
        dynamo = sys.modules.get("torch._dynamo.utils")  # nothing has been compiled while dynamo is not imported
        new: list[str] = []
        for code, reasons in (dynamo.guard_failures if dynamo is not None else {}).items():
            num_reported = self._num_failed.get(code, 0)
            new += reasons[num_reported if num_reported <= len(reasons) else 0 :]  # torch._dynamo.reset forgets them
            self._num_failed[code] = len(reasons)
        return new

    def _newest(self) -> list[Any]:
        """List torch's compilation records since the last call, as far back as torch keeps them (64)."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        new: list[Any] = []
        for metrics in reversed(dynamo.get_compilation_metrics() if dynamo is not None else []):
            if metrics is self._last:
                break
            new.append(metrics)
        self._last = new[0] if new else self._last
        return new[::-1]


def _guard(reason: str) -> str:
    """Take the guard out of a reason such as `0/1: L['x'].size()[0] == 3  # source line`, with a stack below."""
    return reason.partition("\n")[0].partition("  #")[0].partition(": ")[2].strip()


class WarmUp:
    """The forwards of a block that may compile: two, and then the first of another size.

    Behind a graph break, where sizes cannot be marked, torch finds out from two packs what differs between packs.
    """

    def __init__(self) -> None:
        self._num_forwards = 0
        self._sizes: set[int] = set()

    def is_over(self, size: int) -> bool:
        """Tell whether a forward of this size [slots] comes after the warm-up; one that does not belongs to it."""
        if self._num_forwards >= 2 and (size in self._sizes or len(self._sizes) >= 2):
            return True
        self._num_forwards += 1
        self._sizes.add(size)
        return False


def compile_blocks(model: PreTrainedModel, watch: CompileWatch, backend: str = "inductor") -> int:
    """Compile every block of a model; call it after `recompute_blocks`.

    Args:
        model: on its device or without data; sharded before or afterwards.
        watch: is told which forwards are expected to compile.
        backend: of torch.compile.

    Returns:
        Number of blocks.

    Raises:
        ConfigError: the model has no blocks.
    """
    sources = torch.compiler.config.dynamic_sources
    if _DYNAMIC_NUMBERS not in sources:
        torch.compiler.config.dynamic_sources = f"{sources},{_DYNAMIC_NUMBERS}".strip(",")
    model_blocks = blocks(model)
    for block in model_blocks:
        _compile(block.module, watch, backend)
    return len(model_blocks)


def _compile(module: Any, watch: CompileWatch, backend: str) -> None:
    plain = types.MethodType(_own_forward(type(module)), module)
    judging = torch.compile(plain, backend=backend)
    training = judging
    if is_recomputed(module):
        training = torch.compile(_recomputed(module, plain), backend=backend)
        # The graph holds the checkpoint now; transformers 5.17's checkpoint around `__call__` would run everything once
        # more.
        module._gradient_checkpointing_func = _at_once
    warm_ups: defaultdict[tuple[bool, bool], WarmUp] = defaultdict(WarmUp)
    names = inspect.signature(plain).parameters.keys()

    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _alike(args, kwargs, names)
        hidden = _mark_dynamic(args, kwargs)
        run = training if module.training else judging
        if warm_ups[module.training, torch.is_grad_enabled()].is_over(hidden.shape[-2]):
            return run(*args, **kwargs)
        with _one_code_for_all_sizes(hidden.device):
            return watch.warm_up(run, args, kwargs)

    module.forward = forward


def _own_forward(cls: type[nn.Module]) -> types.FunctionType:
    """A block's forward as its class wrote it, without what transformers wraps around it to recompute it.

    Wrapped ones share one code object, to which torch keeps its compilations: towers would look through each other's.
    """
    forward: Any = cls.forward
    while forward.__code__.co_name == "forward_with_checkpointing":
        forward = forward.__wrapped__
    assert isinstance(forward, types.FunctionType)
    return forward


def _recomputed(module: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
    checkpointed, key = module._gradient_checkpointing_func, (type(module), module._gradient_checkpointing_func)

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpointed(plain, *args, **kwargs)

    if key not in _CODES:
        _CODES[key] = recomputed.__code__.replace(co_name=f"{type(module).__name__}_recomputed")
    recomputed.__code__ = _CODES[key]
    return recomputed


def _at_once(forward: Callable[..., Any], *args: Any) -> Any:
    """Stand in for transformers' checkpoint around a block whose compiled graph holds one already."""
    return forward(*args)


_CODES: dict[tuple[type[nn.Module], Callable[..., Any]], types.CodeType] = {}


def _alike(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: Collection[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Leave out arguments that only some packs have and no block needs, so that all packs pass the same guards.

    That is masks that only say that positions restart, as the boundaries say it better, and what transformers hands
    down to blocks of text though it is the vision tower's: `image_cu_seqlens` and the like.
    """
    if kwargs.get("pack_cu_seqlens") is None:
        return args, kwargs

    def is_empty_mask(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() == 4 and value.dtype == torch.bool and not value.numel()

    args = tuple(None if is_empty_mask(value) else value for value in args)
    shared = {name: value for name, value in kwargs.items() if name in names or not name.startswith(_OF_TOWERS)}
    return args, {name: None if is_empty_mask(value) else value for name, value in shared.items()}


def _mark_dynamic(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    hidden, *others = _tensors((*args, *kwargs.values()))
    slots = hidden.shape[-2]
    torch._dynamo.maybe_mark_dynamic(hidden, hidden.dim() - 2)
    for tensor in others:
        if tensor.dim() == 1 and not tensor.is_floating_point():
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        elif slots in tensor.shape:
            torch._dynamo.maybe_mark_dynamic(tensor, tensor.shape.index(slots))
    return hidden


def _one_code_for_all_sizes(device: torch.device) -> AbstractContextManager[Any]:
    """Keep inductor on a CPU from other code for sums of more than 4,096 values, guarded by the sizes of a pack.

    Such code adds up in cascades, to be a little more exact (`need_use_acc_helper` of torch 2.13); a pack on the other
    side of 4,096 slots, or slots times heads, would compile again.
    """
    config: Any = symbolic_shapes_config
    return config.patch(backed_size_oblivious=True) if device.type == "cpu" else nullcontext()


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
