"""What `auto` in speed comes to on a CPU, and on CUDA with and without what it needs."""

import os

import pytest
import torch

from headway.config import SpeedConfig
from headway.errors import ConfigError
from headway.models import precision as run_precision
from headway.models.load import load_model
from headway.train import build as train_speed
from headway.train.build import compiles, put_in_kernels
from helpers.models import tiny_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def model():
    return load_model(tiny_config("qwen3"), random_init=True)


@pytest.fixture
def installed(monkeypatch):
    """Say which of Triton and Liger there are, and note whose kernels are put in."""

    def set_up(*packages, liger_fits=True):
        asked = []

        def use_kernels(_model, name, _device, compiled=()):
            asked.append((name, len(compiled)) if compiled else name)
            if name == "liger" and not liger_fits:
                raise ConfigError("nothing for it")
            return ("Liger kernels: 5 RMSNorms",) if name == "liger" else ()

        monkeypatch.setattr(train_speed, "find_spec", lambda name: object() if name in packages else None)
        monkeypatch.setattr(train_speed, "use_kernels", use_kernels)
        return asked

    return set_up


def test_on_a_cpu_nothing_is_compiled_and_kernels_are_pytorchs(model, installed):
    asked = installed("triton", "liger_kernel")
    assert compiles(SpeedConfig(), model, CPU) == (False, ())
    assert put_in_kernels(SpeedConfig(), model, CPU, is_compiled=False) == ()
    assert asked == ["torch"]


def test_on_cuda_blocks_are_compiled_or_kernels_are_ligers_and_it_is_said(model, installed):
    asked = installed("triton", "liger_kernel")
    is_compiled, (line,) = compiles(SpeedConfig(), model, CUDA)
    assert is_compiled
    assert line == "2 blocks are compiled by torch.compile. Set speed.compile=false to switch compilation off"
    assert put_in_kernels(SpeedConfig(), model, CUDA, is_compiled=True) == ()
    assert put_in_kernels(SpeedConfig(), model, CUDA, is_compiled=False) == ("Liger kernels: 5 RMSNorms",)
    assert asked == ["torch", "torch", "liger"]
    put_in_kernels(SpeedConfig(kernels="liger"), model, CUDA, is_compiled=True)
    assert asked[-1] == ("liger", 2)  # the blocks that it stays out of


def test_what_is_not_installed_is_said_in_a_line(model, installed):
    installed()
    is_compiled, (line,) = compiles(SpeedConfig(), model, CUDA)
    assert not is_compiled
    assert "torch.compile needs Triton" in line
    (line,) = put_in_kernels(SpeedConfig(), model, CUDA, is_compiled=False)
    assert "pip install liger-kernel" in line


def test_a_model_for_which_there_is_nothing_trains_all_the_same(installed):
    installed("triton", "liger_kernel", liger_fits=False)
    lone = torch.nn.Linear(3, 3)
    is_compiled, (line,) = compiles(SpeedConfig(), lone, CUDA)
    assert not is_compiled
    assert "Linear has no repeated layers" in line
    (line,) = put_in_kernels(SpeedConfig(), lone, CUDA, is_compiled=False)
    assert line == "kernels are PyTorch's, because Liger has none for Linear"


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_what_is_set_is_done_or_an_error(model, installed, device):
    asked = installed("triton", "liger_kernel", liger_fits=False)
    for value in (True, False):
        assert compiles(SpeedConfig(compile=value), model, device) == (value, ())
    assert put_in_kernels(SpeedConfig(kernels="torch"), model, device, is_compiled=False) == ()
    with pytest.raises(ConfigError, match="nothing for it"):
        put_in_kernels(SpeedConfig(kernels="liger"), model, device, is_compiled=False)
    assert asked == ["torch", "liger"]


@pytest.mark.parametrize(
    ("settings", "device", "fused"),
    [
        ({}, "auto", True),
        ({}, "cuda:1", True),
        ({}, "cpu", False),
        ({"compile": False}, "auto", False),
        ({"compile": True}, "cpu", True),
        ({"compile": False, "kernels": "liger"}, "auto", True),
    ],
)
def test_a_plan_takes_automatic_compilation_as_on_cuda(settings, device, fused):
    assert SpeedConfig(**settings).is_fused(device) is fused


@pytest.mark.skipif(os.name != "posix", reason="segments grow on Linux alone")
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_segments_grow_unless_the_environment_says_otherwise(monkeypatch, name):
    monkeypatch.setattr(run_precision.os, "environ", {})
    monkeypatch.setattr(run_precision.sys, "platform", "linux")
    run_precision.grow_segments()
    assert run_precision.os.environ == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    monkeypatch.setattr(run_precision.os, "environ", {name: "max_split_size_mb:64"})
    run_precision.grow_segments()
    assert run_precision.os.environ == {name: "max_split_size_mb:64"}
