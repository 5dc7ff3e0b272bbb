"""`headway draw`, `generate` and `chat` with a model that draws and reads."""

import io
import json
import sys

import pytest
import torch

from headway.models.load import load_model
from helpers.drawing_data import WORDS, write_data, write_model

CPU = ("--device", "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A data folder, and a model whose flow is not zero."""
    folder = tmp_path_factory.mktemp("draw")
    write_model(folder / "plain")
    write_data(folder / "data", samples=3)
    torch.manual_seed(0)
    model = load_model(folder / "plain", random_init=True)
    torch.nn.init.normal_(model.llm2vae.weight, std=0.2)
    write_model(folder / "model")
    model.save_pretrained(folder / "model")
    return folder


def test_a_model_that_draws_is_asked_in_words(folder, headway, monkeypatch):
    picture = folder / "data" / "0-0.png"
    few = ("--max-new-tokens", 3, *CPU)
    said = headway("generate", folder / "model", "--prompt", WORDS[2], "--image", picture, "--json", *few)
    assert said.code == 0, said.err
    answer = json.loads(said.out)
    assert answer["prompt_tokens"] > 8
    assert 1 <= answer["tokens"] <= 3
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"/image {picture}\n{WORDS[2]}\n"))
    assert headway("chat", folder / "model", *few).out == answer["answer"] + "\n"
    half = headway("generate", folder / "model", "--prompt", WORDS[2], "--image", picture, "--dtype", "bfloat16", *few)
    assert half.code == 0, half.err
