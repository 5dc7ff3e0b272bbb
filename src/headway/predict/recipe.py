"""Properties of a recipe that a prediction reads: precision and dtypes, sharing, recomputation, trained parts.

Nothing here depends on the device that is planned for. Torch is needed for models whose rows a recipe changes alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import yaml

from headway.config import TrainConfig, changed_config
from headway.count import CostModel, Workload
from headway.count.activations import SavedActivations
from headway.count.quantised import Base
from headway.packing.budget import square_grid
from headway.packing.mesh import MeshShape
from headway.plugins import objective_of
from headway.predict.activations import BFLOAT16, FLOAT32
from headway.predict.engine import Float8, float8_of
from headway.predict.recompute import least_within

Precision = Literal["bfloat16", "bfloat16-autocast", "float32"]


@dataclass(frozen=True, slots=True)
class Sharing:
    """Sharing of a model among processes."""

    shards: int = 1  # processes that hold one copy of the weights between them
    gathers: bool = False  # whether FSDP2 gathers them block by block; a lone process has a plain model
    sequence: int = 1  # processes that share each pack
    expert: int = 1  # processes that the experts of a layer are spread over
    reshard: bool = True  # whether a block's gathered weights are freed between forward and backward
    # whether gradients are summed after every pack; otherwise whole ones wait for the last
    reduce_each_pack: bool = True
    reduce_bytes: int = FLOAT32  # bytes of a number in which gradients are summed
    offload: bool = False  # whether weights, gradients and state lie in the host's memory


@dataclass(frozen=True, slots=True)
class State:
    """Dtypes of weights, gradients and optimizer state, and of forward's products."""

    weight_bytes: int = FLOAT32  # bytes of a weight as the optimizer sees it
    compute_bytes: int = BFLOAT16  # bytes of a weight as matrix products see it
    moment_bytes: float = FLOAT32  # bytes of an optimizer moment; 8-bit codes and their scales are 1 + 4 / 256
    rule: str = "adamw"  # a rule of updating, a name in `headway.count.updating.RULES`
    clips: bool = True  # whether gradients are scaled to a norm
    averaged: bool = False  # whether there is a moving average of the weights that learn, in float32
    average_every: int = 1  # steps between its updates
    float8: Float8 | None = None  # products of blocks in float8
    offload: bool = False  # whether the host updates
    one_pass: bool = False  # whether AdamW makes one pass over large parameters in bfloat16
    accumulates: bool = False  # whether a step sums several packs
    recompute: str = "none"  # blocks that are computed again, as for `recomputed_blocks`
    fused: bool = False  # whether blocks are compiled or run on fused kernels
    liger: bool = False  # whether Liger computes the loss, and gated products, whose gradients it writes over them
    inputs_on_host: bool = False  # whether what enters recomputed blocks waits there for backward
    weighs: bool = False  # whether the output layer runs once more, for the losses that its chunks are weighed by
    logit_bytes: int | None = None  # bytes of a logit in the loss of another engine; None for Headway's loss
    update_copies: int | None = None  # copies of weights that another engine's update makes; None for Headway's update
    kept_results: int = 0  # numbers of a token that linear modules of recomputed blocks gave, where they are kept
    chunk: int | None = None  # slots whose logits exist at a time [slots]; None for those of a whole pack
    base: Base | None = None  # form of frozen matrices, where not in the dtype of the products
    # tokens and patches of a pack if its segments were all as long as the longest; None where attention's sums are not
    padded: tuple[int, int] | None = None


class FrozenForward(NamedTuple):
    """A forward that a run computes beside the forwards of the model that learns."""

    name: str  # name of the forward, in words
    cost_model: CostModel  # ledger of the model that runs, none of which is trained
    config: TrainConfig  # settings of a run that would compute it alone
    each_step: bool  # true if each step computes it of its packs; else the data have it once, before the first


def frozen_forward(config: TrainConfig, cost_model: CostModel) -> FrozenForward | None:
    """Find the forward that a run's objective computes beside the model; None of one that computes none.

    Args:
        config: the recipe.
        cost_model: of its model, with what is frozen frozen and adapters in place.
    """
    objective = objective_of(config.objective_name)
    forward_of = None if objective is None else objective.hook("forwards")
    forward: FrozenForward | None = None if forward_of is None else forward_of(config, cost_model)
    return forward


def assignment(name: str, value: Any) -> str:
    """A setting as `--set` takes it.

    >>> assignment("speed.loss_chunk", None)
    'speed.loss_chunk=null'
    """
    return f"{name}={yaml.safe_dump(value, default_flow_style=True).removesuffix('...' + chr(10)).strip()}"


def with_copies(config: TrainConfig, devices: int) -> TrainConfig:
    """Return the recipe with copies of its shards on all devices, where it names no number of copies."""
    copies = config.parallel.with_copies(devices).replicate
    return config if copies == config.parallel.replicate else changed_config(config, {"parallel.replicate": copies})


def precision_of(config: TrainConfig, devices: int) -> Precision:
    """Precision of forward: sharded weights are gathered in bfloat16, a lone device's weights go through autocast."""
    dtype = config.run.dtype
    if dtype == "float32" or (dtype == "auto" and config.run.device == "cpu"):
        return "float32"
    return "bfloat16" if devices > 1 or dtype == "bfloat16-params" else "bfloat16-autocast"


def recompute_of(
    config: TrainConfig, cost_model: CostModel, saved: Mapping[str, SavedActivations], shape: MeshShape
) -> str:
    """Name the blocks to recompute, as `CostModel.count` takes them; `memory:SIZE` is resolved as in training."""
    size = config.speed.recompute_bytes
    if size is None:
        return config.speed.recompute
    precision = precision_of(config, shape.world_size)
    return least_within(
        cost_model,
        saved[precision],
        fullest_pack(config, cost_model),
        size,
        fused=config.speed.is_fused(config.run.device),
        compute_bytes=compute_bytes_of(precision),
        sequence=shape.sequence,
        inputs_on_host=inputs_on_host(config),
    )


def compute_bytes_of(precision: Precision) -> int:
    """Bytes of a number that forward's products give."""
    return FLOAT32 if precision == "float32" else BFLOAT16


def inputs_on_host(config: TrainConfig) -> bool:
    """Tell whether the inputs of recomputed blocks leave the device; a CPU's memory is the host's."""
    return config.speed.offload == "inputs" and not config.run.device.startswith("cpu")


def state_of(config: TrainConfig, precision: Precision, recompute: str) -> State:
    """Dtypes and bytes of a recipe's tensors, and the way in which its forward computes."""
    weight = BFLOAT16 if config.run.dtype == "bfloat16-params" else FLOAT32
    moments = {"auto": float(weight), "float32": 4.0, "bfloat16": 2.0, "8bit": 1 + 4 / 256}
    return State(
        weight_bytes=weight,
        compute_bytes=compute_bytes_of(precision),
        moment_bytes=moments[config.optim.state],
        base=config.model.base,
        rule=config.optim.name,
        clips=config.optim.clip is not None,
        averaged=config.optim.ema is not None,
        average_every=1 if config.optim.ema is None else config.optim.ema.every,
        float8=float8_of(config.plan.engine) if config.run.dtype == "float8" else None,
        offload=config.parallel.offload,
        one_pass=not (config.parallel.offload or config.run.device.startswith("cpu")),
        accumulates=config.optim.accumulation > 1,
        recompute=recompute,
        fused=config.speed.is_fused(config.run.device),
        liger=config.speed.kernels == "liger",
        inputs_on_host=inputs_on_host(config),
        chunk=config.speed.loss_chunk,
        weighs=config.weighs_losses,
    )


def sharing_of(config: TrainConfig, shape: MeshShape) -> Sharing:
    """Read off a recipe how its processes share the model."""
    parallel = config.parallel
    return Sharing(
        shards=shape.fsdp,
        gathers=shape.world_size > 1,
        sequence=shape.sequence,
        expert=shape.expert,
        reshard=parallel.reshard,
        reduce_each_pack=parallel.reduce == "pack",
        reduce_bytes=FLOAT32 if parallel.reduce_dtype == "float32" else BFLOAT16,
        offload=parallel.offload,
    )


def fullest_pack(config: TrainConfig, cost_model: CostModel) -> Workload:
    """The largest pack that fits the budget: one segment, with a picture of as many patches as there may be."""
    images = one_picture(most_patches(config, cost_model), cost_model)
    return Workload([config.data.tokens_per_pack], images=images)


def most_patches(config: TrainConfig, cost_model: CostModel) -> int:
    """Patches that a pack may hold: its budget, or as many as its tokens can stand for."""
    if not cost_model.has_vision:
        return 0
    return config.data.patches_per_pack or config.data.tokens_per_pack * cost_model.merge_group


def one_picture(patches: int, cost_model: CostModel) -> list[tuple[int, int, int]]:
    """Make the grid of one picture with so many patches; saved activations depend on their number alone."""
    return [square_grid(patches, int(cost_model.merge_group**0.5))] if patches else []
