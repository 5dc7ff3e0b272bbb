"""Find what each recorded operation's cost is proportional to, by comparing runs on workloads of other proportions."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from headway.count import drivers
from headway.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headway.count.tracing.operation import Operation
    from headway.count.workload import Workload

# what may be added to a cost that grows with something else: so much for each of these
_ADDED = ("grids", "frames", "clips", "segments", "tokens", "patches", "sources")


@dataclass(frozen=True)
class Fitted:
    """An operation explained: its driver, FLOPs per unit, and the factor from recorded units to the driver's.

    Attributes:
        driver: what the cost is proportional to.
        forward: FLOPs per unit of the driver.
        scale: what turns the recorded `unit_flops`, of forward or of a gradient, into FLOPs per unit of the driver.
        per_unit: recorded units per unit of the driver: top-k for experts, 1 for most.
    """

    driver: str
    forward: int
    scale: Fraction
    per_unit: Fraction


def candidates(workloads: Sequence[Workload], names: Sequence[str]) -> dict[str, list[int]]:
    """Evaluate drivers that could explain an operation on every workload; those zero somewhere are left out."""
    values = {name: [drivers.parse(name)(w) for w in workloads] for name in names}
    return {name: value for name, value in values.items() if all(value)}


def fit(runs: Sequence[Operation], workloads: Sequence[Workload], known: dict[str, list[int]]) -> list[Fitted]:
    """Explain one operation from its record in each run, by one driver or by the sum of two.

    A sum is a class token beside the patches of an image, or a picture whose tokens see each other inside a causal
    text; it is tried with four runs, whose two equations to spare leave nothing to chance.

    Args:
        runs: the same operation on each workload.
        workloads: what was run, in the same order.
        known: `candidates(...)` for these workloads.

    Raises:
        TraceError: no driver explains how its cost grows.
    """
    first = runs[0]
    units, unit_flops = [run.units for run in runs], first.unit_flops
    if len({run.unit_flops for run in runs}) > 1:  # a product of two activations: its inner size grows too
        units, unit_flops = [run.forward_flops for run in runs], 1
    padding = {u - w.tokens for u, w in zip(units, workloads, strict=True)}
    if first.kind == "convolution" and len(padding) == 1 and min(padding) > 0:
        units = [w.tokens for w in workloads]  # a causal convolution pads its front: those outputs belong to no token
    named = next((run.driver for run in reversed(runs) if run.driver), "")
    if named and [drivers.parse(named)(w) for w in workloads] == units:
        return [_fitted(first, named, Fraction(1), unit_flops)]
    matches: list[tuple[str, Fraction]] = []
    for driver, values in known.items():
        ratios = {Fraction(u, v) for u, v in zip(units, values, strict=True)}
        if len(ratios) == 1:
            matches.append((driver, ratios.pop()))
    if matches:  # one that counts these very units, where there is one
        driver, ratio = min(matches, key=lambda match: match[1] != 1)
        if driver == "segments" and not first.fed:  # every run is one segment in one pack; weights know of packs only
            driver = "packs"
        return [_fitted(first, driver, ratio, unit_flops)]
    for (one, xs), (other, ys) in itertools.permutations(known.items(), 2) if len(runs) > 3 else ():
        if other.startswith(_ADDED) and (factors := _sum_of(units, xs, ys)) is not None:
            return [_fitted(first, d, f, unit_flops) for d, f in zip((one, other), factors, strict=True)]
    seen = [f"{u} at {w.tokens} tokens, {w.patches} patches" for u, w in zip(units, workloads, strict=True)]
    raise TraceError(
        f"no driver explains {first.kind} in module {first.module or '(the model)'}, which did this many units: "
        f"{'; '.join(seen)}. Known drivers: {', '.join(d for d in known if 'window' not in d)}."
    )


def _sum_of(units: Sequence[int], xs: Sequence[int], ys: Sequence[int]) -> tuple[Fraction, Fraction] | None:
    """Find positive factors with units = a x + b y in every run, if there are such."""
    determinant = xs[0] * ys[1] - xs[1] * ys[0]
    if not determinant:
        return None
    a = Fraction(units[0] * ys[1] - units[1] * ys[0], determinant)
    b = Fraction(xs[0] * units[1] - xs[1] * units[0], determinant)
    fits = all(a * x + b * y == u for u, x, y in zip(units, xs, ys, strict=True))
    return (a, b) if fits and a > 0 and b > 0 else None


def _fitted(first: Operation, driver: str, ratio: Fraction, unit_flops: int) -> Fitted:
    forward = unit_flops * ratio
    if forward.denominator != 1:
        raise TraceError(
            f"{first.kind} in module {first.module} does not cost a whole number of FLOPs per unit of {driver}."
        )
    scale = forward / first.unit_flops if first.unit_flops else ratio  # an elementwise recurrence costs nothing
    return Fitted(driver, int(forward), scale, ratio)
