"""Settings of precision that a device has no kernels for are refused before anything is built."""

import pytest
import torch

from headway.config import RunConfig
from headway.errors import ConfigError
from headway.models.precision import choose_precision

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_auto_is_what_the_device_computes_in(tmp_path):
    run = RunConfig(folder=tmp_path)
    assert [choose_precision(run, device).name for device in (CPU, CUDA)] == ["float32", "bfloat16-autocast"]


@pytest.mark.parametrize(
    ("dtype", "device", "message"),
    [
        ("float32", CUDA, r"'float32' takes effect on a CPU only, but the run is on cuda:0.*dtype=bfloat16-autocast"),
        ("bfloat16-autocast", CPU, r"'bfloat16-autocast' takes effect on CUDA only.*on cpu\. Use float32 or auto"),
        ("bfloat16-params", CPU, r"'bfloat16-params' takes effect on CUDA only"),
    ],
)
def test_what_the_device_has_no_kernels_for_is_refused(tmp_path, dtype, device, message):
    with pytest.raises(ConfigError, match=message):
        choose_precision(RunConfig(folder=tmp_path, dtype=dtype), device)
