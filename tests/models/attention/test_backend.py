import pytest
import torch
from transformers import AutoModelForCausalLM, Blip2QFormerConfig, Blip2QFormerModel
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from headway.errors import ConfigError, TrainingError
from headway.models import load_model, register_attention, use_attention
from headway.models.attention import attend, mask


class Layer(torch.nn.Module):
    is_causal = True


def qkv(rows=1, length=6, heads=2):
    return [torch.randn(rows, heads, length, 4) for _ in range(3)]


def test_registering_again_changes_nothing():
    register_attention()
    register_attention()
    assert mask(1, 5, 5) is None


def test_an_unknown_backend_is_refused_with_the_known_ones(tiny_config):
    model = load_model(tiny_config("llama"), random_init=True)
    with pytest.raises(
        ConfigError, match=r"no attention backend 'flash_attention_9'. Known are: eager, .*headway_flash"
    ):
        use_attention(model, "flash_attention_9")


@pytest.mark.parametrize("family", ["qwen3_vl", "gpt_oss_sinks"])
def test_every_part_of_a_model_uses_the_backend_asked_for(family, tiny_config):
    model = load_model(tiny_config(family), random_init=True)
    names = {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
    assert names == {"headway_flash"}
    use_attention(model, "eager")
    assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {"eager"}


def test_plain_masks_need_no_tensor():
    assert mask(1, 8, 8, mask_function=causal_mask_function) is None
    assert mask(1, 8, 8, mask_function=sliding_window_causal_mask_function(4)) is None
    assert mask(2, 8, 8, attention_mask=torch.ones(2, 8, dtype=torch.bool)) is None


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (and_masks(causal_mask_function, lambda *places: places[2] != places[3]), "lambda"),
        (sliding_window_bidirectional_mask_function(2), "sliding_window_bidirectional_overlay"),
    ],
)
def test_a_mask_that_boundaries_cannot_express_is_refused_by_name(function, name):
    with pytest.raises(ConfigError, match=name):
        mask(1, 8, 8, mask_function=function)


def test_a_pack_without_its_boundaries_is_refused_instead_of_leaking():
    segments = torch.tensor([[0, 0, 0, 1, 1, 1]])
    function = and_masks(causal_mask_function, packed_sequence_mask_function(segments))
    marker = mask(1, 6, 6, mask_function=function)
    with pytest.raises(TrainingError, match="Pass pack_cu_seqlens"):
        attend(Layer(), *qkv(), marker)
    boundaries = torch.tensor([0, 3, 6], dtype=torch.int32)
    out, _ = attend(Layer(), *qkv(), marker, pack_cu_seqlens=boundaries, pack_max_seqlen=3)
    assert out.shape == (1, 6, 2, 4)


def test_a_model_given_restarting_positions_alone_is_refused(tiny_config):
    model = load_model(tiny_config("llama"), random_init=True)
    with pytest.raises(TrainingError, match="but the boundaries of its segments were not given"):
        model(torch.ones(1, 6, dtype=torch.long), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), use_cache=False)


def test_a_vision_towers_own_boundaries_win_over_the_packs():
    tensors = qkv()
    own, pack = torch.tensor([0, 2, 6]), torch.tensor([0, 3, 6])
    out, _ = attend(Layer(), *tensors, None, is_causal=False, cu_seq_lens_q=own, pack_cu_seqlens=pack)
    first = [x[:, :, :2] for x in tensors]
    expected = torch.nn.functional.scaled_dot_product_attention(*first)
    assert torch.allclose(out[:, :2], expected.transpose(1, 2), atol=1e-6)


def test_a_vision_tower_on_a_batch_of_equal_images_is_not_cut_by_the_pack():
    tensors = qkv(rows=3)
    out, _ = attend(Layer(), *tensors, None, is_causal=False, pack_cu_seqlens=torch.tensor([0, 4, 18]))
    expected = torch.nn.functional.scaled_dot_product_attention(*tensors)
    assert torch.allclose(out, expected.transpose(1, 2), atol=1e-6)


@pytest.mark.parametrize("windows", [1, 6])
def test_queries_that_read_other_states_see_all_of_those(windows):
    """BLIP-2's Q-Former as transformers has it, whose queries read a window's patches, by itself and beside its eager
    attention; as many queries as patches are rows of one length."""
    config = Blip2QFormerConfig(
        hidden_size=16, num_attention_heads=2, intermediate_size=24, num_hidden_layers=2, encoder_hidden_size=12,
        cross_attention_frequency=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Blip2QFormerModel(config).eval()
    for queries, patches in ((1, 4), (3, 8), (4, 4), (9, 2)):
        inputs = {
            "query_embeds": torch.randn(windows, queries, 16),
            "encoder_hidden_states": torch.randn(windows, patches, 12),
        }
        use_attention(model, "eager")
        expected = model(**inputs).last_hidden_state
        use_attention(model)
        out = model(**inputs, pack_cu_seqlens=torch.tensor([0, 5, 9], dtype=torch.int32), pack_max_seqlen=5)
        assert torch.allclose(out.last_hidden_state, expected, atol=1e-5)


def test_causal_queries_that_read_other_states_are_refused_without_a_mask():
    query, key, value = (*qkv(length=3)[:1], *qkv(length=7)[1:])
    with pytest.raises(
        ConfigError, match="attends from 3 slots to 7, but no mask says which key belongs to which query"
    ):
        attend(Layer(), query, key, value, None)


def test_a_position_bias_is_refused():
    with pytest.raises(ConfigError, match="no position bias"):
        attend(Layer(), *qkv(), None, position_bias=torch.zeros(1))


FAMILIES = ["gpt2", "llama", "mistral_sliding", "gemma2_softcap", "gemma3_sliding", "gpt_oss_sinks", "deepseek_v3"]


def both(tiny_config, family):
    reference = AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation="eager").eval()
    model = load_model(tiny_config(family), random_init=True).eval()
    model.load_state_dict(reference.state_dict())
    return reference, model


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_give_the_eager_models_logits(family, tiny_config):
    reference, model = both(tiny_config, family)
    ids = torch.randint(3, 200, (3, 24))
    padding = torch.ones(3, 24, dtype=torch.long)
    padding[0, :7] = padding[2, 20:] = 0
    with torch.no_grad():
        ours, expected = (m(ids, attention_mask=padding, use_cache=False).logits for m in (model, reference))
    real = padding.bool()
    assert torch.allclose(ours[real], expected[real], atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_generating_from_a_cache_gives_the_eager_models_tokens(family, tiny_config):
    reference, model = both(tiny_config, family)
    ids = torch.randint(3, 200, (2, 20))
    padding = torch.ones(2, 20, dtype=torch.long)
    padding[1, :6] = 0
    options = {
        "attention_mask": padding,
        "max_new_tokens": 12,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    assert torch.equal(model.generate(ids, **options), reference.generate(ids, **options))


def test_autocast_runs_attention_in_its_own_type(tiny_config):
    model = load_model(tiny_config("qwen3"), random_init=True)
    ids, places = torch.ones(1, 6, dtype=torch.long), torch.tensor([[0, 1, 2, 0, 1, 2]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(
            ids, position_ids=places, use_cache=False, pack_cu_seqlens=torch.tensor([0, 3, 6]), pack_max_seqlen=3
        )
    assert out.logits.dtype == torch.bfloat16
    out.logits.float().sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 7)])
def test_the_cuda_kernel_agrees_with_the_cpu_one(causal, window, with_sinks):
    from headway.models.attention.ragged import varlen_attention
    from headway.models.attention.segments import segment_attention

    lengths = [1, 200, 16, 16, 37]
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    shapes = [(270, 4, 12), (270, 2, 12), (270, 2, 12), (4,)]
    inputs = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    copies = [x.detach().cuda().requires_grad_() for x in inputs]
    sinks, cuda_sinks = (inputs[3], copies[3]) if with_sinks else (None, None)
    expected = segment_attention(*inputs[:3], cu, causal, window, 0.3, sinks)
    ours = varlen_attention(*copies[:3], cu.cuda(), 200, causal, window, 0.3, cuda_sinks)
    weight = torch.randn(expected.shape).bfloat16()
    (expected * weight).sum().backward()
    (ours * weight.cuda()).sum().backward()
    assert torch.allclose(ours.cpu().float(), expected.float(), atol=0.03)
    for mine, theirs in list(zip(copies, inputs, strict=True))[: 4 if with_sinks else 3]:
        assert (mine.grad.cpu() - theirs.grad).float().norm() < 0.03 * theirs.grad.float().norm()


@pytest.mark.gpu
def test_float32_on_cuda_is_refused_with_what_to_do():
    tensors = [x.cuda() for x in qkv()]
    with pytest.raises(ConfigError, match="bfloat16 or float16"):
        attend(Layer().cuda(), *tensors, None)
