"""Hold a ledger against the shapes of its model's weights, by eyes of its own: the second witness of the sweep.

The model runs forward once more, on one of the trace's workloads, while `uses` watches what Python calls. What is held
against that, by the kind of the ledger's rows:

* `linear`, `matmul` with a weight, `convolution`: the row's FLOPs on that workload are those of the calls that multiply
  the weight, 2 x (elements of the weight, or of the slice of it) x (rows, or output positions).
* the same rows, per unit of the driver: 2 x elements x a whole number of calls, unless slices of the weight are
  multiplied apart.
* `experts`: the same with 2 x elements x (picks / experts), where the picks are those of the router's own choice among
  so many; and per token the FLOPs are 2 x `Parameter.active`.
* `matmul` of two activations, `attention`: there is no weight to hold them against.
* `recurrence`: its formula has no weight either; parameters of its module that nothing else uses count as its own.

Every parameter of two dimensions or more has a row that trains it, or is looked up, or is used elementwise, or is an
input that is learnt, or belongs to a recurrence, or is listed in the ledger's source, or is one of a module that runs
and takes an argument that the trace does not give. The rest is an exception.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headway.count import drivers
from headway.tracing import build
from headway.tracing.inputs.model_inputs import alternate_forwards, call, inputs_for, without_arguments
from headway.tracing.record import Recorder
from headway.tracing.seams import Seams
from headway.tracing.stand_ins import stand_ins
from headway.tracing.unwrap import lies_within, plain_checkpoints
from headway.tracing.verify import FILLED_UP_REASON, filled_up
from tools.sweep.uses import Uses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headway.count.cost_model import CostModel
    from headway.count.rows import Row
    from headway.count.workload import Workload

_WITHOUT_WEIGHTS = ("attention", "recurrence")


@dataclass(frozen=True)
class Mixture:
    """A module of experts, as the witness sees it.

    Attributes:
        module: its path.
        driver: what its rows grow with.
        experts: how many there are.
        picks: how many of them a token is billed for.
    """

    module: str
    driver: str
    experts: int
    picks: int


@dataclass(frozen=True)
class Exceptional:
    """Something that does not follow the rule.

    Attributes:
        where: parameters, with layer numbers folded into `*`.
        what: does not follow it.
        reason: by a rule; "" where there is none.
    """

    where: str
    what: str
    reason: str = ""


@dataclass
class Checked:
    """What the second witness checked of one model.

    Attributes:
        modules: modules whose rows were held against their weights.
        parameters: parameters of two dimensions or more by what becomes of them.
        mixtures: modules of experts.
        exceptions: what does not follow the rules, each once.
    """

    modules: int = 0
    parameters: Counter[str] = field(default_factory=Counter)
    mixtures: list[Mixture] = field(default_factory=list)
    exceptions: list[Exceptional] = field(default_factory=list)

    @property
    def unexplained(self) -> list[Exceptional]:
        """Exceptions without a reason."""
        return [e for e in self.exceptions if not e.reason]

    def note(self, names: Sequence[str] | frozenset[str], what: str, reason: str = "") -> None:
        """Add an exception, unless layers like this one made it already."""
        where = ", ".join(sorted({re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names}))
        found = Exceptional(where, what, reason)
        if found not in self.exceptions:
            self.exceptions.append(found)


def check_ledger(config: Any, cost: CostModel) -> Checked:
    """Hold a ledger against another look at the model that it was read off.

    Args:
        config: of transformers.
        cost: traced from it.
    """
    model = build.twin_of_config(config)
    build.number_parameters(model)
    build.use_seams(model)
    model.train()
    made = inputs_for(model)
    workload = made.workloads()[-1]
    uses = _watch(model, made.arguments(workload))
    case = _Case(cost, model, uses, workload)
    case.check_products()
    case.check_experts()
    ways: list[tuple[str, Uses]] = []
    if "without" in cost.source:
        ways = [(", ".join(names), _watch(model, given)) for names, given in alternate_forwards(model, made, workload)]
    missing = [name for name in without_arguments(made, workload, []) if name != "kwargs"]
    case.check_parameters(ways, missing)
    return case.seen


def _watch(model: nn.Module, arguments: Any) -> Uses:
    recorder, uses = Recorder(model, lambda _path: ""), Uses(model)
    with recorder, Seams(recorder), stand_ins(model, recorder), plain_checkpoints(), torch.no_grad(), uses:
        call(model, arguments)
    return uses


def _module(name: str) -> str:
    return name.rpartition(".")[0]


class _Case:
    """A ledger, its model's shapes, and what one forward pass did with them."""

    def __init__(self, cost: CostModel, model: nn.Module, uses: Uses, workload: Workload) -> None:
        self.cost, self.uses = cost, uses
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.dim() > 1}
        self.active = {p.name: p.active for p in cost.parameters}
        modules = dict(model.named_modules())
        self.tables = {name for name in self.shapes if isinstance(modules[_module(name)], nn.Embedding)}
        self.modules = {row.module for row in cost.rows}
        self.workload = workload
        self.units = {row.driver: drivers.parse_driver(row.driver)(workload) for row in cost.rows}
        self.executed: dict[frozenset[str], int | None] = {}
        for names, flops in uses.executed.items():
            if matrices := frozenset(names & self.shapes.keys()):
                before = self.executed.get(matrices, 0)
                self.executed[matrices] = None if flops is None or before is None else before + flops
        self.rows: defaultdict[frozenset[str], list[Row]] = defaultdict(list)
        for row in cost.rows:
            if weights := self._weights(row):
                self.rows[weights].append(row)
        self.seen = Checked(modules=len({row.module for rows in self.rows.values() for row in rows}))

    def _weights(self, row: Row) -> frozenset[str]:
        """Name the parameters that a row multiplies activations by: what its weight's gradient trains.

        Without a backward, as in an indexer whose picks no gradient reaches, that is what its module multiplies by.
        """
        if row.op in _WITHOUT_WEIGHTS:
            return frozenset()
        if not row.gradients:
            near = [name for used in self.executed for name in used if lies_within(_module(name), [row.module])]
            return frozenset(name for name in near if _module(name) not in self.modules - {row.module})
        trained = [self._matrices(g.needs) for g in row.gradients if g.phase == "wgrad"]
        seen = [names for names in trained if any(used <= names for used in self.executed)]
        # learnt queries have a gradient of that kind too, and all that they went through since
        return min(reversed(seen), key=len, default=frozenset())

    def _matrices(self, bits: int) -> frozenset[str]:
        return frozenset(p.name for i, p in enumerate(self.cost.parameters) if bits >> i & 1 and p.name in self.shapes)

    def _elements(self, names: frozenset[str]) -> int:
        return sum(torch.Size(self.shapes[name]).numel() for name in names)

    def _experts(self, names: frozenset[str], rows: list[Row]) -> int:
        """Count the experts that weights are of: a stack of matrices, or one parameter in each item of a list.

        Whether a stack is one of experts is told by its rows, or by the part of it that a token uses. 0 for no experts.
        """
        if rows[0].op == "experts":
            return len(names) if len(names) > 1 else self.shapes[next(iter(names))][0]
        partly = [name for name in names if self.active[name] < self._elements(frozenset({name}))]
        return self.shapes[partly[0]][0] if len(names) == len(partly) == 1 and len(self.shapes[partly[0]]) == 3 else 0

    def check_products(self) -> None:
        """Hold the FLOPs of each weight's rows against the calls that multiply it, and against its elements."""
        for names, rows in self.rows.items():
            billed = sum(row.forward * self.units[row.driver] for row in rows)
            parts = [flops for used, flops in self.executed.items() if used <= names]
            if None in parts:
                self.seen.note(names, "is multiplied by a function whose FLOPs are not worked out", "recurrent cell")
                continue
            if not any(row.gradients for row in rows):
                self.seen.note(names, "is billed forward alone", "nothing reads its result, or only to pick by it")
            done = sum(flops for flops in parts if flops is not None)
            if billed != done:
                self.seen.note(names, f"billed {billed:,} FLOPs, called {done:,}", self._why(names, rows, billed, done))
            each = 2 * self._elements(names) // (self._experts(names, rows) or 1)
            if any(row.forward % each for row in rows):
                sliced = "slices of it are multiplied apart" if billed == done else ""
                self.seen.note(names, "per unit no whole number of calls", sliced)

    def _why(self, names: frozenset[str], rows: list[Row], billed: int, done: int) -> str:
        """Explain by a rule why a weight's calls run other FLOPs than are billed; "" where no rule does."""
        if (mixture := self._mixture(names, rows)) and done * mixture.picks == billed * mixture.experts:
            return "the code runs every expert on every token, and weighs those that were not picked by 0"
        if rows[0].op == "convolution" and len(names) == 1:
            (name,) = names
            per_position = 2 * self._elements(names)
            extra, rest = divmod(done - billed, per_position)
            if not rest and 0 < extra < self.shapes[name][-1]:
                return "a causal convolution pads its front, and those outputs belong to no token"
            filled = filled_up(self.workload, rows[0].driver)
            run = sum(row.forward * drivers.parse_driver(row.driver)(filled) for row in rows)
            if done == run:
                return FILLED_UP_REASON
        return ""

    def _mixture(self, names: frozenset[str], rows: list[Row]) -> Mixture | None:
        """Read experts and picks off the shapes and the active elements; None where these are no whole ones."""
        experts = self._experts(names, rows)
        picks, rest = divmod(experts * sum(self.active[name] for name in names), self._elements(names))
        return None if rest or not experts else Mixture(rows[0].module, rows[0].driver, experts, picks)

    def check_experts(self) -> None:
        """Hold the law of experts: forward FLOPs per token are twice the active elements, as the router picks."""
        for names, rows in self.rows.items():
            experts = self._experts(names, rows)
            if not experts and not rows[0].component.endswith(".experts"):
                continue
            forward, active = sum(row.forward for row in rows), sum(self.active[name] for name in names)
            if forward != 2 * active:
                self.seen.note(names, f"forward {forward:,} FLOPs per {rows[0].driver}, active elements {active:,}")
            if not experts:
                continue
            mixture = self._mixture(names, rows)
            if mixture is None:
                self.seen.note(names, f"{active:,} of {self._elements(names):,} elements active: no whole experts")
                continue
            if mixture not in self.seen.mixtures:
                self.seen.mixtures.append(mixture)
            self._check_picks(names, mixture)

    def _check_picks(self, names: frozenset[str], mixture: Mixture) -> None:
        """Look for the router's choice: at once, or one expert after the other."""
        choices, like_it = self.uses.choices, [m for m in self.seen.mixtures if m.experts == mixture.experts]
        if (mixture.experts, mixture.picks) in choices:
            return
        if choices[mixture.experts, 1] >= mixture.picks * len(like_it):
            return
        what = f"{mixture.picks} of {mixture.experts} experts billed"
        beyond = [options for options, picks in choices if picks == mixture.picks]
        more = min((options for options in beyond if options > mixture.experts), default=0)
        idle = f"{more - mixture.experts} of {more} choices are identity experts without weights: an upper bound"
        self.seen.note(names, what, idle if more else "")

    def check_parameters(self, ways: list[tuple[str, Uses]], missing: Sequence[str]) -> None:
        """Say of every parameter of two dimensions or more what becomes of it.

        Args:
            ways: other ways through the model, with what each of them is named after.
            missing: arguments that forward takes and nothing gives.
        """
        trained = frozenset().union(*self.rows)
        states = [row.module for row in self.cost.rows if row.op == "recurrence"]
        unused = [path for path in self.cost.source.get("unused", "").split(", ") if path]
        for name in self.shapes:
            roles = self.uses.roles.get(name, set())
            led = [way for way, other in ways if other.roles.get(name)]
            if name in trained:
                kind = "row"
            elif "weight" in roles:
                kind = "unexplained"
                self.seen.note([name], "is multiplied, and no row is its")
            elif "table" in roles or name in self.tables:
                kind = "looked up"
            elif "input" in roles:
                kind = "learnt input"
            elif "elementwise" in roles:
                kind = "elementwise"
            elif lies_within(_module(name), states) and states:
                kind = "recurrence"
            elif unused and lies_within(name, unused):
                kind = "noted in the source"
                self.seen.note([name], "never runs", "no argument reaches it: `unused` in the ledger's source")
            elif led:
                kind = "noted in the source"
                self.seen.note([name], "does not run", f"runs only with {led[0]}: `without` in the ledger's source")
            elif missing and any(lies_within(other, [_module(name)]) for other in self.uses.roles):
                kind = "for arguments that are not given"
                self.seen.note([name], "is not read where the rest of its module is", f"takes {', '.join(missing)}")
            else:
                kind = "unexplained"
                self.seen.note([name], "has no row, and is neither looked up nor used elementwise")
            self.seen.parameters[kind] += 1
