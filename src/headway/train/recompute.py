"""What `speed.recompute` means for a model and the largest pack of a run."""

import math

from transformers import PreTrainedModel

from headway.count import CostModel, Workload
from headway.count.tracing.saved_blocks import saved_by_block
from headway.data.plan.costs import square_grid
from headway.plan.recompute import block_bytes, fewest_recomputed
from headway.train.config import TrainConfig
from headway.train.device import Precision


def chosen_recompute(config: TrainConfig, model: PreTrainedModel, cost_model: CostModel, precision: Precision) -> str:
    """Which blocks are recomputed, as `recompute_blocks` and `CostModel.count` take it.

    A size is held against a pack of `data.tokens_per_pack` and `data.patches_per_pack`; without a budget of patches, of
    as many as those tokens can stand for.

    Args:
        config: of the run.
        model: as it is trained, before it is sharded or compiled.
        cost_model: of it, with what is frozen frozen.
        precision: of its forward.

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
    kept = block_bytes(cost_model, saved, pack, fused=config.speed.compile, sequence=config.parallel.sequence)
    return ",".join(fewest_recomputed(kept, size)) or "none"
