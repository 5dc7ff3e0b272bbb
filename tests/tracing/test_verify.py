"""A real step under PyTorch's formulas explains every ledger, and a wrong ledger does not pass."""

import functools
from dataclasses import replace

import pytest
import torch
import transformers
from transformers import BloomConfig, DeepseekV4Config, GPTNeoConfig, OPTConfig

from headway.count import Workload
from headway.tracing import trace
from headway.tracing import verify as module
from headway.tracing.build import model_class, with_layers
from headway.tracing.inputs.model_inputs import Inputs
from headway.tracing.verify import verify
from helpers.cases import some
from helpers.models import FAMILIES, VISION_FAMILIES, tiny_config, tiny_ledger, tiny_model


def model_and_step(family):
    torch.manual_seed(0)
    config = tiny_config(family)
    images = [(1, 4, 6), (2, 8, 4)] if family in VISION_FAMILIES else []
    return model_class(config)._from_config(config, dtype=torch.float32), Workload([67], images=images)


@pytest.mark.parametrize("family", some(FAMILIES, {"gpt2", "qwen3_moe", "qwen3_vl", "deepseek_v3"}.__contains__))
def test_every_module_is_equal_or_explained(family):
    lines, unseen = verify(*model_and_step(family))
    assert unseen == set()
    assert [line for line in lines if line.explanation is None] == []
    assert {line.op for line in lines if line.explanation} <= {"attention", "-"}
    assert sum(line.ledger[0] for line in lines) > 0


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(vocab_size=50, hidden_size=12, n_layer=2, n_head=3),
        GPTNeoConfig(
            vocab_size=50, hidden_size=12, num_layers=2, num_heads=3, window_size=9,
            attention_types=[[["global", "local"], 1]],
        ),
    ],
    ids=["bloom", "gpt_neo"],
)  # fmt: skip
def test_attention_by_hand_is_equal_or_explained(config):
    lines, _ = verify(model_class(config)._from_config(config, dtype=torch.float32), Workload([67]))
    assert [line for line in lines if line.explanation is None] == []
    assert sum("the mask allows" in line.explanation for line in lines) == 2


def test_a_product_that_dropout_follows_at_once_keeps_its_backward():
    config = OPTConfig(vocab_size=50, hidden_size=12, ffn_dim=20, num_hidden_layers=1, num_attention_heads=2,
                       word_embed_proj_dim=12, max_position_embeddings=512)  # fmt: skip
    lines, _ = verify(model_class(config)._from_config(config, dtype=torch.float32), Workload([67]))
    assert [line for line in lines if line.explanation is None] == []
    (fc2,) = [line for line in lines if line.module.endswith("fc2")]
    assert fc2.counted == (2 * 67 * 12 * 20, 2 * 2 * 67 * 12 * 20)


def test_scores_over_compressed_keys_are_explained():
    config = DeepseekV4Config(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8, q_lora_rank=16,
        moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, o_groups=2, o_lora_rank=8,
        index_topk=5, index_n_heads=2, index_head_dim=8, sliding_window=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
        compress_rates={"heavily_compressed_attention": 8, "compressed_sparse_attention": 4},
    )  # fmt: skip
    lines, _ = verify(model_class(config)._from_config(config, dtype=torch.float32), Workload([67]))
    assert [line for line in lines if line.explanation is None] == []
    # 67 queries on 67 keys and 8 or 16 compressed ones; the indexer scores the 16
    run = [line.explanation.split(" scores")[0] for line in lines if "the mask allows" in line.explanation]
    assert run == ["eager attention runs all 5,025", "eager attention runs all 1,072", "eager attention runs all 5,561"]


def test_a_model_is_left_as_it_was():
    model, step = model_and_step("qwen3_moe")
    held = torch.ones_like(model.lm_head.weight)
    model.lm_head.weight.grad = held
    implementations = (model.config._attn_implementation, model.config._experts_implementation)
    verify(model, step)
    assert (model.config._attn_implementation, model.config._experts_implementation) == implementations
    assert model.lm_head.weight.grad is held
    assert model.model.embed_tokens.weight.grad is None


@pytest.mark.parametrize("op", ["linear", "attention", "experts"])
def test_a_wrong_ledger_is_not_explained_away(op, monkeypatch):
    model, step = model_and_step("qwen3_moe")

    def tampered(traced, **given):
        cost = trace(traced, **given)
        rows = tuple(replace(row, forward=row.forward * 2) if row.op == op else row for row in cost.rows)
        return replace(cost, rows=rows)

    monkeypatch.setattr(module, "trace", tampered)
    wrong = {line.op for line in verify(model, step)[0] if line.explanation is None}
    assert wrong == {op}


def test_cutting_layers_keeps_each_towers_lists_in_step():
    text = with_layers(tiny_config("gemma3_sliding"), 1)
    assert (text.num_hidden_layers, text.layer_types) == (1, ["sliding_attention"])
    vision = with_layers(tiny_config("qwen3_vl"), 1)
    assert (vision.vision_config.depth, vision.vision_config.deepstack_visual_indexes) == (1, [0])
    assert vision.text_config.num_hidden_layers == 1
    assert with_layers(tiny_config("qwen3"), 9).num_hidden_layers == 2


TOKENS, SOURCES = 23, 37
_TEXT = {"vocab_size": 160, "pad_token_id": 0, "decoder_start_token_id": 1}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
_BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_SPARSE = {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
_STREAMS = {
    "hidden_size": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "num_encoder_layers": 1, "num_decoder_layers": 1,
    "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
}  # fmt: skip
# transformers 5.17 counts an expert's tokens over an axis of one, so that it drops none
DROPS = not transformers.__version__.startswith("5.17")
CAUSAL = "eager attention runs all 529 scores, the mask allows 276"
# name of the configuration -> its options, and the reasons that a step has, with numbers derived here
CASES = {
    "T5": (_T5, {CAUSAL}),
    "Bart": (_BART, {CAUSAL}),
    "Whisper": (dict(_BART, num_mel_bins=16, max_source_positions=50), {CAUSAL}),
    # no expert takes more than 5 of a text's tokens, which are alike: all choose the same one
    "SwitchTransformers": (
        dict(_T5, **_SPARSE, expert_capacity=5, dropout_rate=0.0),
        {CAUSAL, *(f"experts take 5 rows at most: the router dropped {n - 5} of {n}" for n in (37, 23) if DROPS)},
    ),
    "NllbMoe": (
        dict(_BART, num_experts=4, encoder_sparse_step=2, decoder_sparse_step=2),
        {
            CAUSAL,
            "transformers makes NLLB-MoE's choices one-hot twice, and runs 4 rows for each token; those beyond the 2 "
            "chosen have no weight",
        },
    ),
    # 37 positions in blocks of 8
    "LongT5": (dict(_T5, local_radius=7), {CAUSAL, "5 blocks of 8 run whole, each over three blocks of keys"}),
    "LED": (
        dict(_BART, attention_window=8),
        {CAUSAL, "the encoder computes whole windows, in chunks that overlap: 40 for 37"},
    ),
    "PegasusX": (
        dict(_BART, block_size=8, num_global_tokens=3),
        {
            CAUSAL,
            "the encoder computes whole blocks: 40 for 37",
            "staggered blocks begin and end in padding: 48 for 37",
        },
    ),
    "ProphetNet": (_STREAMS, {"each of 2 streams runs its scores whole, as the text does"}),
}

# speech that an encoder reads, as features or as a waveform
_SMALL = {
    "intermediate_size": 48, "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2, "hidden_size": 32,
    "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4, "encoder_num_key_value_heads": 4,
    "decoder_num_key_value_heads": 4, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_SPEECH_ENCODER = {
    "hidden_size": 32, "speech_encoder_layers": 2, "speech_encoder_attention_heads": 4,
    "speech_encoder_intermediate_size": 48, "feature_projection_input_dim": 16, "conv_depthwise_kernel_size": 5,
}  # fmt: skip
SPEECH = {
    "Speech2Text": (
        "Speech2TextForConditionalGeneration",
        dict(_BART, input_feat_per_channel=16, conv_channels=24, max_source_positions=600, max_target_positions=400),
    ),
    "Moonshine": ("MoonshineForConditionalGeneration", _SMALL),
    "SeamlessM4T": (
        "SeamlessM4TForSpeechToText",
        {key: value for key, value in _BART.items() if key != "d_model"} | _SPEECH_ENCODER,
    ),
}


def real(family):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**_TEXT, **CASES[family][0])
    model = getattr(transformers, f"{family}ForConditionalGeneration")._from_config(config).train()
    return model, Workload([TOKENS], sources=[100 if family == "Whisper" else SOURCES])


@functools.cache
def ledger(family):
    return trace(real(family)[0])


def unexplained(model, workload):
    return {line.module for line in verify(model, workload)[0] if line.explanation is None}


@pytest.mark.parametrize("family", some(CASES, "Bart".__eq__))
def test_each_difference_has_the_reason_that_the_code_gives(family, monkeypatch):
    monkeypatch.setattr(module, "trace", lambda _model, **_given: ledger(family))
    lines, unseen = verify(*real(family))
    assert unseen == set()
    assert {line.explanation for line in lines} == {"", *CASES[family][1]}
    assert sum(line.ledger[0] for line in lines) > 0


@pytest.mark.parametrize(
    "frozen", [False, pytest.param(True, marks=pytest.mark.long)], ids=["all trained", "the encoder trained"]
)
@pytest.mark.parametrize("family", some(SPEECH, "Speech2Text".__eq__))
def test_speech_that_an_encoder_reads_counts_what_pytorch_dispatches(family, frozen):
    name, options = SPEECH[family]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, f"{family}Config")(**_TEXT, **options)).train()
    for path, parameter in model.named_parameters():
        parameter.requires_grad_("encoder" in path or not frozen)
    lines, unseen = verify(model, Inputs(model).workloads()[1])
    assert unseen == set()
    assert {line.op for line in lines if line.explanation is None} == set()
    # convolutions are grouped ones, whose backward PyTorch takes for that of dense ones
    assert {line.op for line in lines if line.explanation} <= {"attention", "convolution", "-"}


@pytest.mark.parametrize(
    "family", ["LED", *(pytest.param(name, marks=pytest.mark.long) for name in ("LongT5", "PegasusX"))]
)
@pytest.mark.slow
def test_frozen_layers_have_the_same_reasons(family):
    model, workload = real(family)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("encoder.block.1" in name or "encoder.layers.1" in name)
    assert unexplained(model, workload) == set()


@pytest.mark.parametrize(
    "family",
    [
        "SwitchTransformers",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("NllbMoe", "PegasusX")),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("LongT5", "LED", "ProphetNet")),
    ],
)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_no_reason_covers_a_ledger_that_is_wrong(family, phase, monkeypatch):
    wrong = set()

    def tampered(_model, **_given):
        cost, rows = ledger(family), []
        for row in cost.rows:
            if row.op in ("attention", "experts"):
                wrong.add(row.module)
                more = [replace(g, flops=g.flops + 2) for g in row.gradients]
                changed = {"forward": row.forward + 2} if phase == "forward" else {"gradients": tuple(more)}
                rows.append(replace(row, **changed))
            else:
                rows.append(row)
        return replace(cost, rows=tuple(rows))

    monkeypatch.setattr(module, "trace", tampered)
    assert unexplained(*real(family)) == wrong


def test_a_driver_that_is_not_the_masks_is_not_covered_by_the_square(monkeypatch):
    def tampered(_model, **_given):
        cost = tiny_ledger("qwen3")
        return replace(cost, rows=tuple(replace(r, driver=r.driver.replace("causal", "sliding:9")) for r in cost.rows))

    model = tiny_model("qwen3", dtype=torch.float32)
    monkeypatch.setattr(module, "trace", tampered)
    assert unexplained(model, Workload([67])) == {f"model.layers.{i}.self_attn" for i in range(2)}


@pytest.mark.parametrize(
    ("family", "factor", "held"),
    [
        # a loop shows the reads alone: half, and nothing else
        ("mamba", 1, "its loop writes the state elementwise and reads it here"),
        ("mamba", 2, None),
        # chunks: any ledger up to what they run
        ("qwen3_next", 1, "held as a lower bound only"),
        ("qwen3_next", 40, None),
    ],
)
def test_a_recurrence_is_held_against_its_loop_or_its_chunks(family, factor, held, monkeypatch):
    def tampered(_model, **_given):
        cost = tiny_ledger(family)
        rows = (replace(r, forward=r.forward * factor) if r.op == "recurrence" else r for r in cost.rows)
        return replace(cost, rows=tuple(rows))

    model = tiny_model(family, dtype=torch.float32).train()
    monkeypatch.setattr(module, "trace", tampered)
    reasons = {line.explanation for line in verify(model, Workload([67]))[0] if line.op == "recurrence"}
    (reason,) = reasons
    assert reason is None if held is None else held in reason


def test_scores_that_end_in_no_softmax_are_a_bound():
    config = DeepseekV4Config(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, head_dim=8, q_lora_rank=16,
        moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, o_groups=2, o_lora_rank=8,
        index_topk=5, index_n_heads=2, index_head_dim=8, sliding_window=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, layer_types=["compressed_sparse_attention"], compress_rates={"compressed_sparse_attention": 4},
    )  # fmt: skip
    lines, _ = verify(model_class(config)._from_config(config, dtype=torch.float32), Workload([67]))
    (scorer,) = [line for line in lines if line.module.endswith("indexer.scorer")]
    assert "held as an upper bound only" in scorer.explanation


def test_every_layer_runs_whatever_a_model_drops_while_it_trains():
    model, workload = real("Bart")
    model.model.encoder.layerdrop = model.model.decoder.layerdrop = 1.0
    assert unexplained(model, workload) == set()
    assert (model.model.encoder.layerdrop, model.model.decoder.layerdrop) == (1.0, 1.0)
