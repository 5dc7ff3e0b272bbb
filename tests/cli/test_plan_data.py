"""Lengths of several indices as one table, and what making their packs takes."""

import numpy as np
import pytest

from headway.cli import plan_data as module
from headway.cli.plan_data import making_s
from headway.data.index import LengthIndex
from headway.data.index.length_index import RaggedArray, length_table


def index(tokens, images, videos, bad=()):
    def ragged(grids):
        flat = [grid for row in grids for grid in row]
        offsets = np.cumsum([0, *map(len, grids)])
        return RaggedArray(offsets, np.array(flat, dtype=np.int32).reshape(-1, 3))

    patches = [sum(int(np.prod(grid)) for grid in one + two) for one, two in zip(images, videos, strict=True)]
    none = np.zeros(len(tokens), dtype=np.int32)
    numbers = (np.array(tokens, dtype=np.int32), none, none, none, np.array(patches, dtype=np.int32))
    audio = RaggedArray.empty(len(tokens))
    media = {"images": ragged(images), "videos": ragged(videos), "audio": audio}
    return LengthIndex(*numbers, media, bad=dict.fromkeys(bad))


def test_usable_rows_stand_one_after_the_other_with_their_grids():
    first = index([5, 0, 7], [[(1, 2, 2)], [(1, 9, 9)], [(1, 4, 4), (1, 2, 4)]], [[], [], [(2, 2, 2)]], bad=[1])
    second = index([9], [[]], [[(3, 2, 2)]])
    table = length_table({"one": first, "two": second}, {"one": "drop", "two": "split"})
    assert [(name, part.overlong, part.rows.tolist()) for name, part in table.parts.items()] == [
        ("one", "drop", [0, 1]),
        ("two", "split", [2]),
    ]
    assert table.tokens.tolist() == [5, 7, 9]
    assert table.patches.tolist() == [4, 16 + 8 + 8, 12]
    grids = sorted(zip(table.grid_rows.tolist(), table.grids.tolist(), strict=True))
    assert grids == [(0, [1, 2, 2]), (1, [1, 2, 4]), (1, [1, 4, 4]), (1, [2, 2, 2]), (2, [3, 2, 2])]


class Encoded:
    """An encoder that takes a tenth of a pretended second for each token of a row."""

    def __init__(self):
        self.now, self.rows = 0.0, []

    def encode(self, row):
        self.rows.append(row)
        self.now += 0.1 * row
        return type("Encoded", (), {"tokens": row})


def test_making_is_timed_on_rows_of_all_sources_that_can_be_used(monkeypatch):
    encoder, none = Encoded(), [[]] * 3
    monkeypatch.setattr(module, "perf_counter", lambda: encoder.now)
    monkeypatch.setattr(module, "_MOST_S", 100.0)
    sources, indices = ([5, 1000, 7], [9, 8, 4]), [index([5, 0, 7], none, none, bad=[1]), index([9, 8, 4], none, none)]
    assert making_s(sources, indices, encoder) == pytest.approx(0.1)
    assert sorted(encoder.rows[1:]) == [4, 5, 7, 8, 9]  # after one that opens files
    monkeypatch.setattr(module, "_MOST_S", 1.5)
    encoder.rows.clear()
    assert making_s(sources, indices, encoder) == pytest.approx(0.1)
    assert len(encoder.rows) < 6  # it stops after so long
