"""Events of a trace as columns, in whole nanoseconds, and the operands of operators where a trace has shapes.

Source: `Input Dims`, `Input type` and `Input Strides` of torch.profiler with record_shapes=True (torch 2.0 to 2.13).
"""

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.int64]

NONE = -1  # in any column: the event does not say
UNKNOWN_DEVICE = "unknown device"  # name of a device that a file does not name

_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_TYPES = {name: (int(size), str(short)) for name, (size, short) in _TABLE["types"].items()}
_LISTS = {"TensorList", "GenericList"}  # lists of tensors, whose types a trace does not name
_WRITE_ONLY = set(_TABLE["operators"]["write_only"])
_VIEWS = re.compile(f"_?({'|'.join(_TABLE['operators']['views'])})_?")
_PICKING, _REDUCING = (re.compile("|".join(_TABLE["operators"][name])) for name in ("picking", "reducing"))
# Operators of these namespaces work element by element, but for those of the table. Of other namespaces (custom
# operators) nobody knows which elements they read.
_ELEMENTWISE_NAMESPACES = {"aten", "prims", ""}


class Kind(IntEnum):
    """Kind of an event: the first three kinds are the device's, the other kinds the host's."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2
    OPERATOR = 3
    ANNOTATION = 4
    PYTHON = 5
    LAUNCH = 6  # a call of the device's runtime or driver; synchronisations are among them


@dataclass(frozen=True, slots=True)
class Events:
    """Events as columns of one length; NONE where an event does not say."""

    kind: Column  # a `Kind`
    name: Column  # index into the trace's names
    start_ns: Column  # beginning on the trace's clock [ns]
    end_ns: Column  # end [ns], >= start_ns
    track: Column  # thread of a process on the host, stream on the device
    device: Column  # index of the device; NONE on the host
    correlation: Column  # number that a launch and what it launched share
    sequence: Column  # number that an operator of the forward pass and its backward share
    forward_thread: Column  # 0 in forward, above 0 in backward: the profiler's number of the forward's thread
    group: Column  # index into the trace's names of what a collective says of itself (kind, group, elements)
    operands: Column  # index into the trace's operands, of an operator whose shapes were recorded
    num_bytes: Column  # bytes that a copy moves

    def __len__(self) -> int:
        return len(self.kind)

    def take(self, which: npt.NDArray[Any]) -> "Events":
        """Events of a mask or in an order."""
        return Events(*(getattr(self, field)[which] for field in self.__slots__))


class Product(NamedTuple):
    """Sizes of a matrix product: `batch` products of M x K with K x N."""

    batch: int
    m: int
    n: int
    k: int
    dtype: str  # short name of the first factor's type, such as "bf16"

    @property
    def flops(self) -> int:
        """FLOPs of one call; a multiply-add is 2."""
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class Operands:
    """The tensors that an operator was called with."""

    sizes: tuple[tuple[int, ...], ...]  # sizes of each argument; () of what is a number or no tensor at all
    types: tuple[str, ...]  # name of each tensor's type, as the profiler writes it; "" of what is no tensor
    # elements of each argument that memory holds; a tensor that is expanded has fewer than its sizes say
    num_read: tuple[int, ...]
    has_list: bool  # an argument is a list of tensors, whose types are not told
    # elements of all tensors of each list; 0 of one whose sizes are not told, as of more than 30 tensors
    list_numel: tuple[int, ...] = ()

    @classmethod
    def read(cls, dims: Any, types: Any, strides: Any) -> Self:
        """Read the operands that the profiler wrote; an argument in an unexpected form counts as no tensor."""
        dims, types, strides = (column if isinstance(column, list) else [] for column in (dims, types, strides))
        sizes: list[tuple[int, ...]] = []
        kinds: list[str] = []
        num_read: list[int] = []
        for i, (size, kind) in enumerate(zip(dims, types, strict=False)):
            if str(kind) not in _TYPES or not _is_size(size):
                sizes.append(())
                kinds.append("")
                num_read.append(0)
                continue
            steps = strides[i] if i < len(strides) and _is_size(strides[i]) else []
            steps = steps if len(steps) == len(size) else [1] * len(size)
            sizes.append(tuple(size))
            kinds.append(kind)
            num_read.append(math.prod(n for n, step in zip(size, steps, strict=True) if step))
        list_numel = [_numel_of_list(size) for size, kind in zip(dims, types, strict=False) if str(kind) in _LISTS]
        return cls(tuple(sizes), tuple(kinds), tuple(num_read), bool(list_numel), tuple(list_numel))

    def bytes_moved(self, operator: str) -> int | None:
        """Bytes that an operator must read and write at least, nothing of it kept in a cache; None if unknown.

        All that it reads, once, and what it writes: as much as its largest operand, as of what works element by
        element; nothing where it reduces; one of its operands where that is written in place of a result (`copy_`,
        generated kernels of Triton). A view moves nothing, a look-up the rows that it finds.

        >>> Operands.read([[8, 4], [4], []], ["float", "float", "Scalar"], None).bytes_moved("aten::add")
        272
        """
        namespace, _, name = operator.rpartition("::")
        name = name.removesuffix("_out")
        if _VIEWS.fullmatch(name):
            return 0
        if namespace not in _ELEMENTWISE_NAMESPACES:
            return None
        operand_bytes = [count * _TYPES[kind][0] for count, kind in zip(self.num_read, self.types, strict=True) if kind]
        if name in ("embedding", "gather"):
            return self._bytes_looked_up(operand_bytes)
        if self.has_list or not operand_bytes or _PICKING.fullmatch(name):
            return None
        if name in _WRITE_ONLY:
            return operand_bytes[0]
        writes_an_operand = name == "copy_" or name.startswith("triton_")
        return sum(operand_bytes) + (0 if writes_an_operand or _REDUCING.fullmatch(name) else max(operand_bytes))

    def _bytes_looked_up(self, operand_bytes: Sequence[int]) -> int | None:
        """Bytes of a look-up: the indices, and each element or row of the table that one names, read and written."""
        if len(operand_bytes) < 2 or not self.types[0]:
            return None
        where = max(i for i, kind in enumerate(self.types) if kind)
        rows = math.prod(self.sizes[where])
        # `gather` has as many axes in its indices as in its table, and picks elements; `embedding` picks whole rows.
        width = 1 if len(self.sizes[where]) == len(self.sizes[0]) and where > 1 else math.prod(self.sizes[0][1:])
        return operand_bytes[-1] + 2 * rows * width * _TYPES[self.types[0]][0]

    def product(self, operator: str) -> Product | None:
        """Sizes of the matrix product that an operator computes; None for other operators, or without recorded sizes.

        >>> Operands.read([[10], [8, 4], [4, 10]], ["float"] * 3, None).product("aten::addmm")
        Product(batch=1, m=8, n=10, k=4, dtype='fp32')
        """
        form = _FORMS.get(operator.rpartition("::")[2].removesuffix("_"))
        if form is None:
            return None
        first, is_linear = form
        if len(self.sizes) < first + 2 or not self.types[first]:
            return None
        a, b = self.sizes[first : first + 2]
        if is_linear:
            a, b = (math.prod(a[:-1]), *a[-1:]), b[::-1]
        if operator.endswith(_GROUPED) and len(a) + len(b) == 5:
            a, b = a[-2:], b[-2:]  # one factor per group, and each row or column of the other is of one group
        if len(a) != len(b) or len(a) not in (2, 3) or a[-1] != b[-2] or a[:-2] != b[:-2]:
            return None
        return Product(math.prod(a[:-2]), a[-2], b[-1], a[-1], _TYPES[self.types[first]][1])

    @property
    def dtype(self) -> str | None:
        """Short name of the first tensor's type, such as "bf16"; None without one."""
        return next((_TYPES[kind][1] for kind in self.types if kind), None)


@dataclass(frozen=True, slots=True)
class Trace:
    """One process's trace."""

    path: Path  # the file
    names: Sequence[str]  # every name that occurs, once
    operands: Sequence[Operands]  # all that operators were called with, each once; empty where no shapes were recorded
    device: Events  # kernels, copies and fills, by start
    host: Events  # operators, annotations, Python functions and launches, by track, then start, the outer one first
    steps: tuple[tuple[int, int, int], ...]  # number, start and end [ns] of each `ProfilerStep#`, by start
    step_track: int  # the host thread of the steps; NONE without steps
    rank: int  # rank of the job, 0 where the file does not say
    world_size: int | None  # processes of the job, as the file says; None if it does not
    device_name: str  # name of the device, as the file says; "CPU" where nothing ran on a device
    headway: Mapping[str, Any] | None  # object that Headway wrote beside the events; None in other people's traces
    # compute capability of an NVIDIA device, such as (9, 0); None where the file does not say
    capability: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()  # remarks on the file, as sentences

    @property
    def is_cpu_only(self) -> bool:
        """True if nothing ran on a device, so that operators of the host take the place of kernels."""
        return len(self.device) == 0


def _numel_of_list(sizes: Any) -> int:
    """Elements of all tensors of a list by their sizes; 0 if the sizes are unknown."""
    is_told = isinstance(sizes, list) and all(map(_is_size, sizes))
    return sum(map(math.prod, sizes)) if is_told else 0


def _is_size(size: Any) -> bool:
    return isinstance(size, list) and all(isinstance(n, int) for n in size)


# Rows are sorted by group (expert), so that together they are one product. Their scaled form has sizes alike.
_GROUPED = ("_grouped_mm", "_scaled_grouped_mm")
# Forms of products: which operand is the first factor, and whether the second is a weight of N x K.
_FORMS = {
    **dict.fromkeys(("mm", "bmm", "matmul", "_int_mm", "_scaled_mm", "_scaled_mm_v2", *_GROUPED), (0, False)),
    **dict.fromkeys(("addmm", "_addmm_activation", "baddbmm"), (1, False)),
    **dict.fromkeys(("linear", "_mkl_linear", "_linear_pointwise", "mkldnn_linear"), (0, True)),
}
