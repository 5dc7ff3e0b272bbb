"""Attribution of each event to its purpose: its operator, its module, its phase of the step.

A kernel has the number of the call that launched it; the call lies within operators and annotations of its thread. In
backward, an operator has the number of the forward operator that it differentiates, and so that one's module.

Source: torch/csrc/profiler and torch/csrc/autograd (Sequence number, Fwd thread id, torch 2.0 to 2.13).
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from headway.explain.events import NONE, Column, Kind, Trace
from headway.explain.kernels import Work, is_compiled, work_of_kernel, work_of_operator

_ROUNDING_NS = 1000  # older profilers wrote whole microseconds, so an event may seem to begin within the one before
COMPILING = " (dynamo_timed)"  # ends the names of torch.compile's own work
_MODULE, _PHASE, _LAYER = "module:", "phase:", "nn.Module: "
_EVALUATES = "autograd::engine::evaluate_function: "
_ACCUMULATES = "torch::autograd::AccumulateGrad"
# Source: record_function in torch/distributed/fsdp/_fully_shard, torch/csrc/distributed/c10d/reducer.cpp (torch 2.13).
_DATA_PARALLEL = ("FSDP::", "torch.distributed.ddp.reducer::")
# Operators on lists of tensors: around the model and the optimizer these are gradients and weights. Data parallelism
# copies lists as well.
_LISTS = re.compile(r"aten::(_amp)?_foreach_(?!copy)")


class Chore(StrEnum):
    """Work of the training loop that belongs to no module."""

    NONE = ""
    DATA_PARALLEL = "data parallelism"  # gathers weights and sends gradients: the copies beside the collectives
    ACCUMULATION = "accumulation"  # adds a gradient to what its parameter has
    LISTS = "lists of tensors"  # clips gradients, unscales them, averages weights


class Phase(StrEnum):
    """Activity of a step; the first seven have the values of annotations `phase:NAME`."""

    DATA_WAIT = "data_wait"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    LOGGING = "logging"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    RECOMPUTED = "recomputed"
    COMPILE = "compile"
    UNKNOWN = "unknown"  # launched before the trace began


_ANNOTATED_PHASES = {phase.value: phase for phase in list(Phase)[:7]}
_OWN_LINE = {Phase.DATA_WAIT, Phase.OPTIMIZER, Phase.LOGGING, Phase.CHECKPOINT, Phase.EVALUATION, Phase.COMPILE}


@dataclass(slots=True)
class Surroundings:
    """Operator, module and phase around one event of the host; indices of host events, NONE where there is none."""

    operator: int = NONE  # the innermost operator, itself included
    module: str = ""  # path of the innermost module; "" outside of modules
    phase: Phase | None = None  # None until known from an annotation
    backward: int = NONE  # the innermost operator of backward
    is_recomputed: bool = False  # a forward runs again within backward
    depth: int = 0  # events around it
    forward: int = NONE  # the annotation `phase:forward`, one for each pass of the whole model
    chore: Chore = Chore.NONE  # work around the modules
    is_compiled: bool = False  # True in what torch.compile made
    outer: int = NONE  # the event directly around it


_NOWHERE = Surroundings()


@dataclass(frozen=True, slots=True)
class Attribution:
    """Purpose of every event."""

    launch: Column  # for each device event, the host event that launched it; NONE where the trace has none
    work: list[Work]  # class of each event of the device; in a trace of a CPU alone, of the host
    phase: list[Phase]  # phase of each of these events
    module: list[str]  # module's path of each of these events; "" where none is known
    operator: list[str]  # name of the innermost operator of each of these events; "" where none is known
    # for each of these events the annotation `phase:forward` of the pass that it belongs to, backward and recomputation
    # to that of their forward; an index of host events, NONE where none is known
    passes: list[int]
    chore: list[Chore]  # work around the modules, of each of these events
    is_compiled: list[bool]  # whether each of these events is in what torch.compile made, forward or backward
    contexts: list[Surroundings]  # surroundings of each event of the host


def attribute(trace: Trace) -> Attribution:
    """Find operator, phase and module of each kernel, or of each event of the host where there is no device."""
    contexts = _contexts(trace)
    forwards = _forwards_of_backward(trace)
    names = trace.names
    # Without a device, the operators of the host are the work; with one, the kernels and copies that the host launched.
    if trace.is_cpu_only:
        launch = np.arange(len(trace.host))
        functions = _python_functions(names)
        work = [
            Work.HOST if kind in (Kind.PYTHON, Kind.LAUNCH) or name in functions else _work_of_host(kind, names[name])
            for kind, name in zip(trace.host.kind.tolist(), trace.host.name.tolist(), strict=True)
        ]
    else:
        launch = _launches(trace)
        work = [
            _work_of_device(kind, names[name], _operator_name(trace, contexts, at))
            for kind, name, at in zip(
                trace.device.kind.tolist(), trace.device.name.tolist(), launch.tolist(), strict=True
            )
        ]
    # One row for each event of work: what lies around its launch, and around the forward operator behind its backward.
    surroundings = [contexts[at] if at != NONE else _NOWHERE for at in launch.tolist()]
    forwards_of = [_surroundings_of_forward(context, contexts, forwards) for context in surroundings]
    # Each column has one entry per event of work; `contexts` alone has one per event of the host.
    return Attribution(
        launch=launch,
        work=work,
        phase=[Phase.UNKNOWN if context is _NOWHERE else _phase(context) for context in surroundings],
        # An event of backward has no module of its own: it has the module of the forward that it differentiates.
        module=[context.module or forward.module for context, forward in zip(surroundings, forwards_of, strict=True)],
        operator=[_operator_name(trace, contexts, at) or "" for at in launch.tolist()],
        passes=[_pass(context, contexts, forwards) for context in surroundings],
        chore=[context.chore for context in surroundings],
        is_compiled=[
            context.is_compiled or forward.is_compiled
            for context, forward in zip(surroundings, forwards_of, strict=True)
        ],
        contexts=contexts,
    )


def _surroundings_of_forward(
    context: Surroundings, contexts: list[Surroundings], forwards: Mapping[int, int]
) -> Surroundings:
    """Find the surroundings of the forward operator that an event of backward differentiates."""
    forward = forwards.get(context.backward, NONE)
    return contexts[forward] if forward != NONE else _NOWHERE


def _pass(context: Surroundings, contexts: list[Surroundings], forwards: Mapping[int, int]) -> int:
    """The forward of the whole model that an event belongs to; of an event in backward, the forward it is of."""
    while context.backward != NONE:  # a checkpoint of the reentrant kind differentiates what backward has run again
        context = _surroundings_of_forward(context, contexts, forwards)  # the forward began earlier, so the loop ends
    return context.forward


def _contexts(trace: Trace) -> list[Surroundings]:
    """Find the surroundings of each event: events of a thread nest, and `trace.host` has outer events first."""
    host, names = trace.host, trace.names
    contexts: list[Surroundings] = []
    # Open events: end, kind, surroundings of the events within, index.
    stack: list[tuple[int, int, Surroundings, int]] = []
    track, operator, launch, python = NONE, int(Kind.OPERATOR), int(Kind.LAUNCH), int(Kind.PYTHON)
    for i, (kind, name, start, end, its_track, sequence, forward_thread) in enumerate(
        zip(host.kind.tolist(), host.name.tolist(), host.start_ns.tolist(), host.end_ns.tolist(), host.track.tolist(),
            host.sequence.tolist(), host.forward_thread.tolist(), strict=True)
    ):  # fmt: skip
        if its_track != track:
            stack.clear()
            track = its_track
        while stack and _is_over(stack[-1], start, end, kind):
            stack.pop()
        outer = stack[-1][2] if stack else _NOWHERE
        context = Surroundings(
            outer.operator, outer.module, outer.phase, outer.backward, outer.is_recomputed, len(stack), outer.forward,
            outer.chore, outer.is_compiled, stack[-1][3] if stack else NONE,
        )  # fmt: skip
        if kind == operator:
            _enter_operator(context, i, names[name], sequence, forward_thread)
            if names[name].endswith(COMPILING):  # torch 2.13 writes what compiles as operators
                context.phase = Phase.COMPILE
        elif kind != launch:
            _enter_annotation(context, i, names[name], is_python=kind == python)
        contexts.append(context)
        # An annotation that an exception left open ends with what lies around it.
        stack.append((min(end, stack[-1][0]) if stack else end, kind, context, i))
    return contexts


def _is_over(outer: tuple[int, int, Surroundings, int], start: int, end: int, kind: int) -> bool:
    """Tell whether an event that began before has ended, and so does not lie around this one."""
    outer_end, outer_kind, _, _ = outer
    if outer_end >= end:
        return outer_end <= start
    is_its_beginning = outer_kind == Kind.PYTHON and kind == Kind.ANNOTATION  # record_function.__enter__
    return outer_end <= start + _ROUNDING_NS or is_its_beginning


def _enter_operator(context: Surroundings, index: int, name: str, sequence: int, forward_thread: int) -> None:
    context.operator = index
    context.is_compiled = context.is_compiled or is_compiled(name)
    if name.endswith(_ACCUMULATES):
        context.chore = Chore.ACCUMULATION
    elif name.startswith(_DATA_PARALLEL):
        context.chore = Chore.DATA_PARALLEL
    elif _is_around_the_model(context) and _LISTS.match(name):
        context.chore, context.phase = Chore.LISTS, Phase.OPTIMIZER
    if forward_thread > 0 or (forward_thread == NONE and name.startswith(_EVALUATES)):  # torch 1 has no such number
        context.backward, context.is_recomputed, context.module = index, False, ""
    elif NONE not in (sequence, context.backward):
        context.is_recomputed = True  # within backward, only what runs forward again records for autograd


def _is_around_the_model(context: Surroundings) -> bool:
    """Tell whether a place is in no module, no backward, no phase that has a name and no chore."""
    return not context.module and context.backward == NONE and context.phase is None and context.chore is Chore.NONE


def _enter_annotation(context: Surroundings, index: int, name: str, *, is_python: bool) -> None:
    if is_python:
        if name.startswith(_LAYER):
            layer = name.removeprefix(_LAYER)
            context.module = f"{context.module}.{layer}" if context.module else layer
            context.is_recomputed = context.backward != NONE
    elif name.startswith(_MODULE):
        context.module = name.removeprefix(_MODULE)
        context.is_recomputed = context.backward != NONE
    elif name.startswith(_PHASE):
        phase = _ANNOTATED_PHASES.get(name.removeprefix(_PHASE))
        if phase is not None:
            context.phase, context.forward = phase, index if phase is Phase.FORWARD else NONE
    elif name.startswith(_DATA_PARALLEL):
        context.chore = Chore.DATA_PARALLEL
    elif name.startswith(("Optimizer.step#", "Optimizer.zero_grad#")):
        context.phase = Phase.OPTIMIZER
    elif name.startswith("enumerate(DataLoader)#"):
        context.phase = Phase.DATA_WAIT
    elif name.endswith(COMPILING):
        context.phase = Phase.COMPILE
    elif is_compiled(name):
        context.is_compiled = True


def _phase(context: Surroundings) -> Phase:
    if context.phase in _OWN_LINE:
        return context.phase
    if context.backward != NONE:
        return Phase.RECOMPUTED if context.is_recomputed else Phase.BACKWARD
    return context.phase or Phase.FORWARD


def _forwards_of_backward(trace: Trace) -> Mapping[int, int]:
    """The forward operator that each operator of backward differentiates: the one with its number.

    Numbers count per thread, and backward names the forward's thread by a number of the profiler's own: it is the
    thread that holds most of the numbers.
    """
    host = trace.host
    forward: dict[tuple[int, int], int] = {}  # (track, sequence) -> the last to begin: it made the node
    tracks_of: dict[int, set[int]] = {}
    for i in np.flatnonzero((host.sequence != NONE) & (host.forward_thread <= 0)).tolist():
        track, sequence = int(host.track[i]), int(host.sequence[i])
        forward[track, sequence] = i
        tracks_of.setdefault(sequence, set()).add(track)
    backward = np.flatnonzero((host.sequence != NONE) & (host.forward_thread > 0)).tolist()
    votes: dict[int, Counter[int]] = {}
    for i in backward:
        votes.setdefault(int(host.forward_thread[i]), Counter()).update(tracks_of.get(int(host.sequence[i]), ()))
    thread_of = {thread: max(sorted(tracks), key=tracks.__getitem__) for thread, tracks in votes.items() if tracks}
    forward_of = {
        i: forward.get((thread_of.get(int(host.forward_thread[i]), NONE), int(host.sequence[i])), NONE)
        for i in backward
    }
    # An operator that began later has its number from another count, and might lead in a circle.
    start_ns = host.start_ns
    return {i: operator for i, operator in forward_of.items() if operator != NONE and start_ns[operator] < start_ns[i]}


def _launches(trace: Trace) -> Column:
    numbers = trace.host.correlation
    calls = np.flatnonzero((trace.host.kind == Kind.LAUNCH) & (numbers != NONE) & (numbers != 0))
    by_number = dict(zip(trace.host.correlation[calls].tolist(), calls.tolist(), strict=True))
    return np.array([by_number.get(number, NONE) for number in trace.device.correlation.tolist()], dtype=np.int64)


def _operator_name(trace: Trace, contexts: list[Surroundings], at: int) -> str | None:
    operator = contexts[at].operator if at != NONE else NONE
    return trace.names[trace.host.name[operator]] if operator != NONE else None


def _work_of_device(kind: int, name: str, operator: str | None) -> Work:
    return work_of_kernel(name, operator) if kind == Kind.KERNEL else Work.COPY


def _python_functions(names: Sequence[str]) -> set[int]:
    """Indices of the names of `torch.autograd.Function`s: there is a backward of the same name."""
    all_names = set(names)
    return {i for i, name in enumerate(names) if "::" not in name and f"{name}Backward" in all_names}


def _work_of_host(kind: int, name: str) -> Work:
    work = work_of_operator(name)
    return work if kind == Kind.OPERATOR or work is Work.COMMUNICATION else Work.HOST
