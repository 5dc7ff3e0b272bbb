"""Shuffles that are evaluated where they are asked for: a keyed permutation of 0 .. n-1, place by place.

Nothing is materialised, so a billion places cost no memory, and the same key gives the same permutation on every
machine and with every version of numpy. Integers only: whole-number arithmetic modulo 2**64 has no rounding.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Unsigned = NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = 6
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def key_of(*parts: int) -> int:
    """Fold whole numbers into one key of 64 bits; their order matters.

    >>> key_of(0, 1) == key_of(1, 0)
    False
    """
    key = 0
    for part in parts:
        key = int(_mixed(np.array([(key ^ (part & _MASK)) + _GOLDEN & _MASK], dtype=np.uint64))[0])
    return key


def permute(places: NDArray[Any], size: int, key: int | Unsigned) -> NDArray[np.int64]:
    """Look places up in a pseudo-random permutation.

    Args:
        places: whole numbers from 0 to size - 1, shape (N,).
        size: how many numbers are permuted.
        key: names the permutation; one for all places, or one each, shape (N,).

    Returns:
        Where each place goes, shape (N,); a permutation of 0 .. size - 1 for each key.

    Source: a Feistel network (Luby and Rackoff 1988) on the next power of two, walked along its cycle until the result
    lies below `size` (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains"); its round function is the
    finaliser of splitmix64 (Steele, Lea and Flood 2014).

    >>> sorted(permute(np.arange(5), 5, key=7).tolist())
    [0, 1, 2, 3, 4]
    """
    values = np.asarray(places).astype(np.uint64)
    keys = np.asarray(key, dtype=np.uint64)
    values = _network(values, size, keys)
    outside = np.flatnonzero(values >= size)
    while outside.size:
        values[outside] = _network(values[outside], size, keys[outside] if keys.ndim else keys)
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def shuffled(size: int, key: int) -> NDArray[np.int64]:
    """Shuffle 0 .. size - 1 as a whole."""
    mixed = _mixed(np.arange(size, dtype=np.uint64) + np.uint64(key))
    # sorted by 32 bits of them, 16 at a time, since numpy sorts so few in linear time
    order = np.argsort((mixed >> np.uint64(32)).astype(np.uint16), kind="stable")
    return order[np.argsort((mixed >> np.uint64(48)).astype(np.uint16)[order], kind="stable")]


def _network(values: Unsigned, size: int, keys: Unsigned) -> Unsigned:
    bits = max(2, (size - 1).bit_length())
    low = bits // 2
    widths = np.uint64(64 - (bits - low)), np.uint64(64 - low)
    left, right = values >> np.uint64(low), values & np.uint64((1 << low) - 1)
    for number in range(_ROUNDS):
        if number % 2 == 0:
            left = left ^ (_mixed(right + _round_key(keys, number)) >> widths[0])
        else:
            right = right ^ (_mixed(left + _round_key(keys, number)) >> widths[1])
    return (left << np.uint64(low)) | right


def _round_key(keys: Unsigned, number: int) -> Unsigned:
    with np.errstate(over="ignore"):
        return keys + np.uint64(number * _GOLDEN & _MASK)


def _mixed(values: Unsigned) -> Unsigned:
    """Scramble 64 bits; the high ones come out best mixed."""
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))
