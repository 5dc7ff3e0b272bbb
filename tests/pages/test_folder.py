import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.pages.folder import names_of_runs


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/runs/before", "/runs/after"], ["before", "after"]),
        (["/runs/before/run", "/runs/after/run"], ["before", "after"]),
        (["/runs/before/run/metrics.jsonl", "/runs/after/run"], ["before", "after"]),
        (["/a/metrics.jsonl", "/b/metrics.jsonl"], ["a", "b"]),
        (["/a/mine.jsonl", "/a/yours.jsonl"], ["mine.jsonl", "yours.jsonl"]),
        (["/a/run", "/b/run", "/b/other"], ["a/run", "b/run", "b/other"]),
        (["/run", "/a/run"], ["run", "a/run"]),
        (["/a/run", "/a/run"], ["run (1)", "run (2)"]),
        (["/a/run/.", "/a/run"], ["run (1)", "run (2)"]),
        (["/home/alice/run", "/home/bob/run"], ["run (1)", "run (2)"]),  # nobody's name is on a page
        (["/home/alice/a/run", "/home/bob/b/run"], ["a", "b"]),
        (["/runs/hf_abcdefghijkl", "/runs/b"], ["(hidden)", "b"]),
        (["/r/caf\u00e9", "/r/cafe\u0301"], ["caf\u00e9 (1)", "cafe\u0301 (2)"]),  # composed, and in two letters
        (["/"], ["/"]),
        (["/runs/one/run"], ["one/run"]),
    ],
)
def test_runs_are_named_by_what_differs_in_their_paths(paths, names):
    assert names_of_runs([Path(path) for path in paths]) == names


def test_of_long_names_the_place_where_they_differ_is_shown():
    paths = [Path(f"/runs/qwen3-vl-2b-on-documents-and-charts-of-2026-lr{lr}-and-more-of-a-name") for lr in (1, 3)]
    first, second = names_of_runs(paths)
    assert "lr1-and" in first
    assert "lr3-and" in second


# Names of folders as people and programs make them: long, of any script, with characters that a terminal obeys.
PART = st.one_of(
    st.sampled_from(
        ["run", "run (1)", "run (2)", "a", "b", "metrics.jsonl", "e\u0301", "\u00e9", "x" * 200, "x" * 201]
    ),
    st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=80).filter(
        lambda part: part not in (".", "..")
    ),
)
PATHS = st.lists(st.lists(PART, min_size=1, max_size=4).map(lambda parts: Path("/", *parts)), min_size=1, max_size=6)


@given(PATHS)
def test_names_differ_for_the_eye_and_are_short_and_printable(paths):
    names = names_of_runs(paths)
    assert len(names) == len(paths)
    assert len({unicodedata.normalize("NFKC", name) for name in names}) == len(paths)
    assert all(0 < len(name) <= 60 for name in names)
    assert all("\x1b" not in name and "\u202e" not in name for name in names)
    assert names == names_of_runs(paths)
