"""`headway demo draw` and `headway draw`, as a user starts them."""

import json
import sys

import numpy as np
import pytest
from PIL import Image

from headway.config import load_config
from headway.synthetic.digits import load_scans
from headway_bagel.demo import classify
from helpers.processes import ROOT, run_processes

RECIPE = ROOT / "plugins/headway-bagel/src/headway_bagel/draw.yaml"


def headway(*arguments, cwd):
    (done,) = run_processes([sys.executable, "-m", "headway", *arguments], 1, cwd=cwd, check=False)
    return done


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A demo of a few steps, which draws nothing that anyone could read."""
    folder = tmp_path_factory.mktemp("draw")
    few = ["--set", "eval.max_samples=20", "--set", "optim.warmup_steps=1"]
    return folder, headway("demo", "draw", "--steps", "4", "--json", *few, cwd=folder)


def test_the_recipe_of_the_demo_is_a_configuration():
    load_config(RECIPE)


@pytest.mark.slow
@pytest.mark.own_peak
def test_the_demo_trains_draws_and_judges_itself(shown):
    folder, done = shown
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["complete"]
    assert result["last_flow_loss"] > 0
    assert 0 < result["mfu"] < 1
    judged = result["drawings"]
    assert judged == json.loads((folder / "runs/draw/run/drawn.json").read_text())
    assert judged["drawn"] == 200
    assert sum(of["classifier"] for of in judged["digits"].values()) == round(200 * judged["read_by_classifier"])
    assert sum(of["itself"] for of in judged["digits"].values()) == round(200 * judged["read_by_itself"])
    with Image.open(folder / "runs/draw/run/drawn.png") as grid:
        assert grid.size == (20 * 32, 10 * 32)


@pytest.mark.slow
@pytest.mark.own_peak
def test_the_report_shows_what_was_drawn(shown):
    folder, _ = shown
    done = headway("report", "runs/draw/run", "-o", "report.html", cwd=folder)
    assert done.returncode == 0, done.stderr
    page = (folder / "report.html").read_text()
    assert 'src="data:image/png;base64,' in page
    assert "read so by a classifier" in page
    assert "Flow loss" in page


@pytest.mark.slow
@pytest.mark.own_peak
def test_pictures_are_drawn_of_sentences(shown):
    folder, _ = shown
    asked = ["draw", "runs/draw/run", "Draw a seven.", "Draw a three.", "--size", "8x6", "--steps", "2"]
    done = headway(*asked, "-o", "two.png", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "2 pictures of 8 x 6 pixels in two.png" in done.stdout
    with Image.open(folder / "two.png") as picture:
        assert picture.size == (12, 8)
        first = np.asarray(picture)
    headway(*asked, "-o", "again.png", cwd=folder)
    with Image.open(folder / "again.png") as picture:
        assert np.array_equal(np.asarray(picture), first)


@pytest.mark.slow
@pytest.mark.own_peak
@pytest.mark.parametrize(
    ("size", "said"), [("9x8", "multiple of 2 pixels, at most 8"), ("8", "is not HxW"), ("0x8", "cannot be drawn")]
)
def test_sizes_that_cannot_be_drawn_are_refused(shown, size, said):
    folder, _ = shown
    done = headway("draw", "runs/draw/run", "Draw a seven.", "--size", size, cwd=folder)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())


@pytest.mark.slow
@pytest.mark.own_peak
def test_other_commands_take_such_data_and_models_or_say_why_not(shown):
    folder, _ = shown
    data, model = "runs/draw/data/draw.jsonl", "runs/draw/model"
    looked = headway("look", data, "--model", model, cwd=folder)
    assert looked.returncode == 0, looked.stderr
    assert "<|vision_start|>|<|endoftext|> x 16|<|vision_end|>" in looked.stdout
    indexed = headway("index", data, "--model", model, cwd=folder)
    assert indexed.returncode == 0, indexed.stderr
    assert "supervised  0" in indexed.stdout
    shown_digit = ["--prompt", "Which digit is this?", "--image", "runs/draw/data/images/0000.png"]
    asked = headway("generate", "runs/draw/run", *shown_digit, cwd=folder)
    assert asked.returncode == 0, asked.stderr


def test_the_classifier_reads_real_digits():
    scans = load_scans()
    pixels = np.stack([scan.pixels for scan in scans])
    assert (classify(pixels) == [scan.digit for scan in scans]).mean() > 0.99
    assert (classify(pixels[:, ::-1]) == [scan.digit for scan in scans]).mean() < 0.6  # upside down
