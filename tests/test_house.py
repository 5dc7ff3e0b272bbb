"""The house keeps its shape: no circles, rooms in their order, one meaning for a name, files of a size to read."""

import importlib
import re
from pathlib import Path

import pytest

from tools.house import circles, duplicated_classes, read_package, room_arrows

ROOT = Path(__file__).parents[1]
FILES = read_package(ROOT / "src" / "headway")
ARROWS = room_arrows(FILES)
BASE = ["version", "report", "errors", "cache", "quiet"]
CORE = ["count", "devices", "tracing", "conventions", "plan", "packing", "log", "meter", "models", "data", "synthetic"]
EDGES = ["integrations", "compat", "audit", "importing"]
ORDER = [*BASE, *CORE, "train", *EDGES, "cli", "headway", "__main__"]  # each imports only what stands before it


def test_no_files_import_each_other_in_a_circle():
    assert circles({file.name: file.imports for file in FILES.values()}) == []


def test_a_circle_is_found_where_there_is_one():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_every_room_has_a_place_in_the_order():
    assert {file.room for file in FILES.values()} <= {*ORDER}


@pytest.mark.parametrize("room", ORDER)
def test_a_room_imports_only_what_stands_before_it(room):
    assert ARROWS.get(room, set()) <= {*ORDER[: ORDER.index(room)]}


@pytest.mark.parametrize("edge", EDGES)
def test_an_edge_is_imported_by_edges_and_the_command_line_alone(edge):
    assert {room for room, imported in ARROWS.items() if edge in imported} <= {*EDGES, "cli"}


def test_the_counting_core_knows_no_torch():
    counting = [file for file in FILES.values() if file.room in ("count", "conventions", "packing")]
    assert counting
    imports_torch = re.compile(r"^\s*(import torch|from torch)", flags=re.MULTILINE)
    assert not [file.name for file in counting if imports_torch.search(file.text)]


def test_a_public_class_name_means_one_thing():
    assert duplicated_classes(FILES) == {}


def test_no_file_is_longer_than_four_hundred_lines():
    assert {file.name: file.lines for file in FILES.values() if file.lines > 400} == {}


@pytest.mark.parametrize("room", [room for room in ORDER if room not in (*BASE, "headway", "__main__")])
def test_the_page_on_architecture_names_every_room(room):
    assert f"| `{room}/`" in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_files_that_the_page_names_are_there():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = {name for name in re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", page) if "/your" not in name}
    assert len(named) > 20
    assert [name for name in named if not (ROOT / "src" / "headway" / name).exists()] == []


@pytest.mark.parametrize("module", ["headway", "headway.integrations", "headway.compat.mfu_tracker"])
def test_every_public_name_stands_in_a_page(module):
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    words = {word for page in pages for word in re.findall(r"\w+", page.read_text(encoding="utf-8"))}
    assert [name for name in importlib.import_module(module).__all__ if name not in words] == []
