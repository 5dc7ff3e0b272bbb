"""What a block of a loop computed: stated as a number, seen in the forwards of models, or told batch by batch."""

import functools
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn

from headway.compat.mfu_tracker.ledgers import Call, Ledger, Setup
from headway.count import CostModel, FlopCount, FlopRow, Workload
from headway.errors import UsageError
from headway.meter import Meter, Window
from headway.meter.batches import read_or_copy, workload_of

_ledgers: weakref.WeakKeyDictionary[nn.Module, Ledger] = weakref.WeakKeyDictionary()
_open: "list[Watch]" = []  # blocks under way, the innermost last; backwards come from threads of their own


class Watch:
    """Watches models between entry and exit: notes every forward, and whether its backward ran.

    What counts is what ran between entry and exit: a forward without a backward is billed as one, in whatever mode.
    """

    def __init__(self, ledgers: tuple[Ledger, ...]) -> None:
        self.ledgers = ledgers
        self.forwards: list[Call] = []
        self.backwards: list[Call] = []

    def __enter__(self) -> "Watch":
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


@dataclass(frozen=True, slots=True)
class Counted:
    """The FLOPs of a block, its workload, and how often the weights were read."""

    flops: FlopCount
    workload: Workload  # what it was asked to compute; empty where nothing says
    num_passes: int  # times that the weights were read: once in each forward and once in each backward
    dtype: torch.dtype | None = None  # that autocast has in the block; None without autocast


class TrackedBlock(AbstractContextManager["TrackedBlock"]):
    """A block under way; how its FLOPs are known is its kind's."""

    @abstractmethod
    def counted(self) -> Counted:
        """Count it; the device has passed its end."""


class StatedBlock(TrackedBlock):
    """A block whose FLOPs somebody states."""

    def __init__(self, flops: int | float) -> None:
        self._flops = flops

    def __exit__(self, *exception: object) -> None:
        """Nothing was begun."""

    def counted(self) -> Counted:
        """Return the number; one pass over the weights goes with it."""
        return Counted(_stated(round(self._flops)), Workload(), 1)


class WatchedBlock(TrackedBlock):
    """A block whose FLOPs are those of the forwards of some models that run in it, and of their backwards.

    Args:
        ledgers: of the models.
        added: FLOPs that go with the block and that no ledger knows of.
        recompute: activation checkpointing; read off each model when None.
    """

    def __init__(self, ledgers: tuple[Ledger, ...], added: int = 0, recompute: str | None = None) -> None:
        self._watch = Watch(ledgers)
        self._added = added
        self._recompute = recompute
        self._setups: dict[Ledger, Setup] = {}

    def __enter__(self) -> Self:
        for ledger in self._watch.ledgers:
            ledger.prepare()  # before the block's time begins
        self._watch.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._watch.__exit__()
        self._setups = {ledger: ledger.setup.read() for ledger in self._watch.ledgers}

    def counted(self) -> Counted:
        """Count the forwards and backwards that ran.

        Raises:
            UsageError: there were none.
        """
        watch = self._watch
        if not watch.forwards and not watch.backwards:
            names = ", ".join(ledger.name for ledger in watch.ledgers)
            raise UsageError(
                f"no forward of {names} ran in the block, so its FLOPs are not known. If torch.compile had compiled "
                "the model before it was profiled or tracked, pass what torch.compile returned; of CUDA graphs and "
                "other models pass the FLOPs as a plain number, int(flops), or the batch, track(model, batch=batch)."
            )
        forwards, backwards = set(map(id, watch.forwards)), set(map(id, watch.backwards))
        parts, workloads = [], []
        for call in watch.forwards:
            count, workload = self._count(call, forward_only=id(call) not in backwards)
            parts.append(count)
            workloads.append(workload)
        for call in watch.backwards:
            if id(call) not in forwards:  # its forward ran before the block
                parts.append(_without_forward(self._count(call, forward_only=False)[0]))
        if self._added:
            parts.append(replace(_stated(self._added), convention=parts[0].convention))
        dtypes = [call.dtype for call in (*watch.forwards, *watch.backwards) if call.dtype is not None]
        return Counted(
            sum(parts, FlopCount()),
            Workload.total(workloads),
            len(watch.forwards) + len(watch.backwards),
            dtypes[0] if dtypes else None,
        )

    def _count(self, call: Call, *, forward_only: bool) -> tuple[FlopCount, Workload]:
        setup = self._setups[call.ledger]
        return call.ledger.count(call, setup, recompute=self._recompute, forward_only=forward_only)


class ListedBlock(TrackedBlock):
    """A block whose batches are told one by one.

    Args:
        cost_model: of the model.
        recompute: activation checkpointing, as for `CostModel.count`.
        meter: is told of the batches too, and that the block was a step.
    """

    def __init__(self, cost_model: CostModel, recompute: str = "none", meter: Meter | None = None) -> None:
        self.window: Window | None = None
        self._cost_model = cost_model
        self._recompute = recompute
        self._meter = meter
        self._batches: list[tuple[Mapping[str, Any] | Workload, bool]] = []
        self._given: list[tuple[Any, bool]] = []  # to the meter, once the block has ended well

    def __enter__(self) -> Self:
        if self._meter is not None:
            self._meter.start()  # its first step begins with the first block
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        if self._meter is None or kind is not None:
            return
        for batch, forward_only in self._given:
            self._meter.count(batch, forward_only=forward_only)
        self.window = self._meter.step()

    def count(self, batch: Any, *, forward_only: bool) -> None:
        """Add a batch."""
        if self._meter is not None:
            self._given.append((batch, forward_only))
        self._batches.append((read_or_copy(batch, self._cost_model), forward_only))

    def counted(self) -> Counted:
        """Count the batches.

        Raises:
            UsageError: there were none.
        """
        if not self._batches:
            raise UsageError("the block ended without a batch: call count(batch) on what `with track(...)` gives.")
        model, parts, workloads = self._cost_model, [], []
        for batch, forward_only in self._batches:
            workload = workload_of(batch, model)
            recompute = "none" if forward_only else self._recompute
            parts.append(model.count(workload, recompute=recompute, forward_only=forward_only))
            workloads.append(workload)
        num_passes = sum(1 if forward_only else 2 for _, forward_only in self._batches)
        return Counted(sum(parts, FlopCount()), Workload.total(workloads), num_passes)


def _stated(flops: int) -> FlopCount:
    return FlopCount((FlopRow("stated", "blocks", flops),), "stated")


def _without_forward(count: FlopCount) -> FlopCount:
    return replace(count, rows=tuple(replace(row, forward=0) for row in count.rows))
