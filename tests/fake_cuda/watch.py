"""Sees every operation on the pretended device: what makes the host wait for it, and the bytes that are alive there.

Floats on the device are fake tensors. Integers and booleans keep their values beside them as long as they follow from
what the host knows, so that reads of the device have answers and masks select what they select in training.
"""

import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten, headway = torch.ops.aten, torch.ops.headway
ROUND = 512  # the caching allocator's unit [bytes]

# Operations whose CUDA kernels copy a number to the host and wait for it: a size, mostly.
_WAITING = {
    aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select, aten.masked_scatter_backward,
    aten._unique2, aten.unique_consecutive, aten.unique_dim, aten.bincount,
}  # fmt: skip
_MASKABLE = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
_SHAPED_BY_VALUES = {aten.nonzero, aten.masked_select, aten._unique2, aten.unique_consecutive, aten.repeat_interleave}
_PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}  # where the first factor is
_ROW_BYTES = 16  # of which cuBLAS's fast kernels want rows to be multiples
_BETWEEN = {("fake_cuda", "watch.py"), ("fake_cuda", "backward.py")}  # files that are on the way to every operation
# Loops of this library over experts, for where there is no grouped product: they read where the rows of each end.
_LOOPS = ("headway::grouped_linear", "headway::grouped_outer")


class Wait(NamedTuple):
    """One wait of the host.

    Attributes:
        what: the operation.
        where: file:line of the model's or Headway's code that asked for it.
    """

    what: str
    where: str


class Watch(TorchDispatchMode):
    """Runs operations on the host for real and those on "cuda" on shapes.

    Attributes:
        waits: of the host, in order, while `counting`.
        alive: bytes on the device now.
        peaks: the most bytes at a time, by moment.
        moment: under what name peaks are kept.
        node: of autograd's graph, that runs now; "" in a forward.
        pinned: storages on the host from which the device copies without waiting.
        ops: how often each operation ran on the device.
        narrow: shapes of factors in 16 bits whose rows are no multiple of 16 bytes, which cuBLAS has slow kernels for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.waits: list[Wait] = []
        self.counting = False
        self.alive = 0
        self.peaks: Counter[str] = Counter()
        self.moment = ""
        self.node = ""
        self.pinned: set[int] = set()
        self.sites: dict[int, tuple[int, str]] | None = None
        self.at_peak: dict[str, dict[str, int]] = {}
        self.ops: Counter[str] = Counter()
        self.narrow: set[tuple[int, ...]] = set()
        self._storages: dict[int, int] = {}

    def __enter__(self) -> "Watch":
        self._tolist = patch.object(FakeTensor, "tolist", lambda tensor: self._list(tensor))  # noqa: PLW0108 - bound as a method
        self._tolist.__enter__()
        with self.fake:
            torch.empty(0, device="cuda")  # what torch sets up for fake tensors, before this mode sees it
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._tolist.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        if not any(isinstance(leaf, FakeTensor) or _is_cuda(leaf) for leaf in leaves):
            return self._for_host(func, args, kwargs)
        packet = func._overloadpacket
        self.ops[func._schema.name] += 1
        if reason := _wait(func, packet, args, kwargs, self.pinned):
            self._note(reason)
        self.narrow |= _check_products(packet, args)
        if packet is aten._local_scalar_dense:
            return _value(args[0]).item()
        if packet is aten.equal:
            return torch.equal(_value(args[0]), _value(args[1]))
        if packet in (aten._to_copy, aten.to) and not _is_cuda(kwargs.get("device", args[0])):
            return _on_host(args[0], kwargs)
        if packet is aten.copy_ and not isinstance(args[0], FakeTensor):
            return args[0]
        known = _known_result(func, packet, args, kwargs, leaves)
        if packet in _MASKABLE:
            args = (args[0], self._without_masks(args[1]), *args[2:])
        if func is aten.addmm.dtype_out:  # torch 2.11's shape function takes the dtype for a factor
            out = kwargs["out"]
        elif packet is aten.masked_select:
            out = args[0].new_empty(int(_value(args[1]).sum()))
        elif packet in _SHAPED_BY_VALUES and known is not None:
            out = tree_map(self._like, known)
        else:
            with self.fake:
                out = func(*args, **kwargs)
        self._track(out)
        _remember(out, known)
        return out

    @contextmanager
    def at(self, moment: str) -> Iterator[None]:
        """Count waits and keep peaks under a name."""
        before = self.moment, self.counting
        self.moment, self.counting = moment, True
        self.peaks[moment] = max(self.peaks[moment], self.alive)
        yield
        self.moment, self.counting = before

    def _for_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation for real; memory that is to be pinned is taken for it."""
        out = func(*args, **{name: value for name, value in kwargs.items() if name != "pin_memory"})
        if kwargs.get("pin_memory"):
            self.pinned.add(out.untyped_storage()._cdata)
        return out

    def _like(self, real: torch.Tensor) -> torch.Tensor:
        with self.fake:
            return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="cuda")

    def _without_masks(self, indices: Any) -> list[Any]:
        """Indices with the places that masks select in place of the masks."""
        flat: list[Any] = []
        for index in indices:
            if index is None or index.dtype is not torch.bool:
                flat.append(index)
            else:
                flat += [self._like(places) for places in _value(index).nonzero(as_tuple=True)]
        return flat

    def _list(self, tensor: FakeTensor) -> Any:
        self._note("tolist")
        return _value(tensor).tolist()

    def _note(self, what: str) -> None:
        if self.counting:
            self.waits.append(Wait(what, _site() if not self.node else f"backward of {self.node}"))

    def _track(self, out: Any) -> None:
        for leaf in tree_leaves(out):
            if isinstance(leaf, FakeTensor) and leaf.device.type == "cuda":
                self.hold(leaf)

    def hold(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage as long as it lives."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        size = -(-storage.nbytes() // ROUND) * ROUND
        self._storages[key] = size
        self.alive += size
        if self.sites is not None:
            self.sites[key] = size, f"{_site()} {tuple(tensor.shape)} {tensor.dtype}"
        weakref.finalize(storage, self._freed, key)
        if self.alive > self.peaks[self.moment]:
            self.peaks[self.moment] = self.alive
            if self.sites is not None and self.alive > 1.001 * self.at_peak.get(self.moment, {"": 0})[""]:
                sums: Counter[str] = Counter()
                for held, site in self.sites.values():
                    sums[site] += held
                self.at_peak[self.moment] = {**sums, "": self.alive}

    def _freed(self, key: int) -> None:
        self.alive -= self._storages.pop(key)
        if self.sites is not None:
            self.sites.pop(key, None)


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return isinstance(value, FakeTensor) and value.device.type == "cuda"
    if isinstance(value, str):
        return value.startswith("cuda")
    return isinstance(value, torch.device) and value.type == "cuda"


def _wait(func: Any, packet: Any, args: Any, kwargs: Any, pinned: set[int]) -> str | None:
    """Name what an operation on the device makes the host wait for; None where it does not."""
    name = func._schema.name
    if packet in _WAITING or name in _LOOPS:
        return name
    if (
        packet is aten.repeat_interleave
        and kwargs.get("output_size") is None
        and func is not aten.repeat_interleave.self_int
    ):
        return name
    if packet in _MASKABLE and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
        return f"{name} by a mask"
    if packet in (aten._to_copy, aten.copy_):
        source = args[1] if packet is aten.copy_ else args[0]
        target = args[0] if packet is aten.copy_ else kwargs.get("device", source)
        asynchronous = packet is aten.copy_ and (kwargs.get("non_blocking") or args[2:3] == (True,))
        to_pinned = asynchronous and target.untyped_storage()._cdata in pinned
        if _is_cuda(source) and not _is_cuda(target) and not to_pinned:
            return f"{name} to the host"
        if _is_cuda(target) and not _is_cuda(source) and source.dim() and source.untyped_storage()._cdata not in pinned:
            return f"{name} to the device from memory that is not pinned"
    return None


def _check_products(packet: Any, args: Any) -> set[tuple[int, ...]]:
    """Refuse factors of two dtypes, as kernels do and shape functions do not; give the shapes with unaligned rows."""
    first = _PRODUCTS.get(packet)
    if first is None:
        return set()
    factors = args[first : first + 2]
    if factors[0].dtype is not factors[1].dtype:
        raise RuntimeError(f"{packet} of {factors[0].dtype} and {factors[1].dtype}")
    return {
        tuple(factor.shape)
        for factor in factors
        if factor.itemsize == 2 and min(factor.shape) > 1 and max(factor.stride()[-2:]) * factor.itemsize % _ROW_BYTES
    }


def _value(tensor: torch.Tensor) -> torch.Tensor:
    """What the host would read of a tensor on the device."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    known = getattr(tensor, "known", None)
    if known is not None:
        return known
    if tensor.dtype is torch.bool or tensor.is_floating_point():
        return torch.ones(tensor.shape, dtype=tensor.dtype)  # checks pass, and sums are finite
    raise RuntimeError(f"the host reads {tuple(tensor.shape)} integers of the device that follow from what it computed")


def _on_host(tensor: torch.Tensor, kwargs: Any) -> torch.Tensor:
    known = getattr(tensor, "known", None)
    dtype = kwargs.get("dtype") or tensor.dtype
    return torch.zeros(tensor.shape, dtype=dtype) if known is None else known.to(dtype)


def _known_result(func: Any, packet: Any, args: Any, kwargs: Any, leaves: list[Any]) -> Any:
    """The real result of an operation on integers and booleans whose values are known; None for any other."""
    written = [a for a, s in zip(args, func._schema.arguments, strict=False) if s.alias_info and s.alias_info.is_write]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    values = {}
    for tensor in tensors:
        value = getattr(tensor, "known", None) if isinstance(tensor, FakeTensor) else tensor
        if value is None or tensor.is_floating_point():
            values = None
            break
        values[id(tensor)] = value
    dtype = kwargs.get("dtype")
    random = torch.Tag.nondeterministic_seeded in func.tags or packet in (
        aten.empty,
        aten.empty_strided,
        aten.empty_like,
    )
    if values is None or random or (dtype is not None and dtype.is_floating_point) or func.namespace != "aten":
        for tensor in tree_leaves(written):
            if isinstance(tensor, FakeTensor):
                tensor.known = None
        return None

    def real(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return values[id(value)]
        return torch.device("cpu") if isinstance(value, torch.device) else value

    return func(*tree_map(real, args), **tree_map(real, kwargs))


def _remember(out: Any, known: Any) -> None:
    if known is None:
        return
    for made, real in zip(tree_leaves(out), tree_leaves(known), strict=True):
        if isinstance(made, FakeTensor) and not made.is_floating_point():
            made.known = real


def _site() -> str:
    """Where in a model's or this library's code the host is, with the function that torch calls in between left out."""
    for frame, line in traceback.walk_stack(sys._getframe(2)):
        path = Path(frame.f_code.co_filename)
        if "torch" not in path.parts and (path.parent.name, path.name) not in _BETWEEN:
            return f"{'/'.join(path.parts[-2:])}:{line}"
    return "?"
