"""Attention recorded at a seam, and the first of them: transformers' attention and mask interfaces.

A seam sees heads, both head sizes, the mask and the window, which no matrix product further down would tell. The mask
is a real boolean tensor here, so the pairs it allows are counted, and the count must agree with the formula of the
kind of mask that the model names. Without a mask, the function that the model would have called says who sees whom: it
runs on shapes, and what it attends to is read. Some read a causal flag or a window, others the mask alone.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from headway.count import masks
from headway.errors import TraceError
from headway.tracing import known_values, scores
from headway.tracing.operation import Operand, Operation, RecordedWork
from headway.tracing.phantom import Phantom, phantom
from headway.tracing.record import Recorder

TEXT = "headway_trace"
TOWER = "headway_flash_trace"  # vision towers hand over cu_seqlens only to a name that contains "flash"
BY_HAND = "headway_float_trace"  # masks are floats, as for models that transformers only runs eagerly

_NAMES = (TEXT, TOWER, BY_HAND)
_IMPLEMENTATION = "_implementation_that_runs"  # a twin's configuration has its model's attention here

_recorder: Recorder | None = None


def record_attention(
    recorder: Recorder,
    module: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pairs: int,
    driver: str = "",
    extra: tuple[torch.Tensor, ...] = (),
    masked: bool = False,
    longest: int = 0,
    heads: int = 0,
) -> torch.Tensor:
    """Record one attention over `pairs` pairs and return its output's shape.

    Args:
        recorder: of the running trace.
        module: path of the module that attends.
        q: queries [..., heads, tokens, qk size].
        k: keys [..., kv heads, tokens, qk size].
        v: values [..., kv heads, tokens, v size].
        pairs: allowed (query, key) pairs, summed over the batch, for `heads` heads each.
        driver: what `pairs` is proportional to, where the seam says it.
        extra: further tensors that the output depends on (attention sinks).
        masked: whether `pairs` come from a mask that names no window.
        longest: length of the longest piece, where pieces are packed [positions].
        heads: that `pairs` are of; those of the queries when 0, and 1 where `pairs` are summed over them.

    Returns:
        Output [..., heads, tokens, v size].

    Source: forward Q K^T and P V; backward dV = P^T dO, dP = dO V^T, dQ = dS K, dK = dS^T Q (FlashAttention, Dao et al.
    2022, appendix B.2); its recomputation of Q K^T is not useful work.
    """
    if not pairs:
        raise TraceError(
            f"module {module or '(the model)'} masks all of its attention scores: no query {tuple(q.shape)} sees any "
            f"key {tuple(k.shape)}."
        )
    heads, qk, vo = heads or q.shape[-3], q.shape[-1], v.shape[-1]
    tensors = [t if isinstance(t, Phantom) else phantom(t, fed=True) for t in recorder.attends(q, k, v)]
    q_from, k_from, v_from = (Operand.of(t).sources for t in tensors)
    products = (
        ("dgrad", 2 * heads * vo, v_from),
        ("dgrad", 2 * heads * vo, q_from | k_from),
        ("dgrad", 2 * heads * qk, q_from),
        ("dgrad", 2 * heads * qk, k_from),
    )
    block, unit_flops = recorder.block_of(module), 2 * heads * (qk + vo)
    operation = Operation(module, "attention", pairs, unit_flops, products, block, driver=driver, masked=masked)
    operation.longest, operation.fed = longest, any(t.fed for t in tensors)
    if heads == q.shape[-3]:  # pairs of other masks are of one head each
        operation.cached = k.shape[-3] * (qk + vo)
    recorder.add(operation)
    extras = [t for t in extra if isinstance(t, Phantom)]
    *batch, _, tokens, _ = q.shape

    def make(query: torch.Tensor) -> tuple[torch.Tensor]:  # in the layout in which kernels write
        return (query.new_empty(*batch, tokens, q.shape[-3], vo).transpose(-2, -3),)

    out: torch.Tensor
    (out,) = RecordedWork.apply(operation, make, *tensors, *extras)  # type: ignore[no-untyped-call]
    recorder.attended(out)
    return out


def _transformers_seam(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    eager: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Take the place of an attention function: [batch, heads, tokens, size] in, [batch, tokens, heads, size] out.

    `eager` is what the model calls where no other implementation is set.
    """
    assert _recorder is not None
    path = _recorder.path_of(module)
    boundaries = kwargs.get("cu_seq_lens_q")
    window = kwargs.get("sliding_window")
    driver, longest, heads = "", 0, 0
    query, key, value = of_one_batch(query, key, value)
    if boundaries is not None:
        lengths = np.diff(boundaries.tolist())
        longest = int(lengths.max())
        causal = _sees_no_later_key(_recorder, module, (query, key, value), kwargs, eager)
        pairs = masks.causal_pairs(lengths) if causal else masks.full_pairs(lengths)
    elif attention_mask is not None:
        picked = _picked(module, path, key.shape[-2], kwargs)
        pairs, heads, driver = masked_pairs(_recorder, path, attention_mask, query, key, picked)
        if window and driver == "pairs:causal" and query.shape[-2] <= window:
            driver = f"pairs:sliding:{window}"  # no segment has exceeded the window yet
    else:
        pairs, driver = _unmasked_pairs(_recorder, module, (query, key, value), kwargs, eager)
    extra = tuple(t for t in (attention_mask, *kwargs.values()) if isinstance(t, torch.Tensor))
    out = record_attention(_recorder, path, query, key, value, pairs, driver, extra, longest=longest, heads=heads)
    return out.transpose(1, 2).contiguous(), None


def choose_interface(
    _recorder: Recorder, *, self: Any, attn_implementation: str | None, default: Callable[..., Any]
) -> Callable[..., Any]:
    """Stand in for `AttentionInterface.get_interface`, which gets a model's own function for eager attention."""
    if attn_implementation in _NAMES:
        return partial(_transformers_seam, eager=default)
    function: Callable[..., Any] = self.get(attn_implementation, default)
    return function


def _unmasked_pairs(
    recorder: Recorder,
    module: nn.Module,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    kwargs: dict[str, Any],
    eager: Callable[..., Any] | None,
) -> tuple[int, str]:
    """Count pairs of an attention without a mask, by running the function that the model would have called.

    Returns:
        Pairs, summed over the batch; and their driver where that function says it.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = getattr(getattr(module, "config", None), _IMPLEMENTATION, None) or "eager"
    function = eager if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
    if function is None:  # eager attention that the model calls by itself: all of transformers' read the mask alone
        return plain_pairs(qkv[0], qkv[1], False, None)
    before = len(recorder.operations)
    # learnt queries belong to the batch too: else their product would be a weight's
    shapes = (Phantom(t.meta, fed=True) if isinstance(t, Phantom) else phantom(t, fed=True) for t in qkv)
    try:
        with torch.no_grad():
            function(module, *shapes, None, **kwargs)
    except TraceError:  # a kernel that does not run on shapes is believed to read what the interface hands it
        causal = kwargs.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
        return plain_pairs(qkv[0], qkv[1], causal, kwargs.get("sliding_window") if causal else None)
    finally:
        ran = [op for op in recorder.operations[before:] if op.kind == "attention"]
        del recorder.operations[before:]
    if not ran:
        raise TraceError(
            f"module {recorder.path_of(module) or '(the model)'} attends without a mask by {name!r}, which runs no "
            "softmax over scores, so Headway cannot tell who sees whom. Give a boolean mask, or set another "
            "attention, for example with model.set_attn_implementation('sdpa')."
        )
    return ran[-1].units * (math.prod(qkv[0].shape[:-3]) if ran[-1].by_hand else 1), ran[-1].driver


def _sees_no_later_key(
    recorder: Recorder,
    module: nn.Module,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    kwargs: dict[str, Any],
    eager: Callable[..., Any] | None,
) -> bool:
    """Say whether attention is causal inside segments, as it is over two positions that stand for one."""
    options = {name: value for name, value in kwargs.items() if not isinstance(value, torch.Tensor)}
    pairs, _ = _unmasked_pairs(recorder, module, tuple(t[..., :2, :] for t in qkv), options, eager)  # type: ignore[arg-type]  # three tensors
    return pairs < qkv[0][..., 0, 0, 0].numel() * 4


def _picked(module: nn.Module, path: str, keys: int, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Read an indexer's picks for each query: keys, or blocks of keys, -1 for none.

    Returns:
        Booleans [batch, 1, queries, keys]; None where nothing is picked.
    """
    choices = {
        name: value
        for name, value in kwargs.items()
        if isinstance(value, torch.Tensor)
        and not value.is_floating_point()
        and value.dim() > 2
        and "position" not in name
    }
    places, size = choices.pop("indices", None), 1
    if "block_indices" in choices:
        places, size = choices.pop("block_indices")[:, 0], int(module.indexer.block_size)  # type: ignore[union-attr, arg-type]  # heads pick alike here
    if choices:
        raise TraceError(
            f"module {path or '(the model)'} hands {', '.join(choices)} to its attention, which may pick keys in a "
            "way that Headway does not know."
        )
    if places is None:
        return None
    blocks = -(-keys // size)
    picked = torch.zeros(*places.shape[:2], blocks + 1, dtype=torch.bool)
    index = places.long()
    picked.scatter_(-1, index.masked_fill(index < 0, blocks), True)
    by_block = picked[:, None, :, :blocks]
    return by_block if size == 1 else by_block.repeat_interleave(size, dim=-1)[..., :keys]


def of_one_batch(*tensors: torch.Tensor, axes: int = 3) -> list[torch.Tensor]:
    """Repeat queries, keys or values [..., heads, tokens, size] that all rows of a batch share, as learnt ones.

    Args:
        tensors: with any axes before the last `axes`.
        axes: at the end, which stay as they are: 3 where heads of queries share keys, 2 where heads broadcast too.
    """
    batches = [t.shape[:-axes] for t in tensors]
    if len(set(batches)) == 1:
        return [*tensors]
    batch: tuple[int, ...] = torch.broadcast_shapes(*batches)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return [t.expand(*batch, *t.shape[-axes:]) for t in tensors]


def plain_pairs(q: torch.Tensor, k: torch.Tensor, causal: bool, window: int | None) -> tuple[int, str]:
    """Count pairs of an attention without a mask tensor."""
    batch, (queries, keys) = math.prod(q.shape[:-3]), (q.shape[-2], k.shape[-2])
    if queries != keys:
        if causal or window:
            raise TraceError(f"causal attention of {queries} queries over {keys} keys without a mask is ambiguous.")
        return batch * queries * keys, ""
    if window:
        return batch * masks.sliding_pairs([queries], window), f"pairs:sliding:{window}"
    if causal:
        return batch * masks.causal_pairs([queries]), "pairs:causal"
    return batch * masks.full_pairs([queries]), ""


def masked_pairs(
    recorder: Recorder,
    path: str,
    mask: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    picked: torch.Tensor | None = None,
) -> tuple[int, int, str]:
    """Count the picked pairs that a mask of any shape allows.

    Returns:
        Pairs, summed over the batch; of how many heads each (1 where heads differ: then the sum is over them too); and
        the driver of a known kind of mask, else "".
    """
    if known_values.is_placeholder(mask):
        raise TraceError(
            f"module {path or '(the model)'} attends under a mask that depends on floats, but floats have no data in "
            "a trace. Give the mask, or the lengths behind the mask, as integers or booleans among the inputs."
        )
    queries, keys = q.shape[-2], k.shape[-2]
    stays = scores.pairs_under(mask)
    if stays == "unclear":
        raise TraceError(
            f"module {path or '(the model)'} attends under a mask of floats, whose allowed pairs cannot be counted. "
            "Give it a boolean mask, or none and a causal flag."
        )
    allowed = torch.ones(queries, keys, dtype=torch.bool) if stays is None else stays
    if picked is not None:
        return recorder.count(allowed & picked, q.shape[:-2], queries, keys)
    return (recorder.allowed if stays is mask else recorder.count)(allowed, q.shape[:-2], queries, keys)


def _mask_seam(
    batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0, **kwargs: Any
) -> torch.Tensor | None:
    """Build the real boolean mask, whatever shortcut the backend would take."""
    from transformers.masking_utils import sdpa_mask

    kwargs.pop("allow_is_causal_skip", None)
    kwargs.pop("allow_is_bidirectional_skip", None)
    kwargs["device"] = torch.device("cpu")
    mask: torch.Tensor | None = sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        **kwargs,
    )
    return mask


def _float_mask_seam(*args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> torch.Tensor | None:
    """Build the real mask as floats to add: 0 where a pair is allowed, the least number where not."""
    mask = _mask_seam(*args, **kwargs)
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


def register_seams() -> None:
    """Register the seams with transformers; doing so again changes nothing."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name in _NAMES:
        AttentionInterface.register(name, _transformers_seam)
        AttentionMaskInterface.register(name, _float_mask_seam if name == BY_HAND else _mask_seam)


def lead_here(configs: list[tuple[Any, str]]) -> None:
    """Set the attention of configurations to one of the seams, and keep what it was.

    Args:
        configs: each with the name of its seam; setting one also sets those inside it.
    """
    register_seams()
    for config, _ in configs:
        if config._attn_implementation not in _NAMES:
            vars(config)[_IMPLEMENTATION] = config._attn_implementation
    for config, name in configs:
        config._attn_implementation = name


def set_recorder(recorder: Recorder | None) -> Recorder | None:
    """Set the trace that transformers' seam records into; returns the one before."""
    global _recorder  # transformers calls the seam as a plain function
    previous, _recorder = _recorder, recorder
    return previous
