"""Tiny copies of a model's configuration: the same code runs, on sizes that take milliseconds.

What decides which code runs is kept: the family, kinds of layers, how many queries share a key, how experts are picked.
Head counts are divided by one factor, sizes of heads by another, and every other width by both, so that products and
sums of sizes stay what they were. Lengths from which on a model attends otherwise (windows, chunks, top-k) become
shorter than the segments that it is tried on. Fields are found by the words of their names, so a copy may not fit
together: the first that the model's own code builds and runs is the one.
"""

import copy
import re
from collections.abc import Iterator
from typing import Any

from headway.tracing.build import subconfigs, with_layers

LENGTH = 8
"""Windows, chunks and the like of a tiny copy [tokens]."""
VOCABULARY = 512
"""Entries of its vocabulary, at most [tokens]."""

_FIRST_SPECIAL = VOCABULARY // 2  # first number of a special token
_LAYERS = (4, 12)  # layers of a tower: at least, and at most, until every kind of layer is there
_FACTORS = (
    (16, 8),
    (8, 8),
    (8, 4),
    (8, 2),
    (4, 4),
    (8, 1),
    (4, 2),
    (4, 1),
    (2, 2),
    (1, 8),
    (1, 4),
    (1, 2),
    (2, 1),
    (1, 1),
)
_FEW_FACTORS = ((8, 4), (4, 2), (1, 4), (1, 1))
_SMALLEST = 32  # widths below it are left alone
_LEAST = 4  # least width or size of a head

_ROPES = ("rope_parameters", "rope_scaling")
SPECIAL = re.compile(r"token_ids?$|token_index$|image_patch_id$|_(start|end|newline)_id$")
"""Names of fields that hold numbers of special tokens."""
_HEADS = re.compile(r"heads$|^n_head$|num_query_groups$")
_HEAD_SIZES = re.compile(r"head_dim$|head_size$|headdim$|d_head$|dim_head$|d_kv$|rotary_dim$|kv_channels$")
_WIDTHS = re.compile(
    r"(hidden|intermediate)_(size|dim)|ffn_dim|embed(ding)?_dim|emb_dim|embd$|embedding_size|d_model$|d_ff$|dff$|inner$"
    r"|dim_ff$|mlp_dim|lowrank|_rank$|_width$|dim_model_base|d_ssm|(in|out)put_(size|dim)|proj\w*_dim|expert_dim"
    r"|feed_forward_size|(in|out)_dim$"
)
_LENGTHS = re.compile(r"window(_size|_len)?$|chunk_(size|length)$|floor_scale$|index_topk$|original_max_position")
_MOST = {
    re.compile(r"experts$|expert_num$"): 16,
    re.compile(r"per_tok(en)?$|(^|moe_)(top_?)?k$"): 4,
    re.compile(r"n_group$|expert_group$"): 4,
    re.compile(r"topk_group$"): 2,
    re.compile(r"vocab_size"): VOCABULARY,
}


def tiny_configs(config: Any, tokens: float) -> Iterator[Any]:
    """Make tiny copies of a configuration, smallest first; the last have its own layers, as some share theirs.

    Args:
        config: of a model.
        tokens: of the longest pack; lengths that no pack reaches stay [tokens].
    """
    cut = with_layers(config, _layers(config))
    for base, longest, factors in ((cut, tokens, _FACTORS), (cut, 0, _FEW_FACTORS), (config, tokens, _FEW_FACTORS)):
        for heads, size in factors:
            small = copy.deepcopy(base)
            if _shrink(small, heads, size, longest):
                yield small


def critical_lengths(config: Any) -> list[int]:
    """Lengths from which on a model may attend otherwise, by its configuration, shortest first [tokens]."""
    texts = [vars(part) for part in subconfigs(config) if hasattr(part, "vocab_size")]
    ropes = [rope for text in texts for name in _ROPES if isinstance(rope := text.get(name), dict)]
    values = [value for fields in texts + ropes for name, value in fields.items() if _LENGTHS.search(name)]
    return sorted({value for value in values if type(value) is int and value > LENGTH})


def _layers(config: Any) -> int:
    """Layers that hold every kind of layer that a configuration lists, within bounds."""
    least, most = _LAYERS
    for part in subconfigs(config):
        depth = getattr(part, "num_hidden_layers", None)
        for name, value in vars(part).items():
            if not isinstance(value, list | tuple) or not all(type(entry) in (str, int) for entry in value):
                continue
            if len(value) == depth:
                least = max(least, *(value.index(kind) + 1 for kind in set(value)))
            elif name.endswith(("indices", "indexes")) and value:
                least = max(least, min(value) + 1)
    return min(least, most)


def _shrink(config: Any, heads: int, size: int, tokens: float) -> bool:
    """Divide heads and their sizes, in place; False where heads do not divide, or a width would vanish."""
    special: dict[int, int] = {}  # numbers of special tokens, and what they become

    def token(number: Any) -> Any:
        is_special = type(number) is int and number >= _FIRST_SPECIAL
        return special.setdefault(number, _FIRST_SPECIAL + len(special)) if is_special else number

    for part in subconfigs(config):
        for name, value in list(vars(part).items()):
            small = value
            if SPECIAL.search(name):
                small = [*map(token, value)] if isinstance(value, list | tuple) else token(value)
            elif name in _ROPES and isinstance(value, dict):
                small = _rope(value, size, tokens)
            elif type(value) is int:
                small = _size(name, value, heads, size, tokens if hasattr(part, "vocab_size") else 0)
            if type(small) is int and small == 0 != value:
                return False
            if small is not value:
                setattr(part, name, small)
    return True


def _size(name: str, value: int, heads: int, size: int, tokens: float) -> int:
    if _HEADS.search(name):
        return max(1, value // heads) if value and not (value % heads and heads % value) else 0
    if _LENGTHS.search(name):
        return min(value, LENGTH) if value < tokens else value
    for words, most in _MOST.items():
        if words.search(name):
            return min(value, most)
    divisor = size if _HEAD_SIZES.search(name) else heads * size if _WIDTHS.search(name) and value >= _SMALLEST else 1
    return 0 if divisor > 1 and value < _LEAST * divisor else value // divisor


def _rope(rope: dict[str, Any], size: int, tokens: float) -> dict[str, Any]:
    """Rotary settings, of each kind of layer where they differ, for heads that are so many times smaller."""
    small = dict(rope)
    for name, value in rope.items():
        if isinstance(value, dict):
            small[name] = _rope(value, size, tokens)
        elif name == "mrope_section":
            others = [share // size for share in value[1:]]
            small[name] = [sum(value) // size - sum(others), *others]
        elif name.endswith("_factor") and isinstance(value, list):
            small[name] = value[::size]
        elif type(value) is int and _LENGTHS.search(name):
            small[name] = min(value, LENGTH) if value < tokens else value
    return small
