"""The page on models names every family that the laws are run on."""

import json
from pathlib import Path

import pytest

from helpers.families import FAMILIES
from helpers.folders import COUNTED_OTHERWISE, VLM_FOLDERS

ROOT = Path(__file__).parents[2]
NAMES = json.loads((ROOT / "tools" / "trainable.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


def test_every_family_with_a_folder_has_a_name_on_the_page():
    assert NAMES["families"].keys() == {*FAMILIES, *VLM_FOLDERS}


@pytest.mark.parametrize("family", NAMES["families"])
def test_the_page_has_a_row_for_every_family_with_what_is_counted_otherwise(family):
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {NAMES['families'][family]} |")]
    assert COUNTED_OTHERWISE.get(family, ("", "", ""))[2] in row
