"""Lengths of measured datasets as one table, without the rows that cannot be used."""

from collections.abc import Sequence

import numpy as np

from headway.data.index import LengthIndex
from headway.packing.lengths import LengthTable


def joined(indices: Sequence[LengthIndex]) -> LengthTable:
    """Put the usable rows of several indices one after the other.

    Args:
        indices: of the datasets.
    """
    tokens, patches, grids, rows = [], [], [], []
    start = 0
    for index in indices:
        ok = np.asarray(index.ok)
        place = np.cumsum(ok) - 1 + start  # of each usable row in the table
        tokens.append(index.tokens[ok])
        patches.append(index.patches[ok])
        for ragged in (index.image_grids, index.video_grids):
            of_row = ragged.rows
            grids.append(ragged.values[ok[of_row]].reshape(-1, 3))
            rows.append(place[of_row[ok[of_row]]])
        start += int(ok.sum())
    return LengthTable(
        np.concatenate(tokens).astype(np.int64),
        np.concatenate(patches).astype(np.int64),
        np.concatenate(grids).astype(np.int64),
        np.concatenate(rows).astype(np.int64),
    )
