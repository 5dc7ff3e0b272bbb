"""Attention recorded at the ecosystem's own seams: transformers' attention and mask interfaces, and PyTorch's SDPA.

A seam sees heads, both head sizes, the mask and the window, which no matrix product further down would tell. The mask
is a real boolean tensor here, so the pairs it allows are counted, and the count must agree with the formula of the
kind of mask that the model names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from headway.count import masks
from headway.count.tracing import scores
from headway.count.tracing.operation import Operand, Operation
from headway.count.tracing.phantom import Phantom, phantom
from headway.errors import TraceError

if TYPE_CHECKING:
    from headway.count.tracing.record import Recorder

TEXT = "headway_trace"
TOWER = "headway_flash_trace"  # vision towers hand over cu_seqlens only to a name that contains "flash"
BY_HAND = "headway_float_trace"  # masks are floats, as for models that transformers only runs eagerly

_recorder: Recorder | None = None


class _Attend(torch.autograd.Function):
    """Attention on shapes: no arithmetic, but a node in the graph that tells whether backward reaches it."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, q: Phantom, k: Phantom, v: Phantom, *extra: Phantom) -> torch.Tensor:
        ctx.operation = operation
        ctx.save_for_backward(q, k, v, *extra)
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        for t in (q, k, v, *extra):
            out.sources |= t.sources  # type: ignore[attr-defined]  # new_empty of a phantom is one
        out.fed = True  # type: ignore[attr-defined]
        return out

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        ctx.operation.backward_flops += ctx.operation.expected_backward_flops
        return (None, *(torch.empty_like(t) for t in ctx.saved_tensors))


def attend(
    recorder: Recorder,
    module: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pairs: int,
    driver: str = "",
    extra: tuple[torch.Tensor, ...] = (),
) -> torch.Tensor:
    """Record one attention over `pairs` pairs and return its output's shape.

    Args:
        recorder: of the running trace.
        module: path of the module that attends.
        q: queries [..., heads, tokens, qk size].
        k: keys [..., kv heads, tokens, qk size].
        v: values [..., kv heads, tokens, v size].
        pairs: allowed (query, key) pairs, summed over the batch, for one head.
        driver: what `pairs` is proportional to, where the seam says it.
        extra: further tensors that the output depends on (attention sinks).

    Returns:
        Output [..., heads, tokens, v size].

    Source: forward Q K^T and P V; backward dV = P^T dO, dP = dO V^T, dQ = dS K, dK = dS^T Q (FlashAttention, Dao et al.
    2022, appendix B.2); its recomputation of Q K^T is not useful work.
    """
    heads, qk, vo = q.shape[-3], q.shape[-1], v.shape[-1]
    tensors = [t if isinstance(t, Phantom) else phantom(t, fed=True) for t in (q, k, v)]
    q_from, k_from, v_from = (Operand.of(t).sources for t in tensors)
    products = (
        ("dgrad", 2 * heads * vo, v_from),
        ("dgrad", 2 * heads * vo, q_from | k_from),
        ("dgrad", 2 * heads * qk, q_from),
        ("dgrad", 2 * heads * qk, k_from),
    )
    operation = recorder.add(
        Operation(module, "attention", pairs, 2 * heads * (qk + vo), products, recorder.block_of(module), driver=driver)
    )
    extras = [t for t in extra if isinstance(t, Phantom)]
    out: torch.Tensor = _Attend.apply(operation, *tensors, *extras)  # type: ignore[no-untyped-call]
    return out


def _transformers_seam(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Take the place of an attention function: [batch, heads, tokens, size] in, [batch, tokens, heads, size] out."""
    assert _recorder is not None
    path = _recorder.path_of(module)
    boundaries = kwargs.get("cu_seq_lens_q")
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", False) if causal is None else causal)
    window = kwargs.get("sliding_window")
    driver = ""
    if boundaries is not None:
        lengths = np.diff(boundaries.tolist())
        pairs = masks.causal_pairs(lengths) if causal else masks.full_pairs(lengths)
    elif attention_mask is not None:
        pairs, driver = _masked_pairs(_recorder, path, attention_mask, query, key, kwargs.get("indices"))
    else:
        pairs, driver = _plain_pairs(query, key, causal, window)
    extra = tuple(t for t in (attention_mask, *kwargs.values()) if isinstance(t, torch.Tensor))
    out = attend(_recorder, path, query, key, value, pairs, driver, extra)
    return out.transpose(1, 2).contiguous(), None


def _plain_pairs(q: torch.Tensor, k: torch.Tensor, causal: bool, window: int | None) -> tuple[int, str]:
    """Count pairs of an attention without a mask tensor."""
    batch, (queries, keys) = q.shape[0], (q.shape[-2], k.shape[-2])
    if queries != keys:
        if causal or window:
            raise TraceError(f"causal attention of {queries} queries over {keys} keys without a mask is ambiguous.")
        return batch * queries * keys, ""
    if window:
        return batch * masks.sliding_pairs([queries], window), f"pairs:sliding:{window}"
    if causal:
        return batch * masks.causal_pairs([queries]), "pairs:causal"
    return batch * masks.full_pairs([queries]), ""


def _masked_pairs(
    recorder: Recorder,
    path: str,
    mask: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    indices: torch.Tensor | None = None,
) -> tuple[int, str]:
    """Count the pairs that a mask allows, and name its kind where it is a known one.

    Of the keys that it allows, each query keeps those that an indexer picked: `indices` [batch, queries, picked].
    """
    batch, queries, keys = q.shape[0], q.shape[-2], k.shape[-2]
    stays = scores.of_mask(mask)
    if stays == "unclear":
        raise TraceError(
            f"module {path} attends under a mask of floats, whose allowed pairs cannot be counted. "
            "Give it a boolean mask, or none and a causal flag."
        )
    allowed = torch.ones(queries, keys, dtype=torch.bool) if stays is None else stays
    if indices is not None:
        picked = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool)
        return recorder.count(allowed & picked.scatter_(-1, indices.long(), True)[:, None], batch, queries, keys)
    return (recorder.allowed if stays is mask else recorder.count)(allowed, batch, queries, keys)


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


def register() -> None:
    """Register the seams with transformers; doing so again changes nothing."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name in (TEXT, TOWER, BY_HAND):
        AttentionInterface.register(name, _transformers_seam)
        AttentionMaskInterface.register(name, _float_mask_seam if name == BY_HAND else _mask_seam)


def _set_recorder(recorder: Recorder | None) -> Recorder | None:
    global _recorder  # transformers calls the seam as a plain function
    previous, _recorder = _recorder, recorder
    return previous


class Seams(TorchFunctionMode):
    """While active, attention calls are recorded by `recorder` instead of being decomposed."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __enter__(self) -> Any:
        self._previous = _set_recorder(self.recorder)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        _set_recorder(self._previous)
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention and any(isinstance(a, Phantom) for a in args[:3]):
            return self._sdpa(*args, **kwargs)
        return func(*args, **kwargs)

    def _sdpa(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        _dropout_p: float = 0.0,
        is_causal: bool = False,
        **_options: Any,
    ) -> torch.Tensor:
        """Stand in for `F.scaled_dot_product_attention`."""
        path = self.recorder.module
        if attn_mask is not None:
            pairs, driver = _masked_pairs(self.recorder, path, attn_mask, query, key)
        else:
            pairs, driver = _plain_pairs(query, key, is_causal, None)
        extra = () if attn_mask is None else (attn_mask,)
        return attend(self.recorder, path, query, key, value, pairs, driver, extra)
