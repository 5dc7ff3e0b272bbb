import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headway.version import install_command

TINY_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "tie_word_embeddings": False,
}


def tiny_total(tokens):
    """FLOPs of one segment: q, k, v, o and the gated MLP in three layers, the head, and causal pairs."""
    per_token = 3 * (64 * 16 * (4 + 2 + 2 + 4) + 3 * 64 * 160) + 64 * 320
    pairs = tokens * (tokens + 1) // 2
    return 3 * (2 * per_token * tokens + 2 * 2 * 4 * 16 * 3 * pairs)


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_local_config_is_traced(headway, tmp_path, as_folder):
    file = tmp_path / ("config.json" if as_folder else "my-model.json")
    file.write_text(json.dumps(TINY_QWEN3))
    result = headway("flops", tmp_path if as_folder else file, "--segments", "40", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["flops"]["total"] == tiny_total(40)


def test_a_hub_id_that_cannot_be_had_is_refused(headway):
    result = headway("flops", "nobody/no-such-model", "--segments", "8")
    assert result.code == 2
    assert result.out == ""
    assert "nobody/no-such-model" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize("name", ["./no/such/folder", "~/nothing-here", "a/b/c"])
def test_a_path_that_is_not_there_is_refused_without_asking_the_hub(headway, name):
    result = headway("flops", name, "--segments", "8")
    assert result.code == 2
    assert repr(name) in result.err


def test_a_broken_config_is_refused(headway, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": ')
    result = headway("flops", tmp_path, "--segments", "8")
    assert (result.code, result.out) == (1, "")
    assert str(tmp_path) in result.err.replace("\n", " ")
    assert "Traceback" not in result.err


def test_without_torch_the_error_names_the_extra(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY_QWEN3))
    code = "import sys; sys.modules['torch'] = None; from headway.cli.app import main; main()"
    command = [sys.executable, "-c", code, "flops", str(tmp_path), "--segments", "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert install_command("train") in " ".join(done.stderr.split())
    assert "needs torch" in " ".join(done.stderr.split())


RECIPE = "recipe.yaml"
LIKE_TRAINING = (
    ("flops", "MODEL", "--segments", "40"),
    ("compare", "MODEL", "--segments", "40", "--device", "H100", "--step-time", "1"),
    ("mfu", "MODEL", "--seq-len", "40", "--device", "H100", "--chips", "1", "--mfu", "0.4"),
    ("plan", RECIPE, "--device", "H100", "--set", "model.path=MODEL"),
    ("plan", RECIPE, "--device", "H100", "--set", "model.path=MODEL", "--set", "model.freeze=[model.embed_tokens.*]"),
    ("train", RECIPE, "--dry-run", "--set", "model.path=MODEL"),
    ("tune", RECIPE, "--device", "H100", "--set", "model.path=MODEL"),
)


@pytest.mark.parametrize("name", ["gpt2", pytest.param("QWEN3-8B", marks=pytest.mark.slow)])
@pytest.mark.parametrize("arguments", LIKE_TRAINING, ids=lambda arguments: " ".join(arguments[:2] + arguments[-1:]))
def test_a_folder_that_is_named_like_a_shipped_model_is_the_folder(headway, tmp_path, monkeypatch, name, arguments):
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()
    (Path(name) / "config.json").write_text(json.dumps(TINY_QWEN3))
    Path(RECIPE).write_text(
        "{model: {path: none}, data: {train: rows.jsonl, tokens_per_pack: 65536}, plan: {mix: chats},"
        " optim: {steps: 1, lr: 1}, run: {folder: run}}"
    )
    by_name, by_path = (
        headway(*(argument.replace("MODEL", model) for argument in arguments), "--json")
        for model in (name, f"./{name}")
    )
    assert by_name.code == 0, by_name.err
    shown = [re.sub(r'"seconds": [\d.]+', "", result.out.replace(f"./{name}", name)) for result in (by_name, by_path)]
    assert shown[0] == shown[1]
    if arguments[0] == "flops":
        assert json.loads(by_name.out)["flops"]["total"] == tiny_total(40)
