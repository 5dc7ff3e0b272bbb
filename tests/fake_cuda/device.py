"""What torch asks of a CUDA driver, answered without one."""

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

CUDA, META = 1, 14  # numbers of c10::DeviceType
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"


@contextmanager
def pretend_cuda(capability: tuple[int, int] = (9, 0)) -> Iterator[torch.device]:
    """Let fake tensors live on "cuda:0" on a machine without a driver, with any build of torch.

    The device is named with its number, as `choose_device` does: without one, `to` asks the guard for it.

    Args:
        capability: of the pretended device.
    """
    answers = {
        "torch.cuda._lazy_init": lambda: None,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.current_stream": Stream,
        "torch.cuda.Stream": Stream,
        "torch.cuda.stream": lambda _: nullcontext(),
        "torch.cuda.is_bf16_supported": lambda *_, **__: True,
        "torch.cuda.get_device_capability": lambda *_: capability,
        "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,  # else autocast switches itself off
        "transformers.utils.import_utils.is_fake_tensor": lambda _: False,  # else it takes other ways than on a device
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch(name, answer))
        stack.enter_context(_device_guard())
        yield torch.device("cuda", 0)


class Stream:
    """One of the device's streams, which are all in time."""

    def __init__(self, *_: object) -> None:
        self.waits: list[object] = []

    def wait_stream(self, stream: object) -> None:
        """Wait for all that another was given."""
        self.waits.append(stream)

    wait_event = wait_stream

    def record_event(self) -> object:
        """An event behind all that it was given."""
        return object()


@contextmanager
def _device_guard() -> Iterator[None]:
    """Give a build of torch without CUDA the guard of the meta device, which does nothing.

    Autograd asks for the guard of a tensor's device when it notes an operation. A build with CUDA has one, which torch
    itself replaces by one that does nothing where fake tensors are made and there is no driver.
    """
    if torch.backends.cuda.is_built():
        yield
        return
    library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("*c10.*"))))
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("silu_backward", _no_kernel, "CUDA")  # else torch takes it for one of several operations
    guards = (ctypes.c_void_p * (META + 1)).in_dll(library, _GUARDS)
    guards[CUDA] = guards[META]
    try:
        yield
    finally:
        guards[CUDA] = None
        kernels._destroy()


def _no_kernel(*_: object) -> None:
    raise AssertionError("operations on the pretended device have no kernels")


def instead_of_flex(q, k, v, *, block_mask, scale, enable_gqa):
    """In place of a compiled kernel, which needs a compiler for the device: the mask is made, and not looked at."""
    assert isinstance(block_mask, BlockMask)
    assert block_mask.kv_indices.device.type == "cuda"
    return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=enable_gqa)
