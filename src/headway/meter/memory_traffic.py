"""MBU: the bytes that a step must move at least, over the bytes that the memory could have moved in its time.

What is counted, and why it is a lower bound, is in docs/record.md.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from headway.count import CostModel, Generation, Workload, drivers
from headway.count.modalities import media_towers
from headway.count.recompute import run_again
from headway.count.rows import Parameter, Row
from headway.errors import UsageError


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes that one rank's step must move, reads and writes together."""

    weights: int  # read by forward, by the gradients of activations, and once more by recomputation
    gradients: int  # gradients of parameters, written by backward, added up over micro-batches and read by the update
    optimizer: int  # parameters and optimizer state, read and written by the update
    activations: int  # saved for backward, written once and read once

    @property
    def total(self) -> int:
        """All bytes of the step."""
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """Bytes that the parameters of a part of a model make one rank move."""

    forward: int = 0  # weights that products of one forward read
    dgrad: int = 0  # weights that products of one backward read
    recomputed: int = 0  # weights that the recomputation of one forward reads
    gradients: int = 0  # moved for gradients in each micro-batch
    # added once for each optimizer step; below 0 where its first micro-batch only writes what later ones read and
    # write, and no update reads it
    gradients_of_step: int = 0
    gradients_of_update: int = 0  # gradients that the update reads
    update: int = 0  # parameters and optimizer state that one update reads and writes


@dataclass(frozen=True)
class Traffic:
    """Bytes that a model and its optimizer move per micro-batch, per update and per unit of a batch's drivers."""

    always: ParameterBytes  # parameters that every micro-batch uses
    towers: ParameterBytes  # parameters that only micro-batches with images, videos or audio clips use
    saved: tuple[tuple[str, Fraction], ...]  # driver and bytes that autograd saves per unit of it
    left_out: tuple[str, ...] = ()  # modules whose saved activations no driver explains; they are missing

    @cached_property
    def _saved(self) -> list[tuple[Callable[[Workload], int], int, int]]:
        return [(drivers.parse_driver(driver), *factor.as_integer_ratio()) for driver, factor in self.saved]

    def bytes_of(
        self,
        workload: Workload,
        *,
        num_batches: int = 1,
        num_with_towers: int | None = None,
        num_steps: int = 1,
        num_skipped: int = 0,
        num_forward_only: int = 0,
    ) -> StepBytes:
        """Count the bytes that one rank moves in one or more steps.

        Args:
            workload: what the rank's micro-batches with a backward compute in all.
            num_batches: how many micro-batches that is.
            num_with_towers: how many of them hold images, videos or audio clips; at least 1, where the workload has
                any, when None.
            num_steps: optimizer steps that they make up.
            num_skipped: steps of which the update was left out.
            num_forward_only: micro-batches without a backward, which are not in `workload`.

        Returns:
            Bytes, exact; never more than the steps moved.

        Raises:
            UsageError: numbers that contradict each other.
        """
        if not 0 <= num_skipped <= num_steps <= num_batches or num_forward_only < 0:
            raise UsageError(
                f"num_batches={num_batches}, num_steps={num_steps}, num_skipped={num_skipped}, "
                f"num_forward_only={num_forward_only}: a step has at least one micro-batch, and no more steps are "
                "skipped than there are. Give the numbers of one rank."
            )
        if num_with_towers is None:
            num_with_towers = int(workload.runs_towers)
        weights = gradients = optimizer = 0
        for part, batches in ((self.always, num_batches), (self.towers, min(num_with_towers, num_batches))):
            # Fewest steps that hold these micro-batches.
            steps = -(-batches * num_steps // num_batches) if batches else 0
            updates = max(steps - num_skipped, 0)
            weights += batches * (part.forward + part.dgrad + part.recomputed)
            gradients += batches * part.gradients + steps * part.gradients_of_step
            gradients += updates * part.gradients_of_update
            optimizer += updates * part.update
        weights += num_forward_only * self.always.forward
        saved = sum(evaluate(workload) * numerator // denominator for evaluate, numerator, denominator in self._saved)
        return StepBytes(weights, gradients, optimizer, 2 * saved)


@dataclass(frozen=True)
class ForwardTraffic:
    """Bytes that forwards without a backward move: weights once a forward, cached keys and values as masks allow."""

    weights: int  # weights that every forward reads
    towers: int  # weights that only forwards with images, videos or audio clips read
    cache_per_token: int  # keys and values of one token, of all layers
    cache_reads: tuple[tuple[str, int], ...]  # driver of each attention, and bytes of keys and values that a pair reads

    def of_forwards(self, num_forwards: int, num_with_towers: int) -> int:
        """Count the bytes that forwards without a cache read, some of them with images, videos or audio clips."""
        return num_forwards * self.weights + num_with_towers * self.towers

    def of_generation(self, generation: Generation) -> int:
        """Count the bytes moved to answer prompts: a cache is written once, and read by prefill once and by each step.

        Left out, so that it is a lower bound: activations, logits, states of recurrences and convolutions.
        """
        prefill, decode = generation.prefill, generation.decode
        cache = self.cache_per_token * (2 * prefill.tokens + decode.tokens)
        for driver, num_bytes in self.cache_reads:
            pairs = drivers.parse_driver(driver)
            cache += num_bytes * sum(sign * pairs(workload) for sign, workload in generation.reads)
        return self.weights_of_generation(generation) + cache

    def weights_of_generation(self, generation: Generation) -> int:
        """Count the bytes of weights read to answer prompts: all weights once for each prefill and decode step."""
        forwards = generation.num_prefills + generation.num_decode_steps
        with_towers = generation.num_prefills if generation.prefill.runs_towers else 0
        return self.of_forwards(forwards, with_towers)


def forward_traffic_of(cost_model: CostModel, itemsizes: Sequence[float], cached_itemsize: int) -> ForwardTraffic:
    """Find the bytes that a forward without a backward moves, from a ledger and the types of its weights.

    Args:
        cost_model: the model's ledger.
        itemsizes: bytes of an element of each of its parameters, as forward sees them.
        cached_itemsize: bytes of an element of cached keys and values.
    """
    phases = weights_read(cost_model, 0, "none")
    towers = of_towers(cost_model, phases)
    sizes = [round(elements_met(p) * itemsize) for p, itemsize in zip(cost_model.parameters, itemsizes, strict=True)]
    of_text, of_media = (
        sum(n for i, n in enumerate(sizes) if (phases[0] & group) >> i & 1) for group in (~towers, towers)
    )
    cached: dict[str, int] = {}
    for row in cost_model.rows:
        if row.cached and drivers.tower(row.driver) == "language":
            cached[row.driver] = cached.get(row.driver, 0) + row.cached * cached_itemsize
    return ForwardTraffic(of_text, of_media, sum(cached.values()), tuple(cached.items()))


def elements_met(parameter: Parameter) -> int:
    """Elements read in a pass: one token's experts, the least; the whole copy of weights for latent patches."""
    is_for_others = not parameter.active and not parameter.component.endswith(".experts")
    return parameter.numel if is_for_others else parameter.active


def weights_read(cost: CostModel, trained: int, recompute: str) -> tuple[int, int, int]:
    """Find the parameters, bit i for parameter i, that products read: of forward, of backward, of recomputation."""
    again = run_again(cost.rows, trained, recompute, cost.name)
    forward = dgrad = recomputed = 0
    for i, row in enumerate(cost.rows):
        weights = _weights(row)
        forward |= weights
        if any(gradient.phase == "dgrad" and gradient.needs & trained for gradient in row.gradients):
            dgrad |= weights
        recomputed |= weights if i in again else 0
    return forward, dgrad, recomputed


def _weights(row: Row) -> int:
    """Find the parameters that a row's weight is made of, bit i for parameter i."""
    return functools.reduce(operator.or_, (g.needs for g in row.gradients if g.phase == "wgrad"), 0)


def of_towers(cost: CostModel, phases: tuple[int, int, int]) -> int:
    """Find the parameters that only images and sound use; norms and biases go with their component's products."""
    of_media, of_text, text_components = 0, 0, set()
    for row in cost.rows:
        weights = _weights(row)
        if drivers.tower(row.driver) in media_towers():
            of_media |= weights
        else:
            of_text |= weights
            text_components.add(row.component.partition(".")[0])
    if not of_text:  # a model of pictures alone
        return 0
    for i, p in enumerate(cost.parameters):
        if not phases[0] >> i & 1 and p.component.partition(".")[0] in {*media_towers()} - text_components:
            of_media |= 1 << i
    return of_media & ~of_text


def mbu(num_bytes: int, wall_s: float, bytes_per_s: float) -> float:
    """Return the MBU: bytes that had to be moved at least, over bytes that the memory could have moved.

    Args:
        num_bytes: of one device [bytes].
        wall_s: wall-clock time [s].
        bytes_per_s: memory bandwidth of one device, by its datasheet or measured [B/s].

    Returns:
        A fraction; NaN without a bandwidth.

    Raises:
        UsageError: the time or the bandwidth is not above 0.

    >>> mbu(24_000_000_000, wall_s=0.02, bytes_per_s=4.8e12)
    0.25
    """
    if wall_s <= 0 or bytes_per_s <= 0:
        raise UsageError(
            f"wall_s={wall_s} and bytes_per_s={bytes_per_s}: both must be above 0. The bandwidth is the device's "
            "memory_bytes_per_s (`headway devices NAME` shows it)."
        )
    return num_bytes / (wall_s * bytes_per_s) if math.isfinite(bytes_per_s) else math.nan
