"""Attention under masks that boundaries, causality and one window do not say: images and prefixes seen both ways.

transformers describes such a mask as a function of two places in a row, combined from elementary ones. Here it becomes
a rule, a nested tuple of them, which is evaluated inside each segment alone: memory is the sum of the squared segment
lengths, once for all layers that share the mask, never the square of a whole pack. Attention is written out (scores,
mask, softmax) for what kernels do not have: soft-capped scores, dropout, padded rows and generation from a cache.

Tensor letters as in `attention`; M segments of equal length L are one call.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from headway.models.attention.segments import Group, group_by_group, groups
from headway.models.recompute import refuse_kept_attention


def exact_attention(
    q_BHTD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
    dropout: float,
) -> torch.Tensor:
    """Attend under a mask, shape (B or 1, 1, T, S); returns shape (B, H, T, Dv).

    The mask is boolean (True: may see), or numbers to add to the scores where they are neither capped nor have sinks.
    """
    if dropout > 0.0:
        refuse_kept_attention("no kernel has attention dropout here")
    repeats = q_BHTD.shape[1] // k_BKSD.shape[1]
    # torch's fused kernel where it says all: scores as they are, and a softmax over keys alone.
    if softcap is None and sinks_H is None:
        if mask is not None and q_BHTD.is_cuda:  # no fused kernel there takes both a mask and fewer key heads
            k_BKSD, v_BKSD = (x.repeat_interleave(repeats, dim=1) for x in (k_BKSD, v_BKSD))
        grouped = q_BHTD.shape[1] != k_BKSD.shape[1]
        return F.scaled_dot_product_attention(
            q_BHTD, k_BKSD, v_BKSD, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=grouped
        )
    refuse_kept_attention("no kernel has score soft-capping here, or sinks under a mask")
    # Else by hand: each key head for its query heads, scores and softmax in float32 or wider.
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k_BKSD, v_BKSD))
    wide = torch.promote_types(torch.float32, q_BHTD.dtype)
    scores = (q_BHTD @ k.transpose(2, 3)).to(wide) * scale
    if softcap is not None:
        # Soft capping: scores stay between -softcap and softcap, almost as they were near zero.
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks_H is not None:
        # A sink is one more column of scores, whose weight is thrown away after the softmax.
        sinks = sinks_H.to(wide)[None, :, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    weights = F.dropout(weights, dropout) if dropout > 0.0 else weights
    return weights.to(v.dtype) @ v


Rule = tuple[Any, ...]
"""("causal",), ("all",), ("none",), ("packed",), ("window", keys), ("chunk", tokens), ("blocks", number of a tensor),
("unknown", name), or ("and", rules ...) and ("or", rules ...)."""

# transformers' mask functions by their qualified names: what a rule calls them, and which of their variables it needs.
_ELEMENTARY = {
    "causal_mask_function": ("causal", None),
    "bidirectional_mask_function": ("all", None),
    "sliding_window_overlay.<locals>.inner_mask": ("window", "sliding_window"),
    "chunked_overlay.<locals>.inner_mask": ("chunk", "chunk_size"),
    "blockwise_overlay.<locals>.inner_mask": ("blocks", "block_sequence_ids"),
    "packed_sequence_mask_function.<locals>.inner_mask": ("packed", None),
}
_COMBINING = {
    "and_masks.<locals>.and_mask": ("and", "mask_functions"),
    "or_masks.<locals>.or_mask": ("or", "mask_functions"),
    "remap_positions_for_packed_sequence.<locals>.inner_mask": ("and", "mask_function"),
}
_PLAIN = {"causal", "all", "window", "packed", "and"}


def read_rule(function: Callable[..., Any], length: int, tensors: list[torch.Tensor]) -> Rule:
    """Read a mask function of transformers as a rule.

    A position's place within its own segment stands for what a pack's remapping computes of its position ids.

    Args:
        function: the mask function.
        length: of the row; chunks as long as that cut nothing [tokens].
        tensors: those that rules name by number are added here.

    Returns:
        The rule; ("unknown", name) stands for a function that is not known.
    """
    name = function.__qualname__
    if name in _COMBINING:
        word, variable = _COMBINING[name]
        combined = _variable(function, variable)
        parts = combined if isinstance(combined, tuple) else (combined,)
        rules = [read_rule(part, length, tensors) for part in parts]
        if word == "or":
            rules = [rule for rule in rules if rule != ("none",)] or rules[:1]
        return rules[0] if len(rules) == 1 else (word, *rules)
    return _elementary(function, length, tensors)


def _elementary(function: Callable[..., Any], length: int, tensors: list[torch.Tensor]) -> Rule:
    word, needed = _ELEMENTARY.get(function.__qualname__, ("unknown", None))
    value: Any = function.__qualname__ if word == "unknown" else None
    if needed is not None:
        value = _variable(function, needed)
    if word == "blocks":
        if not bool((value >= 0).any()):
            return ("none",)
        tensors.append(value)
        value = len(tensors) - 1
    if word == "chunk" and value >= length:
        return ("all",)
    return (word,) if value is None else (word, value)


def _variable(function: Callable[..., Any], name: str) -> Any:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return cells[name].cell_contents


def words(rule: Rule) -> set[str]:
    """The words of a rule."""
    return {rule[0]}.union(*(words(part) for part in rule[1:] if isinstance(part, tuple)))


def unknown(rule: Rule) -> set[str]:
    """Names of the mask functions in a rule that are not known."""
    if rule[0] == "unknown":
        return {rule[1]}
    return set().union(*(unknown(part) for part in rule[1:] if isinstance(part, tuple)))


def is_plain(rule: Rule) -> bool:
    """Tell whether boundaries, causality and the layer's own window say all of a rule."""
    return words(rule) <= _PLAIN


@dataclass(frozen=True, eq=False)
class SegmentMask:
    """A mask of one row or batch, to be evaluated inside segments.

    Attributes:
        rule: which keys a query sees.
        tensors: block numbers of the slots, shape (B, T) each; below 0 for slots of no block.
        is_packed: whether positions restart within a row, so that boundaries must be given.
    """

    rule: Rule
    tensors: tuple[torch.Tensor, ...]
    is_packed: bool
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    def groups(self, cu_N: torch.Tensor) -> tuple[tuple[Group, torch.Tensor], ...]:
        """A pack's segments by length, each group with its slots, shape (M L,); made once for all layers."""
        if "groups" not in self._cache:
            self._cache["groups"] = tuple((group, _slots(group).to(cu_N.device)) for group in groups(cu_N.cpu()))
        grouped: tuple[tuple[Group, torch.Tensor], ...] = self._cache["groups"]
        return grouped

    def allowed(self, group: Group, slots: torch.Tensor) -> torch.Tensor:
        """Mask of the keys that each query sees, shape (M, 1, L, L)."""
        if group not in self._cache:
            allowed_MLL = self._evaluate(self.rule, slots.view(group.count, group.length))
            self._cache[group] = allowed_MLL.expand(group.count, -1, -1)[:, None]
        allowed_M1LL: torch.Tensor = self._cache[group]
        return allowed_M1LL

    def bias(self, group: Group, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`allowed` as numbers to add to scores: 0, or minus infinity where a query does not see a key."""
        if (group, dtype) not in self._cache:
            allowed = self.allowed(group, slots)
            blank = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
            self._cache[group, dtype] = blank.masked_fill_(~allowed, -torch.inf)
        bias_M1LL: torch.Tensor = self._cache[group, dtype]
        return bias_M1LL

    def _evaluate(self, rule: Rule, slots_ML: torch.Tensor) -> torch.Tensor:
        """Evaluate a rule inside segments: whether each query sees each key, shape (M or 1, L, L)."""
        word, *arguments = rule
        if word in ("and", "or"):
            parts = [self._evaluate(part, slots_ML) for part in arguments]
            combined = parts[0]
            for part in parts[1:]:
                combined = combined & part if word == "and" else combined | part
            return combined
        if word == "blocks":
            blocks_ML = self.tensors[arguments[0]].flatten()[slots_ML]
            allowed: torch.Tensor = blocks_ML[:, :, None] == blocks_ML[:, None, :]
            return allowed & (blocks_ML >= 0)[:, :, None]
        places_L = torch.arange(slots_ML.shape[1], device=slots_ML.device)
        query, key = places_L[None, :, None], places_L[None, None, :]
        everything = torch.ones_like(query == key)
        conditions: dict[str, Callable[[], torch.Tensor]] = {
            "causal": lambda: key <= query,
            "window": lambda: key > query - arguments[0],
            "chunk": lambda: key // arguments[0] == query // arguments[0],
            "none": lambda: ~everything,
        }
        return conditions.get(word, lambda: everything)()


def plain_mask(causal: bool, window: int | None) -> SegmentMask:
    """The mask of causality and a window alone [tokens], for attention that no kernel has."""
    rules: list[Rule] = [("causal",)] if causal else [("all",)]
    if window is not None:
        rules.append(("window", window))
    return SegmentMask(("and", *rules), (), is_packed=True)


def _slots(group: Group) -> torch.Tensor:
    if group.slots is not None:
        return group.slots
    assert group.start is not None
    return torch.arange(group.start, group.start + group.count * group.length)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped; boundaries are read on the host
def masked_segments(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    cu_seqlens_N: torch.Tensor,
    mask: SegmentMask,
    scale: float,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
    dropout: float,
) -> torch.Tensor:
    """Attend within segments under a mask; returns shape (T, H, Dv). Other arguments as in `segments`."""
    added = softcap is None and sinks_H is None
    grouped = mask.groups(cu_seqlens_N)

    def attend(number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group, slots = grouped[number]
        allowed = mask.bias(group, slots, q.dtype) if added else mask.allowed(group, slots)
        return exact_attention(q, k, v, allowed, scale, softcap, sinks_H, dropout)

    return group_by_group((q_THD, k_TKD, v_TKD), [(slots, group.length) for group, slots in grouped], attend)
