"""Training state in a checkpoint: the tensors that training changes, by name, and the random generators.

Names are the model's own: `model.NAME` for a parameter or buffer, `optimizer.NAME.exp_avg` for what the optimizer keeps
of a parameter, `average.NAME` for its moving average. A tensor that is spread over processes stays so (a DTensor): each
process writes its own part, and any other number of them reads the parts that it needs.
"""

import random
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from headway.errors import CheckpointError
from headway.tracing.unwrap import local

_ALIGNMENT = 64  # bytes; a cache line, and more than any element needs
WEIGHTS, OPTIMIZER, AVERAGE = "model.", "optimizer.", "average."


class Average(Protocol):
    """A moving average of the weights."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The averages themselves, by the parameters' names."""


def training_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, average: Average | None = None
) -> dict[str, torch.Tensor]:
    """Every tensor that training changes, the live ones and by name; tied weights once."""
    tensors = {WEIGHTS + name: tensor for name, tensor in model_tensors(model)}
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, torch.Tensor):
                    raise TypeError(f"the optimizer keeps a {type(value).__name__} as {key} of {name}, not a tensor")
                tensors[f"{OPTIMIZER}{name}.{key}"] = value
    if average is not None:
        tensors |= {AVERAGE + name: value for name, value in average.state_dict().items()}
    return tensors


def model_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and persistent buffers of a model, each once, by the first of its names."""
    visited = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in visited:
            visited.add(id(tensor))
            yield name, tensor.detach()


class HostCopies:
    """Copies of tensors in the host's memory, spread as the originals are, which training may change from then on.

    What lies on a CUDA device is copied into one block of page-locked memory, as large as all of it together. The
    block is made by the first call and stays: later calls copy into it again, so an earlier call's copies must be done
    with. All copies are queued and waited for once.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)

    def take(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy this process's slices of tensors.

        Raises:
            CheckpointError: there is not as much memory that can be page-locked.
        """
        own = {name: local(tensor).detach() for name, tensor in tensors.items()}
        copies = self._room({name: tensor for name, tensor in own.items() if _is_on_device(tensor)})
        for name, copy in copies.items():
            copy.copy_(own[name], non_blocking=True)
        for device in {own[name].device for name in copies}:
            _wait_for(device)
        for name, tensor in own.items():
            if name not in copies:
                copies[name] = tensor.to("cpu", copy=True)
        return {name: _spread_as(tensor, copies[name]) for name, tensor in tensors.items()}

    def _room(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        starts, end = {}, 0
        for name, tensor in tensors.items():
            starts[name] = end
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if len(self._block) != end:  # the optimizer has made more state, say
            self._block = torch.empty(0, dtype=torch.uint8)  # never two of them at a time
            self._block = _page_locked(end)
        return {
            name: self._block[start : start + tensors[name].nbytes].view(tensors[name].dtype).view(tensors[name].shape)
            for name, start in starts.items()
        }


def _is_on_device(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _wait_for(device: torch.device) -> None:
    torch.cuda.current_stream(device).synchronize()


def _page_locked(num_bytes: int) -> torch.Tensor:
    """Page-locked memory of exactly this size; PyTorch's own is rounded up to a power of two."""
    block = torch.empty(num_bytes, dtype=torch.uint8)
    if num_bytes:
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(cudart.cudaHostRegister(block.data_ptr(), num_bytes, 0)):
            raise CheckpointError(
                f"a checkpoint needs {num_bytes / 2**30:.1f} GiB of page-locked host memory for a copy, but that "
                "much is not free. Lower data.prefetch_bytes, use more machines, or set checkpoint.asynchronous to "
                "false. Headway then makes no copy, and training waits until the files are written."
            )
        weakref.finalize(block, cudart.cudaHostUnregister, block.data_ptr()).atexit = False
    return block


def _spread_as(tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return copy
    # The part on the host, under a description that still names the device's mesh: nothing is sent around by it.
    return DTensor(copy, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]  # as torch leaves it


def make_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, names: set[str]) -> None:
    """Let the optimizer make its state of the parameters of these names alone, without changing a weight.

    It takes a step of learning rate zero on gradients of zero, and only for the parameters asked for; so the state has
    the optimizer's own types, devices and spread.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    for name, parameter in model.named_parameters():
        optimizer.state.pop(parameter, None)
        parameter.grad = torch.zeros_like(parameter) if name in names else None
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def random_state() -> dict[str, Any]:
    """The state of every random generator: Python's, NumPy's, PyTorch's on CPU and this process's CUDA device."""
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002 - the global state is what other libraries draw from
    assert isinstance(numpy_state, dict)
    inner = {
        name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in numpy_state["state"].items()
    }
    return {
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": inner},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Put every random generator back to where `random_state` found it.

    Raises:
        CheckpointError: this is no state of theirs.
    """
    try:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        inner = {**state["numpy"]["state"], "key": np.asarray(state["numpy"]["state"]["key"], dtype=np.uint32)}
        np.random.set_state({**state["numpy"], "state": inner})  # noqa: NPY002 - as in random_state
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
    except (TypeError, ValueError, KeyError, OverflowError, RuntimeError) as error:
        raise CheckpointError(
            f"the checkpoint's random generators cannot be restored: {error!r}. Resume from another checkpoint."
        ) from error
