"""Watch the forwards and backwards of models as they happen, in blocks of a loop that is not ours."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headway.compat.mfu_tracker.ledgers import Call, Ledger

if TYPE_CHECKING:
    from collections.abc import Iterator

_ledgers: weakref.WeakKeyDictionary[nn.Module, Ledger] = weakref.WeakKeyDictionary()
_open: list[Watch] = []  # blocks under way, the innermost last; backwards come from threads of their own


class Watch:
    """While entered, notes the forwards of some models, and which of them had their backward.

    What counts is what ran between entry and exit: a forward without a backward is billed as one, in whatever mode.

    Args:
        ledgers: of the models.
    """

    def __init__(self, ledgers: tuple[Ledger, ...]) -> None:
        self.ledgers = ledgers
        self.forwards: list[Call] = []
        self.backwards: list[Call] = []

    def __enter__(self) -> Watch:
        _open.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _open.remove(self)


def ledger_of(model: nn.Module) -> Ledger:
    """Return the ledger of a model, and watch it from now on.

    The hook stays: one that came and went would not be part of what torch.compile makes of the model. Outside blocks it
    does nothing.
    """
    ledger = _ledgers.get(model)
    if ledger is None:
        ledger = _ledgers[model] = Ledger(model)
        if _after_forward not in model._forward_hooks.values():  # the copy of a watched model has the hook
            model.register_forward_hook(_after_forward, with_kwargs=True)
    return ledger


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
def _after_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    ledger = _ledgers.get(module)
    watches = [watch for watch in _open if any(ledger is own for own in watch.ledgers)]
    if ledger is None or not (watches or ledger.follows_backwards):
        return
    call = ledger.note(args, kwargs) if watches else Call(ledger, None)
    for watch in watches:
        watch.forwards.append(call)
    for tensor in _tensors(output):
        if tensor.requires_grad:
            tensor.register_hook(functools.partial(_before_backward, call))  # type: ignore[no-untyped-call]  # as above


def _before_backward(call: Call, _gradient: torch.Tensor) -> None:
    """Note that the backward of a forward begins; each of its outputs says so."""
    call.ledger.num_backwards += 1
    for watch in _open if call.given is not None else ():
        if any(ledger is call.ledger for ledger in watch.ledgers) and all(call is not own for own in watch.backwards):
            watch.backwards.append(call)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
