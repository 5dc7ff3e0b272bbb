"""Phantom tensors: floating-point tensors that are only a shape, so that a model of any size runs on a laptop.

Their operations run on PyTorch's meta kernels. Integer and boolean tensors stay real, so grids, boundaries, window
indices and boolean masks drive the model's Python as they would in training. Each phantom knows three things about its
past: `sources`, the parameters that autograd could send its gradient to (bit i for parameter i); `fed`, whether it
depends on the batch at all (an activation) or on parameters alone (a weight, a cast or view of one); and `scores`,
the product of two activations that it came from, scaled, shifted, masked or normalised since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

from headway.errors import TraceError

aten = torch.ops.aten

# (operation, arguments, meta result) -> the product of two activations that it was; False for any other product, whose
# result is no score whatever its operands were; None for what is no product
OnDispatch = Callable[[Any, tuple[Any, ...], Any], Any]
_on_dispatch: OnDispatch | None = None
_results: dict[Any, Any] = {}  # (operation, shapes) -> meta result; layers repeat each other, and meta kernels are slow


class Phantom(torch.Tensor):
    """A CPU tensor of floats without data; `meta` holds its shape, strides and dtype.

    Where gradients are off, `sources` is kept all the same: what a custom `autograd.Function` returns requires
    gradients although its forward ran without. So `sources` means something only on a tensor that requires gradients.
    """

    meta: torch.Tensor
    sources: int
    fed: bool
    base: Phantom | None
    scores: Any

    @staticmethod
    def __new__(cls: type[Phantom], meta: torch.Tensor, *_past: Any, **_more: Any) -> Phantom:
        """Wrap a meta tensor; `__init__` takes its past."""
        return torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=torch.device("cpu"),
        )

    def __init__(self, meta: torch.Tensor, sources: int = 0, fed: bool = False, base: Phantom | None = None) -> None:
        self.meta = meta
        self.sources = sources
        self.fed = fed
        self.base = base
        self.scores = None

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]  # torch's keyword only steers its printing
        return f"Phantom({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it as an instance method
        cls, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on shapes and hand it to the recorder."""
        return _run(func, args, kwargs or {})


def phantom(tensor: torch.Tensor, *, sources: int = 0, fed: bool = False) -> Phantom:
    """Make a phantom with the shape and dtype of a tensor.

    Args:
        tensor: any tensor; its data is not read.
        sources: parameters upstream, bit i for parameter i.
        fed: whether it depends on the batch.
    """
    return Phantom(tensor.detach().to("meta"), sources, fed)


class Recording:
    """While entered, hands every operation on phantoms to `on_dispatch(func, args, meta_out)`."""

    def __init__(self, on_dispatch: OnDispatch) -> None:
        self.on_dispatch = on_dispatch

    def __enter__(self) -> None:
        self._previous = _set_on_dispatch(self.on_dispatch)

    def __exit__(self, *exception: object) -> None:
        _set_on_dispatch(self._previous)


def _set_on_dispatch(on_dispatch: OnDispatch | None) -> OnDispatch | None:
    global _on_dispatch  # __torch_dispatch__ is a class method: there is no instance to hold it
    previous, _on_dispatch = _on_dispatch, on_dispatch
    _results.clear()
    return previous


def _root(tensor: Phantom) -> Phantom:
    """Follow a view to the tensor that it looks at."""
    return tensor if tensor.base is None else tensor.base


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the leaves of an operation's arguments: tuples, lists and what they hold."""
    if isinstance(value, tuple | list):
        return type(value)(_map(function, v) for v in value)
    return function(value)


def _meta(value: Any) -> Any:
    if isinstance(value, Phantom):
        return value.meta
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _meta_device(value: Any) -> Any:
    return torch.device("meta") if isinstance(value, torch.device) else _meta(value)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors among an operation's arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for v in value:
            yield from _tensors(v)


def _index_without_masks(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace real boolean masks by the indices they select; meta kernels cannot know how many that is."""
    flat: list[Any] = []
    for index in args[1]:
        flat += index.nonzero(as_tuple=True) if index is not None and index.dtype == torch.bool else (index,)
    return (args[0], flat, *args[2:])


def _key(value: Any) -> Any:
    """Describe an argument by all that decides its operation's result shape; scalars by type too, since 1 == 1.0."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return tuple(_key(v) for v in value)
    return type(value), value


def _shapes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation's meta kernel, or recall what it gave for the same shapes."""
    if func._overloadpacket is aten._pack_padded_sequence:
        return _pack(*args)
    key = None
    if not func._schema.is_mutable and not kwargs.get("generator"):
        key = (func, _key(args), tuple((name, _key(value)) for name, value in kwargs.items()))
        if key in _results:
            return _results[key]
    try:
        out = func(*_map(_meta, args), **{name: _map(_meta_device, value) for name, value in kwargs.items()})
    except NotImplementedError as error:
        raise TraceError(f"{func} has no kernel that works on shapes alone: {str(error).splitlines()[0]}") from error
    if key is not None and _on_dispatch is not None:
        _results[key] = out
    return out


def _pack(padded: Phantom, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack padded sequences by their real lengths; returns a meta tensor, and the real batch size of each step."""
    thin = torch.zeros(*padded.shape[:2], 1)
    data, batch_sizes = aten._pack_padded_sequence(thin, lengths, batch_first)
    return padded.meta.new_empty(len(data), *padded.shape[2:]), batch_sizes


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    packet = func._overloadpacket
    if packet in (aten.index, aten.index_put, aten.index_put_, aten._unsafe_index):
        args = _index_without_masks(args)
    elif packet is aten._local_scalar_dense:
        return 0.0
    elif packet in (aten.equal, aten.is_same_size):
        return args[0].shape == args[1].shape
    elif packet is aten.detach and torch._C._current_autograd_node() is None:
        source = args[0]
        return Phantom(source.meta.detach(), 0, source.fed, _root(source))
    out = _shapes(func, args, kwargs)
    flat = [*_tensors(args), *_tensors(list(kwargs.values()))]
    phantoms = [t for t in flat if isinstance(t, Phantom)]
    sources = 0
    if torch._C._current_autograd_node() is None:
        for p in phantoms:
            sources |= p.sources if p.requires_grad or not torch.is_grad_enabled() else 0
    # a real integer tensor is an index made from the batch: rows picked by it are activations
    fed = any(p.fed for p in phantoms) or any(not isinstance(t, Phantom) and t.dim() > 0 for t in flat)
    product = _on_dispatch(func, args, out) if _on_dispatch is not None else None
    scores = {p.numel(): p.scores for p in phantoms if p.scores is not None}
    if func._schema.is_mutable:
        return _mutated(func, args, kwargs, sources, fed)
    view_of = args[0] if func.is_view and args and isinstance(args[0], Phantom) else None
    base = None if view_of is None else _root(view_of)

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_floating_point() or value.is_complex():
            made = Phantom(value, sources, fed, base)
            made.scores = scores.get(value.numel()) if product is None else (product or None)
            return made
        return torch.zeros(value.shape, dtype=value.dtype) if value.is_meta else value

    return _map(wrap, out)


def _mutated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sources: int, fed: bool) -> Any:
    """Return what an in-place or `out=` operation wrote to, with its past brought up to date."""
    if torch.Tag.inplace_view in func.tags:
        with no_dispatch():
            func(*args, **kwargs)  # its own sizes change, as those of its meta tensor did
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        target = kwargs.get(argument.name) if position >= len(args) else args[position]
        for tensor in _tensors(target):
            written.append(tensor)
            if isinstance(tensor, Phantom):
                for t in (tensor, tensor.base) if tensor.base is not None else (tensor,):
                    t.sources |= sources
                    t.fed = t.fed or fed
            elif sources:
                raise TraceError(
                    f"{func} writes activations into a tensor of {tensor.dtype} that was made from no activation, "
                    f"of shape {tuple(tensor.shape)}: its gradient cannot be followed."
                )
    if len(func._schema.returns) == 0:
        return None
    return written[0] if len(func._schema.returns) == 1 else tuple(written)
