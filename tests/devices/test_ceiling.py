import time

import pytest
import torch

from headway.devices import peak_for
from headway.devices.ceiling import cpu_name, measure_ceiling
from headway.errors import UnknownDeviceError


def test_the_ceiling_bounds_a_matmul_and_says_how_it_was_measured():
    begin_s = time.perf_counter()
    peak = peak_for("cpu", torch.float32)
    assert time.perf_counter() - begin_s < 6  # the promise is 3 s; tests share their cores
    assert peak.kind == "ceiling"
    assert peak.name == cpu_name()
    threads = torch.get_num_threads()
    assert f"{threads} thread" in peak.source
    assert "fp32 matmul" in peak.source
    assert 1e9 < peak.flops_per_s < 1e14  # 1 GFLOP/s to 100 TFLOP/s: any CPU there is

    a_NN = torch.randn(256, 256)
    product_s = min(_timed(a_NN) for _ in range(5))
    assert 2 * 256**3 / product_s < 1.5 * peak.flops_per_s  # nothing ordinary runs far above the ceiling


def _timed(a_NN):
    begin_s = time.perf_counter()
    a_NN @ a_NN
    return time.perf_counter() - begin_s


def test_the_ceiling_is_measured_once_and_leaves_the_random_state_alone():
    state = torch.get_rng_state()
    first = measure_ceiling("fp32")
    begin_s = time.perf_counter()
    assert measure_ceiling("fp32") is first
    assert time.perf_counter() - begin_s < 0.01
    assert torch.equal(torch.get_rng_state(), state)


def test_a_dtype_without_a_cpu_matmul_is_refused():
    with pytest.raises(UnknownDeviceError, match="fp32, bf16, fp16, not in 'fp8'"):
        measure_ceiling("fp8")
