import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.explain.measurement import divide

INTERVALS = st.lists(st.tuples(st.integers(-5, 25), st.integers(0, 12), st.integers(0, 3)), max_size=12)


@given(intervals=INTERVALS, window=st.tuples(st.integers(0, 10), st.integers(1, 15)))
def test_every_nanosecond_belongs_to_the_most_important_event_that_runs(intervals, window):
    begin, finish = window[0], window[0] + window[1]
    columns = np.array([(start, start + length, rank) for start, length, rank in intervals], dtype=np.int64)
    pieces = divide(*columns.reshape(-1, 3).T, (begin, finish))
    owners = [
        owner
        for start, end, owner in zip(pieces.start_ns, pieces.end_ns, pieces.owner, strict=True)
        for _ in range(start, end)
    ]
    expected = []
    for moment in range(begin, finish):
        running = [
            (rank, max(start, begin), start, i)
            for i, (start, end, rank) in enumerate(columns.tolist())
            if start <= moment < end
        ]
        expected.append(min(running)[-1] if running else -1)
    assert owners == expected
    assert pieces.ns.sum() == finish - begin
    assert pieces.start_ns.tolist() == [begin, *pieces.end_ns.tolist()][: len(pieces.ns)]
