"""Offload of activations: inputs of recomputed blocks wait for backward in the host's memory.

Of a block that is recomputed whole, its input is all that stays from forward to backward. A block's input is copied to
pinned pages while the block computes, and leaves the device as the next block begins; backward of a block fetches the
input of the block before it, so that copies run beside computing in both directions, on a stream of their own. But for
its first pages the host never waits: streams wait for each other's events. The last input is still there when backward
begins. Weights, views of them, and what blocks share (rotary angles, boundaries of segments) are not touched, as only
the storage of a block's first tensor is.

On a CPU the copies lie in the same memory: a recipe runs there as it does elsewhere, and saves nothing.

`torch.autograd.graph.save_on_cpu` copies synchronously, weights among the rest. torchtune's OffloadActivations has the
same streams, but sees each tensor by itself as it is saved, which behind compiled code is when the block has ended, and
has pinned memory allocated anew, rounded up to powers of two.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from headway.errors import ConfigError
from headway.models.blocks import blocks
from headway.models.recompute import is_recomputed

PAGE = 32 * 2**20
"""Bytes of a page, a power of two, to which torch's allocator of pinned memory rounds up."""


def offload_inputs(model: PreTrainedModel) -> int:
    """Let inputs of recomputed blocks wait in the host's memory, and give the number of blocks.

    It comes after `recompute_blocks` and `compile_blocks`, and before the model is sharded.
    """
    store = InputStore()
    chosen = [block.module for block in blocks(model) if is_recomputed(block.module)]
    for block in chosen:
        module: Any = block
        learns = any(parameter.requires_grad for parameter in module.parameters())
        if "forward" in vars(module):  # compiled, its checkpoint within
            module.forward = store.around(module.forward, learns=learns)
        else:  # the block's checkpoint saves its arguments as anything else is saved
            checkpoint = module._gradient_checkpointing_func
            module._gradient_checkpointing_func = store.around(checkpoint, learns=learns)
    return len(chosen)


class InputStore:
    """Inputs of a model's blocks in the host's memory, in pages that are used again pack after pack.

    Args:
        page_bytes: of a page.
    """

    def __init__(self, page_bytes: int = PAGE) -> None:
        self.page_bytes = page_bytes
        self.free: list[torch.Tensor] = []
        self._stream: Any = None
        self._newest: ReferenceType[StoredInput] | None = None

    def around(self, forward: Callable[..., Any], *, learns: bool) -> Callable[..., Any]:
        """Make a forward whose first tensor is stored as soon as it is called.

        Args:
            forward: of a block, or what runs it.
            learns: whether the block has parameters that do, so that it has a backward whatever enters it.

        Raises:
            ConfigError: by the forward, whose arguments hold no tensor.
        """

        def storing(*args: Any, **kwargs: Any) -> Any:
            hidden = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
            if hidden is None:
                raise ConfigError(
                    "speed.offload: inputs needs the input of a recomputed block as a positional argument, but this "
                    "model gives the input by name. Set speed.offload=none."
                )
            has_backward = torch.is_grad_enabled() and (learns or hidden.requires_grad)
            if not (has_backward and hidden.numel() and _lies_in_order(hidden)):
                return forward(*args, **kwargs)
            stored = self._store(hidden.detach())
            with saved_tensors_hooks(stored.pack, _unpacked):
                return forward(*args, **kwargs)

        return storing

    def _store(self, tensor: torch.Tensor) -> "StoredInput":
        """Begin to copy an input, and let go of the one before."""
        previous = None if self._newest is None else self._newest()
        if previous is not None:
            previous.leave_device()
        stored = StoredInput(self, tensor, self._newest)
        self._newest = ref(stored)
        return stored

    def pages(self, num_bytes: int, device: torch.device) -> list[torch.Tensor]:
        """Take pages for so many bytes."""
        count = -(-num_bytes // self.page_bytes)
        new = [self._page(device) for _ in range(count - len(self.free))]
        return [*new, *(self.free.pop() for _ in range(count - len(new)))]

    def _page(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.page_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def copy(self, pairs: Iterator[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> Any:
        """Copy each second to its first beside what the device computes, after what it has been given so far.

        Returns:
            The event of the end of it; None on a CPU, where all is done.
        """
        if device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # as torch leaves it
        aside: AbstractContextManager[Any] = nullcontext()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))
            aside = torch.cuda.stream(self._stream)
        with aside:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return None if self._stream is None else self._stream.record_event()


class StoredInput:
    """One block's input: on the device until it has been copied, in pages, and on the device again for backward.

    Args:
        store: of its pages.
        tensor: contiguous.
        before: the input that was stored before this one, if any.
    """

    def __init__(self, store: InputStore, tensor: torch.Tensor, before: "ReferenceType[StoredInput] | None") -> None:
        self._store, self._before, self._device = store, before, tensor.device
        self._size, self._dtype = tensor.shape, tensor.dtype
        self._storage = tensor.untyped_storage()._cdata  # a number, which holds nothing
        self._tensor: torch.Tensor | None = tensor
        self._pages: list[torch.Tensor] = []
        self._copied: Any = None
        self._pages = store.pages(tensor.nbytes, tensor.device)
        self._copied = store.copy(((page, part) for part, page in self._parts(tensor)), tensor.device)

    def pack(self, tensor: torch.Tensor) -> "StoredInput | torch.Tensor":
        """Take the place of the input where autograd saves it; anything else it saves as it is."""
        is_input = tensor.untyped_storage()._cdata == self._storage
        if is_input and tensor.shape == self._size and tensor.is_contiguous():
            return self
        return tensor.detach()  # an operation's own result would hold the operation, which holds what is packed

    def leave_device(self) -> None:
        """Free the device's memory for work after the copy."""
        self._wait()
        self._tensor = None

    def fetch(self) -> None:
        """Begin to copy it back, unless it is there."""
        if self._tensor is None:
            self._tensor = torch.empty(self._size, dtype=self._dtype, device=self._device)
            self._copied = self._store.copy(self._parts(self._tensor), self._device)

    def unpacked(self) -> torch.Tensor:
        """Hand it to backward, and begin to fetch the input of the block that backward enters next."""
        self.fetch()
        tensor = self._tensor
        assert tensor is not None
        self.leave_device()
        before = None if self._before is None else self._before()
        if before is not None:
            before.fetch()
        return tensor

    def _wait(self) -> None:
        """Have the device finish a copy before what it is given from now on."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None

    def _parts(self, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        flat = tensor.view(-1).view(torch.uint8)
        for part, page in zip(flat.split(self._store.page_bytes), self._pages, strict=True):  # type: ignore[no-untyped-call]
            yield part, page[: len(part)]

    def __del__(self) -> None:
        self._wait()
        self._store.free += self._pages


def _unpacked(saved: StoredInput | torch.Tensor) -> torch.Tensor:
    return saved.unpacked() if isinstance(saved, StoredInput) else saved


def _lies_in_order(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not is_traceable_wrapper_subclass(tensor)
