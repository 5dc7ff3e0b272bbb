"""A model from nothing and a configuration for it: what they say is so, and `headway train` takes both as they are."""

import json
import shlex
import wave

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from transformers import AutoTokenizer

from headway.config import load_config
from headway.models import load_model
from headway.predict.suggest import MeasuredLengths, pack_length


@pytest.fixture
def questions(tmp_path, monkeypatch):
    """Thirty questions, every second one about a picture."""
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (64, 48), (200, 0, 0)).save(tmp_path / "red.png")
    rows = [{"question": "How red is it?", "answer": f"{n} of 255. " * (n + 1)} for n in range(30)]
    for row in rows[::2]:
        row["image"] = "red.png"
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "words.jsonl").write_text("".join(json.dumps({"text": row["answer"]}) + "\n" for row in rows))
    return tmp_path


def test_a_new_model_and_a_configuration_for_it(headway, questions):
    made = headway("new-model", "tiny", "--data", "questions.jsonl", "--size", "500k", "--json")
    said = json.loads(made.out)

    assert (made.code, said["like"]) == (0, "qwen3_vl")
    model = load_model("tiny")
    assert sum(p.numel() for p in model.parameters()) == said["parameters"]
    assert said["training_bytes"] == 16 * said["parameters"]
    again = headway("new-model", "tiny", "--data", "questions.jsonl")
    assert (again.code, "holds a model already" in again.err) == (2, True)

    wrote = headway(
        *("init", "--model", "tiny", "--data", "questions.jsonl", "--eval", "questions.jsonl", "--device", "4090"),
        *("-o", "a.yaml", "--json"),
    )

    said, config = json.loads(wrote.out), load_config(questions / "a.yaml")
    assert (wrote.code, wrote.err, said["samples"]) == (0, "", 30)
    assert said["median"] <= said["p95"] <= said["longest"] <= config.data.tokens_per_pack == said["tokens_per_pack"]
    assert said["peak_bytes"] > said["steps_per_epoch"] > 0
    assert config.model.random_init is False
    assert (config.data.eval.path, config.eval.at_end) == ("questions.jsonl", True)
    comments = (questions / "a.yaml").read_text()
    assert f"longest {said['longest']} tokens" in " ".join(comments.split())
    kept = headway("init", "--model", "tiny", "--data", "questions.jsonl", "-o", "a.yaml")
    assert (kept.code, "a.yaml exists already" in kept.err) == (2, True)


def test_the_next_command_keeps_the_options_and_runs_as_it_is_printed(headway, questions):
    rows = [{"Frage": "Wie rot?", "antwort": f"{n} von 255"} for n in range(30)]
    (questions / "zwei Wege.jsonl").write_text("\n".join(map(json.dumps, rows)))
    columns = ("--column", "question=Frage", "--column", "answer=antwort")
    made = headway("new-model", "tiny", "--data", "zwei Wege.jsonl", *columns, "--size", "100k")
    program, *arguments = shlex.split(made.out.splitlines()[-1].removeprefix("next"))
    assert program == "headway"
    assert headway(*arguments).code == 0
    assert load_config(questions / "train.yaml").data.train[0].columns == {"question": "Frage", "answer": "antwort"}


@pytest.mark.parametrize("like", ["qwen2-vl", "qwen2_5_vl"])
def test_models_whose_defaults_stand_in_transformers_code_alone_are_made_small_too(headway, questions, like):
    assert headway("new-model", "tiny", "--data", "questions.jsonl", "--like", like, "--size", "100k").code == 0
    model = load_model("tiny")
    assert model(input_ids=torch.tensor([[3, 4, 5]])).logits.shape[:2] == (1, 3)
    grid = torch.tensor([[1, 4, 4]])
    vision = model.config.vision_config
    patches = torch.zeros(16, 3 * vision.temporal_patch_size * vision.patch_size**2)
    assert model.get_image_features(patches, grid).pooler_output[0].shape == (4, model.config.text_config.hidden_size)


def test_text_alone_makes_a_text_model_and_several_files_a_mixture(headway, questions):
    words = (questions / "words.jsonl").read_text().replace('"text"', '"satz"')
    (questions / "words.jsonl").write_text(words)
    (questions / "more.jsonl").write_text(words * 2)
    data = ("--data", "words.jsonl", "--data", "more.jsonl", "--column", "text=satz")
    made = headway("new-model", "tiny", *data, "--size", "100k", "--vocab", 300)
    assert (made.code, "tiny, like qwen3\n" in made.out, "learned from 90 samples" in made.out) == (0, True, True)

    wrote = headway("init", "--model", "tiny", *data, "-o", "b.yaml")

    assert (wrote.code, "on one device" in wrote.out) == (0, True)
    (stage,) = yaml.safe_load((questions / "b.yaml").read_text())["data"]["train"]
    assert load_config(questions / "b.yaml").optim.epochs > 3  # of a model from scratch, in few steps
    named = {"columns": {"text": "satz"}}
    mix = [{"path": "words.jsonl", "weight": 30, **named}, {"path": "more.jsonl", "weight": 60, **named}]
    assert stage == {"mix": mix}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--size", "much"), "--size 'much' is not a number of parameters"),
        (("--like", "qwen33"), "--like 'qwen33' is no model type of the installed transformers. Did you mean qwen3"),
        (
            ("--like", "llava"),
            "A small model like llava cannot be made, because Headway can write small processors only for",
        ),
        (("--like", "llama"), "--like llama reads no pictures and videos, but the data hold some"),
    ],
)
def test_a_model_that_cannot_be_made_is_refused(headway, questions, arguments, says):
    result = headway("new-model", "tiny", "--data", "questions.jsonl", *arguments)
    assert (result.code, " ".join(result.err.split())[: len(says) + 7]) == (2, f"Error: {says}")


@pytest.mark.parametrize("like", ["bert", "roformer"])
def test_no_small_model_is_made_that_reads_in_both_directions(headway, questions, like):
    told = headway("new-model", "tiny", "--data", "words.jsonl", "--like", like)
    assert (told.code, told.out) == (2, "")
    assert "A trial of a tiny copy showed the reason: it reads in both directions" in " ".join(told.err.split())
    assert not (questions / "tiny" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("tokens", "pack"),
    [
        ([100] * 10_000, 1024),  # eight of the median, to a power of two
        ([100] * 999 + [3000], 4096),  # the longest fits
        ([100] * 999 + [90_000], 32768),  # one that is far longer than all others does not
        ([50] * 4, 512),
    ],
)
def test_a_pack_holds_the_longest_sample_and_several_others(tokens, pack):
    assert pack_length(MeasuredLengths(np.array(tokens), 0, 0, are_documents=False)) == pack


@pytest.mark.slow
def test_tokens_added_to_the_tokenizer_alone_are_added_to_the_model_by_the_configuration(headway, questions):
    """As users add them, by transformers, beyond the rows of the embedding."""
    assert headway("new-model", "tiny", "--data", "words.jsonl", "--size", "100k").code == 0
    model, tokenizer = load_model("tiny", attention="sdpa"), AutoTokenizer.from_pretrained("tiny")
    rows = model.get_input_embeddings().weight.shape[0]
    tokenizer.add_tokens([f"<n{number}>" for number in range(rows - len(tokenizer) + 1)])
    tokenizer.add_tokens(["<|see|>"], special_tokens=True)
    tokenizer.save_pretrained("tiny")
    new = tokenizer.convert_ids_to_tokens(rows)
    (questions / "new.jsonl").write_text("".join(json.dumps({"text": f"{n} {new}"}) + "\n" for n in range(30)))

    shown = headway("look", "new.jsonl", "--model", "tiny", "-n", "1")
    message = " ".join((shown.out + shown.err).split())
    assert f"added to it and not to the model: {new!r}, '<|see|>', ids {rows} to {rows + 1}" in message
    assert "List them in model.new_tokens" in message
    assert headway("init", "--model", "tiny", "--data", "words.jsonl", "-o", "b.yaml").code == 0  # which has none
    assert "new_tokens" not in (questions / "b.yaml").read_text()

    made = headway("init", "--model", "tiny", "--data", "new.jsonl", "-o", "a.yaml", "--json")
    assert json.loads(made.out)["bad"] == 0
    settings = yaml.safe_load((questions / "a.yaml").read_text())["model"]
    assert (settings["new_tokens"], settings["new_special_tokens"]) == ([new], ["<|see|>"])
    for command in (
        ("train", "a.yaml", "--dry-run"),
        ("look", "a.yaml"),
        ("train", "a.yaml", "--set", "run.device=cpu"),
    ):
        assert headway(*command).code == 0
    (export,) = (questions / "runs/a/export").glob("step-*")
    assert load_model(str(export)).get_input_embeddings().weight.shape[0] == rows + 2


@pytest.fixture
def sounds(questions):
    """Twelve tones, a folder as the Hub's audiofolder with what is said in them."""
    folder = questions / "tones"
    folder.mkdir()
    for number in range(12):
        with wave.open(str(folder / f"{number}.wav"), "wb") as file:
            file.setparams((1, 2, 16_000, 0, "NONE", ""))
            file.writeframes((8000 * np.sin(np.arange(1600) * 0.1 * (number + 1))).astype("<i2").tobytes())
    rows = "".join(f"{number}.wav,tone {number}\n" for number in range(12))
    (folder / "metadata.csv").write_text(f"file_name,transcription\n{rows}")
    return folder


@pytest.mark.slow
def test_a_small_model_that_listens_is_made_of_sounds_and_trained(headway, sounds):
    made = headway("new-model", "tiny", "--data", sounds, "--size", "100k")
    assert (made.code, "like qwen2_audio" in made.out) == (0, True), made.err
    assert headway("init", "--model", "tiny", "--data", sounds, "-o", "a.yaml").code == 0
    few = [word for setting in ("optim.steps=2", "run.device=cpu") for word in ("--set", setting)]
    assert headway("train", "a.yaml", *few).code == 0
    answers = headway("generate", "runs/a", "--input", sounds / "metadata.csv", "--max-new-tokens", 4)
    assert (answers.code, len(answers.out.splitlines())) == (0, 12), answers.err


def test_sounds_go_to_models_that_read_them_and_pictures_to_others(headway, sounds):
    for data, like, says in (
        (
            (sounds,),
            "qwen3",
            "--like qwen3 reads no sounds, but the data hold some. Leave the option out for qwen2_audio",
        ),
        (
            ("questions.jsonl",),
            "qwen2-audio",
            "--like qwen2-audio reads no pictures and videos, but the data hold some",
        ),
        (
            (sounds, "questions.jsonl"),
            None,
            "The data hold sounds as well as pictures or videos, but a small model reads only one",
        ),
    ):
        named = [word for path in data for word in ("--data", path)] + (["--like", like] if like else [])
        result = headway("new-model", "tiny", *named)
        assert (result.code, says in " ".join(result.err.split())) == (2 if like else 1, True), result.err
    assert not (sounds.parent / "tiny").exists()


@pytest.mark.slow
def test_init_and_the_run_count_the_same_steps_of_pairs(headway, questions):
    """A prompt stands in a pack once for both of its answers, in the count as in the run."""
    sums = [(a, b) for a in range(1, 9) for b in range(1, 9)]
    rows = [{"prompt": f"What is {a} plus {b}?", "chosen": f"{a + b}", "rejected": f"{a + b + 1}"} for a, b in sums]
    (questions / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert headway("new-model", "tiny", "--data", "pairs.jsonl", "--size", "100k").code == 0
    said = json.loads(headway("init", "--model", "tiny", "--data", "pairs.jsonl", "-o", "a.yaml", "--json").out)
    few = [word for setting in ("optim.epochs=1", "run.device=cpu") for word in ("--set", setting)]
    trained = headway("train", "a.yaml", *few)
    assert trained.code == 0, trained.err
    summary = json.loads((questions / "runs/a/summary.json").read_text())
    assert summary["steps"] == said["steps_per_epoch"]
