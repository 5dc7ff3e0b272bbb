"""Exchanges of small blocks, timed between two real processes of this CPU."""

import pytest

from headway.plan.collectives import RankGroup, collective_s
from headway.train import exchange_times
from headway.train.exchange_times import timed_exchanges

KINDS = {"all-gather", "reduce-scatter", "all-reduce", "all-to-all"}


def block_bytes(width):
    """Four bytes for each weight: queries and output w x w, keys and values w x w/2, a gated MLP 3 w x 3 w, norms."""
    return 4 * (2 * width**2 + 2 * width * width // 2 + 9 * width**2 + 2 * width + 2 * width // 4)


@pytest.mark.dist
def test_every_kind_is_timed_at_the_size_of_a_block_and_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    monkeypatch.setattr(exchange_times, "WIDTHS", (16, 256))
    links = timed_exchanges(2)
    assert {kind for kind, _ in links.timed} == KINDS
    for _, points in links.timed:
        assert [size for size, _ in points] == [block_bytes(16), block_bytes(256)]
        assert all(0 < seconds < 60 for _, seconds in points)
    pair, size = RankGroup(2, 2), block_bytes(256)
    gathered = dict(links.timed)["all-gather"][-1][1]
    assert gathered > size / 2 / 100e9  # half of the weights come over, no faster than memory
    assert collective_s("all-gather", size, pair, links).expected == pytest.approx(gathered)
    assert timed_exchanges(2) == links  # read, with the day of the measurement
