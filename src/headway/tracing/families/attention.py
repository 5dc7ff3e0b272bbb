"""Attention known by name: windows and blocks that encoders cut out of padded chunks by hand, and towers' masks.

The code of LED and PEGASUS-X computes chunks that overlap, and padding to whole chunks. A stand-in takes the arguments
of the method that it replaces, runs the module's own projections on real positions, and records the pairs that each
position sees.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from headway.count import masks
from headway.errors import TraceError
from headway.tracing.attention import record_attention
from headway.tracing.record import Recorder
from headway.tracing.scores import known_data


def _heads(x: torch.Tensor, number: int) -> torch.Tensor:
    """Split [batch, tokens, width] into [batch, heads, tokens, size]."""
    return x.view(*x.shape[:2], number, -1).transpose(1, 2)


def _joined(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(2)


def _window(
    module: Any,
    recorder: Recorder,
    hidden_states: torch.Tensor,
    _attention_mask: torch.Tensor | None = None,
    _is_index_masked: torch.Tensor | None = None,
    is_index_global_attn: torch.Tensor | None = None,
    is_global_attn: bool | None = None,
    **_options: Any,
) -> tuple[torch.Tensor]:
    """Stand in for Longformer's attention: a position sees its neighbours; global tokens see all, and all see them.

    Source: Longformer, Beltagy et al. 2020, sections 3.1 and 3.2: global attention has projections of its own; other
    positions read global tokens by their ordinary keys and values.
    """
    batch, length, _ = hidden_states.shape
    path, side, number = recorder.path_of(module), module.one_sided_attn_window_size, module.num_heads
    q, k, v = (_heads(of(hidden_states), number) for of in (module.query, module.key, module.value))
    if not is_global_attn or is_index_global_attn is None:
        pairs, driver = masks.local_pairs([length] * batch, side, side), f"source_pairs:local:{side}:{side}"
        return (_joined(record_attention(recorder, path, q, k, v, pairs, driver)),)
    if batch > 1:
        raise TraceError(
            f"module {path or '(the model)'} has global tokens in {batch} texts. Give an example of one text."
        )
    chosen = is_index_global_attn[0]
    where = chosen.nonzero()[:, 0]
    place = torch.arange(length)
    visible = ((place[:, None] - place).abs() <= side) | chosen
    out = _joined(record_attention(recorder, path, q, k, v, int(torch.count_nonzero(visible[~chosen]))))
    q = _heads(module.query_global(hidden_states[:, where]), number)
    k, v = (_heads(of(hidden_states), number) for of in (module.key_global, module.value_global))
    return (out.index_copy(1, where, _joined(record_attention(recorder, path, q, k, v, len(where) * length))),)


def _unpadded(
    _module: Any,
    _recorder: Recorder,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    inputs_embeds: torch.Tensor,
    **_options: Any,
) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stand in for padding to whole chunks: `_window` takes texts of any length."""
    return 0, input_ids, attention_mask, inputs_embeds


def _blocks(
    module: Any,
    recorder: Recorder,
    token_hidden_states: torch.Tensor,
    global_hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    **_options: Any,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Stand in for PEGASUS-X's attention: a position sees its block and the global tokens, and these see everything.

    Source: PEGASUS-X, Phang et al. 2022, section 3: every second layer's blocks are staggered by half a block, which
    transformers does by padding.
    """
    path, number, size = recorder.path_of(module), module.num_heads, module.block_size
    hidden = known_data(attention_mask)
    if hidden is None or len(hidden) > 1:
        raise TraceError(
            f"module {path or '(the model)'} attends in blocks under an unknown mask. Give one text, unmasked."
        )
    where = (hidden[0] == 0).nonzero()[:, 0]
    projections = (module.q_proj, module.k_proj, module.v_proj)
    q, k, v = (_heads(of(token_hidden_states[:, where]), number) for of in projections)
    global_q, global_k, global_v = (_heads(of(global_hidden_states), number) for of in projections)
    staggered = bool(hidden[0, 0])
    pairs = int((torch.bincount(where // size) ** 2).sum())
    driver = f"source_pairs:{'staggered' if staggered else 'block'}:{size}"
    tokens, few = len(where), global_hidden_states.shape[1]
    near = record_attention(recorder, path, q, k, v, pairs, driver)
    far = record_attention(recorder, path, q, global_k, global_v, tokens * few)
    all_k, all_v = torch.cat([global_k, k], dim=2), torch.cat([global_v, v], dim=2)
    looked = record_attention(recorder, path, global_q, all_k, all_v, few * (few + tokens))
    local = torch.zeros_like(token_hidden_states).index_copy(1, where, module.out_proj(_joined(near + far)))
    return local, module.out_proj(_joined(looked)), None


def unpadded_settings(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Find the settings that have an encoder pad its text to whole blocks, as (holder, name, value without padding)."""
    for module in model.modules():
        if type(module).__name__ == "PegasusXEncoder":
            yield vars(module.config), "block_size", 1


# methods that cut windows out by hand: (class, method)
METHODS: dict[tuple[str, str], Callable[..., Any]] = {
    ("LEDEncoderSelfAttention", "forward"): _window,
    ("LEDEncoder", "_pad_to_window_size"): _unpadded,
    ("PegasusXGlobalLocalAttention", "forward"): _blocks,
}
