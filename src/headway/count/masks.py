"""Exact numbers of query-key pairs that attention masks allow, summed over segments.

Every function takes segment lengths [tokens] and returns an exact Python integer. The diagonal counts: a query sees
itself.
"""

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
    full, remainder = s // c, s % c
    return int((full * (c * (c + 1) // 2) + remainder * (remainder + 1) // 2).sum())


def full_block_pairs(lengths: IntsLike, block: int) -> int:
    """Count pairs of bidirectional attention inside consecutive blocks of each segment.

    Args:
        lengths: segment lengths [tokens], shape (N,), each >= 1.
        block: block length [tokens]; the last block of a segment may be shorter.

    Source: with s = q * block + r: q * block^2 + r^2.

    >>> full_block_pairs([5], block=2)
    9
    """
    s = _lengths(lengths)
    b = _positive(block, "block")
    return int((s // b * b**2 + (s % b) ** 2).sum())


def staggered_block_pairs(lengths: IntsLike, block: int) -> int:
    """Count pairs of bidirectional attention inside consecutive blocks, of which each segment's first is half as long.

    Args:
        lengths: segment lengths [tokens], shape (N,), each >= 1.
        block: block length [tokens]; the last block of a segment may be shorter.

    Source: a block of min(s, block - block // 2), and `full_block_pairs` of what follows it.

    >>> staggered_block_pairs([5], block=2)
    9
    >>> staggered_block_pairs([6], block=4)
    20
    """
    s = _lengths(lengths)
    first = np.minimum(s, _positive(block, "block") - block // 2)
    following = (s - first)[s > first]
    return int((first**2).sum()) + (full_block_pairs(following, block) if following.size else 0)


def local_pairs(lengths: IntsLike, before: int, after: int) -> int:
    """Count pairs of attention in which each query sees its neighbours.

    Args:
        lengths: segment lengths [tokens], shape (N,), each >= 1.
        before: keys before the query that it may see [tokens].
        after: keys after the query that it may see [tokens].

    Source: s for the query itself, and s - d pairs at each distance d from 1 to what is seen on that side.

    >>> local_pairs([4], before=1, after=2)
    12
    """
    s = _lengths(lengths)
    pairs = s
    for reach in (before, after):
        if reach < 0:
            raise WorkloadError(f"a query sees 0 neighbours or more on each side, got {reach}.")
        far = np.minimum(s - 1, reach)
        pairs = pairs + far * s - far * (far + 1) // 2
    return int(pairs.sum())


def relative_pairs(lengths: IntsLike) -> int:
    """Count pairs of queries with the relative positions of all keys, from s - 1 behind to s - 1 ahead.

    Source: s (2 s - 1); Transformer-XL (Dai et al. 2019), appendix B, in its bidirectional form.

    >>> relative_pairs([3, 2])
    21
    """
    s = _lengths(lengths)
    return int((s * (2 * s - 1)).sum())


def block_pairs(lengths: IntsLike, size: int, most: int) -> int:
    """Count pairs of causal attention in which each query sees its own block and some whole blocks before it.

    Args:
        lengths: segment lengths [tokens], shape (N,), each >= 1.
        size: tokens in a block; blocks are cut from each segment's first token.
        most: blocks that each query sees at most, its own included.

    Source: sum over t of min(t, (most - 1) size + (t - 1) mod size + 1); the block selection of MiniMax-M3.

    >>> block_pairs([5], size=2, most=2)
    13
    """
    s = _lengths(lengths)
    b, n = _positive(size, "size"), _positive(most, "most")
    head = np.minimum(s, b * n)
    after = s - head
    full, remainder = after // b, after % b
    own = full * (b * (b + 1) // 2) + remainder * (remainder + 1) // 2
    return int((head * (head + 1) // 2 + after * (n - 1) * b + own).sum())


def pool_pairs(lengths: IntsLike, size: int, most: int) -> int:
    """Count pairs of causal attention in which each query sees some whole pools, and the tokens that fill none yet.

    Args:
        lengths: segment lengths [tokens], shape (N,), each >= 1.
        size: tokens in a pool; pools are cut from each segment's first token.
        most: whole pools that each query sees at most.

    Source: sum over t of min(t, most size + t mod size); the indexer of GLM-5.3-Flash, which always keeps the tail.

    >>> pool_pairs([5], size=2, most=1)
    11
    """
    s = _lengths(lengths)
    p, n = _positive(size, "size"), _positive(most, "most")
    head = np.minimum(s, p * n)
    after = s - head
    full, remainder = after // p, after % p
    tail = full * (p * (p - 1) // 2) + remainder * (remainder + 1) // 2
    return int((head * (head + 1) // 2 + after * n * p + tail).sum())


def compressed_pairs(lengths: IntsLike, rate: int, most: int | None = None) -> int:
    """Count pairs of queries and compressed keys, of which each stands for `rate` tokens that lie before the query.

    Args:
        lengths: segment lengths [tokens], shape (N,), each >= 1.
        rate: tokens in one compressed key; a rest that fills none is not compressed.
        most: compressed keys that each query keeps at most; all when None.

    Source: sum over t of min(floor(t / rate), most); DeepSeek-V4's compressed sparse attention.

    >>> compressed_pairs([5], rate=2)
    6
    """
    s = _lengths(lengths)
    m = _positive(rate, "rate")
    keys = s // m if most is None else np.minimum(s // m, _positive(most, "most"))  # keys of the last query
    return int((m * (keys * (keys - 1) // 2) + keys * (s - m * keys + 1)).sum())


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


def banded_pairs(
    queries: IntsLike, keys: IntsLike, *, left: int | None, right: int | None, bottom_right: bool = True
) -> int:
    """Count pairs of attention in a band around the diagonal, where queries and keys may differ in number.

    Args:
        queries: query lengths [tokens], shape (N,), each >= 1.
        keys: key lengths [tokens], shape (N,), each >= 0.
        left: keys that a query may see before the diagonal; all when None.
        right: keys that it may see after the diagonal; all when None, 0 for causal attention.
        bottom_right: whether the last query's diagonal is the last key, as flash-attn has it since 2.1, or the first
            query's the first key, as in `F.scaled_dot_product_attention(is_causal=True)`.

    Source: query i sees the keys j in [i + d - left, i + d + right], d = keys - queries or 0; flash-attn's interface,
    https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/flash_attn_interface.py.

    >>> banded_pairs([2], [5], left=None, right=0), banded_pairs([2], [5], left=None, right=0, bottom_right=False)
    (9, 3)
    """
    q, k = _lengths(queries, "queries"), _lengths(keys, "keys", least=0)
    if q.shape != k.shape:
        raise WorkloadError(f"attention pairs each query segment with one of keys: got {q.size} and {k.size}.")
    pairs = 0
    for num_queries, num_keys in zip(q.tolist(), k.tolist(), strict=True):
        diagonal = np.arange(num_queries) + (num_keys - num_queries if bottom_right else 0)
        first = np.zeros_like(diagonal) if left is None else np.maximum(diagonal - left, 0)
        last = np.full_like(diagonal, num_keys - 1) if right is None else np.minimum(diagonal + right, num_keys - 1)
        pairs += int(np.maximum(last - first + 1, 0).sum())
    return pairs
