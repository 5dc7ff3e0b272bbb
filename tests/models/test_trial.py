"""The trial of packs, on transformers' own classes, as they are and with a defect planted."""

import pytest
import torch
import transformers
from torch.nn import functional as F
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama

from headway.errors import ConfigError
from headway.models import load, load_model, trial
from headway.models.trial import BOTH_WAYS, DIFFERS, FUTURE, LEAK, try_packs, verdict_on
from headway.tracing import trace
from helpers.models import tiny_config

# transformers' own defaults, of the size of real models; the trial makes them tiny
HELD = ["LlamaConfig", "Qwen3MoeConfig", "DeepseekV3Config", "Gemma3TextConfig", "GptOssConfig", "FalconH1Config"]
APART = {
    "BloomConfig": FUTURE,
    "OpenAIGPTConfig": LEAK,
    "BartConfig": DIFFERS,
    "GPTJConfig": "a pack ends in an error (RuntimeError",
    "MptConfig": "a pack ends in an error (AttributeError",
    "RwkvConfig": "a pack ends in an error (Headway cannot train this model on packs, because its recurrent layers",
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1 + i / 10 for i in range(48)],
    "long_factor": [2.0 + i for i in range(48)],
    "original_max_position_embeddings": 4096,
    "factor": 32.0,
}


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", HELD)
def test_models_whose_packs_are_their_segments_pass(kind):
    assert verdict_on(getattr(transformers, kind)()).mode == "packed"


@pytest.mark.parametrize("kind", APART)
def test_other_text_models_run_segment_by_segment_and_say_why(kind):
    verdict = verdict_on(getattr(transformers, kind)())
    assert verdict.mode == "apart"
    assert verdict.reason.startswith(APART[kind])


@pytest.mark.parametrize("kind", ["BertConfig", "RobertaConfig", "XLNetConfig", "CpmAntConfig"])
def test_models_that_read_in_both_directions_are_refused(kind):
    model = load_model(getattr(transformers, kind)(), random_init=True, device="meta")
    with pytest.raises(
        ConfigError, match=r"cannot be trained on packs\..* it reads in both directions.*docs/models\.md"
    ):
        try_packs(model)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "paligemma", "llava", "idefics3", "qwen2_audio"])
def test_a_picture_or_a_sound_is_tried_where_the_model_takes_one(family):
    verdict = verdict_on(tiny_config(family))
    assert (verdict.mode, verdict.media_error) == ("packed", None)


def test_lengths_from_which_on_a_model_computes_otherwise_are_tried_if_packs_reach_them(monkeypatch):
    # Llama 4's layers without rotary embedding count positions over the row, from 8,192 tokens on
    config = transformers.Llama4TextConfig()
    assert verdict_on(config).mode == "packed"
    monkeypatch.setattr(load, "count_by_segment", lambda _model: None)  # and Headway's mending of it is taken away
    assert verdict_on(config).reason == f"{DIFFERS}, in packs of more than 8,192 tokens"
    assert verdict_on(config, tokens=8192).mode == "packed"


def _llama(attend):
    """Llama's attention with other code in place of the backend that was set."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (f(hidden_states).view(shape).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
        k, v = (modeling_llama.repeat_kv(x, self.num_key_value_groups) for x in (k, v))
        out = attend(q, k, v, kwargs.get("pack_cu_seqlens") is not None)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None

    return forward


def _eager(self, *args, **kwargs):
    """Llama's attention that runs eager attention, whatever was set."""
    name, self.config._attn_implementation_internal = self.config._attn_implementation, "eager"
    try:
        return _LLAMA(self, *args, **kwargs)
    finally:
        self.config._attn_implementation_internal = name


def _row(self, input_ids=None, position_ids=None, **others):
    """GPT-2 that counts positions over the row, whatever it is given."""
    return _GPT2(self, input_ids=input_ids, position_ids=torch.arange(input_ids.shape[1])[None], **others)


_LLAMA, _GPT2 = modeling_llama.LlamaAttention.forward, modeling_gpt2.GPT2Model.forward
_attention = F.scaled_dot_product_attention
PLANTED = {
    "no mask on packs": (_llama(lambda q, k, v, packed: _attention(q, k, v, is_causal=not packed)), FUTURE),
    "the row's mask": (_llama(lambda q, k, v, _packed: _attention(q, k, v, is_causal=True)), LEAK),
    "no mask": (_llama(lambda q, k, v, _packed: _attention(q, k, v)), BOTH_WAYS),
    "another backend": (_eager, "a pack ends in an error"),
    "positions of the row": (_row, DIFFERS),
}


@pytest.mark.parametrize("defect", PLANTED)
def test_a_class_of_transformers_with_a_planted_defect_is_found(defect, monkeypatch):
    code, reason = PLANTED[defect]
    kind = modeling_gpt2.GPT2Model if code is _row else modeling_llama.LlamaAttention
    monkeypatch.setattr(kind, "forward", code)
    verdict = verdict_on(transformers.GPT2Config() if code is _row else transformers.LlamaConfig())
    assert verdict.reason.startswith(reason)
    assert verdict.mode == ("refused" if reason == BOTH_WAYS else "apart")


LENGTHS = (9, 25, 1, 5)
SMALL = {
    "bloom": transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=160, initializer_range=0.2),
    "bart": transformers.BartConfig(
        d_model=32, decoder_layers=2, decoder_ffn_dim=48, decoder_attention_heads=4, vocab_size=160, init_std=0.2,
        dropout=0.0, is_decoder=True, is_encoder_decoder=False, add_cross_attention=False,
    ),
    "phi3": transformers.Phi3Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=160,
        pad_token_id=0, original_max_position_embeddings=16, max_position_embeddings=512, initializer_range=0.2,
        rope_parameters={
            **LONG_ROPE, "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0],
            "original_max_position_embeddings": 16,
        },
    ),
    "stablelm": transformers.StableLmConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=160, initializer_range=0.2,
    ),
    "mamba2": tiny_config("mamba2"),
    "recurrent_gemma": tiny_config("recurrent_gemma"),
}  # fmt: skip


@pytest.mark.parametrize("family", SMALL)
def test_losses_and_gradients_of_a_pack_are_those_of_samples_alone(family):
    torch.manual_seed(0)
    model, ids = load_model(SMALL[family], random_init=True).eval(), torch.arange(sum(LENGTHS))[None] % 150 + 7
    alone = load_model(SMALL[family], random_init=True, attention="eager").eval()
    alone.load_state_dict(model.state_dict())
    ledger = trace(model)
    notes = try_packs(model)
    assert bool(notes) == (family != "phi3")  # whose pack is its segments
    assert trace(model).rows == ledger.rows  # costs are those of segments, however they run
    places = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    pack = {"pack_cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0).int(), "pack_max_seqlen": max(LENGTHS)}
    pack["pack_segments"] = tuple((length, length) for length in LENGTHS)
    logits_TV = model(input_ids=ids, position_ids=places, use_cache=False, **pack).logits[0]
    expected_TV = torch.cat([alone(input_ids=part, use_cache=False).logits[0] for part in ids.split(LENGTHS, dim=1)])
    assert torch.allclose(logits_TV, expected_TV, atol=1e-4)
    for logits in (logits_TV, expected_TV):
        F.cross_entropy(logits, ids[0].roll(-1)).backward()
    for (name, got), want in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert (got.grad is None) == (want.grad is None), name
        if want.grad is not None:
            assert torch.allclose(got.grad, want.grad, rtol=1e-3, atol=1e-5), name


def test_several_processes_are_told_that_segments_run_apart():
    model = load_model(SMALL["bloom"], random_init=True, device="meta")
    with pytest.raises(
        ConfigError, match=r"by itself, because otherwise a token of a pack sees.* Train this model on one process"
    ):
        try_packs(model, is_shared=True)


def test_a_model_that_no_copy_runs_is_a_warning(monkeypatch):
    def fail(*_args, **_options):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", fail)
    (note,) = try_packs(load_model(transformers.LlamaConfig(), random_init=True, device="meta"))
    assert note.startswith("warning: Headway does not know whether LlamaForCausalLM keeps the samples of a pack apart")
    assert "no such kernel" in note


def test_a_verdict_is_kept_until_configuration_or_code_are_others(monkeypatch):
    config, trials = tiny_config("llama"), []

    def counted(config, tokens):
        trials.append(config)
        return verdict_on(config, tokens)

    monkeypatch.setattr(trial, "verdict_on", counted)
    for _ in range(2):
        assert try_packs(load_model(config, random_init=True, device="meta")) == ()
    assert len(trials) == 1
    config.attention_bias = True
    try_packs(load_model(config, random_init=True, device="meta"))
    assert len(trials) == 2
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", PLANTED["the row's mask"][0])
    assert try_packs(load_model(config, random_init=True, device="meta"))
    assert len(trials) == 3
