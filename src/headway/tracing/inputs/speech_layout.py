"""Find the layout in which a model takes speech by running it on each known layout, on shapes alone.

Configurations have a dozen names for the width of a frame of features, and none for whether frames come before
features. A wrong guess does not fit the first convolution or linear layer, so the model itself tells.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headway.errors import TraceError
from headway.tracing.build import LONGEST_WINDOW, subconfigs

# one length a run; no two alike in what strides of 4 or 8 leave over, nor all in the same half of 16
_FREE = (1201, 2011, 1606, 2408)
_EVEN = (1200, 2016, 1632, 2400)  # lengths for a model that takes multiples only
# windows in a clip, and the longest, where a last one that is partly filled could not be followed
_BLOCKS, _LONGEST_BLOCK = (5, 11, 7, 13), 1000
_SAMPLES = 160  # samples of a waveform for each frame of features: speech at 16 kHz, a frame each 10 ms
_WIDTHS = (80, 128)  # mel bands where a configuration does not say
# errors that a model raises on shapes that do not fit it
MISFITS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AssertionError, AttributeError)


@dataclass(frozen=True)
class SpeechLayout:
    """The layout of a model's speech argument."""

    # axes after the clips: "frames" for that axis, numbers for the others, as (80, "frames")
    shape: tuple[int | str, ...]
    lengths: tuple[int, ...]  # frames of a clip in each of four runs; all alike where a model takes one length only
    fixed: int = 0  # the one length that a model takes, else 0
    multiple: int = 1  # clips are padded to a multiple of it, under a mask [frames]

    def padded(self, frames: int) -> int:
        """Give the length that clips of so many frames are handed over in."""
        return -(-frames // self.multiple) * self.multiple

    def of(self, clips: int, frames: int) -> tuple[int, ...]:
        """Give the shape of so many clips of so many frames."""
        return (clips, *(self.padded(frames) if size == "frames" else int(size) for size in self.shape))


def whole_numbers(config: Any, pattern: str) -> list[int]:
    """List the whole numbers of a configuration whose names hold a pattern, those inside it included; each once."""
    values = (
        value
        for part in subconfigs(config)
        for name, value in vars(part).items()
        if type(value) is int and value > 0 and re.search(pattern, name)
    )
    return list(dict.fromkeys(values))


def windows(config: Any) -> list[int]:
    """List possible windows of an encoder's attention [positions], as the configuration says or twice that."""
    sizes = whole_numbers(config, "window|block|radius|chunk|context_size|local")
    return [w for n in sizes for w in (n, 2 * n) if 1 < w <= LONGEST_WINDOW]


def windowed(pairs: str, sizes: Sequence[int]) -> list[str]:
    """Name the drivers of windowed attention of these sizes: in blocks, or each position among its neighbours."""
    blocks = [f"{pairs}:block:{size}" for size in sizes]
    sides = [(side, side) for size in sizes for side in (size, size - 1, size // 2)]
    sides += [((size - 1) // 2, size // 2) for size in sizes]  # windows of `size` positions, the query's own included
    return [*blocks, *(f"{pairs}:local:{before}:{after}" for before, after in dict.fromkeys(sides) if before)]


def find_layout(
    config: Any, argument: str, hear: Callable[[SpeechLayout, int], object], *, masked: bool = True
) -> SpeechLayout:
    """Find the first layout of speech that a model runs on.

    Args:
        config: of the model.
        argument: that carries the speech.
        hear: runs the model on a layout, of so many frames; raises where the shapes do not fit.
        masked: whether clips may be padded: a mask can say how much of them is real.

    Raises:
        TraceError: the model runs on none that is known.
    """
    refused: Exception | None = None
    for speech in _layouts(config, waves=argument == "input_values", masked=masked):
        try:
            for frames in dict.fromkeys(speech.lengths):
                hear(speech, frames)
        except TraceError as error:
            refused = error
        except MISFITS as error:
            refused = refused or error
        else:
            return speech
    raise TraceError(
        f"a model of {type(config).__name__} takes {argument} in a form that is not known here. Give its arguments "
        f"with trace(model, inputs=...). Tried last: {' '.join(str(refused).split())}"
    ) from refused


def _layouts(config: Any, waves: bool, masked: bool) -> Iterator[SpeechLayout]:
    shapes: list[tuple[int | str, ...]]
    if waves:
        shapes = [("frames",), (1, "frames")]
    else:
        single = [*whole_numbers(config, "mel|feat|input_dim|input_size|audio_embed_dim"), *_WIDTHS]
        stacks = whole_numbers(config, "stack")  # frames side by side in one
        widths = dict.fromkeys([*single, *(width * frames for width in single for frames in stacks)])
        shapes = [shape for width in widths for shape in ((width, "frames"), ("frames", width))]
    unit = _SAMPLES if waves else 1
    for lengths, multiples in ((_FREE, [1, *(windows(config) if masked else ())]), (_EVEN, [1])):
        for multiple in multiples:
            yield from (SpeechLayout(shape, tuple(n * unit for n in lengths), multiple=multiple) for shape in shapes)
    blocks = [size for size in windows(config) if size <= _LONGEST_BLOCK]
    for block in sorted(blocks, reverse=True):  # clips that end within one window would not show it
        yield from (SpeechLayout(shape, tuple(n * block * unit for n in _BLOCKS)) for shape in shapes)
    for positions in whole_numbers(config, "max_source_positions|max_position_embeddings"):
        yield from (SpeechLayout(shape, (2 * positions,) * 4, 2 * positions) for shape in shapes)
