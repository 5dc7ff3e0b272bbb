"""`headway draw`, `generate` and `chat` with a model that draws and reads."""

import io
import itertools
import json
import re
import sys

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from bagels import WORDS, write_data, write_model
from headway.models.load import load_model

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


def drawn(headway, folder, *arguments, path):
    done = headway("draw", folder / "model", *arguments, "--steps", 2, "-o", path, *CPU)
    assert done.code == 0, done.err
    with Image.open(path) as picture:
        return np.asarray(picture)


def test_an_edit_has_the_size_of_its_picture_and_both_guidances_count(folder, headway, tmp_path):
    shown = ("--image", folder / "data" / "0-0.png")
    with Image.open(shown[1]) as picture:
        sides = [max(1, round(side / 2)) * 2 for side in picture.size]  # latent patches of 2 pixels, up to 4 a side
    edits = [
        drawn(headway, folder, WORDS[1], *shown, *more, path=tmp_path / f"{number}.png")
        for number, more in enumerate(
            [
                (),
                ("--guidance", 1),
                ("--image-guidance", 3),
                ("--image-guidance", 3, "--renorm", "global"),
                ("--image-guidance", 3, "--guide-between", 0.7, 1),
                ("--shift", 3),
                ("--away-from", WORDS[3]),
            ]
        )
    ]
    assert edits[0].shape[:2] == (sides[1], sides[0])
    for one, other in itertools.combinations(edits, 2):
        assert not np.array_equal(one, other)
    assert np.array_equal(edits[0], drawn(headway, folder, WORDS[1], *shown, "--guidance", 2, path=tmp_path / "x.png"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--image-guidance", 2), "the request shows none"),
        (("--guidance", 1, "--away-from", "Draw."), "no effect where guidance for text is 1"),
        (("--guidance", 1, "--renorm", "channel"), "no effect where both of its scales are 1"),
        (("--guide-between", 0.9, 0.4), "interval of guidance is 0.9 to 0.4"),
        (("--renorm-min", 0.5), "no effect without renorm"),
        (("--image", "nowhere.png"), "There is no image 'nowhere.png'"),
    ],
)
def test_what_cannot_be_drawn_is_one_clear_error(folder, headway, arguments, said):
    done = headway("draw", folder / "model", WORDS[0], *arguments, *CPU)
    assert done.code == 2
    assert said in " ".join(done.err.split())


def test_looking_at_a_recipe_shows_packs_of_what_is_left_of_samples(folder, headway, tmp_path):
    data = {"path": str(folder / "data" / "all.jsonl"), "name": "all"}
    fills = []
    for share in (0.0, 1.0):
        drawing = {"drop_text": share, "drop_read": share, "drop_reference": share}
        recipe = {
            "model": {"path": str(folder / "plain"), "random_init": True, "family": drawing},
            "data": {"train": [data], "tokens_per_pack": 96, "overlong": "error"},
            "optim": {"steps": 1, "lr": 1e-3},
            "run": {"folder": str(tmp_path / "run"), "device": "cpu"},
        }
        path = tmp_path / f"{share}.yaml"
        path.write_text(yaml.safe_dump(recipe))
        looked = headway("look", path, "--packs", 1)
        assert looked.code == 0, looked.err
        fills.append(int(re.search(r"pack 1, step 1: (\d+) samples", looked.out)[1]))
        assert "cut after" not in looked.out
    assert fills[1] > fills[0]
