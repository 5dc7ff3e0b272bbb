"""Find what each recorded operation's cost is proportional to, by comparing runs on workloads of other proportions.

A cost may be a sum of drivers: a class token joins the patches of an image, a prompt each text, a picture's tokens
see each other inside a causal text. Four runs leave an equation or two to spare, so no sum fits by chance.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from headway.count import drivers
from headway.count.workload import Workload
from headway.errors import TraceError
from headway.tracing.operation import Operation

_PAIRS = ("pairs:", "source_pairs", "audio_pairs")  # what attention is named after where lengths would do as well


@dataclass(frozen=True)
class Fitted:
    """An operation explained: its driver, FLOPs per unit, and the factor from recorded units to the driver's."""

    driver: str  # the quantity that the cost is proportional to
    forward: int  # FLOPs per unit of the driver
    # factor from the recorded `unit_flops`, of forward or of a gradient, to FLOPs per unit of the driver
    scale: Fraction
    per_unit: Fraction  # recorded units per unit of the driver: top-k for experts, 1 for most


def candidates(workloads: Sequence[Workload], names: Sequence[str]) -> dict[str, list[int]]:
    """Evaluate drivers that could explain an operation on every workload; those zero somewhere are left out."""
    known = {}
    for name in dict.fromkeys(names):
        units = drivers.parse(name)
        values = [int(units(workload)) for workload in workloads]
        if all(values):
            known[name] = values
    return known


def proportional(units: Sequence[int], known: Mapping[str, Sequence[int]]) -> list[tuple[str, Fraction]]:
    """List the drivers of which every run did the same multiple, with that multiple."""
    first, *rest = units
    return [
        (driver, Fraction(first, unit))
        for driver, (unit, *values) in known.items()
        if all(u * unit == first * v for u, v in zip(rest, values, strict=True))
    ]


def fit(runs: Sequence[Operation], workloads: Sequence[Workload], known: dict[str, list[int]]) -> list[Fitted]:
    """Explain one operation from its record in each run, by one driver or by a sum of drivers.

    Raises:
        TraceError: no driver explains how its cost grows.
    """
    first = runs[0]
    units, unit_flops = [run.units for run in runs], first.unit_flops
    if len({run.unit_flops for run in runs}) > 1:  # a product of two activations: its inner size grows too
        units, unit_flops = [run.forward_flops for run in runs], 1
    padding = {u - w.tokens for u, w in zip(units, workloads, strict=True)}
    width = first.weight[-1] if first.kind == "convolution" and first.weight else 0
    if len(runs) > 1 and len(padding) == 1 and 0 < min(padding) < width:
        units = [w.tokens for w in workloads]  # a causal convolution pads its front: those outputs belong to no token
    named = next((run.driver for run in reversed(runs) if run.driver), "")
    parts = named.split("+") if named else []
    if parts and len(runs) > 1 and [sum(drivers.parse(part)(w) for part in parts) for w in workloads] == units:
        return [_fitted(first, part, Fraction(1), unit_flops) for part in parts]
    if matches := proportional(units, known):
        # one that counts these very units, or pairs for attention, or whole FLOPs, where there is one
        attends = first.kind == "attention"

        def rank(match: tuple[str, Fraction]) -> tuple[bool, bool, int, int]:
            whole = (unit_flops * match[1]).denominator
            rows = match[1].denominator if first.kind == "experts" else 1  # a router picks whole experts
            return match[1] != 1, not (attends and match[0].startswith(_PAIRS) and whole == 1), rows, whole

        driver, ratio = min(matches, key=rank)
        # every run is one segment in one pack: weights know of packs only, one row of zeros is a segment's first state
        if driver == "segments" and not first.fed and first.units > 1:
            driver = "packs"
        return [_fitted(first, *_without_padding(runs, driver, ratio, known), unit_flops)]
    if len(runs) > 3 and (terms := sum_of_drivers(units, known, squares=first.kind == "attention")):
        return [_fitted(first, driver, factor, unit_flops) for driver, factor in terms]
    seen = [f"{u} at {w.tokens} tokens, {w.patches} patches" for u, w in zip(units, workloads, strict=True)]
    raise TraceError(
        f"no driver explains {first.kind} in module {first.module or '(the model)'}, which did this many units: "
        f"{'; '.join(seen)}. Known drivers: {', '.join(d for d in known if 'window' not in d and '/' not in d)}."
    )


def _without_padding(
    runs: Sequence[Operation], driver: str, ratio: Fraction, names: Iterable[str]
) -> tuple[str, Fraction]:
    """Bill a convolution that runs on whole pieces of a clip for the frames that the clip has; the rest is padding.

    The driver that was found, such as `audio/200`, counts pieces of 200 frames, the last one whole; the convolution
    makes `ratio` positions of a piece. `names` are all drivers that could be meant.
    """
    tower, _, piece = driver.partition("/")
    windows = runs[0].windows
    alike = all(run.windows == windows for run in runs)  # clips of other lengths are more pieces, not longer ones
    if len(windows) != 1 or not alike or tower not in ("audio", "sources") or not piece.isdecimal():
        return driver, ratio  # of time and frequency it is not known which is time
    whole = [int(piece)]
    one = Workload([1], audio=whole) if tower == "audio" else Workload([1], sources=whole)
    for name in names:
        if name.startswith(f"{tower}/") and name.endswith(f":{piece}"):
            made = drivers.parse(name)(one)
            if windows[0].made == made > 1:
                return name, ratio / made
    return driver, ratio


def _fitted(first: Operation, driver: str, ratio: Fraction, unit_flops: int) -> Fitted:
    forward = unit_flops * ratio
    if forward.denominator != 1:
        raise TraceError(
            f"{first.kind} in module {first.module or '(the model)'} does not cost a whole number of FLOPs per unit of "
            f"{driver}."
        )
    scale = forward / first.unit_flops if first.unit_flops else ratio  # an elementwise recurrence costs nothing
    return Fitted(driver, int(forward), scale, ratio)


# what may be added to a cost that grows with something else: so much for each of these
_ADDED = ("grids", "frames", "lone", "clips", "segments", "tokens", "patches", "sources", "pairs:cross")
# pairs, the lengths that they are squares of, and the number of those
_FULL = (
    ("patch_pairs:frame", "patch_pairs:grid", "source_pairs:full"),
    ("patches", "sources"),
    ("grids", "frames", "lone"),
)
_TEXT = ("tokens", "segments")


def sum_of_drivers(
    units: Sequence[int], known: Mapping[str, Sequence[int]], *, squares: bool
) -> list[tuple[str, Fraction]]:
    """Explain a cost by two drivers, or by three that make pairs of longer sequences.

    Args:
        units: of four runs.
        known: the drivers' values in the same runs.
        squares: whether the cost may be pairs.

    Returns:
        Drivers with their factors; empty where no sum fits.
    """
    for (one, xs), (other, ys) in itertools.permutations(known.items(), 2):
        if other.startswith(_ADDED) and not other.startswith("sources/") and (factors := _solved(units, (xs, ys))):
            return list(zip((one, other), factors, strict=True))
    for names in _triples(known, squares=squares):
        factors = _solved(units, [known[name] for name in names])
        if factors and _lengthened(*factors, causal=names[0] == "pairs:causal"):
            return list(zip(names, factors, strict=True))
    return []


def _triples(known: Mapping[str, Sequence[int]], *, squares: bool) -> Iterator[tuple[str, ...]]:
    families = [((pairs,), *((name,) for name in _TEXT)) for pairs in ("pairs:full", "pairs:causal")]
    for family in [*families, *([_FULL] if squares else [])]:
        for names in itertools.product(*family):
            chosen = tuple(next((d for d in known if d == n or d.startswith(f"{n}:")), "") for n in names)
            if all(chosen):
                yield chosen


def _lengthened(pairs: Fraction, lengths: Fraction, numbers: Fraction, *, causal: bool) -> bool:
    """Say whether factors are those of sequences of n + k that see each other, for a whole number k.

    Source: (n + k)^2 = n^2 + 2 k n + k^2; causal, (n + k)(n + k + 1) / 2 = n (n + 1) / 2 + k n + k (k + 1) / 2.
    """
    k = lengths / pairs if causal else lengths / pairs / 2
    own = k * (k + 1) / 2 if causal else k * k
    return k.denominator == 1 and numbers == pairs * own


def _solved(units: Sequence[int], terms: Sequence[Sequence[int]]) -> tuple[Fraction, ...]:
    """Find the positive factors of terms that add up to the units of every run; empty if there are none."""
    number = len(terms)
    if len({*zip(*terms, strict=True)}) <= number:  # no run to spare: as many would agree with anything
        return ()
    rows = [list(map(Fraction, row)) for row in zip(*terms, units, strict=True)]
    for step in range(number):  # Gauss-Jordan on as many runs as there are factors
        pivot = next((row for row in rows[step:number] if row[step]), None)
        if pivot is None:
            return ()
        rows.remove(pivot)
        rows.insert(step, pivot)
        for other in rows[:number]:
            if other is not pivot and other[step]:
                share = other[step] / pivot[step]
                other[:] = [x - share * y for x, y in zip(other, pivot, strict=True)]
    factors = tuple(rows[i][number] / rows[i][i] for i in range(number))
    runs = zip(*terms, units, strict=True)
    fits = all(sum(f * x for f, x in zip(factors, run, strict=True)) == u for *run, u in runs)
    return factors if fits and min(factors) > 0 else ()
