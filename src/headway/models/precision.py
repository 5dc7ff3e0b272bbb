"""Device and precision of a run."""

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from headway.config import RunConfig
from headway.errors import ConfigError
from headway.models.float8 import check_float8
from headway.models.parallel.ranks import launched, whole_variable
from headway.words import Argument


@dataclass(frozen=True)
class Precision:
    """Dtypes in which numbers are held and multiplied.

    Attributes:
        name: as in `run.dtype`.
        params: dtype of the parameters, their gradients and the optimizer's moments.
        compute: dtype of the matrix products outside of float8 layers.
        device_type: "cuda" or "cpu".
    """

    name: str
    params: torch.dtype
    compute: torch.dtype
    device_type: str

    @property
    def is_float8(self) -> bool:
        """True if the blocks' linear layers multiply in float8."""
        return self.name == "float8"

    @property
    def peak_dtype(self) -> torch.dtype:
        """Dtype whose peak MFU refers to: the fastest that the step uses."""
        return torch.float8_e4m3fn if self.is_float8 else self.compute

    def autocast(self) -> AbstractContextManager[Any]:
        """Context of a forward pass."""
        if self.params == self.compute:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.compute)


def choose_device(run: RunConfig) -> torch.device:
    """Choose this process's device as `run.device` says; under torchrun, each process its own CUDA device.

    Raises:
        ConfigError: no such device here.
        UsageError: a launcher's variable that cannot be understood.
    """
    name = run.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"{Argument('run.device')} {run.device!r} is no device; use auto, cpu, cuda or cuda:N."
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{Argument('run.device')} {run.device!r} is not supported; use auto, cpu, cuda or cuda:N.")
    if device.type == "cuda":
        grow_segments()
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = device.index
        if name == "cuda":  # each process of a machine takes another one
            index = whole_variable("LOCAL_RANK", 0, 2**31 - 1, unset=None if count > 1 < launched()[1] else 0)
        if index >= count:
            raise ConfigError(
                f"{Argument('run.device')} is {run.device!r}, but PyTorch {torch.__version__} sees {count} CUDA "
                f"devices here. Set {Argument('run.device', 'cpu')}, or install a CUDA build of PyTorch on a machine "
                "with a GPU."
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device


def grow_segments() -> None:
    """Let PyTorch's allocator on CUDA map memory to segments that grow, unless the environment says something else.

    Packs differ in size, and blocks of fixed sizes would leave memory between them that none of them fits. Takes effect
    before CUDA is first used; torch 2.11 and 2.13 read both names.
    """
    if sys.platform == "linux" and not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def choose_precision(run: RunConfig, device: torch.device) -> Precision:
    """The precision that `run.dtype` names, on this device.

    Raises:
        ConfigError: bfloat16 on a CPU, where it would be slower than what it replaces and unlike what a GPU computes;
            float32 on CUDA, where attention has no kernel for it; float8 where the device has none.
    """
    name: str = run.dtype
    if name == "auto":
        name = "bfloat16-autocast" if device.type == "cuda" else "float32"
    if name == "float8":
        check_float8(device)
    if name != "float32" and device.type != "cuda":
        raise ConfigError(
            f"run.dtype {name!r} takes effect on CUDA only, and the run is on {device}; use float32 or auto."
        )
    if name == "float32" and device.type == "cuda":
        raise ConfigError(
            f"run.dtype 'float32' takes effect on a CPU only, and the run is on {device}, whose kernels of attention "
            "within segments compute in bfloat16 or float16. Set run.dtype=bfloat16-autocast (also auto), which keeps "
            "parameters, gradients and moments in float32."
        )
    params = torch.bfloat16 if name == "bfloat16-params" else torch.float32
    compute = torch.float32 if name == "float32" else torch.bfloat16
    return Precision(name, params, compute, device.type)
