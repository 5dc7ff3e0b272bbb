"""Pieces of split samples, against a count of every token by itself."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.packing.pieces import TargetRuns, split, split_sample, target_runs

FLAGS = st.lists(st.booleans(), min_size=1, max_size=40)


def by_hand(flags, most):
    """The pieces in which a token behind the first one is learnt."""
    starts = [a for a in range(0, len(flags), most) if any(flags[a + 1 : a + most])]
    return [(a, min(a + most, len(flags)), a == starts[0]) for a in starts]


@given(st.lists(FLAGS, min_size=1, max_size=6), st.integers(1, 12))
def test_pieces_are_those_in_which_a_token_behind_the_first_is_learnt(samples, most):
    runs = [target_runs(np.array(flags)) for flags in samples]
    for flags, run in zip(samples, runs, strict=True):
        places = {place for start, stop in run for place in range(start, stop)}
        assert places == {place for place, flag in enumerate(flags) if flag and place}
        assert split_sample(len(flags), run, most) == by_hand([False, *flags[1:]], most)
    rows = np.repeat(np.arange(len(samples)), [len(run) for run in runs])
    values = np.array([each for run in runs for each in run], dtype=int).reshape(-1, 2)
    pieces = split(np.array([len(flags) for flags in samples]), TargetRuns(rows, values), most)
    found = list(zip(*(column.tolist() for column in pieces), strict=True))
    assert found == [(n, *each) for n, flags in enumerate(samples) for each in by_hand([False, *flags[1:]], most)]
