"""Opening what a stranger made never runs it, and what a stranger named reaches no terminal as commands to it."""

import ast
import io
import json
import sys
from pathlib import Path

import pytest

TRAIN = """
model: {{path: {model}, random_init: true}}
data: {{train: [{{path: {data}, epochs: 1}}], tokens_per_pack: 64, workers: 0}}
optim: {{steps: 1, lr: 1.0e-3}}
plan: {{devices: 1, mix: images}}
run: {{folder: {run}, device: cpu}}
"""
CODE = """
import pathlib
pathlib.Path({mark!r}).touch()
from transformers import LlamaConfig, PreTrainedTokenizerFast
class EvilConfig(LlamaConfig):
    model_type = "evil"
class EvilTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A model folder that brings code for its configuration and its tokenizer, and a user who says yes to all."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "evil.py").write_text(CODE.format(mark=str(tmp_path / "ran")))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "evil.EvilConfig"}})
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": [None, "evil.EvilTokenizer"]}})
    )
    (tmp_path / "data.jsonl").write_text('{"text": "Hello."}\n')
    recipe = TRAIN.format(model=folder, data=tmp_path / "data.jsonl", run=tmp_path / "run")
    (tmp_path / "recipe.yaml").write_text(recipe)
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        ("train", "{}/recipe.yaml"),
        ("train", "{}/recipe.yaml", "--dry-run"),
        ("flops", "{}/model", "--segments", "8"),
        ("verify", "{}/model"),
        ("index", "{}/data.jsonl", "--model", "{}/model", "--workers", "0"),
    ],
    ids=" ".join,
)
def test_code_of_a_model_folder_is_refused_whatever_stands_on_stdin(command, headway, evil):
    result = headway(*(word.format(evil) for word in command))
    assert result.code in (1, 2)
    assert "needs Python code that comes with its files" in " ".join(result.err.split())
    assert "Headway does not run such code" in " ".join(result.err.split())
    assert "[y/N]" not in result.out + result.err
    assert not (evil / "ran").exists()


ESCAPES = "b\x1b[31m\x9b\u202ead"


def test_control_characters_of_names_reach_no_terminal(headway, tmp_path):
    folder = tmp_path / ESCAPES
    folder.mkdir()
    (folder / "steps.csv").write_text("tokens\n5\n")
    for command in (
        ("flops", folder / "none", "--segments", "8"),
        ("train", folder / "none.yaml"),
        ("goodput", folder),
        ("audit", folder / "none.log"),
        ("pack", "--lengths", folder / "steps.csv", "--tokens", "-1"),
    ):
        result = headway(*command)
        assert result.code != 0
        assert not set(ESCAPES) & {"\x1b", "\x9b", "\u202e"} & set(result.out + result.err), command


@pytest.mark.parametrize("option", ["--segments", "--images", "--past", "--lora", "--recompute"])
def test_a_number_of_too_many_digits_is_refused(option, headway):
    digits = "9" * 5000
    value = {"--images": f"1x2x{digits}", "--recompute": f"every:{digits}"}.get(option, digits)
    others = () if option == "--segments" else ("--segments", "8")  # which would be warned of if given twice
    result = headway("flops", "gpt2", *others, option, value)
    assert result.code == 2
    assert result.err.startswith("Error: ")
    assert len(result.err) < 1000


def test_commands_print_names_of_strangers_through_one_function():
    """`say`, tables and errors show control characters by their numbers; a bare print of an f-string would not."""
    import headway.cli

    for path in Path(headway.cli.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                values = [value for arg in node.args if isinstance(arg, ast.JoinedStr) for value in arg.values]
                named = {ast.unparse(value.value) for value in values if isinstance(value, ast.FormattedValue)}
                assert named <= {"__version__", "table", "render_pairs(pairs)"}, (path.name, node.lineno)


def test_tables_and_lines_show_names_of_strangers_by_their_numbers():
    from headway.report import Column, render_lines, render_pairs, render_table

    hostile = "a\x1b[2J\u202eb"
    table = render_table([Column("x", "left")], [[hostile]], footer=[hostile])
    for text in (table, render_pairs([(hostile, hostile)]), render_lines([hostile])):
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "a\\x1b[2J\\u202eb" in text
