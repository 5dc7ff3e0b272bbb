"""The tokens of an answer, by the lengths of byte-level tokens and by the places that other tokenizers note."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from headway.data.media.placeholders import Tokeniser
from helpers.cases import examples

WORDS = "Hello world, a naïve café; 你好 🙂 e\u0301 x  =  12345\n\n\tdef f():\n        return 1\n"
QWEN = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ADDED = {
    "<end>": AddedToken("<end>", special=True),
    "<|é|>": AddedToken("<|é|>", special=True),
    "<left>": AddedToken("<left>", lstrip=True),
    "<right>": AddedToken("<right>", rstrip=True),
    "    ": AddedToken("    ", normalized=False),
    "\n\n": AddedToken("\n\n", normalized=True),
}


def byte_level(*, trims: bool, splits: bool, composes: bool, prefix: bool = False, suffix: str = "") -> Tokenizer:
    """A byte-level tokenizer as models have them."""
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix=suffix))
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not splits)
    split = pre_tokenizers.Split(Regex(QWEN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level]) if splits else level
    tokenizer.normalizer = normalizers.NFC() if composes else normalizers.Sequence([])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [WORDS] * 3,
        trainers.BpeTrainer(
            vocab_size=330,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            end_of_word_suffix=suffix,
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims, add_prefix_space=False)
    tokenizer.add_tokens([*ADDED.values()])
    return tokenizer


FORMS = {
    "gpt2": {"trims": True, "splits": False, "composes": False},
    "qwen": {"trims": False, "splits": True, "composes": True},
    "prefix": {"trims": True, "splits": False, "composes": False, "prefix": True},
    "suffix": {"trims": True, "splits": False, "composes": False, "suffix": "</w>"},
}
PIECES = st.sampled_from([*ADDED]) | st.sampled_from([" ", "  ", "\n", "\u3000"]) | st.sampled_from(WORDS.split(" "))
TEXTS = st.lists(PIECES | st.text(max_size=3)).map("".join)


@pytest.fixture(scope="module", params=FORMS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return byte_level(**FORMS[request.param])


@pytest.fixture(scope="module")
def tokeniser(tokenizer: Tokenizer) -> Tokeniser:
    return Tokeniser(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


@given(text=TEXTS, first=st.integers(1, 30), length=st.integers(0, 30))
@settings(max_examples=examples(quick=30, usual=200))
def test_the_tokens_of_an_answer_are_those_whose_places_by_the_tokenizer_lie_in_it(
    tokenizer, tokeniser, text, first, length
):
    expected = tokenizer.encode(text)
    tokens = tokeniser.chat(text, [(first, first + length)], {}, "a chat")
    assert tokens.ids_S.tolist() == expected.ids
    # The first token of a sample is nobody's target.
    assert tokens.supervised_S.tolist()[1:] == [first <= start < first + length for start, _ in expected.offsets][1:]
