"""Phantom tensors: floating-point tensors that are only a shape, so that a model of any size runs on a laptop.

Their operations run on PyTorch's meta kernels. Integer and boolean tensors stay real, so grids, boundaries, window
indices and boolean masks drive the model's Python as they would in training. Each phantom knows a few things about its
past: `sources`, the parameters that autograd could send its gradient to (bit i for parameter i); `fed`, whether it
depends on the batch at all (an activation) or on parameters alone (a weight, a cast or view of one); `scores`, the
product of two activations that it came from, scaled, shifted, masked or normalised since; `stays`, which of its pairs
a mask has not hidden; and `constant`, the data of one.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._mode_utils import no_dispatch

from headway.tracing import known_values

aten = torch.ops.aten

# (operation, arguments, meta result) -> the product of two activations that it was; False for any other product, whose
# result is no score whatever its operands were; None for what is no product
OnDispatch = Callable[[Any, tuple[Any, ...], Any], Any]
# (operation, arguments, result) -> which pairs stay in the result, where it may be scores or a bias
OnResult = Callable[[Any, tuple[Any, ...], Any], Any]
# pairs that no mask has hidden: booleans (..., queries, keys); None for all of them, "unclear" where nobody can say
Stays = torch.Tensor | Literal["unclear"] | None
_on_dispatch: OnDispatch | None = None
_on_result: OnResult | None = None
_own_storages: frozenset[int] = frozenset()  # addresses of the data that the model holds beside its parameters
# (operation, shapes) -> meta result: layers, runs and models repeat each other, and meta kernels are slow
_results: dict[Any, Any] = {}
_MOST_RESULTS = 1 << 13  # a few megabytes


class Phantom(torch.Tensor):
    """A CPU tensor of floats without data; `meta` holds its shape, strides and dtype.

    Where gradients are off, `sources` is kept all the same: what a custom `autograd.Function` returns requires
    gradients although its forward ran without. So `sources` means something only on a tensor that requires gradients.
    """

    meta: torch.Tensor
    sources: int
    fed: bool
    base: "Phantom | None"
    scores: Any
    stays: Stays
    writes: int
    picked: bool

    @staticmethod
    def __new__(cls: "type[Phantom]", meta: torch.Tensor, *_past: Any, **_more: Any) -> "Phantom":
        """Wrap a meta tensor; `__init__` takes its past."""
        return torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=torch.device("cpu"),
        )

    def __init__(self, meta: torch.Tensor, sources: int = 0, fed: bool = False, base: "Phantom | None" = None) -> None:
        self.meta = meta
        self.sources = sources
        self.fed = fed
        self.base = base
        self.scores = None
        self.stays = None
        self.forced: torch.Tensor | None = None  # places of infinity along the last axis: a top-k picks these
        self.parts: known_values.Parts | None = None  # values that are known for some places along an axis
        self.writes = 0  # in-place operations on it or on its views
        self.picked = False  # rows that an index picked, or a view of such
        self.is_sparse_matrix = False  # whether it stands in for one
        self.steps = 0  # elementwise products and sums of activations, one after another, that it came out of
        self._constant: tuple[torch.Tensor, int] | None = None

    @property
    def constant(self) -> torch.Tensor | None:
        """Data of a constant; None if the data is unknown, or was written to since."""
        return self._constant[0] if self._constant is not None and self._constant[1] == root(self).writes else None

    @constant.setter
    def constant(self, value: torch.Tensor | None) -> None:
        self._constant = None if value is None else (value, root(self).writes)

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]  # torch's keyword only steers its printing
        return f"Phantom({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it as an instance method
        cls, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on shapes and hand it to the recorder."""
        if torch.is_inference_mode_enabled():  # without autograd, nothing is decomposed on its way here
            out = func.decompose(*args, **(kwargs or {}))
            if out is not NotImplemented:
                return out
        return _run(func, args, kwargs or {})


def phantom(tensor: torch.Tensor, *, fed: bool = False) -> Phantom:
    """Make a phantom with the shape and dtype of a tensor.

    Args:
        tensor: any tensor; its data is not read.
        fed: whether it depends on the batch.
    """
    return Phantom(tensor.detach().to("meta"), fed=fed)


def phantom_floats(shape: Sequence[int]) -> Phantom:
    """Make floats of the batch (an input, or another model's output) that are a shape alone."""
    return Phantom(torch.empty(tuple(shape), device="meta", dtype=torch.bfloat16), fed=True)


def blank(tensor: torch.Tensor) -> torch.Tensor:
    """Make a new buffer of floats a constant, so that activations may be written into it."""
    if not tensor.is_floating_point() or tensor.device.type != "cpu" or not 0 < tensor.numel() <= _LARGEST_KNOWN:
        return tensor
    buffer = phantom(tensor)
    buffer.constant = tensor
    return buffer


class Recording:
    """Mode that hands operations on phantoms to `on_dispatch`, and results of other operations to `on_result`.

    Args:
        model: whose own integers, such as the places at which a matrix is filled, are not of the batch.
        on_dispatch: see `OnDispatch`.
        on_result: see `OnResult`.
    """

    def __init__(self, model: nn.Module, on_dispatch: OnDispatch, on_result: OnResult) -> None:
        own = [*known_values.tensors([vars(module) for module in model.modules()])]
        self._tensors = own  # references, so that no other tensor gets the address of one of these
        self.listeners = (on_dispatch, on_result, frozenset(map(_storage, own)) - {0})

    def __enter__(self) -> None:
        self._previous = _listen(*self.listeners)

    def __exit__(self, *exception: object) -> None:
        _listen(*self._previous)


def _storage(tensor: torch.Tensor) -> int:
    """Return the address of a plain tensor's data, which its views share; 0 for any other tensor."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    return tensor.untyped_storage().data_ptr() if is_plain else 0


def _listen(
    on_dispatch: OnDispatch | None, on_result: OnResult | None, storages: frozenset[int]
) -> tuple[OnDispatch | None, OnResult | None, frozenset[int]]:
    global _on_dispatch, _on_result, _own_storages  # __torch_dispatch__ is a class method: no instance holds them
    previous = (_on_dispatch, _on_result, _own_storages)
    _on_dispatch, _on_result, _own_storages = on_dispatch, on_result, storages
    if len(_results) > _MOST_RESULTS:
        _results.clear()
    return previous


def is_identity(tensor: torch.Tensor) -> bool:
    """Say whether a real tensor is an identity matrix, whose product with a weight is that weight: no activation."""
    square = tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1] and tensor.is_floating_point()
    return square and torch.equal(tensor, torch.eye(len(tensor), dtype=tensor.dtype))


PRODUCTS = {aten.mul, aten.mul_, aten.addcmul, aten.addcmul_, aten.lerp, aten.lerp_}  # element by element
_JOINING = PRODUCTS | {aten.add, aten.add_, aten.sub, aten.sub_}


def elementwise_operands(packet: Any, args: tuple[Any, ...]) -> "list[Phantom]":
    """List the activations that an operation multiplies or adds element by element; none for another operation."""
    if packet not in _JOINING:
        return []
    return [a for a in args if isinstance(a, Phantom) and a.fed and a.numel() > 1]


def root(tensor: Phantom) -> Phantom:
    """Follow a view to the tensor that it looks at."""
    return tensor if tensor.base is None else tensor.base


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_map(function, v) for v in value)
    return function(value)


def _meta(value: Any) -> Any:
    if isinstance(value, Phantom):
        return value.meta
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _meta_device(value: Any) -> Any:
    return torch.device("meta") if isinstance(value, torch.device) else _meta(value)


def _index_without_masks(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace real boolean masks by the indices they select; meta kernels cannot know how many that is."""
    flat: list[Any] = []
    for index in args[1]:
        flat += index.nonzero(as_tuple=True) if index is not None and index.dtype == torch.bool else (index,)
    return (args[0], flat, *args[2:])


def _key(value: Any) -> Any:
    """Describe an argument by all that decides its operation's result shape; scalars by type too, since 1 == 1.0."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.storage_offset(), value.dtype
    if isinstance(value, tuple | list):
        return tuple(_key(v) for v in value)
    return type(value), value


def _shapes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation's meta kernel, or recall what it gave for the same shapes."""
    if func._overloadpacket is aten._pack_padded_sequence:
        return _pack(*args)
    if torch.Tag.inplace_view in func.tags and isinstance(args[0], Phantom):
        args[0].meta = args[0].meta.detach()  # sizes are about to change, and other phantoms may share the meta tensor
    # bfloat16 is all that the kernel takes on shapes
    if func._overloadpacket is aten._grouped_mm and args[0].dtype != torch.bfloat16:
        return func(*(a.meta.bfloat16() if isinstance(a, Phantom) else _meta(a) for a in args)).to(args[0].dtype)
    if func._overloadpacket.__name__.startswith(
        "_scaled_mm"
    ):  # takes 8-bit floats alone, which parameters are not here
        args = (*(a if a.dtype.itemsize == 1 else a.meta.to(torch.float8_e4m3fn) for a in args[:2]), *args[2:])
    key = None
    if not func._schema.is_mutable and not kwargs.get("generator"):
        options = tuple((name, _key(value)) for name, value in kwargs.items())
        key = (func, torch.get_default_dtype(), _key(args), options)
        if key in _results:
            return _results[key]
    try:
        out = func(*_map(_meta, args), **{name: _map(_meta_device, value) for name, value in kwargs.items()})
    except NotImplementedError as error:
        reason = str(error).splitlines()[0].partition(". ")[0]  # pages on PyTorch's backends follow
        raise RuntimeError(f"{func} has no kernel that works on shapes alone: {reason}.") from error
    if key is not None and _on_dispatch is not None:
        _results[key] = out
    return out


# constants that take only their shape from an operand
_CONSTANT: dict[Any, Callable[[tuple[Any, ...]], Any]] = {
    aten.zeros_like: lambda _: 0,
    aten.new_zeros: lambda _: 0,
    aten.ones_like: lambda _: 1,
    aten.new_ones: lambda _: 1,
    aten.full_like: lambda args: args[1],
    aten.new_full: lambda args: args[2],
}
_LARGEST_KNOWN = 1 << 27  # elements; masks over more are not worth their memory


def _constant(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> torch.Tensor | None:
    """Compute the result of an operation on constants alone; None where an operand is not known, or it is random."""
    packet = func._overloadpacket
    if not isinstance(out, torch.Tensor) or out.numel() > _LARGEST_KNOWN:
        return None
    if packet in _CONSTANT:
        is_real = not (out.is_floating_point() or out.is_complex())  # integers are handed out, and may be written to
        filled = torch.full(out.shape if is_real else (), _CONSTANT[packet](args), dtype=out.dtype)
        return filled.expand(out.shape)
    if torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten":
        return None
    if any(isinstance(t, Phantom) and t.constant is None for t in known_values.tensors((*args, *kwargs.values()))):
        return None
    try:
        real: torch.Tensor = func(
            *_map(_constant_of, args), **{name: _map(_constant_of, v) for name, v in kwargs.items()}
        )
    except IndexError:  # a segment beyond the model's table of positions: its shapes are right all the same
        return None
    return real


_PICKING = {aten.index, aten.index_select, aten.gather}  # operations that pick rows
_SAME = {aten.clone, aten._to_copy, aten._unsafe_view}  # operations after which rows are still those


def _picked(packet: Any, args: tuple[Any, ...]) -> bool:
    """Say whether a result holds rows that an index picked, or is a view or copy of such."""
    return packet in _PICKING or (packet in _SAME and args[0].picked)


def _constant_of(value: Any) -> Any:
    return value.constant if isinstance(value, Phantom) else value


def _pack(padded: Phantom, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack padded sequences by their real lengths; returns a meta tensor, and the real batch size of each step."""
    thin = torch.zeros(*padded.shape[:2], 1)
    data, batch_sizes = aten._pack_padded_sequence(thin, lengths, batch_first)
    return padded.meta.new_empty(len(data), *padded.shape[2:]), batch_sizes


def _answer(packet: Any, args: tuple[Any, ...]) -> Any:
    """Answer an operation that no kernel on shapes can answer; None for all other operations."""
    if packet is aten._local_scalar_dense:
        return 0.0 if args[0].constant is None else args[0].constant.item()
    if packet in (aten.equal, aten.is_same_size):
        return args[0].shape == args[1].shape
    if packet is aten.detach and torch._C._current_autograd_node() is None:
        return _detached(args[0])
    return None


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # the result's shape, or an answer where no kernel on shapes has one
    packet = func._overloadpacket
    if (answer := _answer(packet, args)) is not None:
        return answer
    if packet in (aten.index, aten.index_put, aten.index_put_, aten._unsafe_index):
        args = _index_without_masks(args)
    out = _shapes(func, args, kwargs)

    # the result depends on its past, and a recorder counts the operation if it is a product
    phantoms, sources, fed = _past(args, kwargs)
    forward = torch._C._current_autograd_node() is None
    product = _on_dispatch(func, args, out) if _on_dispatch is not None else None
    if func._schema.is_mutable:
        for p in phantoms[:1]:
            root(p).steps = max(root(q).steps for q in phantoms) + (len(elementwise_operands(packet, args)) > 1)
        return _mutated(func, args, kwargs, sources, fed)

    # the past that results take over: attention scores of their size, data where all operands are constant, and the
    # tensor that they look at
    scores = {p.numel(): p.scores for p in phantoms if p.scores is not None}
    steps = max((root(p).steps for p in phantoms), default=0) + (len(elementwise_operands(packet, args)) > 1)
    constant = _constant(func, args, kwargs, out) if forward and product is None else None
    view_of = args[0] if func.is_view and args and isinstance(args[0], Phantom) else None
    base = None if view_of is None else root(view_of)

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_floating_point() or value.is_complex():
            result = Phantom(value, sources, fed, base)
            result.constant, result.steps = constant, steps
            result.picked = _picked(packet, args) if view_of is None else view_of.picked
            if product is None:
                result.scores = scores.get(value.numel())
                if packet is aten.sum and phantoms[0].scores is not None and value.dim():
                    result.scores = phantoms[0].scores  # summed over heads, as an indexer does
                if forward and constant is None and _on_result is not None:
                    result.stays = _on_result(packet, args, result)
            else:
                result.scores = product or None
            return result
        return known_values.integers(packet, args, value) if constant is None else constant

    results = _map(wrap, out)
    if forward:
        known_values.follow(packet, args, [t for t in known_values.tensors((results,)) if isinstance(t, Phantom)])
    return results


def _past(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Phantom], int, bool]:
    flat = [*known_values.tensors((*args, *kwargs.values()))]
    phantoms = [t for t in flat if isinstance(t, Phantom)]
    sources = 0
    if torch._C._current_autograd_node() is None:
        for p in phantoms:
            sources |= p.sources if p.requires_grad or not torch.is_grad_enabled() else 0
    # a real integer tensor is an index made from the batch, if not the model's own: rows picked by it are activations
    real = [t for t in flat if not isinstance(t, Phantom) and t.dim() > 0]
    fed = any(p.fed for p in phantoms) or not all(_storage(t) in _own_storages or is_identity(t) for t in real)
    return phantoms, sources, fed


def _detached(source: Phantom) -> Phantom:
    copied = Phantom(source.meta.detach(), 0, source.fed, root(source))
    copied.constant, copied.stays = source.constant, source.stays
    return copied


def _mutated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sources: int, fed: bool) -> Any:
    """Return the tensors that an in-place or `out=` operation wrote to, with their past brought up to date."""
    if torch.Tag.inplace_view in func.tags:
        with no_dispatch():
            func(*args, **kwargs)  # the phantom's own sizes change, as those of its meta tensor did
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        target = kwargs.get(argument.name) if position >= len(args) else args[position]
        for tensor in known_values.tensors((target,)):
            written.append(tensor)
            if isinstance(tensor, Phantom):
                _overwritten(func, args, kwargs, tensor, sources, fed)
            elif sources:
                data_chooses = (
                    ""
                    if tensor.numel()
                    else "; the number of such values (points, boxes) depends on the data, not on shapes"
                )
                raise RuntimeError(
                    f"{func} writes activations into a tensor of {tensor.dtype} that was made from no activation, of "
                    f"shape {tuple(tensor.shape)}, so Headway cannot follow its gradient{data_chooses}."
                )
    if len(func._schema.returns) == 0:
        return None
    return written[0] if len(func._schema.returns) == 1 else tuple(written)


def _overwritten(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Phantom, sources: int, fed: bool
) -> None:
    for t in (tensor, tensor.base) if tensor.base is not None else (tensor,):
        t.sources |= sources
        t.fed = t.fed or fed
    if torch._C._current_autograd_node() is not None:
        return
    constant = None
    if tensor.constant is not None and tensor.base is None and tensor is args[0]:
        copied = (tensor.constant.clone(), *args[1:])
        constant = _constant(func, copied, kwargs, tensor.meta)
    stays = None if constant is not None or _on_result is None else _on_result(func._overloadpacket, args, tensor)
    if tensor.base is not None and stays is not None:
        sizes = slice(-2 if not isinstance(stays, torch.Tensor) or stays.dim() == 2 else None, None)
        is_all_of_it = tensor.base.numel() == tensor.numel() and tensor.base.shape[sizes] == tensor.shape[sizes]
        tensor.base.stays = stays if is_all_of_it else "unclear"
    tensor.stays = stays
    if func._overloadpacket is aten.scatter_ and isinstance(args[3], float) and args[3] == math.inf:
        tensor.forced = args[2] if args[1] % tensor.dim() == tensor.dim() - 1 else None
    root(tensor).writes += 1
    tensor.constant = constant
