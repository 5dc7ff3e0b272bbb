"""Operators that a forward and its backward launch on a device, by block: as plain code runs them, and as fused code.

An operator counts as one launch of a kernel; views, allocations and questions of sizes launch nothing. Every operator
below autograd is seen, whether it keeps a tensor for backward or not. Stand-ins of recurrences run on shapes, so that
the launches of the code that runs in their place are counted apart, on tensors of the meta device.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from headway.tracing.families.recurrences import PACKAGES, written_out
from headway.tracing.known_values import tensors
from headway.tracing.operation import READERS
from headway.tracing.phantom import Phantom, aten
from headway.tracing.record import Recorder
from headway.tracing.unwrap import lies_within

ATTENTION = {"forward": 1, "backward": 3}
"""Kernels of attention: backward sums slopes and outputs, computes, and rounds the queries' gradients.

Source: flash-attention 2, csrc/flash_attn/src/flash_bwd_launch_template.h, read 2026-11-30.
"""
FLASH_LINEAR = {"heads": (8, 12), "channels": (9, 11)}
"""Launches of a gated delta rule's forward and backward, by what its gates are of. Forward norms queries and keys, sums
decays, fills with zeros, solves (two kernels with gates of channels), and computes writes, states and outputs. Backward
computes writes and states again, has four kernels of its own and sums of their parts, and those of decays and norms.

Source: flash-linear-attention 0.6.0, chunk.py, chunk_fwd.py, chunk_intra.py and chunk_bwd.py of fla/ops/kda and
fla/ops/gated_delta_rule, common/chunk_o.py and common/chunk_delta_h.py, read 2026-11-30.
"""
PACKAGED = {"causal_conv1d_fn": (1, 3)}
"""Launches of packages' functions in forward and backward, by name. A function without a row has one of each. Backward
of the convolution fills the weight's gradient with zeros, runs, and casts that gradient.

Source: causal-conv1d 1.7.0, causal_conv1d/cpp_functions.py.
"""
CUT = 3
"""Operators of the backward of cutting a segment out of a pack: zeros, a copy into them, and a sum."""

# operators of a device that launch nothing: they allocate, look, or copy a number to the host
_NOTHING = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.detach, aten.alias,
    aten._unsafe_view, aten._reshape_alias, aten.lift_fresh, aten.is_same_size, aten._local_scalar_dense, aten.set_,
}  # fmt: skip
# operators that are written in terms of others on every device: a tensor of zeros, and a copy into a part of it
_TWICE = {aten.slice_backward, aten.select_backward, aten.diagonal_backward, aten.unfold_backward}
_LENGTHS = (256, 512)  # tokens on which a recurrence's own code is counted: whole chunks of any code

Way = Literal["", "pack", "segment"]
Phase = Literal["forward", "backward"]


@dataclass(frozen=True)
class RunningCode:
    """Code that runs recurrent layers on the machine that trains.

    Attributes:
        way_of: whether a module is a recurrent layer, which runs over a pack at once or over each segment; "" for
            another module.
        over_pack: the function in PyTorch's operations that runs over a pack in the place of another; None for none.
        packages: packages of kernels that are there.
    """

    way_of: Callable[[nn.Module], Way] = lambda _: ""
    over_pack: Callable[[Callable[..., Any]], Callable[..., Any] | None] = lambda _: None
    packages: frozenset[str] = frozenset()


def launches_of(func: Any) -> int:
    """Count the kernels that an operator launches on a device.

    >>> [launches_of(f) for f in (aten.mm.default, aten.view.default, aten.slice_backward.default)]
    [1, 0, 2]
    """
    packet = func._overloadpacket
    if func.is_view or packet in _NOTHING or torch.Tag.inplace_view in func.tags:
        return 0
    return 2 if packet in _TWICE else 1


class LaunchCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Counts the launches of a recorded forward and backward, by phase and module.

    Args:
        recorder: of the same run.
        code: that runs recurrent layers.
        tokens: of the run [tokens].
    """

    def __init__(self, recorder: Recorder, code: RunningCode, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder, self._code, self._tokens = recorder, code, tokens
        self._plain: Counter[tuple[Phase, str]] = Counter()
        self._products: Counter[tuple[Phase, str]] = Counter()
        self._real: Counter[tuple[Phase, str]] = Counter()  # on integers alone; attention's are the recorder's own
        self._calls: list[tuple[str, str, Any, tuple[Any, ...], dict[str, Any]]] = []  # calls of stand-ins, by module
        self._nodes: list[range] = []  # autograd nodes of stand-ins, whose own operators nobody runs
        self._stands_in = False
        modules = recorder.model.named_modules()
        self._ways: dict[str, Way] = {path: way for path, module in modules if (way := code.way_of(module))}

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count its launches."""
        result = func(*args, **(kwargs or {}))
        count, node = launches_of(func), torch._C._current_autograd_node()
        if not count or self._stands_in:
            return result
        place: tuple[Phase, str] = ("forward", self._recorder.module)
        if node is not None:
            number = node._sequence_nr()
            if any(number in nodes for nodes in self._nodes):
                return result
            place = ("backward", self._recorder.module_of(number))
        launches = self._plain if any(isinstance(t, Phantom) for t in tensors((*args, result))) else self._real
        launches[place] += count
        self._products[place] += count if func._overloadpacket in READERS else 0
        return result

    def around(self, name: str, original: Any, stand_in: Callable[..., Any]) -> Callable[..., Any]:
        """Put the launches of the code that runs in the place of those of a stand-in."""
        return partial(self._run, name, original, stand_in)

    def _run(self, name: str, original: Any, stand_in: Callable[..., Any], *args: Any, **options: Any) -> Any:
        begin, self._stands_in = torch._C._autograd._get_sequence_nr(), True
        try:
            result = stand_in(*args, **options)
        finally:
            self._stands_in = False
        self._nodes.append(range(begin, torch._C._autograd._get_sequence_nr()))
        if result is not None:  # the mixer runs piece by piece where it is
            self._calls.append((self._recorder.module, name, original, args, options))
        return result

    def _of_function(
        self, module: str, name: str, original: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> dict[Phase, tuple[int, Fraction]]:
        """Count the launches of a function by phase: those of a call, and those of each token."""
        if PACKAGES.get(name, "fla") in self._code.packages:
            gates = options.get("g", args[3] if len(args) > 3 else None)
            gated = "channels" if gates is not None and gates.dim() == 4 else "heads"
            forward, backward = PACKAGED.get(name, (1, 1)) if name in PACKAGES else FLASH_LINEAR[gated]
            return {"forward": (forward, Fraction(0)), "backward": (backward, Fraction(0))}
        is_at_once = self._way(module) == "pack"
        function = (self._code.over_pack(original) if is_at_once else None) or written_out(original)
        if function is None:
            return {"forward": (1, Fraction(0)), "backward": (1, Fraction(0))}
        short, long = (_counted(function, self._tokens, tokens, args, options) for tokens in _LENGTHS)
        a_token = {phase: Fraction(long[phase] - short[phase], _LENGTHS[1] - _LENGTHS[0]) for phase in short}
        return {phase: (short[phase] - int(a_token[phase] * _LENGTHS[0]), a_token[phase]) for phase in short}

    def _way(self, module: str) -> Way:
        return next((way for path, way in self._ways.items() if lies_within(module, [path])), "")

    def by_block(
        self, block_of: Callable[[str], str], fused_kernels: Mapping[str, int]
    ) -> dict[str, dict[str, Fraction]]:
        """Add up launches by block, as `SavedBlock.launches` has them.

        Args:
            block_of: path of a module to that of its block.
            fused_kernels: tensors that elementwise operators make for products, by block: a kernel each where they are
                fused, and one for their gradients.
        """
        blocks: dict[str, dict[str, Fraction]] = {}

        def add(module: str, key: str, count: Fraction | int, fused: Fraction | int | None = None) -> None:
            rows = blocks.setdefault(block_of(module), {})
            for name, launches in ((key, count), (f"fused {key}", count if fused is None else fused)):
                if launches:
                    rows[name] = rows.get(name, Fraction(0)) + launches

        # code behind stand-ins, cuts of segments, and attention, whose seam asks on integers what no kernel asks
        for phase, module, count, of_token in self._behind_stand_ins():
            self._plain[phase, module] += count
            add(module, f"{phase} a token", of_token)
        for path, way in self._ways.items():
            add(path, "backward a segment", CUT if way == "segment" else 0)
        attention = [operation for operation in self._recorder.operations if operation.kind == "attention"]
        for operation in attention:
            add(operation.module, "forward", ATTENTION["forward"])
            add(operation.module, "backward", ATTENTION["backward"] if operation.backward_flops else 0)
        attending = {operation.module for operation in attention}
        self._plain.update({place: count for place, count in self._real.items() if place[1] not in attending})

        # operators that were dispatched; a recurrent layer is not compiled, and another's products stay where it is
        for (phase, module), count in self._plain.items():
            way = self._way(module)
            key = f"{phase} a segment" if way == "segment" else phase
            add(module, key, count, None if way else self._products[phase, module])
        learning = {block_of(module) for phase, module in self._plain if phase == "backward"}
        for block, kernels in fused_kernels.items():
            add(block, "forward", 0, kernels)
            add(block, "backward", 0, kernels if block in learning else 0)
        return blocks

    def _behind_stand_ins(self) -> Iterator[tuple[Phase, str, int, Fraction]]:
        """Launches of the code behind stand-ins: phase, module, those of a call, and those of each token."""
        same_calls: dict[Any, dict[Phase, tuple[int, Fraction]]] = {}  # layers repeat each other
        for call in self._calls:
            module, name, _, args, _ = call
            key = (name, self._way(module), tuple(t.shape for t in args if isinstance(t, torch.Tensor)))
            same_calls[key] = same_calls.get(key) or self._of_function(*call)
            for phase, (count, of_token) in same_calls[key].items():
                yield phase, module, count, of_token


def _counted(
    function: Callable[..., Any], length: int, tokens: int, args: tuple[Any, ...], options: dict[str, Any]
) -> dict[Phase, int]:
    """Count the launches of a function by phase, on one segment of so many tokens in the place of its length."""

    def resized(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        first, *sizes = value.shape or (1,)
        shape = [first, *(tokens if size == length else size for size in sizes)]
        learns = value.is_floating_point()
        return torch.empty(shape if value.dim() else [], dtype=value.dtype, device="meta", requires_grad=learns)

    boundaries = {
        "cu_seqlens": torch.empty(2, dtype=torch.int32, device="meta"),
        "seq_idx": torch.empty(1, tokens, dtype=torch.int32, device="meta"),
    }
    needed = inspect.signature(function).parameters
    arguments = {name: resized(option) for name, option in options.items() if name in needed and name not in boundaries}
    arguments |= {name: value for name, value in boundaries.items() if name in needed}
    counter = _Counter()
    with counter:
        results = function(*map(resized, args), **arguments)
    out = next(t for t in (results if isinstance(results, tuple) else (results,)) if isinstance(t, torch.Tensor))
    slopes = torch.empty_like(out)
    with counter:
        torch.autograd.backward(out, slopes)
    return counter.counts


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts launches by phase alone."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: dict[Phase, int] = {"forward": 0, "backward": 0}

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        phase: Phase = "forward" if torch._C._current_autograd_node() is None else "backward"
        self.counts[phase] += launches_of(func)
        return func(*args, **(kwargs or {}))
