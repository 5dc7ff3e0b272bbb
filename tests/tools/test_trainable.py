"""The page on models names every family that the laws are run on, and says of every type what its trial gives."""

import json
from pathlib import Path

import pytest
import transformers

from helpers.families import FAMILIES
from helpers.folders import COUNTED_OTHERWISE, VLM_FOLDERS
from tools.trainable import listed, outcome_of, registered

ROOT = Path(__file__).parents[2]
NAMES = json.loads((ROOT / "tools" / "trainable.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


def test_every_family_with_a_folder_has_a_name_on_the_page():
    assert NAMES["families"].keys() == {*FAMILIES, *VLM_FOLDERS}


@pytest.mark.parametrize("family", NAMES["families"])
def test_the_page_has_a_row_for_every_family_with_what_is_counted_otherwise(family):
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {NAMES['families'][family]} |")]
    assert COUNTED_OTHERWISE.get(family, ("", "", ""))[2] in row


TYPES = listed(PAGE)


def test_the_page_lists_every_registered_type_once():
    if f"transformers {transformers.__version__}," not in PAGE:
        pytest.skip("the page is of another version of transformers")
    assert sorted(TYPES) == registered()
    assert sum(PAGE.count(f"`{kind}`") for kind in ("llama", "bloom", "qwen3_vl", "bert-generation")) == 4


# some under every heading
@pytest.mark.parametrize("kind", ["llama", "qwen3_5_moe", "bloom", "stablelm", "cpmant", "gemma3n"])
def test_the_page_says_of_a_type_what_its_trial_gives(kind):
    assert outcome_of(kind)[0] == TYPES[kind]


@pytest.mark.long
@pytest.mark.parametrize("kind", TYPES)
def test_the_page_says_of_every_type_what_its_trial_gives(kind):
    assert outcome_of(kind)[0] == TYPES[kind]
