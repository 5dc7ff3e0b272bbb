import pytest
from transformers import AutoConfig, AutoTokenizer

from headway.models.load import load_model, load_processor
from headway.synthetic.digits import QUESTIONS, write_reader


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_reader(tmp_path_factory.mktemp("reader"))


def test_it_is_an_ordinary_model_folder(folder):
    assert AutoConfig.from_pretrained(folder).model_type == "qwen3_vl"
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<|im_end|>"


def test_it_is_a_model_of_about_a_million_parameters(folder):
    model = load_model(str(folder), random_init=True)
    assert 0.5e6 < sum(p.numel() for p in model.parameters()) < 2e6


def test_answers_are_one_token_a_digit(folder):
    tokenizer = load_processor(folder).tokenizer
    for answer in ("0", "47", "1234", "9999"):
        assert tokenizer.convert_ids_to_tokens(tokenizer(answer).input_ids) == list(answer)


def test_questions_are_about_a_token_a_word(folder):
    tokenizer = load_processor(folder).tokenizer
    for question in QUESTIONS:
        assert len(tokenizer(question).input_ids) <= len(question.split()) + 3
