"""Activation checkpointing: chosen blocks keep their inputs and compute the rest again in backward.

Of a block whose attention is kept, the results of attention's kernels are kept beside it (selective activation
checkpointing): the output and the log-sum-exp of the scores, so that the dearest operation over long segments does not
run twice.

Non-reentrant throughout. A compiled block has its checkpoint inside the graph, see `compiling`; any other has
transformers' own, which wraps `forward` and so leaves the hooks of FSDP outside (transformers 5.17 wraps `__call__`).
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachingTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from headway.count.recompute import recomputed_blocks
from headway.errors import ConfigError, UsageError
from headway.models.blocks import blocks

# Forwards of attention, each of which gives its output and the log-sum-exp that its backward reads. Whatever of them a
# model comes to run is kept: packs run the first five, rows of a batch PyTorch's own.
_ATTENTION = frozenset({
    "torch_attn::_varlen_attn",
    "headway::segment_attention",
    "headway::ragged_attention",
    "flash_attn::_flash_attn_varlen_forward",
    "flash_attn_3::fwd",
    "flash_attn_3::_flash_attn_forward",
    "flash_attn::_flash_attn_forward",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "aten::_cudnn_attention_forward",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
})  # fmt: skip


def recompute_blocks(model: PreTrainedModel, choice: str, towers: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Let blocks be recomputed in backward.

    Args:
        model: its blocks are changed in place.
        choice: none, full, every:N (every N-th block of each tower), one of these of a tower, such as vision:full, or
            names of blocks, joined by commas; after `,-attention` what attention computed is kept. In
            `CostModel.count` each stands for the same operations.
        towers: that the blocks are in, as `CostModel.block_towers`; needed by a choice that names one.

    Returns:
        Names of the chosen blocks.

    Raises:
        ConfigError: a term chooses no block, or there are no blocks.
    """
    if choice == "none":
        return ()
    modules = {block.name: block.module for block in blocks(model)}
    try:
        chosen = recomputed_blocks(choice, list(modules), towers or {})
    except UsageError as error:
        raise ConfigError(str(error)) from error
    if any(chosen.values()):
        logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_not_of_in_place)
    for name, keeps_attention in chosen.items():
        module: Any = modules[name]
        module.gradient_checkpointing = True
        module._gradient_checkpointing_func = checkpointed_but_attention if keeps_attention else checkpointed
    return tuple(chosen)


def is_recomputed(module: nn.Module) -> bool:
    """Whether a block was chosen."""
    return bool(getattr(module, "gradient_checkpointing", False))


def checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a block's forward so that it is computed again in backward; no block draws random numbers."""
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, preserve_rng_state=False)


def checkpointed_but_attention(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a block's forward so that all of it but attention is computed again in backward."""
    run = partial(forward, **kwargs)
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, context_fn=_keep_attention)


def _keep_attention() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
    contexts = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]  # torch leaves it so
    return contexts


def refuse_kept_attention(why: str) -> None:
    """Refuse attention that has no kernel where its result is to be kept: it would run again all the same.

    Args:
        why: what the kernels lack, for the message.

    Raises:
        ConfigError: a block runs forward whose attention is kept.
    """
    if any(isinstance(mode, _CachingTorchDispatchMode) for mode in _get_current_dispatch_mode_stack()):
        raise ConfigError(
            f"speed.recompute keeps what attention computed, but {why}, so this model's attention is written out and "
            "would be computed again. Leave out ',-attention'."
        )


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_attention(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_not_of_in_place(record: logging.LogRecord) -> bool:
    """Filter out torch's warning about in-place operations: none touches a tensor that is kept."""
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()


@cache  # asked for every operation of every block
def _is_attention(operator: Any) -> bool:
    return getattr(getattr(operator, "_schema", None), "name", "") in _ATTENTION
