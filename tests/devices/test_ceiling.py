import pytest
import torch

from headway.devices import peak_for
from headway.devices.ceiling import measure_ceiling
from headway.devices.probe import cpu_name
from headway.errors import UnknownDeviceError

pytestmark = pytest.mark.own_peak


def test_the_ceiling_says_how_it_was_measured():
    peak = peak_for("cpu", torch.float32)
    assert peak.kind == "ceiling"
    assert peak.name == cpu_name()
    threads = torch.get_num_threads()
    assert f"{threads} thread" in peak.source
    assert "fp32 matmul" in peak.source
    assert 1e9 < peak.flops_per_s < 1e14  # 1 GFLOP/s to 100 TFLOP/s: any CPU there is


def test_the_ceiling_is_measured_once_and_leaves_the_random_state_alone():
    state = torch.get_rng_state()
    first = measure_ceiling("fp32")
    assert measure_ceiling("fp32") is first
    assert torch.equal(torch.get_rng_state(), state)


def test_a_dtype_without_a_cpu_matmul_is_refused():
    with pytest.raises(UnknownDeviceError, match="fp32, bf16, fp16, not in 'fp8'"):
        measure_ceiling("fp8")
