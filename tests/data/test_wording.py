"""Errors name the ways out in the words of whoever asked."""

import re
from pathlib import Path

import pytest

import headway.data
from headway.data.samples import Origin, SampleError
from headway.data.wording import _WORDS, errors_in_words_of
from headway.errors import DataError


@pytest.mark.parametrize(
    ("speaker", "said"),
    [("yaml", "or raise data.max_characters."), ("options", "or raise --max-characters.")],
)
def test_the_way_out_is_said_in_the_words_of_the_speaker(speaker, said):
    for error in (
        DataError("a.jsonl: too long. Split the text, or raise max_characters."),
        SampleError(Origin("a", "a.jsonl", 0, "line 1"), "too long. Split the text, or raise max_characters."),
    ):
        with pytest.raises(DataError) as caught, errors_in_words_of(speaker):
            raise error
        assert caught.value is error
        assert str(error).endswith(said)


def test_every_phrase_is_one_that_the_rooms_of_the_data_say():
    rooms = Path(headway.data.__file__).parent
    code = "".join(path.read_text(encoding="utf-8") for path in rooms.rglob("*.py") if path.name != "wording.py")
    said = re.sub(r"""["']\n\s*f?["']""", "", code)  # texts that go on in the next line
    for phrase in _WORDS:
        assert phrase in said
