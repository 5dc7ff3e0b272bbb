"""What `speed.recompute` means for a model and the largest pack of a run, and what a model saves."""

import math

from transformers import PreTrainedModel

from headway.count import CostModel, Workload
from headway.count.activations import SavedActivations, shipped_activations
from headway.count.models import shipped_name
from headway.count.recompute import as_choice
from headway.models.load import load_config
from headway.packing.budget import square_grid
from headway.plan.recompute import block_bytes, least_recomputed
from headway.tracing.block_activations import saved_by_block, saved_of_config
from headway.train.config import TrainConfig
from headway.train.device import Precision


def chosen_recompute(
    config: TrainConfig, model: PreTrainedModel, cost_model: CostModel, precision: Precision, *, fused: bool
) -> str:
    """Which blocks are recomputed, as `recompute_blocks` and `CostModel.count` take it.

    A size is held against a pack of `data.tokens_per_pack` and `data.patches_per_pack`; without a budget of patches, of
    as many as those tokens can stand for.

    Args:
        config: of the run.
        model: as it is trained, before it is sharded or compiled.
        cost_model: of it, with what is frozen frozen.
        precision: of its forward.
        fused: whether blocks are compiled.

    Raises:
        PlanError: a size that is too small even with all blocks recomputed.
        TraceError: a size, and the model cannot be traced.
    """
    size = config.speed.recompute_bytes
    if size is None:
        return config.speed.recompute
    tokens, patches = config.data.tokens_per_pack, config.data.patches_per_pack
    if patches is None:
        patches = tokens * cost_model.merge_group if cost_model.has_vision else 0
    images = [square_grid(patches, math.isqrt(cost_model.merge_group))] if patches else []
    saved = saved_by_block(model, autocast=None if precision.params == precision.compute else precision.compute)
    pack = Workload([tokens], images=images)
    kept = block_bytes(cost_model, saved, pack, fused=fused, sequence=config.parallel.sequence)
    return as_choice(least_recomputed(kept, size))


def saved_of(path: str, precision: str) -> SavedActivations:
    """What autograd saves of a model in training: as it ships, or traced from its configuration.

    Args:
        path: as in `model.path`.
        precision: one of `headway.count.activations.PRECISIONS`.

    Raises:
        TraceError: the model cannot be traced.
    """
    shipped = shipped_name(path)
    if shipped is not None:
        return shipped_activations(shipped, precision)
    return saved_of_config(load_config(path), precision)
