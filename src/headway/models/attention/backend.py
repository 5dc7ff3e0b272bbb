"""The attention backend "headway_flash": every segment of a pack attends to itself only, without a mask in memory.

Tensor letters: B batch rows, H query heads, K key/value heads, T slots of a pack, N segments, M segments of equal
length in one call, L their length, D head size.

The language pack's boundaries travel as model-forward keywords that transformers hands down to every attention call:
`pack_cu_seqlens` (int32, shape (N+1,), on the model's device) and `pack_max_seqlen` (int). A vision tower passes the
boundaries of its own images or windows, and those win. Without either, each batch row is one segment. Where answers
share a prompt, `pack_splits` says who sees whom. Where several processes share the pack (or the tower's patches),
`pack_split` says how, and attention exchanges this process's slots of all heads for all slots of its heads and back
(`parallel.exchange`). Bidirectional attention without boundaries of its own (a vision tower that works on a batch of
equal images) takes rows as segments too.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel, masking_utils
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headway.errors import ConfigError, TrainingError
from headway.models.attention.cuda_kernel import cuda_kernel
from headway.models.attention.masks import (
    SegmentMask,
    exact_attention,
    is_plain,
    masked_segments,
    plain_mask,
    read_rule,
    unknown,
    words,
)
from headway.models.attention.segments import segment_attention
from headway.models.attention.splits import SplitMask, split_attention
from headway.models.parallel.exchange import Split, heads_to_tokens, own_heads, tokens_to_heads
from headway.models.products import product_dtype

NAME = "headway_flash"  # "flash" in the name makes vision towers hand over their cu_seqlens instead of looping


def register_attention() -> None:
    """Make "headway_flash" known to transformers; calling it again changes nothing."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    masking: Any = masking_utils  # typed as if nobody replaced its functions
    original = getattr(masking, "is_flash_attention_requested", None)
    if original is not None and not hasattr(original, "__wrapped__"):
        masking.is_flash_attention_requested = _but_this_one(original)
    prepare = getattr(masking, "_preprocess_mask_arguments", None)
    if prepare is not None and not hasattr(prepare, "__wrapped__"):
        masking._preprocess_mask_arguments = _as_it_is(prepare)


def _but_this_one(original: Callable[..., bool]) -> Callable[..., bool]:
    """Tell transformers' masks that this backend, whatever its name says, does attend in chunks."""

    @functools.wraps(original)
    def is_flash(config: Any = None, *args: Any, **kwargs: Any) -> bool:
        return getattr(config, "_attn_implementation", None) != NAME and original(config, *args, **kwargs)

    return is_flash


def _as_it_is(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a model hand its finished mask on to its text model, as transformers lets it do with one that is a tensor."""

    @functools.wraps(original)
    def prepare(config: Any, inputs_embeds: torch.Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(attention_mask, SegmentMask):
            return True, attention_mask, *[None] * 5
        return original(config, inputs_embeds, attention_mask, *args, **kwargs)

    return prepare


def use_attention(model: PreTrainedModel, name: str = NAME) -> None:
    """Switch every part of a model (language, vision, experts' hosts) to one attention backend.

    transformers' own switch replaces unknown flash backends on some models (GPT-OSS) by a kernel from the Hub; this
    one sets what was asked for.

    Raises:
        ConfigError: no backend of that name is registered.
    """
    register_attention()
    backends = ["eager", *sorted(ALL_ATTENTION_FUNCTIONS.valid_keys())]
    if name not in backends:
        raise ConfigError(f"There is no attention backend {name!r}. Known are: {', '.join(backends)}.")
    pending: list[Any] = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    while pending:
        config = pending.pop()
        config._attn_implementation_internal = name
        parts = (getattr(config, part, None) for part in config.sub_configs)
        pending.extend(part for part in parts if part is not None)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | SegmentMask | None:
    """Choose the mask that transformers hands to `attend`.

    None where segment boundaries, causality and a window say it all; an empty tensor where positions restart, which
    obliges the caller to give the pack's boundaries; a `SegmentMask` for what none of these says; a boolean mask (B, 1,
    queries, keys) for padded rows and for generation from a cache.

    Raises:
        ConfigError: the model combines its mask with a pattern that boundaries cannot express.
    """
    tensors: list[torch.Tensor] = []
    rule = read_rule(mask_function, q_length, tensors)
    if missing := sorted(unknown(rule)):
        raise ConfigError(
            f"The attention backend {NAME!r} cannot express a mask that this model builds ({', '.join(missing)}). It "
            "knows causal, bidirectional, sliding-window and chunked attention within segments, and blocks with "
            'bidirectional attention. Load the model with the attention backend "sdpa" and one sample per row, or '
            "take a model of a family that docs/models.md lists."
        )
    is_packed = "packed" in words(rule) and not torch.compiler.is_compiling()
    is_complete = q_length == kv_length and (is_packed or attention_mask is None or bool(attention_mask.all()))
    if is_complete and not is_plain(rule):
        return SegmentMask(rule, tuple(tensors), is_packed)
    if is_packed:
        return torch.empty(1, 1, 0, 0, dtype=torch.bool)
    if is_complete:
        return None
    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **kwargs)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | SegmentMask | SplitMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    pack_cu_seqlens: torch.Tensor | None = None,
    pack_max_seqlen: int | None = None,
    pack_split: Split | None = None,
    pack_splits: SplitMask | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within segments; the function that transformers' models call.

    Args:
        module: the attention layer; its `is_causal` holds where `is_causal` is not given.
        query: shape (B, H, T, D).
        key: shape (B, K, T, D); K divides H.
        value: shape (B, K, T, Dv).
        attention_mask: what `mask` returned; or the splits of a pack.
        scaling: factor on the scores; D**-0.5 by default.
        dropout: probability of dropping an attention weight.
        sliding_window: keys each query may see, itself included [tokens].
        softcap: scores are squashed to softcap * tanh(scores / softcap).
        is_causal: whether queries see only keys at or before their own place.
        s_aux: one learnt score per head that takes part in the softmax and has no value ("sink"), shape (H,).
        position_bias: not supported.
        cu_seq_lens_q: a vision tower's own segment boundaries, shape (N+1,).
        max_length_q: the longest of those segments [patches].
        pack_cu_seqlens: the language pack's segment boundaries, shape (N+1,).
        pack_max_seqlen: the longest of those segments [tokens].
        pack_split: how the slots are dealt to several processes; T are this process's then, and B is 1.
        pack_splits: who sees whom within the language pack's segments, where that is more than causality.

    Returns:
        The attended values, shape (B, T, H, Dv), and None where transformers has a place for attention weights.

    Raises:
        ConfigError: the model or its settings need what this device's kernels do not compute exactly.
        TrainingError: positions restart, so the row is a pack, but its boundaries were not given.
    """
    if position_bias is not None:
        raise ConfigError(
            f'The attention backend {NAME!r} has no position bias. Load the model with the backend "sdpa" instead.'
        )
    # The layer's own settings. A window holds for causal layers alone: a tower's windows are segments.
    causal = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    window = sliding_window if causal else None
    query, key, value = _one_dtype(query, key, value)
    # The mask is one of three: runs within segments, a rule to evaluate, or a boolean tensor written out.
    own = attention_mask if isinstance(attention_mask, SegmentMask) else None
    written = attention_mask if isinstance(attention_mask, torch.Tensor) and attention_mask.numel() else None
    # Boundaries: a tower's own win; those of the language pack hold for causal attention and under its own mask.
    cu_N, longest = cu_seq_lens_q, max_length_q
    if cu_N is None and (causal or (own is not None and own.is_packed)):
        cu_N, longest = pack_cu_seqlens, pack_max_seqlen
    splits = attention_mask if isinstance(attention_mask, SplitMask) else None
    if pack_splits is not None and causal and cu_seq_lens_q is None:
        splits = pack_splits
        _check_plain(attention_mask, window, softcap, s_aux)
    reads_others = written is None and _reads_others(module, query, key, causal or cu_N is not None)
    if (own is not None or written is not None or reads_others) and pack_split is not None:
        raise ConfigError(
            "This model attends through its own mask, or to states outside the pack, so several processes cannot "
            "share a pack. Set parallel.sequence to 1."
        )
    # Padded rows, generation from a cache, other states: no segments, queries and keys may differ in number.
    if written is not None or reads_others:
        out = exact_attention(query, key, value, written, scale, softcap, s_aux, dropout)
        return out.transpose(1, 2).contiguous(), None
    # A mask without boundaries where positions restart: attention would leak between samples.
    if splits is None and cu_N is None and (attention_mask is not None if own is None else own.is_packed):
        raise TrainingError(
            "The position ids restart within a row, but the boundaries of its segments were not given, so segments "
            "would see each other. Pass pack_cu_seqlens and pack_max_seqlen to the model too, as "
            "Batch.model_inputs() does."
        )
    # Neither pack nor tower: each row is one segment.
    if cu_N is None:
        rows, length = query.shape[0], query.shape[2]
        cu_N = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=query.device)
        longest = length
    # Segments lie end to end on one axis: rows of a batch are folded into it.
    q_THD, k_TKD, v_TKD = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    # Give other processes' heads away for all slots of this one's; the way back is at the end.
    if pack_split is not None:
        q_THD, k_TKD, v_TKD = tokens_to_heads(q_THD, k_TKD, v_TKD, pack_split)
        s_aux = None if s_aux is None else own_heads(s_aux, pack_split)
    if splits is not None:
        out_THD = split_attention(q_THD, k_TKD, v_TKD, splits, scale, dropout)
    elif own is not None:
        out_THD = masked_segments(q_THD, k_TKD, v_TKD, cu_N, own, scale, softcap, s_aux, dropout)
    else:
        call = q_THD, k_TKD, v_TKD, cu_N, longest, causal, window, scale, s_aux
        out_THD = _within_segments(call, softcap, dropout)
    if pack_split is not None:
        out_THD = heads_to_tokens(out_THD, query.shape[2], query.shape[1], pack_split)
    return out_THD.reshape(query.shape[0], query.shape[2], *out_THD.shape[1:]), None


def _reads_others(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, is_bounded: bool) -> bool:
    """Say whether queries read all states of another module in their row of the batch, as a Q-Former's do.

    Raises:
        ConfigError: boundaries or causality are to hold, of which there is one for queries and keys alike.
    """
    queries, keys = query.shape[2], key.shape[2]
    if queries != keys and is_bounded:
        raise ConfigError(
            f"{type(module).__name__} attends from {queries} slots to {keys}, but no mask says which key belongs to "
            'which query. Load the model with the attention backend "sdpa" and one sample per row.'
        )
    return queries != keys


def _check_plain(mask: Any, window: int | None, softcap: float | None, sinks_H: torch.Tensor | None) -> None:
    """Refuse attention that is more than causal where a pack's splits take the place of its mask."""
    written = isinstance(mask, SegmentMask) or (isinstance(mask, torch.Tensor) and mask.numel() > 0)
    more = {"a mask of its own": written, f"a window of {window} tokens": window is not None}
    more |= {f"scores capped at {softcap}": softcap is not None, "sinks": sinks_H is not None}
    if reasons := [what for what, is_there in more.items() if is_there]:
        raise ConfigError(
            f"Answers of this pack share a prompt, but the model attends with {', '.join(reasons)}, which does not "
            "support shared prompts. Set shared_prompts to false, so that each answer has its own copy of the prompt."
        )


def _within_segments(call: tuple[Any, ...], softcap: float | None, dropout: float) -> torch.Tensor:
    """Attend with the kernel for this device; arguments of a `CudaKernel`, and two settings that none of them has."""
    q_THD: torch.Tensor
    q_THD, k_TKD, v_TKD, cu_N, longest, causal, window, scale, sinks_H = call
    if q_THD.shape[1] == 0:  # more processes than heads: this one has none to attend with
        return q_THD.reshape(q_THD.shape[0], 0, v_TKD.shape[2])
    if q_THD.is_cuda:
        if softcap is not None or dropout > 0.0:
            raise ConfigError(
                f"The attention backend {NAME!r} has neither score soft-capping nor attention dropout on CUDA (this "
                f"model asks for softcap={softcap}, dropout={dropout}). Set model.dropout: off, or use the backend "
                '"sdpa" with one sample per row.'
            )
        if longest is None:
            raise TrainingError(
                "The pack's boundaries came without the length of its longest segment. Pass pack_max_seqlen too."
            )
        return cuda_kernel()(q_THD, k_TKD, v_TKD, cu_N, int(longest), causal, window, scale, sinks_H)
    if softcap is not None or dropout > 0.0:
        plain = plain_mask(causal, window)
        out_THD: torch.Tensor = masked_segments(q_THD, k_TKD, v_TKD, cu_N, plain, scale, softcap, sinks_H, dropout)
        return out_THD
    return segment_attention(q_THD, k_TKD, v_TKD, cu_N, causal, window, scale, sinks_H)


def _one_dtype(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Bring query, key and value to one type: autocast's, else the values'.

    Rotary embeddings are often computed in float32, which leaves queries and keys wider than the values.
    """
    dtype = product_dtype(tensors[0], tensors[-1])
    return tuple(tensor.to(dtype) for tensor in tensors)
