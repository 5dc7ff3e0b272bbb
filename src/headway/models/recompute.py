"""Activation checkpointing: chosen blocks keep what enters them and compute the rest again in backward.

Non-reentrant throughout. A compiled block has its checkpoint inside the graph, see `compiling`; any other has
transformers' own, which wraps `forward` and so leaves the hooks of FSDP outside.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from headway.errors import ConfigError
from headway.models.blocks import blocks


def recompute_blocks(model: PreTrainedModel, choice: str) -> tuple[str, ...]:
    """Let blocks be recomputed in backward.

    Args:
        model: its blocks are changed in place.
        choice: none, full, every:N (every N-th block of each tower), or names of blocks joined by commas. In
            `CostModel.count` each stands for the same blocks.

    Returns:
        Names of the chosen blocks.

    Raises:
        ConfigError: no block is chosen by something else than none, or there are no blocks.
    """
    if choice == "none":
        return ()
    found = blocks(model)
    if choice == "full":
        chosen = found
    elif choice.startswith("every:"):
        n, places = int(choice.removeprefix("every:")), Counter[str]()
        chosen = ()
        for block in found:
            places[block.tower] += 1
            chosen += (block,) if places[block.tower] % n == 0 else ()
    else:
        names = set(choice.split(","))
        chosen = tuple(block for block in found if block.name in names)
    if not chosen:
        largest = max(Counter(block.tower for block in found).values())
        raise ConfigError(
            f"recompute {choice!r} chooses none of the model's {len(found)} blocks; the longest tower has {largest}."
        )
    for block in chosen:
        module: Any = block.module
        module.gradient_checkpointing = True
        module._gradient_checkpointing_func = checkpointed
    return tuple(block.name for block in chosen)


def is_recomputed(module: nn.Module) -> bool:
    """Whether a block was chosen."""
    return bool(getattr(module, "gradient_checkpointing", False))


def checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a block's forward so that it is computed again in backward; no block draws random numbers."""
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, preserve_rng_state=False)
