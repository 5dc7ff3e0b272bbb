import hashlib
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoConfig, AutoTokenizer

from headway.data import read_samples
from headway.errors import DataError
from headway.models.load import load_model, load_processor
from headway.synthetic.digits import FRAMES, QUESTIONS, write_digits, write_reader
from headway.version import install_command


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_digits(tmp_path_factory.mktemp("digits"), num_one_digit=200, num_train=300, num_eval=100, renderings=2)


def scan_of(image):
    """The scan that an image shows, by the number in its name."""
    return int(Path(image.path).name.split("_")[1])


def scans_in(samples):
    return {scan_of(image) for sample in samples for image in sample.images}


def test_no_held_out_scan_is_ever_trained_on(data):
    train = read_samples(data.one_digit) + read_samples(data.train)
    held_out = scans_in(read_samples(data.eval))
    assert held_out
    assert not held_out & scans_in(train)


def test_the_split_and_the_number_of_images_are_as_told(data):
    assert data.num_train_scans + data.num_eval_scans == 1797
    assert data.num_images == 2 * data.num_train_scans + data.num_eval_scans
    assert data.num_images == len(list((data.train.parent / "images").iterdir()))


def test_answers_are_the_digits_that_scikit_learn_says(data):
    from sklearn.datasets import load_digits

    target = load_digits().target
    for sample in read_samples(data.train)[:50] + read_samples(data.eval)[:50]:
        assert sample.answer == "".join(str(target[scan_of(image)]) for image in sample.images)


def test_samples_have_one_to_four_images_and_several_wordings(data):
    samples = read_samples(data.train)
    assert set(Counter(len(sample.images) for sample in samples)) == {1, 2, 3, 4}
    assert len({sample.messages[0].text for sample in samples}) == 4
    assert {len(sample.images) for sample in read_samples(data.one_digit)} == {1}


def test_images_vary_in_size_and_aspect_and_need_no_resizing(data):
    sizes = set()
    for path in (data.train.parent / "images").iterdir():
        with Image.open(path) as image:
            sizes.add((image.height, image.width))
    assert sizes == set(FRAMES)
    assert all(side % 16 == 0 for size in sizes for side in size)


def test_a_rendering_looks_like_its_scan_and_differs_from_the_next(data):
    from sklearn.datasets import load_digits

    images = load_digits().images
    folder = data.train.parent / "images"
    for path in sorted(folder.glob("train_*_0.png"))[:60]:
        twin = path.with_name(path.name.replace("_0.png", "_1.png"))
        assert path.read_bytes() != twin.read_bytes()
        with Image.open(path) as image:
            ink = sum(image.resize((8, 8)).get_flattened_data())
        assert ink > 0.25 * images[int(path.name.split("_")[1])].sum() / 16 * 255


def test_the_same_seed_writes_the_same_files(data, tmp_path):
    def digest(folder):
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}

    write_digits(tmp_path, num_one_digit=200, num_train=300, num_eval=100, renderings=2)
    assert digest(tmp_path) == digest(data.train.parent)


def test_the_lines_are_chat_samples(data):
    line = json.loads(data.train.read_text().splitlines()[0])
    assert [message["role"] for message in line["messages"]] == ["user", "assistant"]
    assert {part["type"] for part in line["messages"][0]["content"]} == {"text", "image"}


def test_without_scikit_learn_the_error_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=re.escape(install_command("demo"))):
        write_digits(tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write the digits"):
        write_digits(tmp_path / "file" / "data")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_reader(tmp_path_factory.mktemp("reader"))


def test_it_is_an_ordinary_model_folder(model_folder):
    assert AutoConfig.from_pretrained(model_folder).model_type == "qwen3_vl"
    assert AutoTokenizer.from_pretrained(model_folder).eos_token == "<|im_end|>"


def test_it_is_a_model_of_about_a_million_parameters(model_folder):
    model = load_model(str(model_folder), random_init=True)
    assert 0.5e6 < sum(p.numel() for p in model.parameters()) < 2e6


def test_answers_are_one_token_a_digit(model_folder):
    tokenizer = load_processor(model_folder).tokenizer
    for answer in ("0", "47", "1234", "9999"):
        assert tokenizer.convert_ids_to_tokens(tokenizer(answer).input_ids) == list(answer)


def test_questions_are_about_a_token_a_word(model_folder):
    tokenizer = load_processor(model_folder).tokenizer
    for question in QUESTIONS:
        assert len(tokenizer(question).input_ids) <= len(question.split()) + 3
