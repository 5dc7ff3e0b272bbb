"""Find what each recorded operation's cost is proportional to, by comparing runs on workloads of other proportions."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from headway.count import drivers
from headway.count.workload import Workload
from headway.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headway.count.tracing.operation import Operation

WINDOW_SIDES = range(2, 65)  # window sizes of vision attention that are tried [patches]
_LENGTHS = (131, 197, 263)  # primes: no product of a model's sizes equals a multiple of two of them


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


def workloads_for(merge: int | None, longest_window: int = 0) -> list[Workload]:
    """Plan three single-segment workloads that no two drivers treat alike.

    Args:
        merge: patches along a side that merge into one token, None for a text model.
        longest_window: the largest attention window seen [tokens]; later segments exceed it, so that its edge is
            exercised.
    """
    grids: Sequence[list[tuple[int, int, int]]] = ([], [], [])
    if merge is not None:
        m = merge
        grids = (
            [(1, 6 * m, 10 * m)],
            [(1, 14 * m, 4 * m), (1, 6 * m, 10 * m)],
            [(3, 10 * m, 6 * m), (1, 4 * m, 4 * m)],
        )
    extra = longest_window if longest_window <= 1 << 14 else 0
    lengths = [_LENGTHS[0], *(_next_prime(n + extra) for n in _LENGTHS[1:])]
    return [Workload([n], images=g) for n, g in zip(lengths, grids, strict=True)]


def _next_prime(n: int) -> int:
    while any(n % d == 0 for d in range(2, int(n**0.5) + 1)):
        n += 1
    return n


def candidates(workloads: Sequence[Workload], merge: int | None) -> dict[str, list[int]]:
    """Evaluate every driver that could explain an operation on every workload; those zero somewhere are left out."""
    names = ["tokens", "pairs:causal", "pairs:full"]
    if merge is not None:
        names += ["patches", "patch_pairs:frame", "patch_pairs:grid"]
        names += [f"patches/{merge**2}"] if merge > 1 else []
        names += [f"patch_pairs:window:{side}" for side in WINDOW_SIDES]
        names += ["grids", "frames"]
    names.append("segments")
    values = {name: [drivers.parse(name)(w) for w in workloads] for name in names}
    return {name: value for name, value in values.items() if all(value)}


def fit(runs: Sequence[Operation], workloads: Sequence[Workload], known: dict[str, list[int]]) -> Fitted:
    """Explain one operation from its record in each run.

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
        return _fitted(first, named, Fraction(1), unit_flops)
    matches: list[tuple[str, Fraction]] = []
    for driver, values in known.items():
        ratios = {Fraction(u, v) for u, v in zip(units, values, strict=True)}
        if len(ratios) == 1:
            matches.append((driver, ratios.pop()))
    if not matches:
        seen = [f"{u} at {w.tokens} tokens, {w.patches} patches" for u, w in zip(units, workloads, strict=True)]
        raise TraceError(
            f"no driver explains {first.kind} in module {first.module or '(the model)'}, which did this many units: "
            f"{'; '.join(seen)}. Known drivers: {', '.join(d for d in known if 'window' not in d)}."
        )
    # one that counts these very units, where there is one
    driver, ratio = min(matches, key=lambda match: match[1] != 1)
    return _fitted(first, driver, ratio, unit_flops)


def _fitted(first: Operation, driver: str, ratio: Fraction, unit_flops: int) -> Fitted:
    forward = unit_flops * ratio
    if forward.denominator != 1:
        raise TraceError(
            f"{first.kind} in module {first.module} does not cost a whole number of FLOPs per unit of {driver}."
        )
    scale = forward / first.unit_flops if first.unit_flops else ratio  # an elementwise recurrence costs nothing
    return Fitted(driver, int(forward), scale, ratio)
