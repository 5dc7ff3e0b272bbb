"""Rates at a model's sizes, measured on this very CPU, with shapes that take microseconds."""

import pytest

from headway.devices import model_rates as module
from headway.devices.model_rates import model_rates, pack_of
from headway.errors import UnknownDeviceError
from headway.models.attention import attend

SHAPES = [(64, 32, 16), (8, 4, 2)]


@pytest.fixture(autouse=True)
def _small(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "_LENGTHS", {"cpu": (16, 32)})
    monkeypatch.setattr(module, "_PACK", {"cpu": 64})
    monkeypatch.setattr("headway.devices.ceilings._SIZES", {"cpu": (2**16,)})


def test_a_precision_that_is_not_measured_is_one_clear_error():
    with pytest.raises(UnknownDeviceError, match="not on cpu in 'int8'"):
        model_rates("cpu", "int8", SHAPES, (2, 8), attend)


@pytest.mark.parametrize(("slots", "length"), [(1024, 16), (1024, 256), (2048, 1024), (8, 1)])
def test_a_pack_of_segments_of_many_lengths_is_full(slots, length):
    pack = pack_of(slots, length)
    assert sum(pack) == slots
    assert all(0.75 * length - 1 <= one <= 1.25 * length + 1 for one in pack[:-1])
    assert len({*pack}) > min(2, length - 1)
