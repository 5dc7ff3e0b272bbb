"""Exact numbers of query-key pairs that attention masks allow, summed over segments.

Every function takes segment lengths [tokens] and returns an exact Python integer. The diagonal counts: a query sees
itself.
"""

from __future__ import annotations

import numpy as np

from headway.count.integers import Ints, IntsLike, as_ints
from headway.errors import WorkloadError

_SAFE_LENGTH = 1 << 20  # lengths up to here: s * s * 2**22 segments stay below 2**63


def _lengths(values: IntsLike, what: str = "lengths", least: int = 1) -> Ints:
    lengths = as_ints(values, what).reshape(-1)
    if lengths.size and lengths.min() < least:
        raise WorkloadError(f"{what} must each be at least {least}, got {int(lengths.min())}.")
    if lengths.size and (lengths.max() > _SAFE_LENGTH or lengths.size > 1 << 22):
        return lengths.astype(object)  # Python integers: no overflow
    return lengths


def _positive(value: int, what: str) -> int:
    if value < 1:
        raise WorkloadError(f"{what} must be at least 1 token, got {value}.")
    return int(value)


def full_pairs(lengths: IntsLike) -> int:
    """Count pairs of bidirectional attention: each query sees the whole segment.

    Source: s * s.

    >>> full_pairs([3, 2])
    13
    """
    s = _lengths(lengths)
    return int((s * s).sum())


def causal_pairs(lengths: IntsLike) -> int:
    """Count pairs of causal attention: query t sees keys 1 to t.

    Source: sum over t of t = s (s + 1) / 2.

    >>> causal_pairs([3, 2])
    9
    """
    s = _lengths(lengths)
    return int((s * (s + 1) // 2).sum())


def sliding_pairs(lengths: IntsLike, window: int) -> int:
    """Count pairs of causal attention in which each query sees at most `window` keys.

    The same count holds for causal top-k attention with k = window.

    Args:
        lengths: segment lengths [tokens], shape (N,), each >= 1.
        window: keys each query may see, itself included [tokens].

    Source: sum over t of min(t, window).

    >>> sliding_pairs([3], window=2)
    5
    """
    s = _lengths(lengths)
    w = _positive(window, "window")
    head = np.minimum(s, w)
    return int((head * (head + 1) // 2 + (s - head) * w).sum())


def chunked_pairs(lengths: IntsLike, chunk: int) -> int:
    """Count pairs of causal attention inside consecutive chunks of each segment.

    Args:
        lengths: segment lengths [tokens], shape (N,), each >= 1.
        chunk: chunk length [tokens]; the last chunk of a segment may be shorter.

    Source: with s = q * chunk + r: q * chunk (chunk + 1) / 2 + r (r + 1) / 2.

    >>> chunked_pairs([5], chunk=2)
    7
    """
    s = _lengths(lengths)
    c = _positive(chunk, "chunk")
    whole, rest = s // c, s % c
    return int((whole * (c * (c + 1) // 2) + rest * (rest + 1) // 2).sum())


def prefix_pairs(lengths: IntsLike, prefixes: IntsLike) -> int:
    """Count pairs of prefix attention: the prefix sees itself in full, the rest is causal.

    Args:
        lengths: segment lengths [tokens], shape (N,), each >= 1.
        prefixes: prefix length of each segment [tokens], shape (N,) or one number, 0 <= prefix <= length.

    Source: p * p for the prefix, sum over t from p + 1 to s of t for the rest.

    >>> prefix_pairs([5], prefixes=[3])
    18
    """
    s = _lengths(lengths)
    p = np.broadcast_to(_lengths(np.atleast_1d(as_ints(prefixes, "prefixes")), "prefixes", least=0), s.shape)
    if (p > s).any():
        bad = int(np.argmax(p > s))
        raise WorkloadError(f"prefix {p[bad]} is longer than its segment of {s[bad]} tokens.")
    return int((p * p + s * (s + 1) // 2 - p * (p + 1) // 2).sum())


def cross_pairs(queries: IntsLike, keys: IntsLike) -> int:
    """Count pairs of cross attention: each query of a segment sees every key of its partner.

    Args:
        queries: query lengths [tokens], shape (N,), each >= 1.
        keys: key lengths [tokens], shape (N,), each >= 0.

    Source: q * k.

    >>> cross_pairs([2, 3], [10, 1])
    23
    """
    q, k = _lengths(queries, "queries"), _lengths(keys, "keys", least=0)
    if q.shape != k.shape:
        raise WorkloadError(f"cross attention pairs each query segment with one of keys: got {q.size} and {k.size}.")
    return int((q * k).sum())
