"""What a base's files said and training did not change, an export says too: in the base's own keys, beside the new."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from transformers import AutoConfig, AutoTokenizer

from checkpoint.transformers4 import CLASSES, FAMILIES, LLAMA3, LONG
from headway.checkpoint.spelling import keep_spelling
from headway.config import parse_config
from headway.synthetic.processor import write_tokenizer
from headway.train.run import train

ROOT = Path(__file__).parents[2]
TRANSFORMERS4 = Path(os.environ.get("HEADWAY_TRANSFORMERS4", ROOT / ".transformers4"))
needs_transformers4 = pytest.mark.skipif(
    not (TRANSFORMERS4 / "transformers").is_dir(), reason="no transformers 4 here; `make .transformers4/.set-up` has it"
)
MROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}
SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
# As config.json has them on the Hub, in the words of transformers 4: Qwen3-0.6B, Llama-3.1-8B, Phi-3-mini-128k,
# gemma-3-1b-it, Qwen2.5-VL-3B (whose text settings stand outside of any section), at toy sizes.
PUBLISHED = {
    "qwen3": {"model_type": "qwen3", "rope_theta": 1000000, "rope_scaling": None, "torch_dtype": "bfloat16"},
    "llama": {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": LLAMA3, "torch_dtype": "bfloat16"},
    "phi3": {
        "model_type": "phi3",
        "rope_theta": 10000.0,
        "rope_scaling": LONG,
        "original_max_position_embeddings": 64,
        "max_position_embeddings": 256,
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        "rope_theta": 1000000,
        "rope_local_base_freq": 10000,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 6,
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "rope_theta": 1000000.0,
        "rope_scaling": MROPE,
        "torch_dtype": "bfloat16",
        "vision_config": {"depth": 2, "hidden_size": 64, "in_chans": 3, "spatial_patch_size": 14},
    },
}


def written(base, folder):
    """The folder as the installed transformers saves the base, in float32 as training has it, respelt."""
    config = AutoConfig.from_pretrained(base)
    config.dtype = "float32"
    config.save_pretrained(folder)
    keep_spelling(folder, str(base), config)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_setting_of_the_base_is_where_it_was(name, tmp_path):
    base = SIZES | PUBLISHED[name]
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text(json.dumps(base))
    config = written(tmp_path / "base", tmp_path / "export")
    for key, value in base.items():
        expected = "float32" if key == "torch_dtype" else value  # the export's own
        assert config.get(key, config.get("text_config", {}).get(key)) == expected or key == "vision_config", key
    if name == "qwen2_5_vl":  # transformers 4.57 reads the section alone, where there is one
        assert config["text_config"]["rope_scaling"] == MROPE
        assert config["text_config"]["rope_theta"] == 1000000.0
        assert config["vision_config"].items() >= base["vision_config"].items()
    plain = AutoConfig.from_pretrained(tmp_path / "base")
    plain.dtype = "float32"
    ours = AutoConfig.from_pretrained(tmp_path / "export")
    ours._name_or_path = plain._name_or_path = ""
    assert ours.to_dict() == plain.to_dict()


def test_what_training_changed_stays_changed(tmp_path):
    """A quantisation that the export has not, and rows that were added, do not come back from the base."""
    base = SIZES | PUBLISHED["llama"] | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text(json.dumps(base))
    config = AutoConfig.from_pretrained(tmp_path / "base")
    del config.quantization_config
    config.vocab_size = 65
    config.save_pretrained(tmp_path / "export")
    keep_spelling(tmp_path / "export", str(tmp_path / "base"), config)
    after = json.loads((tmp_path / "export/config.json").read_text())
    assert "quantization_config" not in after
    assert after["vocab_size"] == 65
    assert (after["rope_theta"], after["rope_scaling"]) == (500000.0, LLAMA3)


def test_a_tokenizer_keeps_its_class_and_the_names_of_its_special_tokens(tmp_path):
    """Keys as transformers 4 wrote them; a token that training added is in each list beside those of the base."""
    base, export = tmp_path / "base", tmp_path / "export"
    write_tokenizer(base, ["hello there"])
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|pic|>"]})
    tokenizer.save_pretrained(base)
    config = json.loads((base / "tokenizer_config.json").read_text())
    special = config.pop("extra_special_tokens")
    config = {key: value for key, value in config.items() if key not in ("is_local", "local_files_only")}
    number = tokenizer.convert_tokens_to_ids("<|pic|>")
    picture = {"content": "<|pic|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    before = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": special,
        "extra_special_tokens": {"image_token": "<|pic|>"},
        "added_tokens_decoder": {str(number): picture | {"special": True}},
    }
    (base / "tokenizer_config.json").write_text(json.dumps(config | before))
    (base / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": special}))
    (base / "config.json").write_text(json.dumps(SIZES | PUBLISHED["qwen3"]))
    trained = AutoTokenizer.from_pretrained(base, local_files_only=True)
    trained.add_special_tokens({"extra_special_tokens": ["<|extra|>"]}, replace_extra_special_tokens=False)
    trained.save_pretrained(export)
    keep_spelling(export, str(base), AutoConfig.from_pretrained(base))
    after = json.loads((export / "tokenizer_config.json").read_text())
    assert after["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert after["extra_special_tokens"] == {"image_token": "<|pic|>"}
    assert after["additional_special_tokens"] == [*special, "<|extra|>"]
    assert after["added_tokens_decoder"][str(number + 1)]["content"] == "<|extra|>"
    assert not after.keys() & {"is_local", "local_files_only"}
    assert json.loads((export / "special_tokens_map.json").read_text())["additional_special_tokens"][-1] == "<|extra|>"
    opened = AutoTokenizer.from_pretrained(export)
    assert opened("<|pic|><|extra|>")["input_ids"] == [number, number + 1]
    assert opened.image_token == "<|pic|>"


def test_the_parts_of_a_processor_follow_the_run_in_files_of_their_own(tmp_path):
    """Bounds on pictures that the run has changed, in the base's two spellings; the rest as the base has it."""
    (tmp_path / "base").mkdir()
    (tmp_path / "export").mkdir()
    (tmp_path / "base/config.json").write_text(json.dumps(SIZES | PUBLISHED["qwen3"]))
    picture = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "max_pixels": 12845056}
    (tmp_path / "base/preprocessor_config.json").write_text(json.dumps(picture | {"min_pixels": 3136}))
    size = {"shortest_edge": 3136, "longest_edge": 1003520}
    now = {"image_processor": {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "size": size}}
    (tmp_path / "export/processor_config.json").write_text(json.dumps(now))
    keep_spelling(tmp_path / "export", str(tmp_path / "base"), AutoConfig.from_pretrained(tmp_path / "base"))
    after = json.loads((tmp_path / "export/preprocessor_config.json").read_text())
    assert after == picture | {"min_pixels": 3136, "max_pixels": 1003520}
    assert not (tmp_path / "export/video_preprocessor_config.json").exists()


def transformers4(*arguments):
    """Run tests/checkpoint/transformers4.py with transformers 4 in front of everything that is installed here."""
    script = ROOT / "tests/checkpoint/transformers4.py"
    environment = os.environ | {"PYTHONPATH": str(TRANSFORMERS4), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


@needs_transformers4
@pytest.mark.long
def test_transformers_4_reads_of_an_export_what_it_reads_of_the_base(tmp_path):
    """Logits, tokens, special tokens, chats and picture sizes, of a run with a learning rate of nearly zero."""
    assert transformers.__version__.startswith("5.")
    transformers4("make", tmp_path / "bases")
    rows = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "a cat"}]
    (tmp_path / "chats.jsonl").write_text(8 * f"{json.dumps({'messages': rows})}\n")
    exports = []
    for name in CLASSES:
        raw = {
            "model": {"path": str(tmp_path / "bases" / name)},
            "data": {"train": str(tmp_path / "chats.jsonl"), "tokens_per_pack": 128, "workers": 0},
            "optim": {"steps": 1, "lr": 1e-12},
            "run": {"folder": str(tmp_path / "runs" / name), "threads": 1},
        }
        exports.append(train(parse_config(raw, source="")).model)
    bases = json.loads(transformers4("ask", *(tmp_path / "bases" / name for name in CLASSES)))
    ours = json.loads(transformers4("ask", *exports))
    assert CLASSES.keys() == FAMILIES.keys()
    for name, base, export in zip(CLASSES, bases, ours, strict=True):
        assert export == base, name
