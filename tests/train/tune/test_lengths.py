"""Lengths of several indices as one table."""

import numpy as np

from headway.data.index import LengthIndex
from headway.data.index.length_index import Ragged
from headway.train.tune.lengths import joined


def index(tokens, images, videos, bad=()):
    def ragged(grids):
        flat = [grid for row in grids for grid in row]
        offsets = np.cumsum([0, *map(len, grids)])
        return Ragged(offsets, np.array(flat, dtype=np.int32).reshape(-1, 3))

    patches = [sum(int(np.prod(grid)) for grid in one + two) for one, two in zip(images, videos, strict=True)]
    none = np.zeros(len(tokens), dtype=np.int32)
    numbers = (np.array(tokens, dtype=np.int32), none, none, none, np.array(patches, dtype=np.int32))
    audio = Ragged.empty(len(tokens))
    return LengthIndex(*numbers, ragged(images), ragged(videos), audio, bad=dict.fromkeys(bad))


def test_usable_rows_stand_one_after_the_other_with_their_grids():
    first = index([5, 0, 7], [[(1, 2, 2)], [(1, 9, 9)], [(1, 4, 4), (1, 2, 4)]], [[], [], [(2, 2, 2)]], bad=[1])
    second = index([9], [[]], [[(3, 2, 2)]])
    table = joined([first, second])
    assert table.tokens.tolist() == [5, 7, 9]
    assert table.patches.tolist() == [4, 16 + 8 + 8, 12]
    grids = sorted(zip(table.grid_rows.tolist(), table.grids.tolist(), strict=True))
    assert grids == [(0, [1, 2, 2]), (1, [1, 2, 4]), (1, [1, 4, 4]), (1, [2, 2, 2]), (2, [3, 2, 2])]
