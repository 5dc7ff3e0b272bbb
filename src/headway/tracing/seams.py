"""Every seam at which a trace records attention, and every setting that must not hide work meanwhile.

`F.scaled_dot_product_attention` is built into PyTorch and is caught on its way; functions written in Python are
exchanged for the time of the trace. Compilation, the fast path of `nn.MultiheadAttention` and fused recurrent kernels
are switched off, so that a compiled or a fused module dispatches what its eager form does.

A model may have imported an attention function by name, kept it in an attribute or a closure, or compiled it. All of
these hold the same function object, so what is exchanged is that object's code; no reference has to be found.
"""

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from headway.count import masks
from headway.errors import TraceError
from headway.tracing import attention_packages, known_values
from headway.tracing.attention import masked_pairs, of_one_batch, plain_pairs, record_attention, set_recorder
from headway.tracing.operation import READERS
from headway.tracing.phantom import Phantom, aten, blank, phantom
from headway.tracing.record import Recorder
from headway.tracing.unwrap import replaced

_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


class Seams(TorchFunctionMode):
    """While active, attention calls are recorded by `recorder` instead of being decomposed."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __enter__(self) -> Any:
        self._open = ExitStack()
        self._previous = set_recorder(self.recorder)
        self._open.callback(lambda: set_recorder(self._previous))
        self._open.enter_context(torch.compiler.set_stance("force_eager"))
        (fused, *_) = torch.backends.mkldnn.set_flags(_enabled=False)  # type: ignore[no-untyped-call]
        self._open.callback(torch.backends.mkldnn.set_flags, _enabled=fused)
        self._open.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        checks = torch.distributions.Distribution
        self._open.callback(checks.set_default_validate_args, checks._validate_args)
        checks.set_default_validate_args(False)  # the checks would read values
        self._open.enter_context(CodeExchange(self._replacements()))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._open.close()

    def _replacements(self) -> dict[FunctionType, Callable[..., Any]]:
        """Find the attention functions that are imported; a model can call no other."""
        replacements: dict[FunctionType, Callable[..., Any]] = {}
        for module, functions in attention_packages.SEAMS.items():
            for name, seam in functions.items():
                function: Any = sys.modules.get(module)
                for part in name.split("."):
                    function = getattr(function, part, None)
                if isinstance(function, FunctionType):
                    replacements[function] = self._bound(seam, inspect.signature(function))
        return replacements

    def _bound(self, seam: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
        """Call a seam with arguments by name, as the function's own signature names them in the version at hand."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return seam(self.recorder, **signature.bind(*args, **kwargs).arguments)

        return call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # these functions are recorded, or refused, without running
        if func is F.scaled_dot_product_attention and _has_phantom((*args, *kwargs.values())):
            return self._sdpa(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._multi_head(*args, **kwargs)
        if getattr(func, "__name__", "").removesuffix(".default") == "_int_mm":
            return self._integer_product(*args)
        if reason := _refusal(getattr(func, "__name__", ""), (*args, *kwargs.values())):
            raise TraceError(f"module {self.recorder.module or '(the model)'} {reason}")
        if func in _STAND_INS and _has_phantom(args):
            return _STAND_INS[func](*args, **kwargs)

        # anything else runs as it is; placeholders among its arguments are followed, and select no row
        known_values.refuse_lengths(func, args, self.recorder.module)
        selects = known_values.selects_by_floats(func, args)
        try:
            result = func(*(known_values.without_rows(args) if selects else args), **kwargs)
        except Exception as error:
            self.recorder.note_failure(error, getattr(func, "__name__", str(func)))
            raise
        known_values.pass_on(args, kwargs, result)
        if selects and known_values.is_empty(result):
            self.recorder.selecting[self.recorder.module] = None
        if getattr(func, "__name__", "") in ("requires_grad_", "__set__"):
            self._ask(args[0])
        if func is torch.empty and result.is_floating_point():
            return phantom(result)  # an empty tensor holds no data, and may be written activations
        return blank(result) if func in (torch.zeros, torch.eye) else result

    def _ask(self, tensor: torch.Tensor) -> None:
        """Note that a model lets an activation, such as its input, ask for a gradient: it is computed then."""
        if isinstance(tensor, Phantom) and tensor.requires_grad and tensor.is_leaf and not tensor.sources:
            tensor.sources = self.recorder.beyond

    def _integer_product(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Record a product of quantised operands, which are real integers and so no phantoms, and spare it."""
        operation = READERS[aten._int_mm](self.recorder, (left, right), None)
        if operation is not None:
            self.recorder.add(operation)
        return torch.zeros(left.shape[0], right.shape[1], dtype=torch.int32)

    def _sdpa(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        _dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        enable_gqa: bool = False,
        **_options: Any,
    ) -> torch.Tensor:
        """Stand in for `F.scaled_dot_product_attention`: [..., tokens, size], with any axes before, heads the last."""
        path = self.recorder.module
        axes = max(3, *(t.dim() for t in (query, key, value)), 0 if attn_mask is None else attn_mask.dim())
        is_flat = axes > max(t.dim() for t in (query, key, value))
        query, key, value = (t[(None,) * (axes - t.dim())] for t in (query, key, value))
        query, key, value = of_one_batch(query, key, value, axes=3 if enable_gqa else 2)
        if attn_mask is not None:
            pairs, heads, driver = masked_pairs(self.recorder, path, attn_mask, query, key)
        elif is_causal and query.shape[-2] != key.shape[-2]:
            queries, keys = [query.shape[-2]], [key.shape[-2]]
            per_row = masks.banded_pairs(queries, keys, left=None, right=0, bottom_right=False)
            pairs, heads, driver = math.prod(query.shape[:-3]) * per_row, 0, ""
        else:
            (pairs, driver), heads = plain_pairs(query, key, is_causal, None), 0
        extra = () if attn_mask is None else (attn_mask,)
        out = record_attention(
            self.recorder, path, query, key, value, pairs, driver, extra, masked=attn_mask is not None, heads=heads
        )
        return out[0] if is_flat and axes == 3 else out

    def _multi_head(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run `nn.MultiheadAttention`'s forward on this mode's attention, which it reaches while no mode is active.

        The weights that it may return come from the same products as its output, so they are made up as a shape.
        """
        call = _MULTI_HEAD.bind(*args, **kwargs)
        call.apply_defaults()
        wanted, averaged = call.arguments["need_weights"], call.arguments["average_attn_weights"]
        call.arguments["need_weights"] = False
        weights: list[torch.Tensor] = []

        def attention(query: torch.Tensor, key: torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
            out = self._sdpa(query, key, *more, **options)
            weights.append(out[..., :1].expand(*out.shape[:-1], key.shape[-2]))
            return out

        with replaced([(vars(F), "scaled_dot_product_attention", attention)]):
            out, _ = F.multi_head_attention_forward(*call.args, **call.kwargs)
        if not wanted:
            return out, None
        (of_heads,) = weights
        of_heads = of_heads if call.arguments["query"].dim() == 3 else of_heads[0]
        return out, of_heads.mean(-3) if averaged else of_heads


def _pad_packed(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, value: float, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad packed sequences; PyTorch's own writes them into a tensor that is made from no operand."""
    steps = max(len(batch_sizes), total_length)
    sizes = torch.nn.functional.pad(batch_sizes, (0, steps - len(batch_sizes)))
    rows = torch.arange(int(batch_sizes[0]))
    real = rows < sizes[:, None]
    index = torch.where(real, sizes.cumsum(0)[:, None] - sizes[:, None] + rows, len(data))
    padded = torch.cat([data, data.new_full((1, *data.shape[1:]), value)])[index]
    return (padded.transpose(0, 1) if batch_first else padded), real.sum(0)


def _filled(indices: torch.Tensor, values: torch.Tensor, size: Any, **_options: Any) -> torch.Tensor:
    """Stand in for a sparse matrix by the full one, which no kernel on shapes adds to another; no product takes it."""
    full = values.new_zeros(size).index_put(tuple(indices), values, accumulate=True)
    full.is_sparse_matrix = True  # type: ignore[attr-defined]  # a phantom
    return full


_STAND_INS: dict[Any, Callable[..., Any]] = {
    torch._VF._pad_packed_sequence: _pad_packed,
    torch.sparse_coo_tensor: _filled,
}


def _has_phantom(values: Any) -> bool:
    return any(isinstance(value, Phantom) for value in values)


def _refusal(name: str, values: Any) -> str:
    """Say why a function cannot be run on shapes; "" for one that can."""
    if name.startswith("fft_") and any(isinstance(value, Phantom) and value.fed for value in values):
        transform = name.replace("_", ".", 1)
        return (
            f"runs {transform}. A Fourier transform is no matrix product, so Headway cannot count it. Trace the "
            "model without the transform."
        )
    if name.startswith("_nested_") and _has_phantom(values):
        return (
            "makes a nested tensor, but a trace runs on shapes, which hold no lengths. Attend over padded rows with "
            "their mask, or over packed rows by varlen_attn with cumulative boundaries. Both count the same pairs."
        )
    return ""


_PLACE = "the replacement"


def _forward(*args: Any, **kwargs: Any) -> Any:
    replacement: Any = "the replacement"
    return replacement(*args, **kwargs)


def _code_calling(replacement: Callable[..., Any], function: FunctionType) -> CodeType:
    """Make code that calls `replacement`, held as a constant, for a function that may have a closure."""
    constants = tuple(replacement if constant == _PLACE else constant for constant in _forward.__code__.co_consts)
    return _forward.__code__.replace(co_consts=constants, co_freevars=function.__code__.co_freevars)


class CodeExchange:
    """While entered, calls of each function go to its replacement.

    >>> def double(x): return 2 * x
    >>> functions = [double]
    >>> with CodeExchange({double: lambda x: 0}):
    ...     functions[0](21)
    0
    >>> functions[0](21)
    42
    """

    def __init__(self, replacements: Mapping[FunctionType, Callable[..., Any]]) -> None:
        self.replacements = replacements

    def __enter__(self) -> None:
        self._before = [(function, function.__code__) for function in self.replacements]
        for function, replacement in self.replacements.items():
            function.__code__ = _code_calling(replacement, function)

    def __exit__(self, *exception: object) -> None:
        for function, code in self._before:
            function.__code__ = code
