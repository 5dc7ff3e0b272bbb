"""Hold a ledger against PyTorch's own counter, on a real step of a real model, module by module.

The step runs with eager attention and eager experts, whose products PyTorch's formulas see singly. Some differences
are then expected, and each gets a reason that is checked by arithmetic. What runs inside a recurrence is told apart
from the rest of its module, which must agree.

A reason is given only where it predicts what PyTorch counted, forward and backward, to the FLOP; the pairs that a mask
allows are those that the real softmaxes went over. Three can do less, and their words say so: the chunks of a
recurrence are a bound from below, scores that end in no softmax one from above; a kernel that PyTorch has no formula
for, or a recurrence of elementwise products, is not seen at all.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from headway.count import drivers
from headway.count.cost_model import CostModel
from headway.count.modalities import MODALITIES
from headway.count.rows import Row
from headway.count.workload import Workload
from headway.tracing import trace
from headway.tracing.build import configs, run_every_layer
from headway.tracing.classify import members
from headway.tracing.families.surplus import paddings, unchosen_rows
from headway.tracing.inputs.model_inputs import call, inputs_for
from headway.tracing.results import Results
from headway.tracing.scores import HIDDEN
from headway.tracing.stand_ins import watched
from headway.tracing.unwrap import lies_within

aten = torch.ops.aten
RECURRENCE = " (recurrence)"  # after a module's path: what it runs inside its recurrence
_CONVOLUTIONS = {aten.convolution, aten.convolution_backward}
_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}


@dataclass(frozen=True)
class Line:
    """One module's FLOPs in one step, by the ledger and by PyTorch."""

    module: str  # path
    op: str  # kind of operation, by the ledger
    ledger: tuple[int, int]  # forward and backward FLOPs by the ledger
    counted: tuple[int, int]  # forward and backward FLOPs that PyTorch's formulas give for what was dispatched
    explanation: str | None  # reason why the two differ; "" where they are equal, None where nothing explains it


def verify(
    model: nn.Module, workload: Workload, *, inputs: Any = None, results: Results = None
) -> tuple[list[Line], set[str]]:
    """Run one real step of a model under PyTorch's formulas and compare it with the model's ledger.

    Args:
        model: a real model with weights, on any device; its attention and experts are run eagerly, and its gradients
            are left as they were.
        workload: one segment, with the grids that lie in it.
        inputs: as for `trace`.
        results: as for `trace`.

    Returns:
        A line per module that either side bills, in the ledger's order, and the operations that PyTorch cannot see.

    Raises:
        TraceError: the model has no complete ledger.
    """
    cost = trace(model, inputs=inputs, results=results)
    eager = configs(model)
    before = [(c._attn_implementation, c._experts_implementation) for c in eager]
    for config in eager:
        config._attn_implementation = config._experts_implementation = "eager"
    drops = run_every_layer(model)
    gradients = [parameter.grad for parameter in model.parameters()]
    counted = CountedStep(model)
    try:
        arguments = inputs_for(model, inputs).arguments(workload, next(model.parameters()).device)
        with counted, watched(model, counted.recurrence):
            _real_backward(call(model, arguments), results)
    finally:
        for config, (attention, experts) in zip(eager, before, strict=True):
            config._attn_implementation, config._experts_implementation = attention, experts
        for holder, name, value in drops:
            setattr(holder, name, value)
        for parameter, grad in zip(model.parameters(), gradients, strict=True):
            parameter.grad = grad
    counted.gather({row.module for row in cost.rows if row.op == "experts"})
    return _compare(cost, counted, workload, model), counted.unseen


def _real_backward(output: Any, results: Results) -> None:
    """Run the real step's backward, as a training loop would.

    From what is found apart from what `trace` starts from, so that both cannot share a mistake: in the real output, by
    the way in which PyTorch itself opens containers, and by what really requires a gradient.
    """
    if results is None and hasattr(output, "trained"):
        results = output.trained
    loss = _item(output, "loss")
    if callable(results):
        output = results(output)
    elif results is not None:
        output = [_item(output, name) for name in ([results] if isinstance(results, str) else results)]
    elif isinstance(loss, torch.Tensor) and loss.requires_grad:
        output = loss
    starts = [leaf for leaf in _leaves(output, {}) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if starts:
        sum(start.abs().sum() for start in starts).backward()  # type: ignore[union-attr]  # a tensor, as there are some


def _leaves(output: Any, opened: dict[int, Any]) -> Iterator[Any]:
    """List the leaves of PyTorch's own containers, and those of the objects among them, such as dataclasses."""
    for leaf in tree_leaves(output):
        yield leaf
        if id(leaf) not in opened and hasattr(leaf, "__dict__") and not isinstance(leaf, torch.Tensor | nn.Module):
            opened[id(leaf)] = leaf
            yield from _leaves(vars(leaf), opened)


def _item(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, dict) else getattr(output, name, None)


class CountedStep(TorchDispatchMode):
    """Counts what PyTorch has a formula for, by the module whose forward, or whose forward's backward, runs it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._path_of = {id(module): path for path, module in model.named_modules()}
        self._stack: list[str] = [""]
        self._module_of_node: dict[int, str] = {}
        self.forward: Counter[str] = Counter()  # FLOPs by module path
        self.backward: Counter[str] = Counter()  # FLOPs by module path
        self.outer: Counter[str] = Counter()  # FLOPs of outer products without parameters, by module path
        # FLOPs of convolutions that PyTorch counts and no token has, by module path and whether it is backward
        self.too_much: Counter[tuple[str, bool]] = Counter()
        self.unseen: set[str] = set()  # kernels that PyTorch's counter has no formula for
        self.fused: dict[str, str] = {}  # name of such a kernel, by module path
        # forward FLOPs of each expert of a list, by the list's path and its own
        self.of_expert: defaultdict[str, Counter[str]] = defaultdict(Counter)
        # places of each, those that no mask had hidden, and places for each query; by module path
        self.softmaxes: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)

    def __enter__(self) -> Any:
        def enter(module: nn.Module, _args: Any) -> None:
            self._stack.append(self._path_of.get(id(module), self._stack[-1]))

        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            self._stack.pop()

        self._hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def recurrence(self, function: Any) -> Any:
        """Wrap a function so that what it runs is told apart from the rest of the running module."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            path = self._stack[-1].removesuffix(RECURRENCE)
            self._stack.append(path + RECURRENCE)
            try:
                return function(*args, **kwargs)
            finally:
                self._stack.pop()

        return wrapped

    def gather(self, experts: set[str]) -> None:
        """Add what each expert of a list ran to the list, to which the ledger bills it."""
        for counter in (self.forward, self.backward):
            for path in list(counter):
                home = next((home for home in experts if lies_within(path, [home])), path)
                if home != path:
                    if counter is self.forward:
                        expert = path.removeprefix(f"{home}.").partition(".")[0]
                        self.of_expert[home][expert] += counter[path]
                    counter[home] += counter.pop(path)

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        # in backward the module is that whose forward made the autograd node
        node: Any = torch._C._current_autograd_node()
        path = self._stack[-1]
        operands = [a for a in args if isinstance(a, torch.Tensor)]
        if node is not None:
            path = self._module_of_node.get(node._sequence_nr(), path)
        elif any(a.requires_grad for a in operands):
            # the first operation after a node was made is its own; dropout, say, allocates before it makes one
            self._module_of_node.setdefault(torch._C._autograd._get_sequence_nr() - 1, path)
        # softmaxes alone show what the real masks hid
        if packet is aten._softmax and node is None:
            self.softmaxes[path].append((out.numel(), int(torch.count_nonzero(args[0] > HIDDEN)), out.shape[-1]))
        if packet not in flop_registry:
            if func.namespace != "aten" or packet.__name__.startswith("_scaled_dot_product"):
                self.fused[path] = str(func)
                self.unseen.add(f"{func} in {path or 'the model'}")
            return out
        # FLOPs by PyTorch's formula, which counts padding of a convolution too
        flops = int(flop_registry[packet](*args, **(kwargs or {}), out_val=out))
        if packet in _CONVOLUTIONS:
            self.too_much[path, node is not None] += flops - _convolved(packet, args, out)
        if node is not None:
            self.backward[path] += flops
        elif packet in _PRODUCTS and operands[-2].shape[-1] == 1 and not any(a.requires_grad for a in operands):
            self.outer[path] += flops
        else:
            self.forward[path] += flops
        return out


def _convolved(packet: Any, args: Any, out: Any) -> int:
    """Count a convolution's FLOPs: 2 per weight and output position, once forward and once per gradient it gives.

    A causal convolution pads its front and has more outputs than inputs; those outputs belong to no token. PyTorch's
    formula of the backward (2.13) takes a grouped convolution for a dense one.
    """
    if packet is aten.convolution:
        x, weight, y, transposed, times = args[0], args[1], out, args[6], 1
    else:
        y, x, weight, transposed, times = args[0], args[1], args[2], args[7], sum(args[10][:2])
    positions = min(math.prod(x.shape[2:]), math.prod(y.shape[2:])) if not transposed else math.prod(x.shape[2:])
    return int(2 * x.shape[0] * positions * weight.numel() * times)


@dataclass(frozen=True)
class ModuleBill:
    """The FLOPs that a ledger bills one module for in a step."""

    module: str  # path
    rows: tuple[Row, ...]  # the ledger's rows of it
    trained: int  # the parameters that are, as bits
    workload: Workload

    @property
    def flops(self) -> tuple[int, int]:
        """FLOPs forward and backward."""
        return self.on(lambda driver: drivers.parse_driver(driver)(self.workload))

    def on(self, units: Callable[[str], int]) -> tuple[int, int]:
        """Count FLOPs forward and backward on other units than the workload's."""
        forward = sum(units(row.driver) * row.forward for row in self.rows)
        backward = sum(
            units(row.driver) * sum(g.flops for g in row.gradients if g.runs(self.trained)) for row in self.rows
        )
        return forward, backward


def _compare(cost: CostModel, step: CountedStep, workload: Workload, model: nn.Module) -> list[Line]:
    rows: defaultdict[str, list[Any]] = defaultdict(list)
    for row in cost.rows:
        rows[row.module + RECURRENCE if row.op == "recurrence" else row.module].append(row)
    lines = []
    for module in dict.fromkeys([*rows, *step.forward, *step.outer, *step.backward]):
        bill = ModuleBill(module, tuple(rows[module]), cost.trained, workload)
        counted = (step.forward[module] + step.outer[module], step.backward[module])
        op = rows[module][0].op if rows[module] else "-"
        lines.append(Line(module, op, bill.flops, counted, explain_difference(bill, step, model)))
    return lines


def explain_difference(bill: ModuleBill, step: CountedStep, model: nn.Module) -> str | None:
    """Say why what PyTorch counted for a module differs from what its ledger bills.

    Returns:
        The reason; "" where the two are equal, None where no reason predicts what was counted.
    """
    module, ledger = bill.module, bill.flops
    counted = (step.forward[module], step.backward[module])
    if counted == ledger:
        return "rotary angles: an outer product without parameters is no model FLOP" if step.outer[module] else ""
    if counted == (ledger[0] + step.too_much[module, False], ledger[1] + step.too_much[module, True]):
        return (
            "a causal convolution's padding is no token's, and PyTorch takes a grouped one's backward for a dense one's"
        )
    if module.endswith(RECURRENCE):
        return _recurrence(ledger, counted)
    if module in step.fused and counted == (0, 0):
        return f"PyTorch's counter has no formula for {step.fused[module]}"
    if any(row.op == "experts" for row in bill.rows):
        experts = model.get_submodule(module)
        return _every_expert(bill, counted, experts) or _experts(bill, step.of_expert[module], counted, model)
    return _padded(bill, counted, model) or _squares(bill, step, counted)


def _recurrence(ledger: tuple[int, int], counted: tuple[int, int]) -> str | None:
    """Compare a recurrence with the form that the ledger bills, whose products `recurrences.recur` derives.

    Forward, half of a state-space model's FLOPs write the state and half read it; a loop that writes elementwise shows
    the reads alone, and those of its backward that its reads need. Chunks read and write the state as often and
    multiply inside each chunk too, so they run no less.
    """
    if counted == (0, 0):
        return (
            "a recurrence is counted in its recurrent form; it ran in elementwise products, of which PyTorch counts "
            "none: held against nothing"
        )
    half = ledger[0] // 2
    if 2 * counted[0] == ledger[0] and counted[1] in (0, half, 2 * half) and counted[1] <= ledger[1]:
        return "a recurrence is counted in its recurrent form; its loop writes the state elementwise and reads it here"
    if counted[0] >= ledger[0] > 0 and counted[1] >= ledger[1]:
        return (
            "a recurrence is counted in its recurrent form; it ran in chunks, which is more: held as a lower bound only"
        )
    return None


def _every_expert(bill: ModuleBill, counted: tuple[int, int], experts: nn.Module) -> str | None:
    """Compare a stack of experts that all ran on every token with the few of them that a token is routed to."""
    stacks = [p for p in experts.parameters(recurse=False) if p.dim() == 3]
    # FLOPs per token of all experts, and of those that the router chooses
    of_all, of_chosen = 2 * sum(p.numel() for p in stacks), sum(row.forward for row in bill.rows)
    if not stacks or any(mine * of_all != theirs * of_chosen for mine, theirs in zip(bill.flops, counted, strict=True)):
        return None
    return (
        f"code runs all {stacks[0].shape[0]} experts on every token, most of them on zeros: only those that the router "
        "chose are counted"
    )


def _experts(bill: ModuleBill, of_expert: dict[str, int], counted: tuple[int, int], model: nn.Module) -> str | None:
    """Compare experts of a list by their rows: each expert costs 2 FLOPs a row and weight."""
    ledger, module = bill.flops, model.get_submodule(bill.module)
    experts = members(bill.module, module)
    weights = {sum(p.numel() for p in expert.parameters() if p.dim() > 1) for expert in experts.values()}
    if len(weights) != 1 or counted[1] * ledger[0] != ledger[1] * counted[0]:
        return None
    per_row = 2 * weights.pop()
    rows = {path: flops // per_row for path, flops in of_expert.items()}
    routed, run = ledger[0] // per_row, sum(rows.values())
    if run * per_row != counted[0]:
        return None
    # every token met every expert, in a class that is known to do that
    tokens = {drivers.parse_driver(row.driver)(bill.workload) for row in bill.rows}
    if {run} == {n * len(experts) for n in tokens} and (
        reason := unchosen_rows(module, len(experts), routed * len(experts) // run)
    ):
        return reason
    # the router dropped rows beyond the experts' capacity
    mixture = model.get_submodule(bill.module.rpartition(".")[0])
    limits = {m.expert_capacity for m in mixture.modules() if isinstance(getattr(m, "expert_capacity", None), int)}
    if run < routed and limits == {max(rows.values(), default=0)}:
        return f"experts take {limits.pop():,} rows at most: the router dropped {routed - run:,} of {routed:,}"
    return None


FILLED_UP_REASON = "an encoder fills up the last piece of a clip, and those frames are no clip's"


def filled_up(workload: Workload, driver: str) -> Workload:
    """Return the workload whose clips are rounded up to whole pieces, as an encoder that cuts them into pieces runs it.

    Args:
        workload: with clips or sources.
        driver: of a row, such as `audio/2:1:200` for pieces of 200 frames.
    """
    steps = driver.partition("/")[2].split(":")
    piece = int(steps[2]) if steps[2:] else 1
    filled: dict[str, Any] = {
        name: -(-workload.sizes(name) // piece) * piece for name, row in MODALITIES.items() if row.shape == "lengths"
    }
    return Workload(workload.segments, sources=-(-workload.sources // piece) * piece, **filled)


def _padded(bill: ModuleBill, counted: tuple[int, int], model: nn.Module) -> str | None:
    """Compare code that computes padding, or blocks beyond each position's mask."""
    if any(row.op == "convolution" for row in bill.rows):
        filled = filled_up(bill.workload, bill.rows[0].driver)
        if counted == bill.on(lambda driver: drivers.parse_driver(driver)(filled)):
            return FILLED_UP_REASON
    for path, padding in paddings(model, bill.workload):
        if lies_within(bill.module, [path]) and counted == bill.on(padding.units):
            return padding.reason
    return None


def _squares(bill: ModuleBill, step: CountedStep, counted: tuple[int, int]) -> str | None:
    """Compare eager attention, which computes whole squares of scores, with the pairs that the mask allows."""
    # FLOPs per score, forward and backward; by hand, scores and values have a row each
    of_driver: dict[str, tuple[int, int]] = {}
    workload = bill.workload
    for row in bill.rows:
        is_square = drivers.tower(row.driver) == "language" or row.driver == "patch_pairs:frame"
        if row.op == "attention" and (is_square or _all_pairs(row.driver)):
            forward, backward = of_driver.get(row.driver, (0, 0))
            needed = sum(g.flops for g in row.gradients if g.runs(bill.trained))
            of_driver[row.driver] = (forward + row.forward, backward + needed)
    if len(set(of_driver.values())) != 1:
        return None
    # scores that the mask allows, and those that ran
    per_score, per_score_back = next(iter(of_driver.values()))
    allowed, run = bill.flops[0] // per_score, counted[0] // per_score
    if run < allowed or counted != (run * per_score, run * per_score_back):
        return None
    # a square ran: one text's queries over all keys, its own and compressed ones beside them; all pictures in a row;
    # all of a clip
    is_of_text = workload.num_segments == 1 and run % workload.tokens == 0
    of_clips = {drivers.parse_driver(_all_pairs(driver))(workload) for driver in of_driver if _all_pairs(driver)}
    if not (is_of_text or run == workload.patches**2 or run in of_clips):
        return None
    why = f"eager attention runs all {run:,} scores, the mask allows {allowed:,}"
    if not step.softmaxes[bill.module]:
        return f"{why} by the ledger; no softmax shows them, so that is held as an upper bound only"
    return why if allowed in _unmasked_scores(step.softmaxes[bill.module], run) else None


def _unmasked_scores(softmaxes: list[tuple[int, int, int]], run: int) -> Iterator[int]:
    """Count the scores of a head that the real mask left visible, from the softmaxes that a module ran.

    A softmax is its places, those that no mask had hidden, and places for each query; a head has `run` scores. Two
    counts are tried: each head has its scores alone, or each query has one place more, a learnt sink.
    """
    places, shown = (sum(numbers[i] for numbers in softmaxes) for i in (0, 1))
    for sinks in (0, sum(number // width for number, _, width in softmaxes)):
        heads, remainder = divmod(places - sinks, run)
        if heads and not remainder and (shown - sinks) % heads == 0:
            yield (shown - sinks) // heads


def _all_pairs(driver: str) -> str:
    """Name the driver of all pairs of a clip or source for a driver that counts some of them; "" for other drivers.

    `audio_pairs:block:10/2` gives `audio_pairs:full/2`, `pairs:causal` gives "".
    """
    pairs, slash, steps = driver.partition("/")
    kind = pairs.partition(":")[0]
    return f"{kind}:full{slash}{steps}" if drivers.counts_pairs_of_lengths(driver) else ""
