"""Time of a training step before it runs, by line, as `headway explain` divides it after it ran.

Matrix products and attention of each component take their FLOPs over the rate of their shapes; everything else moves
bytes. What autograd saves says how many: in forward each saved tensor is written by one kernel and read by the next,
in backward it is read once more, and its gradient is written and read. A step of several ranks takes as long as the
heaviest of them.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from headway.count import CostModel, FlopCount, Workload, drivers
from headway.count.activations import SavedActivations, bytes_of
from headway.count.flop_count import FlopRow
from headway.count.quantised import quantised_parameters
from headway.count.recompute import with_head
from headway.count.rows import Row
from headway.count.step_facts import flops_on_padding
from headway.count.units import block_of, chosen_blocks, remembered
from headway.count.updating import RULES, trained_by_rule
from headway.predict.activations import BFLOAT16, FLOAT32, attentions
from headway.predict.communication import Exchanges, Links, exposed_s
from headway.predict.engine import HEADWAY, Engine
from headway.predict.kernel_bytes import (
    SORTS_S,
    SUMMED,
    TOP_K_S,
    clipping_bytes,
    loss_bytes,
    muon_products,
    own_update,
    update_bytes,
    update_launches,
)
from headway.predict.recipe import State
from headway.predict.speeds import HEAD_SIZE, Cases, Shape, Speeds, host_copy_s
from headway.predict.weights import is_float8, spread_over, values_of_experts
from headway.report.step_lines import NAMES, SLOW

ROWS = (64, 512, 2048, 8192)
"""Rows of inputs for which the rates of products are measured; sizes in practice lie between or near."""

FORWARD_MOVES, BACKWARD_MOVES = 2, 3
"""Times that elementwise operations move each byte that autograd saves: written and read in forward; in backward it is
read once more, and its gradient is written and read."""

LOSS_LAUNCHES = 14
"""Operators that a chunk of the loss launches in float32, its gradients included; casts of bfloat16 are four more."""

DEQUANTISED = 22
"""Bytes that dequantising a value moves: its code as an index (2 written, 2 read), its value in float32 (written, then
read and written with its scale, then read: 16), and rounded (2). Not measured on a device yet."""

_NOTHING = Cases.exact(0.0)
_PHASES = ("forward", "dgrad", "wgrad", "recompute")
# "attention", "experts", "float8" or "product"; the features of a linear module
_Kind = tuple[str, tuple[int, int] | None]


@dataclass(frozen=True, slots=True)
class TimeLine:
    """A part of a predicted step."""

    key: str  # name for programs, as in `headway explain`
    name: str  # name for people
    seconds: Cases  # time [s]


@dataclass(frozen=True)
class StepForecast:
    """A predicted step of all devices."""

    lines: tuple[TimeLine, ...]  # lines that add up to the step, case by case
    flops: int  # useful FLOPs of a mean step, all devices together
    peak_flops_per_s: float  # peak of all devices together [FLOP/s]
    tokens: float  # real tokens of a mean step, all devices together
    reference: Cases = _NOTHING  # forward of its packs that a stored reference takes before the first step [s]
    launches: int = 0  # operators that the host of each device launches for a step
    launching: Cases = _NOTHING  # time that launches take the host, hidden or not [s]

    def before(self, tokens: float) -> Cases:
        """Time that a stored reference of so many tokens takes before the first step [s]."""
        return self.reference.times(tokens / self.tokens)

    @property
    def seconds(self) -> Cases:
        """Time of a step [s]."""
        return sum((line.seconds for line in self.lines), Cases.exact(0.0))

    def line(self, key: str) -> Cases:
        """Time of a line; 0 where the step has none of that key [s]."""
        return next((line.seconds for line in self.lines if line.key == key), _NOTHING)

    @property
    def step_s(self) -> float:
        """Expected time of a step [s]."""
        return self.seconds.expected

    @property
    def mfu(self) -> Cases:
        """Useful FLOPs over the FLOPs that the devices could compute meanwhile, a fraction."""
        return Cases(*(self.flops / (self.peak_flops_per_s * seconds) for seconds in self.seconds))

    @property
    def tokens_per_s(self) -> Cases:
        """Real tokens per second, all devices together."""
        return Cases(*(self.tokens / seconds for seconds in self.seconds))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; of each quantity the best, the expected and the worst case."""
        lines = [{"key": line.key, "name": line.name, "seconds": [*line.seconds]} for line in self.lines]
        return {
            "step_s": [*self.seconds],
            "mfu": [*self.mfu],
            "tokens_per_s": [*self.tokens_per_s],
            "tokens": self.tokens,
            "flops": self.flops,
            "peak_flops_per_s": self.peak_flops_per_s,
            "reference_s": [*self.reference],
            "launches": self.launches,
            "launching_s": [*self.launching],
            "lines": lines,
        }


@dataclass(frozen=True)
class StepWork:
    """Work of a mean step for the devices."""

    flops: FlopCount  # useful FLOPs of all devices together, by component
    pack: Workload  # a micro-batch of mean size, with its slots
    packs: int  # micro-batches of each device in a step
    tokens: float  # real tokens, all devices together
    segments: float = 1.0  # segments of a pack
    devices: int = 1  # number of devices
    sequence: int = 1  # devices that share each pack
    expert: int = 1  # devices that the experts of a layer are spread over
    shards: int = 1  # devices that share one copy of the optimizer's state
    # numbers that a device adds up over a step's packs: its slices if each pack's are summed, else all that it trains
    gradients: int | None = None
    balance: float = 1.0  # mean over heaviest FLOPs of the ranks, a fraction
    exchanges: Exchanges | None = None  # exchanges of a device for a pack; None if they hide behind computing
    links: Links | None = None  # links of the devices; None with `exchanges`
    making_s: float = 0.0  # time in which the workers of a device make its packs [s]; 0 if packs are ready


class StepTimes:
    """Predicts steps of one model on one kind of device.

    Args:
        cost_model: of the model, with what is frozen frozen and adapters in place.
        saved: what autograd saves of it, in the precision of its forward.
        speeds: of the device.
        engine: whose kernels compute what is no product.
    """

    def __init__(
        self, cost_model: CostModel, saved: SavedActivations, speeds: Speeds, *, engine: Engine = HEADWAY
    ) -> None:
        self._cost_model, self._saved, self._speeds, self._engine = cost_model, saved, speeds, engine
        trained = cost_model.trained
        kinds_of_driver: dict[tuple[str, str], dict[str, Counter[_Kind]]] = defaultdict(lambda: defaultdict(Counter))
        alive = set()
        queries = {row.block: (row.component, row.driver) for row in reversed(cost_model.rows) if row.op != "attention"}
        self._queries: dict[tuple[str, str], tuple[str, str]] = {}  # attention's, by a product of the same block
        sizes = {attention.block: attention.size for attention in attentions(cost_model, saved, BFLOAT16)}
        self._head_sizes: dict[tuple[str, str], int] = {}  # attention's, if it is known
        for row in cost_model.rows:
            if row.op == "attention" and row.block in sizes:
                self._head_sizes.setdefault((row.component, row.driver), sizes[row.block])
            kinds, kind = kinds_of_driver[row.component, row.driver], (_kind_of(row), row.features)
            if row.op == "attention" and row.block in queries:
                self._queries.setdefault((row.component, row.driver), queries[row.block])
            kinds["forward"][kind] += row.forward
            kinds["recompute"][kind] += row.forward
            for gradient in row.gradients:
                if gradient.runs(trained):
                    kinds[gradient.phase][kind] += gradient.flops
                    alive.add(row.block)
        self._kinds, self._alive = kinds_of_driver, alive
        # share of its experts that a token chooses, by component
        self._chosen = {p.component: p.active / p.numel for p in cost_model.parameters if p.active}

    def predict(self, work: StepWork, state: State) -> StepForecast:
        """Predict a step.

        Args:
            work: what it asks of the devices.
            state: dtypes, and how forward computes.

        Raises:
            UsageError: `state.recompute` chooses no block.
        """
        speeds, devices = self._speeds, work.devices
        # useful FLOPs at the peak, then what is lost to the ceiling of real products, recomputation and padding
        padding = self._padding(work, state)
        rows = self._run_again(work, state)
        at_ceiling: dict[str, float] = defaultdict(float)
        for row in rows:
            flops = (row.total + row.recompute) * _share(row, padding, work)
            at_ceiling[row.name] += flops / speeds.ceiling_flops_per_s
        useful = work.flops.total / devices
        at_peak = useful / speeds.peak_flops_per_s
        head = {
            "useful": at_peak,
            "ceiling": useful / speeds.ceiling_flops_per_s - at_peak,
            "recomputation": sum(row.recompute for row in rows) / devices / speeds.ceiling_flops_per_s,
            "padding": sum(padding.values()) / devices / speeds.ceiling_flops_per_s,
        }
        lines = [TimeLine(key, NAMES[key], Cases.exact(seconds)) for key, seconds in head.items()]
        # components whose products are slower than the ceiling: their own time less that at the ceiling
        for name, seconds in self.computed_s(work, state).items():
            lines.append(TimeLine(f"{SLOW}.{name}", f"{SLOW}: {name}", seconds - Cases.exact(at_ceiling[name])))
        # elementwise operations and copies of gathered weights move bytes; the optimizer moves its own
        copied = 0 if work.exchanges is None else work.exchanges.copied_bytes
        moved = speeds.moving_s(work.packs * (self.moved_bytes(work, state) + copied))
        lines.append(self._line("memory", moved + self._routing_s(work, state).times(work.packs)))
        passes = sum((line.seconds for line in lines), Cases.exact(0.0))
        forward = sum(row.forward for row in rows) / sum(row.total + row.recompute for row in rows)
        both = (passes.times(forward), passes.times(1 - forward))
        lines.append(self._line("copies", self._copies_s(work, state, *both)))
        lines.append(self._line("optimizer", self._optimizer_s(work, state)))
        # time that exchanges take longer than forward and backward, and waiting for the rank with the most work
        computed = sum((line.seconds for line in lines), Cases.exact(0.0))
        if work.exchanges is not None and work.links is not None:
            waits = exposed_s(work.exchanges, work.packs, *both, work.links, overlap=speeds.runs_ahead)
            lines.append(self._line("communication.transfer", waits))
        waiting = computed.times(1 / work.balance - 1) if work.balance else Cases.exact(0.0)
        lines.append(self._line("communication.waiting", waiting))
        # the host launches kernels ahead of the device, and the step waits for what it does not hide
        launching = host = speeds.launching_s(launches := self.step_launches(work, state))
        if speeds.runs_ahead:
            launching = Cases(*(max(0.0, seconds) for seconds in launching - computed))
        lines.append(self._line("idle.launch", launching))
        # data are made beside all of it
        step = sum((line.seconds for line in lines), Cases.exact(0.0))
        lines.append(self._line("idle.data", Cases(*(max(0.0, work.making_s - seconds) for seconds in step))))
        peak = speeds.peak_flops_per_s * devices
        shown = tuple(line for line in lines if any(line.seconds))
        return StepForecast(shown, work.flops.total, peak, work.tokens, launches=round(launches), launching=host)

    def computed_s(self, work: StepWork, state: State) -> dict[str, Cases]:
        """Predict the time of products and attention of a step on one device, by component [s].

        Args:
            work: what the step asks of the devices.
            state: dtypes, and how forward computes.
        """
        rows, padding = self._run_again(work, state), self._padding(work, state)
        amounts = {
            (row.name, row.driver): row.forward / (self._kinds[row.name, row.driver]["forward"].total() or 1)
            for row in rows
        }
        took: dict[str, Cases] = {}
        for row in rows:
            seconds = self._component_s(row, _share(row, padding, work), work, state, amounts)
            took[row.name] = took.get(row.name, Cases.exact(0.0)) + seconds
        return took

    def step_launches(self, work: StepWork, state: State) -> float:
        """Count the operators that the host of a device launches for a step: its packs, their sums, and the update."""
        of_packs = work.packs * self.launches(state, work.pack.slots / work.sequence, work.segments)
        return of_packs + update_launches(self._cost_model, state, work.shards, work.packs, self._engine.update)

    def launches(self, state: State, slots: float, segments: float) -> float:
        """Count the operators that the host launches for a pack of so many slots and segments, its loss included."""
        chosen = chosen_blocks(state.recompute, self._cost_model, self._saved)
        is_compiled = state.fused and not state.liger  # Liger's kernels are launched between others
        total = 1.0 * LOSS_LAUNCHES * math.ceil(slots / (state.chunk or slots))
        for name, block in self._saved.blocks.items():
            learns = name in self._alive if name else bool(self._alive)
            for phase, times in (("forward", 1 + (name in chosen)), ("backward", int(learns))):
                total += times * block.num_launches(phase, slots, segments, fused=is_compiled and bool(name))
        return total

    def _run_again(self, work: StepWork, state: State) -> list[FlopRow]:
        """Rows of a step with their recomputation: the same share of each forward in any pack."""
        recompute = with_head(state.recompute) if state.weighs else state.recompute
        share = {
            (row.name, row.driver): Fraction(row.recompute, row.forward)
            for row in self._cost_model.count(work.pack, recompute=recompute).rows
            if row.forward
        }
        return [
            replace(row, recompute=round(row.forward * share.get((row.name, row.driver), 0))) for row in work.flops.rows
        ]

    @staticmethod
    def _line(key: str, seconds: Cases) -> TimeLine:
        return TimeLine(key, NAMES[key], seconds)

    def _component_s(
        self, row: FlopRow, factor: float, work: StepWork, state: State, amounts: Mapping[tuple[str, str], float]
    ) -> Cases:
        """Time of the products and the attention of one component under one driver on one device."""
        seconds = Cases.exact(0.0)
        attention = {"forward": 0.0, "backward": 0.0}
        units = drivers.parse_driver(row.driver)(work.pack) / work.sequence
        if row.name == "language.head" and state.chunk is not None:
            units = min(units, state.chunk)
        for phase in _PHASES:
            flops = getattr(row, phase) * factor
            kinds = self._kinds[row.name, row.driver][phase]
            for (kind, features), part in kinds.items():
                share = flops * part / kinds.total()
                if kind == "attention":
                    attention["forward" if phase in ("forward", "recompute") else "backward"] += share
                elif kind == "experts":
                    seconds += self._speeds.grouped_s(share, units * self._chosen.get(row.name, 1.0) * work.expert)
                else:
                    shape, rate, casts = product_shape(phase, math.ceil(units), features), None, 0.0
                    if state.float8 is not None and kind == "float8" and shape is not None:
                        rate, shards = state.float8.rate, 1 if state.offload else work.shards
                        casts = state.float8.moved_bytes(phase, shape, shards, work.packs)
                    seconds += self._speeds.product_s(share, shape, state.compute_bytes, float8=rate, casts=casts)
        queries = amounts.get(self._queries.get((row.name, row.driver), ("", ""))) or work.tokens
        pairs = amounts[row.name, row.driver]
        if not any(attention.values()):
            return seconds
        size = self._head_sizes.get((row.name, row.driver), HEAD_SIZE)
        slots = work.pack.patches if row.name.startswith("vision.") else work.pack.slots
        speeds = self._speeds.of_pack(slots, pairs / queries)
        return seconds + speeds.attention_s(attention["forward"], attention["backward"], pairs / queries, size)

    def _padding(self, work: StepWork, state: State) -> Mapping[str, int]:
        """FLOPs that slots without a token take in a step of all devices, by component."""
        if work.pack.slots <= work.pack.tokens:
            return {}
        on_padding = flops_on_padding(self._cost_model, work.pack, state.recompute) or 0
        packs = work.packs * work.devices // work.sequence
        language = {row.name: row.total for row in work.flops.rows if row.name.startswith("language.")}
        language.pop("language.attention", None)
        total = sum(language.values())
        return {name: on_padding * packs * flops // total for name, flops in language.items()}

    def moved_bytes(self, work: StepWork, state: State) -> float:
        """Bytes that elementwise operations move for a pack on one device."""
        sizes = _bytes_by_block(self._saved, work.pack, state.fused)
        again = sum(sizes[name] for name in chosen_blocks(state.recompute, self._cost_model, self._saved))
        alive = sum(size for name, size in sizes.items() if name in self._alive)
        moved: float = FORWARD_MOVES * (sum(sizes.values()) + again) + BACKWARD_MOVES * alive
        moved += 2 * self._inputs(work, state)
        # no kernel of Liger's weighs losses
        fused = state.liger and not state.weighs if self._engine.fuses_loss is None else self._engine.fuses_loss
        slots = (work.pack.slots if work.pack.logits is None else work.pack.logits) / work.sequence
        moved += self._engine.bytes_of_biases(self._cost_model, work.pack)
        moved += work.sequence * loss_bytes(self._cost_model, slots, state, fused=fused, learns=bool(self._alive))
        gradients = self._cost_model.params.trainable if work.gradients is None else work.gradients
        accumulated = 3 * state.weight_bytes * gradients if work.packs > 1 else 0
        return moved / work.sequence + accumulated + self._dequantising_bytes(work, state)

    def _dequantising_bytes(self, work: StepWork, state: State) -> float:
        """Bytes that making the weights of a base for their products moves, in each pass that multiplies by them."""
        if state.base is None:
            return 0
        chosen = chosen_blocks(state.recompute, self._cost_model, self._saved)
        names, values = quantised_parameters(self._cost_model), 0
        for parameter in self._cost_model.parameters:
            if parameter.name in names:
                block = block_of(parameter, self._saved)
                passes = 1 + (block in self._alive) + (block in chosen)
                values += passes * parameter.numel // spread_over(parameter, work.expert)
        return DEQUANTISED * values

    def _inputs(self, work: StepWork, state: State) -> int:
        """Inputs of recomputed blocks that wait in the host's memory, of all ranks that share a pack [bytes]."""
        if not state.inputs_on_host:
            return 0
        chosen = self._alive & chosen_blocks(state.recompute, self._cost_model, self._saved).keys()
        return sum(bytes_of(self._saved.blocks[name].entry, work.pack) for name in chosen)

    def _copies_s(self, work: StepWork, state: State, forward: Cases, backward: Cases) -> Cases:
        """Time of copies to the host's memory beyond forward, and of copies back beyond backward [s]."""
        copies = host_copy_s(work.packs * self._inputs(work, state) / work.sequence, self._speeds.host_bytes_per_s)
        return Cases(
            *(max(0.0, copy - f) + max(0.0, copy - b) for copy, f, b in zip(copies, forward, backward, strict=True))
        )

    def _routing_s(self, work: StepWork, state: State) -> Cases:
        """Time in which a pack's rows are sorted by expert and added up again, beyond that of the bytes they save."""
        if self._speeds.is_measured or not self._engine.sorts_rows:  # the time of a model's own blocks has it
            return Cases.exact(0.0)
        slots, seconds = work.pack.slots / work.sequence, Cases.exact(0.0)
        again = chosen_blocks(state.recompute, self._cost_model, self._saved)
        for block, values in values_of_experts(self._cost_model, self._saved).items():
            # forward adds up what experts give, backward the gradients of what they read; both sort for it
            added = state.compute_bytes * values * slots * (1 + (block in self._alive))
            seconds += self._speeds.memory_s(added * (1 / SUMMED - 1))
            seconds += Cases.exact((1 + (block in again)) * (SORTS_S + slots * TOP_K_S))
        return seconds

    def _optimizer_s(self, work: StepWork, state: State) -> Cases:
        """Time of an update: the bytes that it reads and writes, and Muon's products."""
        # gradients are read for their norm and scaled; then the update reads and writes what it is about
        num_bytes = 0.0
        for rule, trained in trained_by_rule(self._cost_model, state.rule).items():
            update = self._engine.update or own_update(state, rule)
            num_bytes += clipping_bytes(state, trained, update) + update_bytes(state, trained, update, rule)
        # the moving average is read and written, and the weights read for it, at some of the steps
        if state.averaged:
            num_bytes += (2 * FLOAT32 + state.weight_bytes) * self._cost_model.params.trainable / state.average_every
        moved = (self._speeds.host_memory_s if state.offload else self._speeds.memory_s)(num_bytes / work.shards)
        if not RULES[state.rule].iterations:
            return moved
        # each matrix is orthogonalised once for each copy of the weights, in bfloat16
        matrices = muon_products(self._cost_model)
        products = (self._speeds.product_s(flops / work.shards, shape, BFLOAT16) for shape, flops in matrices)
        return sum(products, moved)


def _kind_of(row: Row) -> str:
    """Kind of a row: attention, products of experts, a product that float8 converts, or another one."""
    if row.op in ("attention", "experts"):
        return row.op
    return "float8" if is_float8(row) else "product"


@remembered
def _bytes_by_block(saved: SavedActivations, pack: Workload, fused: bool) -> dict[str, int]:
    """Activations that each block saves of a pack [bytes]; "" for activations outside of blocks."""
    return {name: bytes_of(block.fused if fused else block.plain, pack) for name, block in saved.blocks.items()}


def _share(row: FlopRow, padding: Mapping[str, int], work: StepWork) -> float:
    """Share of a component's FLOPs that one device computes, padding included."""
    return (1 + (padding.get(row.name, 0) / row.total if row.total else 0.0)) / work.devices


def product_shape(phase: str, units: int, features: tuple[int, int] | None) -> Shape | None:
    """Sizes (m, k, n) of the product that a linear module runs in a phase.

    Args:
        phase: forward, recompute, dgrad or wgrad.
        units: rows of its input.
        features: in and out; None where they are not known.

    >>> product_shape("wgrad", 4096, (1024, 3072))
    (3072, 4096, 1024)
    """
    if features is None:
        return None
    wide, out = features
    return {"dgrad": (units, out, wide), "wgrad": (out, units, wide)}.get(phase, (units, wide, out))


def shapes_of(cost_model: CostModel, rows: Iterable[int] = ROWS) -> list[Shape]:
    """List the products of a model's linear modules in forward and backward, small ones first.

    Args:
        cost_model: of the model.
        rows: numbers of rows of their inputs to list them for.
    """
    features = {row.features for row in cost_model.rows if row.features is not None}
    shapes = {
        shape
        for units in rows
        for sizes in features
        for phase in ("forward", "dgrad", "wgrad")
        if (shape := product_shape(phase, units, sizes)) is not None
    }
    return sorted(shapes, key=lambda shape: (math.prod(shape), shape))
