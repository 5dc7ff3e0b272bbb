"""Costs that are a sum of drivers: tokens of the model's own beside those of the batch.

A class token joins the patches of an image, a prompt joins each text, a picture's tokens see each other inside a causal
text. Four runs leave an equation or two to spare, and factors must be those of such a thing, so nothing is left to
chance.
"""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# what may be added to a cost that grows with something else: so much for each of these
_ADDED = ("grids", "frames", "lone", "clips", "segments", "tokens", "patches", "sources")
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
        if other.startswith(_ADDED) and (factors := _solved(units, (xs, ys))):
            return list(zip((one, other), factors, strict=True))
    for names in _triples(known, squares=squares):
        factors = _solved(units, [known[name] for name in names])
        if factors and _lengthened(*factors, causal=names[0] == "pairs:causal"):
            return list(zip(names, factors, strict=True))
    return []


def _triples(known: Mapping[str, Sequence[int]], *, squares: bool) -> Iterator[tuple[str, ...]]:
    """List pairs, lengths and numbers that go together."""
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
