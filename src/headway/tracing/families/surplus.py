"""Code known by name that runs more than its model needs: padding, whole blocks of scores, experts nobody chose.

Source: transformers' code of each class; the units are derived beside each.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headway.count import drivers
from headway.count.workload import Workload
from headway.tracing.record import Recorder


@dataclass(frozen=True)
class Padding:
    """The units that a module's code runs, padding included."""

    workload: Workload  # workload of the step, padding included
    run: dict[str, int]  # units that really run, of the drivers whose count on that workload they exceed
    reason: str  # a sentence for people

    def units(self, driver: str) -> int:
        """Count the units of a driver that really run."""
        return self.run[driver] if driver in self.run else drivers.parse_driver(driver)(self.workload)


def paddings(model: nn.Module, workload: Workload) -> Iterator[tuple[str, Padding]]:
    """Iterate over the modules whose code runs more than the model needs, each with how much more."""
    length = int(workload.sources[0]) if workload.sources.size else 0  # length of the source that the encoder reads

    def padded(run_length: int, run: dict[str, int], reason: str) -> Padding:
        padded_workload = Workload(workload.segments, sources=[run_length])
        return Padding(padded_workload, run, f"{reason}: {run_length:,} for {length:,}")

    for path, module in model.named_modules():
        part: Any = module
        kind = type(module).__name__
        # each block of queries over three blocks of keys: its own and its two neighbours'
        if kind == "LongT5LocalAttention":
            size, radius = part.block_len, part.block_len - 1
            blocks = -(-length // size)
            run = {f"source_pairs:local:{radius}:{radius}": blocks * size * 3 * size}
            yield path, Padding(workload, run, f"{blocks} blocks of {size} run whole, each over three blocks of keys")
        # the source filled up to whole windows
        elif kind == "LEDEncoder":
            window = part.config.attention_window
            size = window if isinstance(window, int) else max(window)
            filled = -(-length // size) * size
            sides = {layer.self_attn.longformer_self_attn.one_sided_attn_window_size for layer in part.layers}
            run = {f"source_pairs:local:{side}:{side}": _overlapping(filled, side) for side in sides}
            yield path, padded(filled, run, "the encoder computes whole windows, in chunks that overlap")
        # the source filled up to whole blocks
        elif kind == "PegasusXEncoder":
            filled = -(-length // part.config.block_size) * part.config.block_size
            yield path, padded(filled, {}, "the encoder computes whole blocks")
        # staggered blocks: half a block of padding before and after
        elif kind == "PegasusXEncoderLayer" and part.stagger_blocks_this_layer:
            size = part.block_size
            filled = (-(-length // size) + 1) * size
            run = {f"source_pairs:staggered:{size}": filled * size}
            yield f"{path}.self_attn", padded(filled, run, "staggered blocks begin and end in padding")
        # streams of the text, each of which sees the text's keys and its own
        elif kind == "ProphetNetNgramSelfAttention":
            square = workload.tokens**2
            run = {"pairs:causal": square, "pairs:full": 2 * part.ngram * square, "tokens": 0, "segments": 0}
            yield path, Padding(workload, run, f"each of {part.ngram} streams runs its scores whole, as the text does")


def _overlapping(length: int, side: int) -> int:
    """Count scores of LED's attention, of whose FLOPs half are scores and half values.

    Source: `_sliding_chunks_query_key_matmul` cuts length / side - 1 chunks of 2 side positions, which see one another;
    `_sliding_chunks_matmul_attn_probs_value` multiplies length / side rows of chunks of side by 3 side.
    """
    scores, values = (length // side - 1) * (2 * side) ** 2, length * 3 * side
    return (scores + values) // 2


def _two_experts(
    module: Any, _recorder: Recorder, hidden_states: torch.Tensor, _mask: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Stand in for NLLB-MoE's experts, which take two for each token.

    transformers makes its mask of first choices one-hot a second time, so that its first expert multiplies each token
    once for every expert that was not chosen; rows beyond the two have a weight of zero.
    """
    out = torch.zeros_like(hidden_states)
    every = torch.arange(len(hidden_states))
    for number, expert in enumerate(list(module.values())[:2]):
        out.index_add_(0, every, expert(hidden_states[every]) * weights[:, number, None])
    return out


def unchosen_rows(module: nn.Module, experts: int, chosen: int) -> str | None:
    """Explain why every token meets all experts of a module; None where its class is not known to do that."""
    if (type(module).__name__, "forward") not in METHODS:
        return None
    return (
        f"transformers makes NLLB-MoE's choices one-hot twice, and runs {experts} rows for each token; those beyond "
        f"the {chosen} chosen have no weight"
    )


# methods that run experts otherwise than their model means: (class, method)
METHODS: dict[tuple[str, str], Callable[..., Any]] = {("NllbMoeExperts", "forward"): _two_experts}
