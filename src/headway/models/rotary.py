"""Positions in a pack: angles go by the length of each segment, and slots are counted within it, not in the row.

LongRoPE and dynamic NTK choose frequencies by the largest position of a row, and some models scale by it too. A pack is
one row, so a long segment would turn the angles of every short one beside it. Such an embedding is found by trying it:
the angles of its first positions differ once a far position stands in the row. On a pack it then runs once for all
segments whose lengths give it the same function, mostly one or two times. Attention that counts the slots of its row by
itself, as Llama 4 does to scale its queries, is given those of each segment.

Tensor letters: T slots that this process computes, R rows of positions.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel, modeling_rope_utils
from transformers.modeling_layers import GradientCheckpointingLayer

from headway.errors import ConfigError
from headway.models.parallel.exchange import Split
from headway.models.recurrent import names_read
from headway.models.waits import RunningPack, running_pack
from headway.plugins import lays_out_packs

_FAR = 2**30  # a position beyond every original length

_NO_BOUNDARIES_MESSAGE = (
    "Headway cannot train this model on packs, because its rotary embedding depends on the longest sample of a row. "
    "Set data.strategy to none to put one sample in each pack."
)


def rotate_by_segment(model: PreTrainedModel) -> None:
    """Have rotary embeddings that go by the length of a row go by that of each segment of a pack.

    They also forget the longest row that they have seen, by which dynamic NTK would go on.
    """
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    inside = {id(part) for block in blocks for part in block.modules()}
    for module in list(model.modules()):
        if (function_of := _reader_of_rows(module)) is not None:
            # A block that is computed again in backward is not told of its pack, nor is a model that lays out its own.
            is_blind = id(module) in inside or lays_out_packs(model.config)
            vars(module)["forward"] = _refusing if is_blind else _by_segment(module.forward, function_of)


def count_by_segment(model: PreTrainedModel) -> None:
    """Have attention that counts the slots of its row, as its code tells, count them anew in each segment of a pack."""
    for module in model.modules():
        attends = not isinstance(module, PreTrainedModel) and "ALL_ATTENTION_FUNCTIONS" in names_read(module)
        if attends and "arange" in names_read(module):
            vars(module)["forward"] = _counting(module.forward)


def _counting(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(
        hidden_states: torch.Tensor,
        *args: Any,
        pack_cu_seqlens: torch.Tensor | None = None,
        pack_split: Split | None = None,
        **options: Any,
    ) -> Any:
        if pack_cu_seqlens is None:
            return forward(hidden_states, *args, **options)
        options |= {"pack_cu_seqlens": pack_cu_seqlens, "pack_split": pack_split}
        with _SlotsOfSegments(hidden_states.shape[1], pack_cu_seqlens, pack_split):
            return forward(hidden_states, *args, **options)

    return run


class _SlotsOfSegments(TorchFunctionMode):
    """Answers `torch.arange` of a row with the places of its slots within their segments.

    Args:
        slots: of the row, those that this process computes.
        boundaries_N: of the pack's segments.
        split: how its slots are dealt to several processes; None where one computes all.
    """

    def __init__(self, slots: int, boundaries_N: torch.Tensor, split: Split | None) -> None:
        super().__init__()
        self._slots, self._boundaries_N, self._split = slots, boundaries_N, split

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run torch's function; see the class."""
        out_T: Any = func(*args, **(kwargs or {}))
        if func is not torch.arange or len(args) != 1 or args[0] != self._slots:
            return out_T
        if self._split is not None:
            out_T = out_T + self._split.local().start
        segment_T = torch.searchsorted(self._boundaries_N, out_T, right=True) - 1
        return out_T - self._boundaries_N[segment_T]


def reads_rows(model: nn.Module) -> bool:
    """Tell whether a model has a rotary embedding that goes by the length of a row."""
    return any(_reader_of_rows(module) is not None for module in model.modules())


class _Functions:
    """Tells the functions of an embedding apart, by kind of layer and length of the row.

    Args:
        module: the embedding; a twin of it on the CPU is made of its configuration, as it may have no values yet.
    """

    def __init__(self, module: Any) -> None:
        with torch.device("cpu"):
            self._twin = type(module)(module.config)
        self.kinds: list[str | None] = list(module.rope_type) if isinstance(module.rope_type, dict) else [None]
        self._known: dict[tuple[str | None, int], bytes] = {}
        self._rows = 1
        try:
            self(self.kinds[0], 2)
        except (IndexError, RuntimeError, ValueError):  # the module takes the three rows of M-RoPE
            self._rows = 3
            self(self.kinds[0], 2)

    def __call__(self, kind: str | None, length: int) -> bytes:
        """Describe the function on rows of a length, the same for equal ones."""
        length = max(length, 2)
        if (kind, length) not in self._known:
            with torch.device("cpu"), _forgetting(self._twin):
                positions = torch.tensor([0, 1, length - 1]).expand(*([3] if self._rows == 3 else []), 1, -1)
                parts = [angles[..., :2, :] for angles in _angles(self._twin, kind, positions)]
                values = (part.contiguous().numpy().tobytes() for part in (*parts, *self._twin.buffers()))
                self._known[kind, length] = b"".join(values)
        return self._known[kind, length]


def _reader_of_rows(module: nn.Module) -> _Functions | None:
    """The functions of an embedding that goes by the length of a row; None of any other module.

    Those that may are transformers' own whose forward is wrapped so that its frequencies can be updated.
    """
    wrapped: Any = type(module).forward
    while getattr(wrapped, "__globals__", {}).get("__name__") != modeling_rope_utils.__name__:
        if (wrapped := getattr(wrapped, "__wrapped__", None)) is None:
            return None
    try:
        functions = _Functions(module)
    except (IndexError, RuntimeError, ValueError):  # the configuration does not fit; the model's forward says so
        return None
    return functions if any(functions(kind, 2) != functions(kind, _FAR) for kind in functions.kinds) else None


def _angles(module: Any, kind: str | None, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    angles = module(torch.zeros(1, 1, 1), positions, *([] if kind is None else [kind]))
    return angles if isinstance(angles, tuple) else (angles,)


@contextmanager
def _forgetting(module: nn.Module) -> Iterator[None]:
    """Give an embedding back what it was before, save frequencies that it has computed: those of a length stay so."""
    attributes, buffers = dict(vars(module)), dict(module._buffers)
    try:
        yield
    finally:
        for name, value in list(vars(module).items()):
            if name not in attributes and not (isinstance(value, torch.Tensor) and value.is_floating_point()):
                del vars(module)[name]
        vars(module).update(attributes)
        module._buffers.clear()
        module._buffers.update(buffers)


def _refusing(*_args: Any, **_options: Any) -> Any:
    raise ConfigError(_NO_BOUNDARIES_MESSAGE)


def _by_segment(forward: Any, function_of: _Functions) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **options: Any) -> Any:
        return _run(forward, function_of, x, position_ids, args, options)

    return run


class _Piece(NamedTuple):
    """Slots of a pack that lie side by side and have one function, that of rows of such a length."""

    function: bytes
    start: int
    stop: int
    length: int


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped; lengths are read on the host
def _run(
    forward: Any,
    function_of: _Functions,
    x: torch.Tensor,
    positions_RT: torch.Tensor,
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    def angles(positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with _forgetting(forward.__self__):
            turned = forward(x, positions, *args, **options)
        return turned if isinstance(turned, tuple) else (turned,)

    def angles_of(pieces: list[_Piece]) -> Iterator[tuple[torch.Tensor, ...]]:
        # Behind them stands their last position, which chooses the function and which another process may have.
        last = positions_RT.new_full((*positions_RT.shape[:-1], 1), pieces[0].length - 1)
        slots = [positions_RT[..., piece.start : piece.stop] for piece in pieces]
        sizes = [piece.stop - piece.start for piece in pieces]
        turned = angles(torch.cat([*slots, last], dim=-1))
        return zip(*(torch.split(part, [*sizes, 1], dim=-2)[:-1] for part in turned), strict=True)

    pack = running_pack()
    if pack is None:
        joined = angles(positions_RT)
    else:
        # Each function runs once, on all of its slots, and its angles go back to where these stand.
        kind = options.get("layer_type", args[0] if args else None)
        pieces = _pieces(pack, positions_RT, functools.partial(function_of, kind))
        parts: dict[_Piece, tuple[torch.Tensor, ...]] = {}
        for function in dict.fromkeys(piece.function for piece in pieces):
            own = [piece for piece in pieces if piece.function == function]
            parts |= zip(own, angles_of(own), strict=True)
        joined = tuple(torch.cat(columns, dim=-2) for columns in zip(*(parts[piece] for piece in pieces), strict=True))
    return joined if len(joined) > 1 else joined[0]


def _pieces(pack: RunningPack, positions_RT: torch.Tensor, function_of: Callable[[int], bytes]) -> list[_Piece]:
    spans = pack.spans(positions_RT)
    if spans[-1][1] != positions_RT.shape[-1]:
        raise ConfigError(_NO_BOUNDARIES_MESSAGE)
    groups = groupby(spans, key=lambda span: function_of(span[2]))
    members = ((function, list(group)) for function, group in groups)
    return [_Piece(function, group[0][0], group[-1][1], group[0][2]) for function, group in members]
