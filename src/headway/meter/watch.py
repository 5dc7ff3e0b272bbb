"""Forwards that are counted by themselves, each once it has ended, with the backward that its results really get.

A model of text or latents is traced once, and each forward is read off its arguments. Any other is traced for each
shape of its arguments, after the step in which it came; so is what a method other than `forward` runs of it, as a VAE's
`encode` runs its encoder: the outermost modules that really run are counted.

A hook on the gradients of a forward's results tells that a backward reaches it, and autograd's plan of that backward
which parameters and arguments it gives a gradient (`leaves.py`). Nothing waits for a device, and no result is kept.
"""

import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any, cast

import torch
from torch import nn

from headway.count import CostModel, Workload
from headway.errors import UsageError, WorkloadError
from headway.meter.batches import input_gradients_of, read_or_copy, refuse_cached_keys
from headway.meter.environment import in_components_of
from headway.meter.hooks import CallStack, ModuleHooks, arguments_by_name, guarded, is_compiled, outermost
from headway.meter.leaves import Leaves, Reach, WatchedForward, node_of, tensors_at_top, tensors_in, will_run
from headway.tracing.shapes import ShapeTraces, shape_key, without_data
from headway.tracing.unwrap import unwrapped

_ONE_CALL = Workload(packs=1)  # one forward of the shapes that it was traced on
_MOST_SHAPES = 512  # traced shapes of one module
_FEW_RESULTS = 8  # results that are watched wherever they are
_MOST_PLANS = 4096  # plans of backwards of one watch


class ForwardWatch:
    """Counts the forwards of one model for a meter, until it is closed.

    Args:
        model: whose forwards are counted; its wrappers may be around it.
        meter: of the loop, a `StepMeter`; errors go to its `stop_counting`.
        cost_model: of the model, without rows where each shape is traced; or a function that says before each forward
            which of the meter's it is. None is the meter's own.
        is_trained: whether the steps train this very model.
        workload: makes a workload from a forward's arguments by name; None where they say it by themselves.
        phase: begins the phase that a forward is in. Forwards in evaluation mode are then left out in any phase, and
            what cannot be read is an error.
        counts: whether forwards are counted; else the loop's own counts are told what became of them.
        breaks_graphs: whether the hooks run between the parts of a function around the model that is compiled.
        is_headless: whether the head of the model runs elsewhere, on the positions that were asked for.

    Attributes:
        num_calls: forwards so far.
        is_lost: whether a compiled function runs the model, around all hooks.
    """

    def __init__(
        self,
        model: nn.Module,
        meter: Any,
        cost_model: "CostModel | Callable[[], CostModel | None] | None" = None,
        *,
        is_trained: bool = True,
        workload: Callable[[Mapping[str, Any]], Workload] | None = None,
        phase: Callable[[], AbstractContextManager[Any]] | None = None,
        counts: bool = True,
        breaks_graphs: bool = False,
        is_headless: bool = False,
    ) -> None:
        inner = unwrapped(model)
        self.name, self.counts, self.is_trained = type(inner).__name__, counts, is_trained
        self.num_calls, self.is_lost, self._has_warned, self._is_closed = 0, False, False, False
        self._meter, self._cost_model = meter, cost_model
        self._workload, self._phase, self._is_headless = workload, phase, is_headless
        self._model, self._inner = weakref.ref(model), weakref.ref(inner)
        self._own_forward = vars(model).get("forward")
        self._calls: CallStack = meter.calls  # a watch within another's forwards has its own
        self._owner: ForwardWatch | None = None  # the owner outlives a watch of the model without its head
        # forwards of this step; those whose backward came after their step; and the forwards that each backward under
        # way has come to, with the parameters that it reaches
        self._forwards: list[WatchedForward] = []
        self._later: list[WatchedForward] = []
        self._backwards: dict[int, tuple[dict[Leaves, int], dict[WatchedForward, int]]] = {}
        self._leaves: weakref.WeakKeyDictionary[nn.Module, Leaves] = weakref.WeakKeyDictionary()
        self._traces: weakref.WeakKeyDictionary[nn.Module, ShapeTraces] = weakref.WeakKeyDictionary()
        self._by_key: dict[Any, CostModel] = {}  # ledgers of shapes that have been traced
        self._plans: dict[Any, Reach] = {}  # by all that is known of a forward's graph
        if is_trained and not is_headless:
            self._leaves[inner] = meter.leaves
        self._hooks = ModuleHooks(self, first=phase is not None, breaks_graphs=breaks_graphs)
        self.resume()

    @property
    def _ledger(self) -> CostModel:
        ledger = self._cost_model() if callable(self._cost_model) else self._cost_model
        ledger = self._meter.cost_model if ledger is None else ledger
        return cast(CostModel, ledger)

    def resume(self) -> None:
        """Begin, or go on after a pause."""
        model, inner = self._model(), self._inner()
        if self._hooks.are_on or self._is_closed or model is None or inner is None:
            return
        self._hooks.watch(model, inner if is_compiled(model) else None)
        if not self._ledger.rows and self._meter.watches_parts:
            for module in outermost(inner):
                self._hooks.watch(module)
        self._hooks.watch_blocks(inner)

    def pause(self) -> None:
        """Let forwards go by, at no cost, such as the forwards of a generation that is counted as a whole."""
        self._hooks.close()

    def close(self) -> None:
        """Leave the model as it was."""
        self._is_closed = True
        self._hooks.close()
        for leaves in self._leaves.values():
            leaves.close()
        self._forwards, self._later = [], []
        self._backwards.clear()
        self._traces.clear()
        self._by_key.clear()
        self._plans.clear()

    def settle(self) -> None:
        """Count the step's forwards; shapes that are new are traced here, in no step's time.

        Raises:
            HeadwayError: one of them cannot be counted, or they run where no hook does.
        """
        later, self._later, forwards = self._later, [], self.take()
        if self.is_lost:
            raise UsageError(
                f"{self.name} runs inside a function that torch.compile compiled, around the meter's hooks. Compile "
                "the model itself, or count its batches yourself: Meter(model, watch=False) and Meter.count(batch)."
            )
        for forward in later:
            self._count(forward, backward_only=True)
        for forward in forwards:
            self._count(forward)

    def take(self) -> list[WatchedForward]:
        """Give the forwards since the last call."""
        self._calls.stack.clear()  # an interrupt leaves entries
        self._backwards.clear()
        forwards, self._forwards[:] = [*self._forwards], []
        for forward in forwards:
            if forward.plan is not None and forward.reached is None:
                forward.plan.is_at_top = False  # the next backward may come through any result
        return forwards

    def _count(self, forward: WatchedForward, *, backward_only: bool = False) -> None:
        forward.is_counted = True
        work, cost_model, plan = forward.batch, forward.cost_model, forward.plan
        if cost_model is None:
            cost_model = self._traced(forward)
            if forward.key is not None:
                self._by_key[forward.key] = cost_model
            forward.batch = None
        # The traced arguments tell which of them require a gradient.
        work, inputs = (_ONE_CALL, ()) if forward.batch is None else (work, forward.differentiated)
        facts = cost_model, forward.phase, forward.reached, forward.is_known, inputs, self._meter.recompute
        if plan is None or backward_only or forward.has_rerun or plan.bill is None or plan.bill[0] != facts:
            billed = self._meter.billing(
                forward.phase,
                cost_model,
                forward_only=not forward.has_backward,
                input_gradients=inputs,
                trained=forward.trained_of(cost_model) if forward.has_backward else None,
                dropped=forward.dropped,
                backward_only=backward_only,
                has_rerun=forward.has_rerun,
            )
            if plan is not None and not backward_only and not forward.has_rerun:
                plan.bill = facts, billed
        else:
            billed = plan.bill[1]
        self._meter.bill(work, billed)

    def begin(self, module: nn.Module) -> None:
        """Note that a watched module begins to run: a forward, or a part of one that is counted."""
        stack = self._calls.stack
        # a module within a forward that is counted, or within another module of this watch, is a part of it
        is_part = bool(stack) and any(forward is not None or watch is self for _, forward, _, watch in stack)
        around = None if is_part or self._phase is None else ExitStack()
        stack.append((module, None, around, self))
        if is_part:
            return
        try:
            stack[-1] = module, self._begun(module, around), around, self
        except Exception as error:  # noqa: BLE001 - whatever it is, the forward is the loop's
            self._meter.stop_counting(error)

    def _begun(self, module: nn.Module, around: ExitStack | None) -> WatchedForward | None:
        """Open a forward; None for one that is no work of a step."""
        # an evaluation is none; all of a phase that the loop names is
        meter, phase = self._meter, self._meter.current_phase
        trains = meter.trains_now or (self._phase is None and phase is not None)
        meter.hear_of_forward(trains)
        if meter.is_away or not trains:
            return None
        has_gradients, is_again = torch.is_grad_enabled(), torch._C._current_autograd_node() is not None
        if is_again and not has_gradients:
            return None
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise UsageError(
                f"{self.name} runs inside a transform of torch.func, such as grad or vmap, which hides from hooks what "
                "its backward computes. Count the steps yourself: Meter(model, watch=False) and Meter.count(batch)."
            )
        if self._phase is not None and around is not None and not is_again:
            model = self._model()  # the model itself, not what was compiled from it
            is_own = model is None or vars(model).get("forward") is self._own_forward
            if not is_own and (headless := self._headless()) is not None:
                around.callback(headless.close)
                return None
            around.enter_context(self._phase())
            phase = meter.current_phase
        inner = self._inner()
        target: Any = inner if inner is not None and (module is inner or unwrapped(module) is inner) else module
        leaves = self._leaves_of(target)
        # A hook that runs within compiled code means that its graph is broken here.
        self.is_lost = self.is_lost and not self._hooks.is_within_compiled()
        meter.follow(leaves)
        return WatchedForward(target, leaves, phase, has_gradients=has_gradients, is_again=is_again)

    def _leaves_of(self, module: Any) -> Leaves:
        leaves = self._leaves.get(module)
        if leaves is None:
            leaves = self._leaves[module] = Leaves(module)
        return leaves

    def end(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], results: Any) -> None:
        """Note that a watched module has run, or failed: then it is not counted."""
        stack = self._calls.stack
        if not stack or stack[-1][0] is not module:
            return
        _, forward, around, _ = stack.pop()
        if around is not None:
            around.close()
        if forward is None or sys.exception() is not forward.exception:
            return
        try:
            self._note(forward, module, arguments_by_name(module, args, kwargs), results)
        except Exception as error:  # noqa: BLE001 - whatever it is, the forward is the loop's
            self._meter.stop_counting(error)

    def _note(self, forward: WatchedForward, module: nn.Module, arguments: Any, results: Any) -> None:
        """Note down a forward that has ended, and watch for its backward."""
        by_name = arguments if isinstance(arguments, dict) else dict(enumerate(arguments))
        forward.trained = forward.leaves.trained
        if forward.is_again or not forward.has_gradients:
            forward.shapes = [(name, value.shape) for name, value in by_name.items() if hasattr(value, "shape")]
        if forward.is_again:
            self._note_again(forward, results)
            return
        asking = {name: value for name, value in by_name.items() if getattr(value, "requires_grad", False)}
        forward.inputs = (*asking,)
        if self._hooks.blocks and not is_compiled(module) and module._compiled_call_impl is None:
            forward.dropped = self._hooks.blocks - forward.ran
        if forward.has_gradients:
            forward.plan = self._plan_of(forward)
        if self.counts and not self._read(forward, arguments):
            return
        self.num_calls += 1
        if forward.has_gradients:
            self._watch_results(forward, results, asking)
        self._forwards.append(forward)

    def _plan_of(self, forward: WatchedForward) -> Reach:
        """Look up what backwards through such a forward have reached; the first of its kind may have other parts."""
        num_nodes = torch._C._autograd._get_sequence_nr() - forward.nodes_before
        leaves, key = forward.leaves, (forward.dropped, len(self._forwards), num_nodes)
        plan = self._plans.get((leaves, leaves.version, forward.trained, *key))
        if plan is None:
            self._meter.follow(leaves, at_once=True)
            forward.trained = leaves.trained
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plan = self._plans.setdefault((leaves, leaves.version, forward.trained, *key), Reach())
        return plan

    def _read(self, forward: WatchedForward, arguments: Any) -> bool:
        """Read the work of a forward off its arguments; False where the loop counts a generation as a whole."""
        if self._is_generating(forward, arguments):
            return False
        ledger = self._ledger
        if self._workload is not None:
            forward.cost_model, forward.batch = ledger, self._workload(arguments)
            return True
        if ledger.rows and isinstance(arguments, Mapping):
            refuse_cached_keys(self.name, arguments)
            if self._is_headless and isinstance(num_logits := arguments.get("logits_to_keep"), int):
                # Logits of the last position are dropped: they predict nothing.
                arguments = {**arguments, "logits_to_keep": num_logits - 1}
            # arguments that cannot be read, such as states that require a gradient: their shapes tell more
            with nullcontext() if self._phase is not None else suppress(WorkloadError):
                if forward.has_gradients:
                    ledger.with_input_gradients(input_gradients_of(arguments))
                forward.batch = read_or_copy(arguments, ledger)
                forward.cost_model = ledger
                return True
        shapes = None if self._is_headless else shape_key(arguments)
        forward.key = None if shapes is None else (forward.leaves, forward.leaves.version, shapes)
        forward.cost_model = self._by_key.get(forward.key)
        if forward.cost_model is None:
            forward.batch = without_data(arguments)
        return True

    def _is_generating(self, forward: WatchedForward, arguments: Any) -> bool:
        """Say whether a forward fills or reads a cache, as one step of generation does."""
        if self._phase is not None or forward.has_gradients or not isinstance(arguments, Mapping):
            return False
        if arguments.get("past_key_values") is None:
            return False
        if forward.phase is None and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self.name} generates within a step, and its forwards with a cache are not counted one by one: count "
                'them as a whole, with meter.phase("rollout", forward_only=True): '
                "meter.count(headway.Generation(prompts, answers)).",
                RuntimeWarning,
                stacklevel=2,
            )
        return True

    def _watch_results(self, forward: WatchedForward, results: Any, asking: Mapping[Any, Any]) -> None:
        """Hook the results of a forward, through whose gradients its backward comes."""
        plan: Any = forward.plan
        inputs = {name: node_of(value) for name, value in asking.items()} if asking else asking
        # A cache of keys and values holds two tensors a layer, through which few backwards come first.
        tensors = at_top = [results] if isinstance(results, torch.Tensor) else tensors_at_top(results)
        if tensors is not results and (plan.varies or not plan.is_at_top):
            tensors = [*dict.fromkeys([*at_top, *tensors_in(results)])]
        hooked = [place for place, tensor in enumerate(tensors) if tensor.grad_fn is not None]
        if inputs:  # a hook on an argument that is handed through would hold itself
            own = {id(node) for node in inputs.values()}
            hooked = [place for place in hooked if id(tensors[place].grad_fn) not in own]
        forward.is_known = bool(hooked) or (bool(tensors) and not any(tensor.requires_grad for tensor in tensors))
        if not hooked:
            return
        is_old = plan.reached is not None and not plan.varies and self._meter.num_steps % self._meter.looks_every
        nodes = None if is_old else forward.leaves.nodes(forward.trained)
        for place in hooked:
            hook = _Gradient(self._owner or self, forward, inputs, nodes)
            hook.has_many = plan.is_at_top or len(tensors) > _FEW_RESULTS
            hook.result = 1 << place if place < len(at_top) or not hook.has_many else 0
            tensors[place].register_hook(hook)

    def _note_again(self, again: WatchedForward, results: Any) -> None:
        """Watch for the backward of a forward that ran without gradients first, as in a reentrant checkpoint."""
        for forward in reversed(self._forwards):
            if not forward.has_gradients and forward.leaves is again.leaves and forward.shapes == again.shapes:
                forward.trained, forward.has_rerun = again.trained, True
                forward.plan = self._plan_of(again)
                self._watch_results(forward, results, {})
                return

    def backward_begins(self, forward: WatchedForward, gradient: "_Gradient") -> None:
        """Note that a backward has come to a forward's results; the gradients are noted once it has ended well."""
        task = torch._C._current_graph_task_id()
        if task not in self._backwards:
            self._backwards[task] = {}, {}
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(functools.partial(_after_backward, weakref.ref(self), task))
        of_leaves, forwards = self._backwards[task]
        forward.results |= gradient.result
        if forward in forwards:
            return
        leaves, nodes, plan = forward.leaves, gradient.nodes, cast(Reach, forward.plan)
        plan.is_at_top = gradient.has_many and gradient.result > 0
        if leaves not in of_leaves:
            leaves.arrived = 0
            trained = leaves.outside(forward.trained, forward.dropped)
            of_leaves[leaves] = cast(int, plan.reached) if nodes is None else leaves.reached(trained, nodes)
        forwards[forward] = of_leaves[leaves]
        if gradient.inputs:
            forward.answered |= {name for name, node in gradient.inputs.items() if will_run(node)}
        if torch.is_grad_enabled() or forward.reached is not None:
            self._meter.second_backward = self.name

    def backward_ends(self, task: int) -> None:
        """Note the gradients of the forwards to whose results a backward came."""
        for forward, planned in self._backwards.pop(task, ({}, {}))[1].items():
            if forward.reached is None and forward.is_counted:
                self._later.append(forward)
            bits = planned | forward.leaves.arrived
            # if nothing at all gets a gradient, the parameters have another form, such as flat ones
            bits = bits if bits or forward.answered else forward.trained
            forward.reached = (forward.reached or 0) | bits
            if (plan := forward.plan) is not None:
                plan.varies = plan.varies or (plan.reached is not None and plan.results != forward.results)
                plan.reached, plan.results = forward.reached, forward.results

    def is_traced(self, module: nn.Module) -> None:
        """Note that torch.compile goes around a module's hooks, and hook the compiled form of the module instead."""
        trains = self._meter.trains_now or self._meter.current_phase is not None
        if self._calls.stack or not trains or (self._meter.is_away and not self._meter.is_compiling):
            return
        self.is_lost = self.is_lost or not self._hooks.watch_compiled(module)

    def block_begins(self, path: str) -> None:
        """Note that a block runs in this watch's forward, if one goes on."""
        for _, forward, _, watch in self._calls.stack:
            if watch is self and forward is not None:
                forward.ran |= {path}

    def _headless(self) -> "ForwardWatch | None":
        """Watch the model without its head, which a method runs in place of the model's forward."""
        bare = getattr(self._inner(), "base_model", None)
        if not isinstance(bare, nn.Module) or bare is self._model():
            return None
        options: Any = {"workload": self._workload, "phase": self._phase, "breaks_graphs": self._hooks.breaks_graphs}
        options |= {"is_trained": self.is_trained, "is_headless": True}
        watch = ForwardWatch(bare, self._meter, self._cost_model, **options)
        watch._forwards, watch._owner, watch._calls = self._forwards, self, CallStack()
        watch._leaves[bare] = self._leaves_of(self._inner())
        return watch

    def _traced(self, forward: WatchedForward) -> CostModel:
        """Trace a forward's module on the shapes of its arguments, with the gradients that these were given."""
        if (module := forward.module()) is None:
            return CostModel(self.name, (), ())
        traces = self._traces.get(module)
        if traces is None:
            around = functools.partial(self._meter.away, "set-up")
            rename = functools.partial(in_components_of, name=self.name, driver="packs")
            traces = self._traces[module] = ShapeTraces(module, self._meter.results, rename, around)
        if len(traces) >= _MOST_SHAPES:
            raise UsageError(
                f"{self.name} is called with other shapes again and again, {_MOST_SHAPES} by now: give its cost model, "
                "headway.trace(model, inputs=FUNCTION OF A WORKLOAD), and count its batches."
            )
        for name in set(forward.inputs) - set(forward.differentiated):
            forward.batch[name].requires_grad_(False)
        cost_model = traces.of(forward.batch)
        self._meter.add_ledger(cost_model, is_trained=self.is_trained)
        return cost_model


class _Gradient:
    """The hook of the gradient of one of a forward's results; it holds its watch weakly.

    Args:
        watch: that is told of the gradient.
        forward: whose result it is.
        inputs: nodes of the forward's arguments that require a gradient.
        nodes: of the parameters; None where it is known which of them a backward reaches.

    Attributes:
        result: bit of the result; 0 of one of many that lies within an object.
        has_many: whether the forward has many results.
    """

    __torch_unserializable__ = True  # a tensor with it may be written
    result, has_many = 0, False

    def __init__(
        self, watch: ForwardWatch, forward: WatchedForward, inputs: Mapping[Any, Any], nodes: Sequence[Any] | None
    ) -> None:
        self._watch, self._forward, self.inputs, self.nodes = weakref.ref(watch), forward, inputs, nodes

    def __call__(self, _gradient: Any) -> None:
        if (watch := self._watch()) is not None:
            guarded(watch.backward_begins, watch._meter.stop_counting)(self._forward, self)


def _after_backward(watch: "weakref.ref[ForwardWatch]", task: int) -> None:
    if (owner := watch()) is not None:
        guarded(owner.backward_ends, owner._meter.stop_counting)(task)
