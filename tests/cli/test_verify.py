import json

import pytest
import transformers

from helpers.models import tiny_config, tiny_model

_T5 = {
    "vocab_size": 160, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "architectures": ["T5ForConditionalGeneration"],
}  # fmt: skip
_LED = {
    "vocab_size": 160, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "attention_window": 8,
    "architectures": ["LEDForConditionalGeneration"],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    tiny_config("qwen3_moe").save_pretrained(tmp_path)
    return tmp_path


def test_a_clean_ledger_exits_0_and_explains_each_difference(headway, folder):
    done = headway("verify", str(folder), "--layers", "1")
    assert done.code == 0
    assert "0 not" in done.out
    assert "eager attention runs all 38,809 scores, the mask allows 19,503" in done.out
    assert "UNEXPLAINED" not in done.out


def test_json_holds_both_sides_of_every_module(headway, folder):
    done = headway("verify", str(folder), "--json")
    record = json.loads(done.out)
    assert (record["schema_version"], record["layers"], record["unexplained"], record["unseen"]) == (1, 2, 0, [])
    modules = {entry["module"]: entry for entry in record["modules"]}
    # tokens x top-k rows of gate and up (32 to 2 x 16) and down (16 to 32)
    experts = modules["model.layers.*.mlp.experts"]
    assert experts["times"] == 2
    assert experts["ledger"] == experts["counted"]
    assert experts["ledger"]["forward"] == 2 * 197 * 2 * (32 * 32 + 16 * 32)


@pytest.mark.slow
def test_a_saved_model_that_hears_is_verified_from_its_folder(headway, tmp_path):
    tiny_model("granite_speech").save_pretrained(tmp_path)
    done = headway("verify", str(tmp_path), "--json")
    record = json.loads(done.out)
    assert (done.code, record["unexplained"], record["unseen"]) == (0, 0, [])
    modules = {entry["module"]: entry for entry in record["modules"]}
    blocks = modules["model.encoder.layers.*.attn"]
    assert blocks["times"] == 2
    assert blocks["ledger"] == blocks["counted"]
    assert blocks["ledger"]["forward"] > 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["no-such-model"], 2, "'no-such-model' is neither"),
        (["gpt2", "--device", "tpu"], 2, "--device 'tpu' is neither cpu nor cuda"),
        (["deepseek-v3", "--layers", "4"], 1, "Give fewer --layers"),
        (["gpt2", "--layers", "0"], 2, "--layers"),
    ],
)
def test_mistakes_are_one_paragraph(headway, arguments, code, message):
    done = headway("verify", *arguments)
    assert done.code == code
    assert message in " ".join(done.err.split())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.T5Config(**_T5), "eager attention runs all 38,809 scores, the mask allows 19,503"),
        # 311 tokens and a window of 8 are padded to 39 windows
        pytest.param(
            transformers.LEDConfig(**_LED),
            "the encoder computes whole windows, in chunks that overlap: 312 for 311",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["t5", "led"],
)
def test_an_encoder_decoder_of_a_folder_is_explained(headway, tmp_path, config, reason):
    config.save_pretrained(tmp_path)
    done = headway("verify", str(tmp_path))
    assert (done.code, "UNEXPLAINED" in done.out) == (0, False)
    assert reason in done.out
    assert "PyTorch cannot see  nothing that ran here" in done.out
