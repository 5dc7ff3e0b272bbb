"""Rates at a model's sizes, measured on this very CPU, with shapes that take microseconds."""

import pytest

from headway.devices import model_rates as module
from headway.devices.model_rates import model_rates
from headway.errors import UnknownDeviceError

SHAPES = [(64, 32, 16), (8, 4, 2)]


@pytest.fixture(autouse=True)
def _small(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "_LENGTHS", {"cpu": (16, 32)})
    monkeypatch.setattr(module, "_ELEMENTS", {"cpu": (64, 256)})
    monkeypatch.setattr("headway.devices.ceilings._SIZES", {"cpu": (2**16,)})


def test_every_size_is_measured_once_and_kept():
    first = model_rates("cpu", "fp32", SHAPES, (2, 8))
    assert [*first.products] == [(8, 4, 2), (64, 32, 16)]
    assert [*first.attention] == [16, 32]
    assert [*first.bytes_per_s] == [64 * 4, 256 * 4]
    rates = [
        *first.products.values(),
        *first.bytes_per_s.values(),
        *(one for both in first.attention.values() for one in both),
    ]
    assert all(rate > 0 for rate in rates)
    assert not first.is_cached
    again = model_rates("cpu", "fp32", SHAPES, (2, 8))
    assert again.is_cached
    assert again.products == first.products
    assert again.as_json()["products"][0]["shape"] == [8, 4, 2]
    assert not model_rates("cpu", "fp32", SHAPES, (2, 8), refresh=True).is_cached
    assert not model_rates("cpu", "fp32", [(8, 4, 4)], (2, 8)).is_cached  # other sizes


def test_a_precision_that_is_not_measured_is_one_clear_error():
    with pytest.raises(UnknownDeviceError, match="not on cpu in 'int8'"):
        model_rates("cpu", "int8", SHAPES, (2, 8))
