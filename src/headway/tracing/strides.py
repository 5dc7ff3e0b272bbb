"""Read off a run what an encoder's convolutions make of its frames: the strides, and how they round.

A convolution's window says how its output length follows from its input length. Chained from the frames on, the windows
give every length that the encoder works on, exactly, remainders included; where an encoder cuts its input into pieces,
its first convolution reads pieces of one length. Nothing is believed that the lengths of all runs do not bear out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headway.count.drivers import shorten
from headway.count.workload import Workload
from headway.tracing.operation import ConvolutionWindow, Operation

_MOST_PADDING = 1 << 10  # positions that code adds by hand before a convolution, at most
_GROUPS = range(2, 17)  # positions that an encoder may merge into one after its convolutions


@dataclass(frozen=True)
class _Length:
    """A length that an encoder works on: positions `stride` frames apart, of which the first needs `first` frames."""

    stride: int  # frames
    first: int  # frames; 0 or less where padding makes more positions than there are strides
    piece: int  # frames after which the encoder starts afresh; 0 where it does not
    seen: tuple[int, ...]  # the length in each run [positions], () where no convolution reads it

    def after(self, windows: Sequence[ConvolutionWindow]) -> "_Length | None":
        """Follow the length through a convolution, given its window in each run; None if it reads another length."""
        one = windows[0]
        if not self.seen:
            return None
        extra = {w.read - n for w, n in zip(windows, self.seen, strict=True)}
        if len(extra) != 1 or not 0 <= min(extra) <= _MOST_PADDING:
            return None
        added = extra.pop() + 2 * one.padding
        first = self.first + self.stride * (one.span - 1 - added)
        return _Length(self.stride * one.stride, first, self.piece, tuple(w.made for w in windows))

    def merged(self) -> "Iterator[_Length]":
        """Give the lengths after merging groups of positions, with and without a last one that is partly filled."""
        for size in _GROUPS:
            yield _Length(self.stride * size, self.first, self.piece, ())
            yield _Length(self.stride * size, self.first + self.stride * (size - 1), self.piece, ())

    def steps(self) -> str:
        """Write it as what follows the slash of a driver."""
        if self.piece:
            return f"{self.stride}:{self.first}:{self.piece}"
        return f"{self.stride}" if self.first == 1 else f"{self.stride}:{self.first}"


def shortened(runs: Sequence[Sequence[Operation]], workloads: Sequence[Workload], names: Sequence[str]) -> list[str]:
    """List drivers that count what convolutions make of the frames, likeliest first."""
    blocks = sorted({op.longest for operations in runs for op in operations if op.longest})
    pairs = [
        name.replace(":full", f":block:{block}") for name in names if name.endswith("_pairs:full") for block in blocks
    ]
    return [f"{name}/{steps}" for steps in _strides(runs, workloads) for name in (*names, *pairs)]


def _strides(runs: Sequence[Sequence[Operation]], workloads: Sequence[Workload]) -> list[str]:
    """List what may follow the slash of a driver of sources or audio, likeliest first."""
    frames = [{*w.audio.tolist(), *w.sources.tolist()} for w in workloads]
    if any(len(lengths) != 1 for lengths in frames):
        return []
    start = tuple(lengths.pop() for lengths in frames)
    found = [_Length(1, 1, 0, start)]
    for operations in zip(*runs, strict=True):
        for windows in zip(*(operation.windows for operation in operations), strict=True):
            piece = windows[0].read
            alike = len({w.read for w in windows}) == 1 and windows[0].made > 1
            if alike and operations[0].from_input and piece < min(start):
                found += [_Length(1, 1, piece, (piece,) * len(runs)), _Length(piece, 1, 0, ())]
            made = next((m for length in reversed(found) if (m := length.after(windows)) is not None), None)
            if made is not None and made not in found and _borne_out(made, start):
                found.append(made)
    found.sort(key=lambda length: length.piece)  # whole clips first: pieces of a multiple of the stride change nothing
    merged = [more for length in found for more in length.merged()]
    return [steps for steps in dict.fromkeys(length.steps() for length in (*found, *merged)) if steps != "1"]


def _borne_out(length: _Length, frames: Sequence[int]) -> bool:
    """Say whether the arithmetic gives the length that each run had, of a whole piece where there are pieces."""
    read = np.array([length.piece] * len(frames) if length.piece else frames)
    return bool((shorten(read, length.stride, length.first) == length.seen).all())
