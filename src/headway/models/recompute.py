"""Activation checkpointing: chosen blocks keep their inputs and compute the rest again in backward.

Results of chosen operations can be kept beside a block (selective activation checkpointing): of attention's kernels the
output and the log-sum-exp of the scores, of linear layers what they give. Attention is told by its operators, a linear
layer by the sizes of its weight, which are the same eager, traced by torch.compile, and gathered by FSDP.

Non-reentrant throughout. A compiled block has its checkpoint inside the graph, see `compiling`; any other has
transformers' own, which wraps `forward` and so leaves the hooks of FSDP outside (transformers 5.17 wraps `__call__`).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
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

from headway.count.recompute import ATTENTION, kept_layers, recomputed_blocks
from headway.count.rows import Row
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


_WEIGHTS = {
    "aten::mm": (1, True),
    "aten::addmm": (2, True),
    "aten::_scaled_mm": (1, True),
    "headway::onednn_linear": (1, False),
}
"""Products that a linear layer runs: the weight's place among their arguments, and whether it is transposed there."""

_QUANTISED = "headway::quantised_linear"
"""Product by a weight that is held in bytes, as the compiler sees it: its fifth argument is the weight's shape."""

Sizes = frozenset[tuple[int, int]]
"""Features in and out of linear layers."""


def recompute_blocks(
    model: PreTrainedModel, choice: str, towers: Mapping[str, str] | None = None, rows: Sequence[Row] = ()
) -> tuple[str, ...]:
    """Let blocks be recomputed in backward.

    Args:
        model: its blocks are changed in place.
        choice: none, full, every:N (every N-th block of each tower), one of these for a tower, such as vision:full, or
            names of blocks, joined by commas; after `,-attention`, `,-projections` and `,-mlp` what these computed is
            kept. In `CostModel.count` each stands for the same operations.
        towers: that the blocks are in, as `CostModel.block_towers`; needed by a choice that names one.
        rows: of the cost model; needed by a choice that keeps projections or mlp.

    Returns:
        Names of the chosen blocks.

    Raises:
        ConfigError: a term chooses no block, there are no blocks, or what is to be kept cannot be.
    """
    if choice == "none":
        return ()
    modules = {block.name: block.module for block in blocks(model)}
    try:
        chosen = recomputed_blocks(choice, list(modules), towers or {})
        layers_kept = kept_layers(chosen, rows)
    except UsageError as error:
        raise ConfigError(str(error)) from error
    if any(chosen.values()):
        logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_not_of_in_place)
    for name, kinds in chosen.items():
        module: Any = modules[name]
        module.gradient_checkpointing = True
        layers = {row.module: row.features for row in layers_kept[name] if row.features}
        sizes = (vars(model.get_submodule(path)).get("multiplied", features) for path, features in layers.items())
        module._gradient_checkpointing_func = checkpointed_but(ATTENTION in kinds, frozenset(sizes))
    return tuple(chosen)


def is_recomputed(module: nn.Module) -> bool:
    """Tell whether a block was chosen."""
    return bool(getattr(module, "gradient_checkpointing", False))


def checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a block's forward so that it is computed again in backward; no block draws random numbers."""
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, preserve_rng_state=False)


@cache  # blocks that keep the same have one function, and so one compilation
def checkpointed_but(attention: bool, products: Sizes = frozenset()) -> Callable[..., Any]:
    """Make a function that runs a block's forward so that all but some of it is computed again in backward.

    Args:
        attention: whether what attention's kernels give is kept.
        products: sizes of the linear layers whose results are kept.
    """
    if not attention and not products:
        return checkpointed
    policy = _Policy(attention, products)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        both: tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
        both = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]  # torch leaves it so
        return both

    def checkpointed_in_part(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = partial(forward, **kwargs)
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    return checkpointed_in_part


@dataclass(frozen=True)
class _Policy:
    attention: bool
    products: Sizes

    def __call__(self, _context: Any, operator: Any, *args: Any, **_kwargs: Any) -> CheckpointPolicy:
        name = _name_of(operator)
        if name == _QUANTISED:
            is_kept = tuple(reversed(args[4])) in self.products
        elif name in _WEIGHTS:
            place, is_transposed = _WEIGHTS[name]
            sizes = tuple(args[place].shape if is_transposed else args[place].T.shape)
            # a size that is traced as any number is no weight's
            is_kept = all(isinstance(size, int) for size in sizes) and sizes in self.products
        else:
            is_kept = self.attention and name in _ATTENTION
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def refuse_kept_attention(why: str) -> None:
    """Refuse attention that has no kernel where its result is to be kept: it would run again all the same.

    Args:
        why: what the kernels lack, for the message.

    Raises:
        ConfigError: a block runs forward whose attention is kept.
    """
    modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _CachingTorchDispatchMode)]
    if any(getattr(mode.policy_fn, "attention", False) for mode in modes):
        raise ConfigError(
            f"speed.recompute cannot keep the output of this model's attention, because {why}. Leave out ',-attention'."
        )


def _is_not_of_in_place(record: logging.LogRecord) -> bool:
    """Filter out torch's warning about in-place operations: none touches a tensor that is kept."""
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()


@cache  # asked for every operation of every block
def _name_of(operator: Any) -> str:
    return getattr(getattr(operator, "_schema", None), "name", "")
