"""A checkpoint in BAGEL's layout becomes a model folder that trains; a damaged one is named."""

import json
import random
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from bagels import TEXT, TOWER, VAE, WORDS, tiny_bagel, write_data
from headway.data import read_samples
from headway.data.encoders import collator_of
from headway.errors import CheckpointError, ConfigError, HeadwayError
from headway.models.load import load_model, load_processor
from headway.synthetic.processor import write_tokenizer
from headway_bagel.checkpoint import import_bagel
from headway_bagel.encoding import DrawingEncoder
from helpers.cases import ODD

WIDE = VAE | {"block_out_channels": [32, 64], "norm_num_groups": 32, "scaling_factor": 0.3611, "shift_factor": 0.1159}


def flux_name(name, num_blocks=2):
    """The name of an autoencoder's weight in FLUX's code, from diffusers'."""
    up = {i: num_blocks - 1 - i for i in range(num_blocks)}
    rules = [
        (r"down_blocks\.(\d+)\.resnets", r"down.\1.block"),
        (r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample"),
        (r"up_blocks\.(\d+)\.resnets", lambda m: f"up.{up[int(m[1])]}.block"),
        (r"up_blocks\.(\d+)\.upsamplers\.0", lambda m: f"up.{up[int(m[1])]}.upsample"),
        (r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}"),
        (r"mid_block\.attentions\.0\.group_norm", "mid.attn_1.norm"),
        (r"mid_block\.attentions\.0\.to_([qkv])", r"mid.attn_1.\1"),
        (r"mid_block\.attentions\.0\.to_out\.0", "mid.attn_1.proj_out"),
        ("conv_shortcut", "nin_shortcut"),
        ("conv_norm_out", "norm_out"),
    ]
    for pattern, new in rules:
        name = re.sub(pattern, new, name)
    return name


@pytest.fixture(scope="module")
def model():
    return tiny_bagel(WIDE, model_type="qwen2", qk_norm=True, vocab_size=400).eval()


@pytest.fixture
def folder(tmp_path, model):
    """A tiny checkpoint as BAGEL's authors write theirs."""
    folder = tmp_path / "BAGEL"
    write_tokenizer(folder, WORDS)
    (folder / "config.json").write_text("{}")
    text = {**TEXT, "vocab_size": 400, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (folder / "llm_config.json").write_text(json.dumps(text))
    layers = TOWER["num_hidden_layers"] + 1  # of which the last is not used
    vision = {**TOWER, "num_hidden_layers": layers, "model_type": "siglip_vision_model", "rope": True}
    (folder / "vit_config.json").write_text(json.dumps(vision))
    state = model.state_dict()
    save_file({n: t.clone() for n, t in state.items() if not n.startswith("vae_model")}, folder / "ema.safetensors")
    latents = {}
    for name, tensor in model.vae_model.state_dict().items():
        name = flux_name(name)  # noqa: PLW2901
        is_product = "attn_1" in name and "norm" not in name and name.endswith("weight")
        latents[name] = (tensor[:, :, None, None] if is_product else tensor).clone()
    save_file(latents, folder / "ae.safetensors")
    return folder


def test_a_checkpoint_in_bagels_layout_becomes_a_model_folder(folder, tmp_path, model):
    import_bagel(folder, tmp_path / "model")
    opened = load_model(tmp_path / "model").eval()
    expected = model.state_dict()
    found = opened.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    write_data(tmp_path / "data")
    encoder = DrawingEncoder(load_processor(tmp_path / "model"), opened.config)
    sample = encoder.encode(read_samples(tmp_path / "data" / "all.jsonl")[1])
    given = collator_of(encoder)([sample]).noised(0, 1).model_inputs()
    dense = given | {"attention_mask": given["attention_mask"].dense()}
    torch.testing.assert_close(opened(**given).flow, model(**dense).flow, atol=1e-5, rtol=1e-5)
    opened.save_pretrained(tmp_path / "saved")
    again = load_model(tmp_path / "saved").state_dict()
    assert all(torch.equal(again[name], expected[name]) for name in expected)


@pytest.mark.parametrize("file", ["llm_config.json", "ae.safetensors", "ema.safetensors"])
def test_what_is_missing_is_named(folder, tmp_path, file):
    (folder / file).unlink()
    with pytest.raises(CheckpointError, match=f"lacks {file}"):
        import_bagel(folder, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_no_value_of_its_configurations_ends_in_an_error_of_its_own(folder, tmp_path):
    refused = []
    for file in ("llm_config.json", "vit_config.json"):
        honest = json.loads((folder / file).read_text())
        spoilt = [honest | {key: value} for key in honest for value in ODD]
        for settings in [honest | {"num_hidden_layers": 10**9}, *random.Random(0).sample(spoilt, 40)]:
            (folder / file).write_text(json.dumps(settings))
            try:
                import_bagel(folder, tmp_path / f"model {len(refused)}")
            except HeadwayError as error:
                refused.append(str(error))
            shutil.rmtree(tmp_path / f"model {len(refused)}", ignore_errors=True)
        (folder / file).write_text(json.dumps(honest))
    assert 30 < len(refused) < 82


def test_weights_of_another_model_are_refused(folder, tmp_path):
    weights = load_file(folder / "ema.safetensors")
    weights["language_model.model.norm.weight"] = torch.zeros(3)
    save_file(weights, folder / "ema.safetensors")
    with pytest.raises(CheckpointError, match=r"1 weights in .*language_model.model.norm.weight \(3,\)"):
        import_bagel(folder, tmp_path / "model")


def test_a_file_that_is_cut_short_is_named(folder, tmp_path):
    content = (folder / "ae.safetensors").read_bytes()
    (folder / "ae.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"ae\.safetensors cannot be read"):
        import_bagel(folder, tmp_path / "model")


def test_nothing_is_written_over(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    with pytest.raises(ConfigError, match="not empty"):
        import_bagel(folder, tmp_path / "model")
