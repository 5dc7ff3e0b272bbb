"""Code known by name that computes padding, or whole blocks of scores, beyond what its model needs.

Source: transformers' code of each class; the units are derived beside each.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from headway.count import drivers
from headway.count.workload import Workload


@dataclass(frozen=True)
class Padding:
    """How much more than a model needs its code runs."""

    workload: Workload  # of the step, padding included
    run: dict[str, int]  # units that really run, of the drivers whose count on that workload they exceed
    reason: str  # a sentence for people

    def units(self, driver: str) -> int:
        """Count the units of a driver that really run."""
        return self.run[driver] if driver in self.run else drivers.parse(driver)(self.workload)


def paddings(model: nn.Module, workload: Workload) -> Iterator[tuple[str, Padding]]:
    """Iterate over the modules whose code runs more than the model needs, each with how much more."""
    read = int(workload.sources[0]) if workload.sources.size else 0

    def padded(length: int, run: dict[str, int], reason: str) -> Padding:
        return Padding(Workload(workload.segments, sources=[length]), run, f"{reason}: {length:,} for {read:,}")

    for path, module in model.named_modules():
        part: Any = module
        kind = type(module).__name__
        if kind == "LongT5LocalAttention":
            size, radius = part.block_len, part.block_len - 1
            blocks = -(-read // size)
            run = {f"source_pairs:local:{radius}:{radius}": blocks * size * 3 * size}
            yield path, Padding(workload, run, f"{blocks} blocks of {size} run whole, each over three blocks of keys")
        elif kind == "LEDEncoder":
            window = part.config.attention_window
            size = window if isinstance(window, int) else max(window)
            whole = -(-read // size) * size
            sides = {layer.self_attn.longformer_self_attn.one_sided_attn_window_size for layer in part.layers}
            run = {f"source_pairs:local:{side}:{side}": _overlapping(whole, side) for side in sides}
            yield path, padded(whole, run, "the encoder computes whole windows, in chunks that overlap")
        elif kind == "PegasusXEncoder":
            whole = -(-read // part.config.block_size) * part.config.block_size
            yield path, padded(whole, {}, "the encoder computes whole blocks")
        elif kind == "PegasusXEncoderLayer" and part.stagger_blocks_this_layer:
            size = part.block_size  # half a block of padding before and after
            whole = (-(-read // size) + 1) * size
            run = {f"source_pairs:staggered:{size}": whole * size}
            yield f"{path}.self_attn", padded(whole, run, "staggered blocks begin and end in padding")
        elif kind == "ProphetNetNgramSelfAttention":
            square = workload.tokens**2  # of the text; each stream sees the text's keys and its own
            run = {"pairs:causal": square, "pairs:full": 2 * part.ngram * square, "tokens": 0, "segments": 0}
            yield path, Padding(workload, run, f"each of {part.ngram} streams runs its scores whole, as the text does")


def _overlapping(length: int, side: int) -> int:
    """Count scores of LED's attention, of whose FLOPs half are scores and half values.

    Source: `_sliding_chunks_query_key_matmul` cuts length / side - 1 chunks of 2 side positions, which see one another;
    `_sliding_chunks_matmul_attn_probs_value` multiplies length / side rows of chunks of side by 3 side.
    """
    scores, values = (length // side - 1) * (2 * side) ** 2, length * 3 * side
    return (scores + values) // 2
