"""Try every choice of settings: plan its memory and, where that is near the limit or below, its packs and its time.

Packs are planned by the planner that training uses, over the same lengths, once for each packing length, accumulation
and number of ranks. Memory is planned first, for it is cheap: where the thriftiest choice of a packing length is far
beyond the limit, none of the others is looked at.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from headway.config import TrainConfig
from headway.count import CostModel
from headway.count.recompute import parse_recompute, result_kind
from headway.errors import ConfigError, DataError, PlanError, UsageError
from headway.packing.lengths import MIXES, LengthTable, Numbers
from headway.predict.fitting import room_of
from headway.predict.memory import MemoryPlan
from headway.predict.packs import Packs, plan_packs
from headway.predict.prediction import OtherPacks, Prediction
from headway.predict.predictor import Predictor
from headway.predict.recipe import assignment
from headway.predict.tune.space import LEFT, Space, Values, admitted, changes
from headway.report import format_bytes
from headway.words import Argument

BEYOND = 1.25
"""Share of the limit up to which choices are timed too, to tell what more memory would buy."""

MORE_LOST = 0.001
"""Share of the tokens that a choice may leave out, cut or split beyond the losses of the recipe's own packs."""

MOST_LOST = 0.04
"""The same of packs that are so short that they are only named beside the choices, with what they leave out."""

WORTH = 1.03
"""Times the recipe's useful FLOP/s from which on other packs are worth a word."""

_TYPICAL = 30_000  # samples of a mix, by which rare long ones are counted; a plan's steps may have none of them
_SHARES_OF_LEFT = (1.0, 0.92, 0.6)  # sizes tried for `memory:SIZE`
_MIB = 2**20


@dataclass(frozen=True, eq=False)
class SearchResult:
    """Result of a search."""

    own: Prediction  # the recipe, unchanged
    candidates: tuple[Prediction, ...]  # timed choices, the fastest first, those beyond the limit among them
    # the same of packs that leave out more samples than the recipe's own, up to `MOST_LOST`
    shorter: tuple[Prediction, ...]
    tried: int  # choices with a memory plan of their own or of a thriftier choice
    packings: int  # packs that were planned
    room_bytes: int | None  # limit [bytes]; None for none
    seconds: float  # wall time of the search [s]

    def fits(self, candidate: Prediction) -> bool:
        """Tell whether a choice is within the limit."""
        return self.room_bytes is None or candidate.memory.peak <= self.room_bytes

    @cached_property
    def ranked(self) -> tuple[Prediction, ...]:
        """Choices within the limit, the fastest first."""
        return tuple(candidate for candidate in self.candidates if self.fits(candidate))

    @property
    def fitting(self) -> int:
        """Number of choices within the limit."""
        return len(self.ranked)

    @property
    def fastest_shorter(self) -> Prediction | None:
        """The fastest choice within the limit whose packs leave out more samples, if all others are slower by far."""
        fastest = next((candidate for candidate in self.shorter if self.fits(candidate)), None)
        best = self.ranked[0].flops_per_s if self.ranked else 0.0
        return fastest if fastest is not None and fastest.flops_per_s >= WORTH * best else None


@dataclass
class Search:
    """Looks for the fastest choices."""

    config: TrainConfig  # recipe
    predictor: Predictor  # predictor of its model
    devices: int  # processes, a device each
    room_bytes: int | None  # memory of each device [bytes]; None for no limit
    lengths: tuple[str, LengthTable]  # name and table of the samples' lengths
    space: Space  # settings that are tried
    _packs: dict[tuple[Any, ...], Packs | None] = field(default_factory=dict)
    _tried: int = 0
    _least: tuple[int, Values] = field(default_factory=lambda: (2**62, {}))

    def __post_init__(self) -> None:
        name, table = self.lengths
        mix = MIXES.get(self.config.plan.mix or "")
        is_mix = mix is not None and name.startswith(f"{mix.name}:")
        self._tokens: Numbers = mix.lengths(_TYPICAL).tokens if mix is not None and is_mix else table.tokens
        columns = {column.name: getattr(table, column.name) for column in fields(LengthTable)}
        self.lengths = (name, PricedLengths(**columns))
        # a model without attention, such as Mamba, has no results of it to keep
        kinds = {result_kind(row) for row in self.predictor.cost_model.rows}
        self.space = replace(
            self.space,
            recomputes=tuple(
                choice
                for choice in self.space.recomputes
                if all(term.text in kinds for term in parse_recompute(choice) if term.leaves_out)
            ),
        )

    def run(self) -> SearchResult:
        """Try everything.

        Raises:
            PlanError: no choice gives steps of the size asked for, or none fits the limit.
            ConfigError: a recipe that the devices do not fit.
            DataError: the recipe's own packs do not hold its longest sample.
        """
        start_s = time.perf_counter()
        # the recipe as it is sets how many tokens may be left out
        own = self.own()
        lost = self._lost(own.config, own.work)
        timed = sorted(self._candidates(lost), key=_order)
        # packs that leave out more samples than the recipe's are no choices: a caller names them with their losses
        choices, shorter = (
            tuple(choice for choice in timed if (self._lost(choice.config, choice.work) > lost + MORE_LOST) is more)
            for more in (False, True)
        )
        result = SearchResult(own, choices, shorter, self._tried, len(self._packs), self.room_bytes, 0.0)
        # no choice at all, or none that fits: say what would change that
        if not self._tried:
            raise PlanError(
                f"no packs of the recipe's samples give steps of {self.space.step_tokens:,} tokens "
                f"+-{100 * self.space.tolerance:g} % on {self.devices} devices: ranks x accumulation x packing length "
                f"must come near. Give another {Argument('tokens_per_step')}, or a larger tolerance."
            )
        if self.room_bytes is not None and not result.ranked:
            size, values = self._least
            settings = [assignment(name, value) for name, value in values.items()]
            fastest = result.fastest_shorter
            raise PlanError(
                f"none of {self._tried:,} choices fits {format_bytes(self.room_bytes)} on each of {self.devices} "
                f"devices. The least that was found takes {format_bytes(size)}"
                f"{', with ' + ', '.join(settings) if settings else ''}. Allow more with {Argument('memory')}, give "
                f"more {Argument('devices')}, fewer {Argument('tokens_per_step')}, or hold less: optim.state=8bit, "
                "model.lora, run.dtype."
                + ("" if fastest is None else f" Packs that leave out samples fit: {' '.join(fastest.settings)}.")
            )
        return replace(result, seconds=time.perf_counter() - start_s)

    def own(self) -> Prediction:
        """The recipe as it is.

        Raises:
            ConfigError: the devices do not fit it.
            DataError: its packs do not hold its longest sample.
        """
        packs = self._planned(self.config)
        if packs is None:  # the error says why
            packs = self._plan(self.config)
        return self._candidate(self.config, {}, packs, self._memory(self.config, packs))

    def _candidates(self, lost: float) -> Iterator[Prediction]:
        table = self.lengths[1]
        for packing in self.space.packings(self.config, self.devices, table):
            packs: Packs | None = None
            for mesh in self.space.meshes(self.devices, packing["parallel.sequence"]):
                values = {**packing, **mesh, **self.space.thriftiest}
                thrifty = admitted(self.config, values)
                if thrifty is None:
                    continue
                choices = self._choices(packing)
                if packs is None:
                    self._tried += len(choices)
                    if not self._may_fit(self._memory_of_budget(thrifty)):
                        self._note(self._memory_of_budget(thrifty), values)
                        continue
                    self._tried -= len(choices)
                    packs = self._planned(thrifty)
                    if packs is None or not self._is_wanted(packs, thrifty, lost):
                        break
                self._tried += len(choices) if self._lost(thrifty, packs) <= lost + MORE_LOST else 0
                least = self._memory(thrifty, packs)
                self._note(least.peak, values)
                if self._may_fit(least.peak):
                    for choice in choices:
                        yield from self._timed(thrifty, {**packing, **mesh, **choice}, packs)

    def _choices(self, packing: Values) -> list[Values]:
        return [
            {**sharing, "speed.recompute": recompute, "speed.loss_chunk": chunk}
            for sharing, recompute, chunk in product(
                self.space.sharings(packing["optim.accumulation"]), self.space.recomputes, self.space.chunks
            )
        ]

    def _timed(self, thrifty: TrainConfig, values: Values, packs: Packs) -> Iterator[Prediction]:
        """The choice, if it is near the limit; with the least recomputation, one choice for each size tried.

        Args:
            thrifty: a choice of the same packs and mesh.
            values: all settings of this one.
            packs: of both.
        """
        recompute = values["speed.recompute"]
        for size in [recompute] if recompute != LEFT else self._sizes_left(thrifty, values, packs):
            chosen = {**values, "speed.recompute": size}
            config = admitted(thrifty, chosen)
            memory = None if config is None else self._admitted(config, packs)
            if config is not None and memory is not None and self._may_fit(memory.peak):
                yield self._candidate(config, changes(self.config, chosen), packs, memory)

    def _sizes_left(self, thrifty: TrainConfig, values: Values, packs: Packs) -> list[str]:
        """Divide the room that the limit leaves for activations, as `memory:SIZE`; no sizes if all fit, or none do."""
        if self.room_bytes is None:
            return []
        nothing_again, all_again = (
            None if config is None else self._admitted(config, packs)
            for config in (admitted(thrifty, {**values, "speed.recompute": r}) for r in ("none", "full"))
        )
        if nothing_again is None or all_again is None or nothing_again.peak <= self.room_bytes:
            return []
        left = self.room_bytes - (all_again.peak - all_again.activations - all_again.recomputing)
        sizes = [int(share * left) // _MIB for share in _SHARES_OF_LEFT]
        return [f"memory:{size // 512 / 2}GiB" if size >= 4096 else f"memory:{size}MiB" for size in sizes if size > 0]

    def _candidate(self, config: TrainConfig, changed: Values, packs: Packs, memory: MemoryPlan) -> Prediction:
        shape, model = config.parallel.mesh_shape(self.devices), self.predictor.cost_model
        time = self.predictor.time(config, packs, self.devices)
        return Prediction(config, model.name, shape, model.params, memory, packs, time, changes=changed)

    def _planned(self, config: TrainConfig) -> Packs | None:
        """Packs of a configuration, planned once; None if its samples do not fit them."""
        data = config.data
        sequence, accumulation = config.parallel.sequence, config.optim.accumulation
        key = (data.tokens_per_pack, data.patches_per_pack, self.devices // sequence, accumulation)
        if key not in self._packs:
            try:
                self._packs[key] = self._plan(config)
            except (ConfigError, DataError):
                self._packs[key] = None
        return self._packs[key]

    def _plan(self, config: TrainConfig) -> Packs:
        shape = config.parallel.mesh_shape(self.devices)
        packs = plan_packs(config, self.predictor.cost_model, shape, "none", lengths=self.lengths)
        assert packs is not None  # there are lengths
        return packs

    def _is_wanted(self, packs: Packs, config: TrainConfig, lost: float) -> bool:
        """Tell whether steps have the size asked for, and few more samples are left out than by the recipe itself."""
        tokens = packs.step_tokens(config, config.parallel.mesh_shape(self.devices))
        is_size = abs(tokens / self.space.step_tokens - 1) <= self.space.tolerance
        return is_size and self._lost(config, packs) <= lost + MOST_LOST

    def longer(self, config: TrainConfig) -> tuple[float, float]:
        """Count the samples that are longer than a pack of a choice: their share, and that of their tokens."""
        is_longer = self._tokens > config.data.tokens_per_pack
        return float(is_longer.mean()), float(self._tokens[is_longer].sum() / self._tokens.sum())

    def _lost(self, config: TrainConfig, packs: Packs) -> float:
        """Share of the samples' tokens that are left out, or of the samples that are split, whichever is more."""
        counts, (samples, tokens) = packs.counts, self.longer(config)
        all_tokens = counts.tokens + counts.tokens_dropped
        planned = max(counts.tokens_dropped / max(1, all_tokens), counts.split / max(1, counts.read))
        cut = tokens - samples * config.data.tokens_per_pack / float(self._tokens.mean())
        return max(planned, {"split": samples, "truncate": cut}.get(config.data.overlong_of_all, tokens))

    def _may_fit(self, peak: int) -> bool:
        return self.room_bytes is None or peak <= BEYOND * self.room_bytes

    def _note(self, peak: int, values: Values) -> None:
        if peak < self._least[0]:
            self._least = (peak, changes(self.config, values))

    def _admitted(self, config: TrainConfig, packs: Packs) -> MemoryPlan | None:
        """Memory of a choice; None if the model has no such blocks, or they do not fit the size given."""
        try:
            return self._memory(config, packs)
        except UsageError:
            return None

    def _memory(self, config: TrainConfig, packs: Packs) -> MemoryPlan:
        return self.predictor.memory(config, self.devices, (packs.most_tokens, packs.most_patches), packs.padded)

    def _memory_of_budget(self, config: TrainConfig) -> int:
        """Peak with packs that are nine tenths full and hold no pictures: less than any real ones [bytes]."""
        return self.predictor.memory(config, self.devices, (math.ceil(0.9 * config.data.tokens_per_pack), 0)).peak


@dataclass(frozen=True, eq=False)
class PricedLengths(LengthTable):
    """Lengths whose FLOPs are counted once for all packs."""

    _costs: dict[str, Numbers] = field(default_factory=dict, init=False)

    def costs(self, cost_model: CostModel) -> Numbers:
        """FLOPs of training on each sample, forward and backward, shape (N,)."""
        if cost_model.name not in self._costs:
            self._costs[cost_model.name] = super().costs(cost_model)
        return np.array(self._costs[cost_model.name])


def same_step(
    config: TrainConfig, predictor: Predictor, devices: int, lengths: tuple[str, LengthTable]
) -> tuple[OtherPacks, ...]:
    """Search packing length, accumulation and recomputation for the fastest step of as many tokens.

    Args:
        config: the recipe.
        predictor: of its model, with device, speeds and links.
        devices: processes, a device each.
        lengths: name and table of the samples' lengths.

    Returns:
        The fastest choice that leaves out no more samples than the recipe, where it is faster by `WORTH` or the recipe
        does not fit; then, where it is faster by as much again, the fastest choice that leaves out up to `MOST_LOST`.
    """
    search = Search(config, predictor, devices, room_of(predictor.device), lengths, Space.of_packs(config, devices))
    try:
        result = search.run()
    except (PlanError, ConfigError, DataError):  # nothing fits, or nothing gives steps of this size
        return ()
    own, best, shorter = result.own, result.ranked[0], result.fastest_shorter
    is_worth = bool(best.changes) and (not result.fits(own) or best.flops_per_s >= WORTH * own.flops_per_s)
    choices = [best] * is_worth + [shorter] * (shorter is not None)
    return tuple(OtherPacks(choice, *search.longer(choice.config), choice is shorter) for choice in choices if choice)


def front(candidates: Sequence[Prediction]) -> list[Prediction]:
    """Choices than which none is both smaller and faster, the smallest first.

    Args:
        candidates: any choices.
    """
    best: list[Prediction] = []
    for candidate in sorted(candidates, key=lambda c: (c.memory.peak, -c.flops_per_s)):
        if not best or candidate.flops_per_s > best[-1].flops_per_s:
            best.append(candidate)
    return best


def distinct(candidates: Sequence[Prediction], count: int) -> list[Prediction]:
    """The first of each kind, so many of them."""
    first: dict[tuple[Any, ...], Prediction] = {}
    for candidate in candidates:
        first.setdefault(candidate.kind, candidate)
    return list(first.values())[:count]


def _order(candidate: Prediction) -> tuple[float, int, int]:
    """Sort key: the fastest first; below a thousandth of difference, fewer changes first, then less memory."""
    return (-round(1000 * math.log(candidate.flops_per_s)), len(candidate.changes), candidate.memory.peak)
