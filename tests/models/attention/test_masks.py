"""Attention under a mask of the model's own, inside a pack's segments: what each segment alone would give."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.masking_utils import (
    and_masks,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    create_chunked_causal_mask,
    or_masks,
    packed_sequence_compatibility_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from headway.errors import ConfigError, TrainingError
from headway.models.attention import attend, mask, register_attention
from headway.models.attention.backend import NAME
from headway.models.attention.masks import SegmentMask

LENGTHS = (7, 12, 7, 1)
BLOCKS = [[-1, 0, 0, 0, -1, -1, -1], [-1, -1, 1, 1, 1, 1, -1, 2, 2, 2, -1, -1], [3, 3, -1, -1, 4, 4, 4], [-1]]


class Layer(torch.nn.Module):
    is_causal = True


def chunked(_blocks):
    return chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))


def windowed_blocks(blocks):
    either = or_masks(causal_mask_function, blockwise_overlay(blocks))
    return and_masks(either, sliding_window_overlay(5))


def blocks_beside_a_window(blocks):
    return or_masks(sliding_window_causal_mask_function(3), blockwise_overlay(blocks))


def prefix(blocks):
    return or_masks(causal_mask_function, blockwise_overlay(torch.where(blocks >= 0, 0, -1)))


def of_pack(kind):
    """The pack's mask as transformers hands it over: positions remapped, whatever the blocks' places are."""
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    segments = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
    blocks = torch.tensor([block for each in BLOCKS for block in each])[None]
    function = packed_sequence_compatibility_function(kind(blocks), positions, segments)
    return mask(1, sum(LENGTHS), sum(LENGTHS), mask_function=function, device="cpu")


def tensors(heads=4, kv_heads=2):
    torch.manual_seed(0)
    size = sum(LENGTHS)
    shapes = [(1, heads, size, 8), (1, kv_heads, size, 8), (1, kv_heads, size, 8)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def boundaries():
    return torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kind", [chunked, windowed_blocks, blocks_beside_a_window, prefix])
def test_a_segment_of_a_pack_sees_what_it_sees_alone(kind, sinks, softcap):
    made = of_pack(kind)
    assert isinstance(made, SegmentMask)
    s_aux = torch.randn(4) if sinks else None
    q, k, v = tensors()
    options = {"pack_cu_seqlens": boundaries(), "pack_max_seqlen": max(LENGTHS)}
    out, _ = attend(Layer(), q, k, v, made, softcap=softcap, s_aux=s_aux, **options)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad((out * weight).sum(), (q, k, v))

    parts, starts = [], boundaries().tolist()
    for start, length, blocks in zip(starts, LENGTHS, BLOCKS, strict=False):
        seen = sdpa_mask(
            1, length, length, mask_function=kind(torch.tensor([blocks])), allow_is_causal_skip=False, device="cpu"
        )
        cut = [x[:, :, start : start + length] for x in (q, k, v)]
        parts.append(attend(Layer(), *cut, seen, softcap=softcap, s_aux=s_aux)[0])
    alone = torch.cat(parts, dim=1)
    expected = torch.autograd.grad((alone * weight).sum(), (q, k, v))
    assert torch.allclose(out, alone, atol=1e-6)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(grads, expected, strict=True))


def test_blocks_that_are_nowhere_and_chunks_longer_than_the_row_need_no_mask():
    empty = torch.full((1, 9), -1)
    assert mask(1, 9, 9, mask_function=or_masks(causal_mask_function, blockwise_overlay(empty))) is None
    assert mask(1, 9, 9, mask_function=chunked_causal_mask_function(9, torch.zeros(1, dtype=torch.long))) is None


def test_a_pack_with_such_a_mask_but_without_its_boundaries_is_refused():
    with pytest.raises(TrainingError, match="Pass pack_cu_seqlens"):
        attend(Layer(), *tensors(), of_pack(prefix))


def test_processes_that_share_a_pack_cannot_share_such_a_mask():
    with pytest.raises(ConfigError, match=r"parallel.sequence to 1"):
        attend(Layer(), *tensors(), of_pack(prefix), pack_cu_seqlens=boundaries(), pack_split=object())


def test_all_layers_share_one_mask():
    made, (q, k, v) = of_pack(windowed_blocks), tensors()
    for _ in range(2):
        attend(Layer(), q, k, v, made, pack_cu_seqlens=boundaries(), pack_max_seqlen=max(LENGTHS))
    held = [each for each in made._cache.values() if isinstance(each, torch.Tensor) and each.dtype == torch.float32]
    assert sum(each.numel() for each in held) == sum(length**2 for length in LENGTHS)


def test_transformers_makes_chunked_masks_for_this_backend():
    register_attention()
    config = LlamaConfig(attention_chunk_size=4)
    config._attn_implementation_internal = NAME
    made = create_chunked_causal_mask(
        config=config, inputs_embeds=torch.zeros(1, 9, 8), attention_mask=None, past_key_values=None
    )
    assert isinstance(made, SegmentMask)
