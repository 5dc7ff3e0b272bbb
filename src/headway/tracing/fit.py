"""Find the driver of each recorded operation's cost, by comparing runs on workloads of different proportions.

A cost may be a sum of drivers: a class token joins the patches of an image, a prompt each text, a picture's tokens
see each other inside a causal text. Four runs leave an equation or two to spare, so no sum fits by chance.

What an encoder's convolutions make of its frames, strides and rounding, is read off the runs too. A convolution's
window says how its output length follows from its input length. Chained from the frames on, the windows give every
length that the encoder works on, exactly, remainders included; where an encoder cuts its input into pieces, its first
convolution reads pieces of one length. Nothing is believed that the lengths of all runs do not bear out.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from headway.count import drivers
from headway.count.drivers import shorten
from headway.count.modalities import MODALITIES
from headway.count.workload import Workload
from headway.errors import TraceError
from headway.tracing.operation import ConvolutionWindow, Operation


@dataclass(frozen=True)
class DriverFit:
    """An operation explained: its driver, FLOPs per unit, and the factor from recorded units to the driver's."""

    driver: str  # the quantity that the cost is proportional to
    forward: int  # FLOPs per unit of the driver
    # factor from the recorded `unit_flops`, of forward or of a gradient, to FLOPs per unit of the driver
    scale: Fraction
    per_unit: Fraction  # recorded units per unit of the driver: top-k for experts, 1 for most


def candidates(workloads: Sequence[Workload], names: Sequence[str]) -> dict[str, list[int]]:
    """Evaluate drivers that could explain an operation on every workload; drivers with a zero are left out."""
    driver_units = {}
    for name in dict.fromkeys(names):
        units = drivers.parse_driver(name)
        values = [int(units(workload)) for workload in workloads]
        if all(values):
            driver_units[name] = values
    return driver_units


def proportional(units: Sequence[int], driver_units: Mapping[str, Sequence[int]]) -> list[tuple[str, Fraction]]:
    """List the drivers of which every run did the same multiple, with that multiple."""
    first, *later = units
    return [
        (driver, Fraction(first, unit))
        for driver, (unit, *values) in driver_units.items()
        if all(u * unit == first * v for u, v in zip(later, values, strict=True))
    ]


def fit(
    runs: Sequence[Operation], workloads: Sequence[Workload], driver_units: dict[str, list[int]], doubled: int = 0
) -> list[DriverFit]:
    """Explain one operation from its record in each run, by one driver or by a sum of drivers.

    Args:
        runs: the operation in each run.
        workloads: what each run was on.
        driver_units: units of each driver that could explain it, in each run.
        doubled: FLOPs of its forward in a pass over two segments as the first run's; 0 where there was none.

    Raises:
        TraceError: no driver explains how its cost grows.
    """
    # work of each run, in units that cost the same in all runs
    first = runs[0]
    units, unit_flops = [run.units for run in runs], first.unit_flops
    if len({run.unit_flops for run in runs}) > 1:  # a product of two activations: its inner size grows too
        units, unit_flops = [run.forward_flops for run in runs], 1
    padding = {u - w.tokens for u, w in zip(units, workloads, strict=True)}
    width = first.weight[-1] if first.kind == "convolution" and first.weight else 0
    if len(runs) > 1 and len(padding) == 1 and 0 < min(padding) < width:
        units = [w.tokens for w in workloads]  # a causal convolution pads its front: those outputs belong to no token

    # the driver that a mask names, if it gives the units of every run
    by_mask = next((run.driver for run in reversed(runs) if run.driver), "")
    parts = by_mask.split("+") if by_mask else []
    if parts and len(runs) > 1 and [sum(drivers.parse_driver(part)(w) for part in parts) for w in workloads] == units:
        return [_fitted(first, part, Fraction(1), unit_flops) for part in parts]

    # a driver of which every run did the same multiple
    if matches := proportional(units, driver_units):
        # a driver that counts these very units, or pairs for attention, or whole FLOPs, if there is such a driver
        attends = first.kind == "attention"

        def names_pairs(driver: str) -> bool:
            return driver.startswith("pairs:") or drivers.counts_pairs_of_lengths(driver)

        def rank(match: tuple[str, Fraction]) -> tuple[bool, bool, int, int]:
            share = (unit_flops * match[1]).denominator  # 1 where a unit of the driver costs whole FLOPs
            rows = match[1].denominator if first.kind == "experts" else 1  # a router picks whole experts
            return match[1] != 1, not (attends and names_pairs(match[0]) and share == 1), rows, share

        driver, ratio = min(matches, key=rank)
        # every run is one segment in one pack: two segments tell these apart; else weights know of packs only, and one
        # row of zeros is a segment's first state
        is_of_weights = not first.fed and (first.units > 1 or not first.unit_flops)
        if driver == "segments" and (doubled == first.forward_flops if doubled else is_of_weights):
            driver = "packs"
        return [_fitted(first, *_without_padding(runs, driver, ratio, driver_units), unit_flops)]

    # two drivers or three that add up in every run
    if len(runs) > 3 and (terms := sum_of_drivers(units, driver_units, squares=first.kind == "attention")):
        return [_fitted(first, driver, factor, unit_flops) for driver, factor in terms]
    counts = [f"{u} at {w.tokens} tokens, {w.patches} patches" for u, w in zip(units, workloads, strict=True)]
    tried = ", ".join(driver for driver in driver_units if "window" not in driver and "/" not in driver)
    raise TraceError(
        f"no driver explains {first.kind} in module {first.module or '(the model)'}. Its units were: "
        f"{'; '.join(counts)}. Known drivers: {tried}."
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
    comes_in_lengths = tower == "sources" or (tower in MODALITIES and MODALITIES[tower].shape == "lengths")
    if len(windows) != 1 or not alike or not comes_in_lengths or not piece.isdecimal():
        return driver, ratio  # time and frequency cannot be told apart
    lengths: dict[str, Any] = {tower: [int(piece)]}
    one_piece = Workload([1], **lengths)
    for name in names:
        if name.startswith(f"{tower}/") and name.endswith(f":{piece}"):
            positions = drivers.parse_driver(name)(one_piece)
            if windows[0].num_outputs == positions > 1:
                return name, ratio / positions
    return driver, ratio


def _fitted(first: Operation, driver: str, ratio: Fraction, unit_flops: int) -> DriverFit:
    forward = unit_flops * ratio
    if forward.denominator != 1:
        raise TraceError(
            f"{first.kind} in module {first.module or '(the model)'} does not cost a whole number of FLOPs per unit of "
            f"{driver}."
        )
    scale = forward / first.unit_flops if first.unit_flops else ratio  # an elementwise recurrence costs nothing
    return DriverFit(driver, int(forward), scale, ratio)


# drivers that may be added to a cost that grows with another driver: so much for each unit
_ADDED = ("grids", "frames", "lone", "clips", "segments", "tokens", "patches", "sources", "pairs:cross")
# pairs, the lengths that they are squares of, and the number of those
_FULL = (
    ("patch_pairs:frame", "patch_pairs:grid", "source_pairs:full"),
    ("patches", "sources"),
    ("grids", "frames", "lone"),
)
_TEXT = ("tokens", "segments")


def sum_of_drivers(
    units: Sequence[int], driver_units: Mapping[str, Sequence[int]], *, squares: bool
) -> list[tuple[str, Fraction]]:
    """Explain a cost by two drivers, or by three that make pairs of longer sequences.

    Args:
        units: of four runs.
        driver_units: units of each driver in the same runs.
        squares: whether the cost may be pairs.

    Returns:
        Drivers with their factors; empty where no sum fits.
    """
    for (driver, xs), (added, ys) in itertools.permutations(driver_units.items(), 2):
        if added.startswith(_ADDED) and not added.startswith("sources/") and (factors := _solved(units, (xs, ys))):
            return list(zip((driver, added), factors, strict=True))
    for names in _triples(driver_units, squares=squares):
        factors = _solved(units, [driver_units[name] for name in names])
        if factors and _lengthened(*factors, causal=names[0] == "pairs:causal"):
            return list(zip(names, factors, strict=True))
    return []


def _triples(driver_units: Mapping[str, Sequence[int]], *, squares: bool) -> Iterator[tuple[str, ...]]:
    families = [((pairs,), *((name,) for name in _TEXT)) for pairs in ("pairs:full", "pairs:causal")]
    families.append((("pairs:joint",), ("joint",), ("segments",)))  # with registers beside text and latents
    for family in [*families, *([_FULL] if squares else [])]:
        for names in itertools.product(*family):
            chosen = tuple(next((d for d in driver_units if d == n or d.startswith(f"{n}:")), "") for n in names)
            if all(chosen):
                yield chosen


def _lengthened(pairs: Fraction, lengths: Fraction, numbers: Fraction, *, causal: bool) -> bool:
    """Say whether sequences of n + k that see each other explain the factors, for a whole number k.

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


_MOST_PADDING = 1 << 10  # positions that code adds by hand before a convolution, at most
_GROUPS = range(2, 17)  # positions that an encoder may merge into one after its convolutions


@dataclass(frozen=True)
class _Length:
    """A length that an encoder works on: positions `stride` frames apart, of which the first needs `first` frames."""

    stride: int  # frames
    first: int  # frames; 0 or less where padding makes more positions than there are strides
    piece: int  # frames after which the encoder starts afresh; 0 where it does not
    lengths: tuple[int, ...]  # the length in each run [positions], () where no convolution reads it

    def after(self, windows: Sequence[ConvolutionWindow]) -> "_Length | None":
        """Follow the length through a convolution, given its window in each run; None if it reads another length."""
        window = windows[0]
        if not self.lengths:
            return None
        extra = {w.num_inputs - n for w, n in zip(windows, self.lengths, strict=True)}
        if len(extra) != 1 or not 0 <= min(extra) <= _MOST_PADDING:
            return None
        added = extra.pop() + 2 * window.padding
        first = self.first + self.stride * (window.span - 1 - added)
        return _Length(self.stride * window.stride, first, self.piece, tuple(w.num_outputs for w in windows))

    def merged(self) -> "Iterator[_Length]":
        """Give the lengths after merging groups of positions, with and without a last one that is partly filled."""
        for size in _GROUPS:
            yield _Length(self.stride * size, self.first, self.piece, ())
            yield _Length(self.stride * size, self.first + self.stride * (size - 1), self.piece, ())

    def steps(self) -> str:
        """Write it as what follows the slash of a driver."""
        if self.piece:
            return f"{self.stride}:{self.first}:{self.piece}"
        return f"{self.stride}" if self.first == 1 else f"{self.stride}:{self.first}"


def strided_drivers(
    runs: Sequence[Sequence[Operation]], workloads: Sequence[Workload], names: Sequence[str]
) -> list[str]:
    """List drivers that count the outputs of convolutions over frames, likeliest first."""
    blocks = sorted({op.longest for operations in runs for op in operations if op.longest})
    pairs = [
        name.replace(":full", f":block:{block}") for name in names if name.endswith("_pairs:full") for block in blocks
    ]
    return [f"{name}/{steps}" for steps in _strides(runs, workloads) for name in (*names, *pairs)]


def _strides(runs: Sequence[Sequence[Operation]], workloads: Sequence[Workload]) -> list[str]:
    """List the possible parts after the slash of a driver of sources or audio, likeliest first."""
    rows = [name for name, row in MODALITIES.items() if row.shape == "lengths"]
    frames = [{*w.sources.tolist(), *(length for name in rows for length in w.sizes(name).tolist())} for w in workloads]
    if any(len(lengths) != 1 for lengths in frames):
        return []
    start = tuple(lengths.pop() for lengths in frames)
    chain = [_Length(1, 1, 0, start)]  # the lengths that follow from one another, of the frames first
    for operations in zip(*runs, strict=True):
        for windows in zip(*(operation.windows for operation in operations), strict=True):
            # a first convolution that reads one length whatever the clip reads pieces of it
            piece = windows[0].num_inputs
            is_fixed = len({w.num_inputs for w in windows}) == 1 and windows[0].num_outputs > 1
            if is_fixed and operations[0].from_input and piece < min(start):
                chain += [_Length(1, 1, piece, (piece,) * len(runs)), _Length(piece, 1, 0, ())]
            output = next((m for length in reversed(chain) if (m := length.after(windows)) is not None), None)
            if output is not None and output not in chain and _borne_out(output, start):
                chain.append(output)
    chain.sort(key=lambda length: length.piece)  # whole clips first: pieces of a multiple of the stride change nothing
    merged = [after for length in chain for after in length.merged()]
    return [steps for steps in dict.fromkeys(length.steps() for length in (*chain, *merged)) if steps != "1"]


def _borne_out(length: _Length, frames: Sequence[int]) -> bool:
    """Say whether the arithmetic gives the length that each run had, of a whole piece where there are pieces."""
    clips = np.array([length.piece] * len(frames) if length.piece else frames)
    return bool((shorten(clips, length.stride, length.first) == length.lengths).all())
