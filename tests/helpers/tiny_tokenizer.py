"""A tokenizer of words w0, w1, ... made on the spot, for trainers that ask for one."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3}


def tiny_tokenizer(num_words: int = 150) -> PreTrainedTokenizerFast:
    """Build it; a word is a token, and nothing is added to a text."""
    vocabulary = SPECIAL | {f"w{i}": len(SPECIAL) + i for i in range(num_words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
