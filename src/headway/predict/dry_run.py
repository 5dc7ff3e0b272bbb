"""Needs of a run, from its recipe alone: parameters, memory of each device, FLOPs of a step, and packs.

Nothing is trained, and no weights are read; lengths come from the recipe's `plan` section or from who calls. For models
whose ledger ships, torch is not needed either.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headway.config import TrainConfig
from headway.count import CostModel, FlopCount, Workload
from headway.count.activations import SavedActivations
from headway.count.recompute import choice_in_words, with_head
from headway.count.rows import ParamCount
from headway.count.splits import branched
from headway.devices import Device
from headway.errors import ConfigError
from headway.packing import Budget, Items, Order, OverlongCounts, Plan, PlanReport
from headway.packing.budget import segments_within
from headway.packing.lengths import LengthTable
from headway.packing.measure import report_on
from headway.packing.mesh import MeshShape
from headway.predict.fitting import Way, saved_with_adapters, ways_to_fit
from headway.predict.frozen_forward import frozen_forward
from headway.predict.held import Sharing, State
from headway.predict.memory import MemoryPlan, plan_memory
from headway.predict.moments import BFLOAT16, FLOAT32
from headway.predict.planned_lengths import fullest_pack, lengths_of, most_patches, one_picture, policies_of
from headway.predict.recompute import least_within

SCHEMA_VERSION = 1
USABLE = 0.9
"""Share of a device's memory that a plan may fill; the rest is for what it does not count."""

Precision = Literal["bfloat16", "bfloat16-autocast", "float32"]


@dataclass(frozen=True)
class Packs:
    """Packs planned over typical lengths.

    Attributes:
        lengths: where the lengths are from.
        report: fill, balance and mixing.
        counts: what became of over-long samples.
        samples_per_pack: mean number of segments in a pack.
        most_tokens: of the fullest pack [tokens].
        most_patches: of the pack with the most [patches].
        padded: tokens and patches of the pack that has the most where all its segments are as long as the longest.
        mean_patches: of a pack on average [patches].
        flops: of a mean step, all devices together, by component.
        epoch_tokens: of all samples once, those that are left out not among them.
        reference: FLOPs of the forward of a model that does not learn, likewise; None without one.
    """

    lengths: str
    report: PlanReport
    counts: OverlongCounts
    samples_per_pack: float
    most_tokens: int
    most_patches: int
    padded: tuple[int, int]
    mean_patches: float
    flops: FlopCount
    epoch_tokens: int
    reference: FlopCount | None = None

    @property
    def tokens_per_sample(self) -> float:
        """Tokens that are trained on for each sample of the data, those that are left out among the samples."""
        return self.epoch_tokens / self.counts.read

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        names = ("lengths", "samples_per_pack", "most_tokens", "most_patches", "mean_patches")
        numbers = {name: getattr(self, name) for name in names}
        return {**numbers, **self.report.to_dict(), "overlong": self.counts.to_dict()}


@dataclass(frozen=True)
class DryRun:
    """Result of a dry run.

    Attributes:
        model: name of the ledger.
        shape: how the devices share the work.
        device: whose memory it must fit; None if none was named.
        params: numbers of parameters.
        memory: of each device.
        packs: None without lengths to plan over.
        refers: when that forward is computed.
        ways: settings that make it fit, where it does not, or all of them together, if they are not enough.
        notes: what a size recomputes, and what the numbers leave open.
    """

    model: str
    shape: MeshShape
    device: Device | None
    params: ParamCount
    memory: MemoryPlan
    packs: Packs | None
    ways: tuple[Way, ...]
    notes: tuple[str, ...]
    refers: Literal["each step", "once"] = "once"

    @property
    def flops(self) -> FlopCount | None:
        """Of a mean step, all devices together, with a reference that each step computes; None without lengths."""
        if self.packs is None:
            return None
        reference = self.packs.reference
        return self.packs.flops if reference is None or self.refers == "once" else self.packs.flops + reference

    @property
    def fits(self) -> bool | None:
        """True if the run fits `USABLE` of the device's memory; None without a device."""
        room = room_of(self.device)
        return None if room is None else self.memory.peak <= room

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        shape, params, device = self.shape, self.params, self.device
        reference = None if self.packs is None else self.packs.reference
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "devices": shape.world_size,
            "mesh": asdict(shape),
            "device": None if device is None else {"name": device.title, "memory_bytes": device.memory_bytes},
            "params": {"total": params.total, "trainable": params.trainable, "active": params.active},
            "memory": self.memory.to_dict(),
            "fits": self.fits,
            "ways": [way.to_dict() for way in self.ways],
            "flops": None if self.flops is None else _flops_json(self.flops),
            "reference": None if reference is None else {"runs": self.refers, "flops": reference.total},
            "packs": None if self.packs is None else self.packs.to_dict(),
            "notes": list(self.notes),
        }


def dry_run(
    config: TrainConfig,
    cost_model: CostModel,
    saved: Mapping[str, SavedActivations],
    *,
    devices: int,
    device: Device | None,
    lengths: tuple[str, LengthTable] | None = None,
) -> DryRun:
    """Plan a run.

    Args:
        config: the recipe.
        cost_model: of its model, as it ships or was traced.
        saved: what autograd saves of the model, by precision; looked up are `precision_of`, and, where the run does
            not fit, that of the ways in which it would.
        devices: processes, a device each.
        device: whose memory it must fit.
        lengths: name and table of the samples' lengths; those of the recipe's plan section when None.

    Raises:
        ConfigError: a mesh that the devices do not fit, or lengths of which none fits a pack.
        UsageError: a pattern that matches nothing.
    """
    shape = config.parallel.mesh_shape(devices)
    learning = learning_model(config, cost_model)
    left_out = saved[precision_of(config, devices)].left_out
    notes = []
    recompute = recompute_of(config, learning, saved, shape)
    if config.speed.recompute_bytes is not None:
        notes.append(f"speed.recompute={config.speed.recompute} {choice_in_words(recompute, learning.block_towers)}")
    packs = plan_packs(config, learning, shape, recompute, lengths)
    if packs is None:
        notes.append("no lengths: with data.train here, plan.mix or plan.lengths, packs and FLOPs are planned too")
        tokens, patches = config.data.tokens_per_pack, most_patches(config, learning)
        padded = (tokens, patches)
    else:
        tokens, patches, padded = packs.most_tokens, packs.most_patches, packs.padded
    if learning.has_vision and not patches:
        notes.append("no pictures are in the lengths, so the vision tower holds no activations")
    if config.speed.kernels == "liger" and config.speed.compile is False:
        notes.append("activations are those of fused kernels, which Liger has for most elementwise operations, not all")
    if config.run.dtype == "float8":
        notes.append("float8 copies of weights and activations are not counted")

    planned, ways = memory_and_ways(config, learning, saved, devices, device, (tokens, patches), padded)
    if left_out:
        notes.append(f"activations of {', '.join(left_out[:3])} are not explained, and missing")
    second = frozen_forward(config, learning)
    refers: Literal["each step", "once"] = "each step" if second is not None and second.each_step else "once"
    if config.objective is not None:
        notes.append(f"what {config.objective.path} computes beside the model is not planned: a plan does not run it")
    return DryRun(cost_model.name, shape, device, learning.params, planned, packs, ways, tuple(notes), refers)


def with_copies(config: TrainConfig, devices: int) -> TrainConfig:
    """Return the recipe with copies of its shards on all devices, where it names no number of copies."""
    return config.model_copy(update={"parallel": config.parallel.with_copies(devices)})


def learning_model(config: TrainConfig, cost_model: CostModel) -> CostModel:
    """Freeze what a recipe freezes, and put its adapters in place."""
    if config.model.has_own_shape:
        from headway.optim import learning_with_tokens  # whose classes say what is changed

        return learning_with_tokens(config.model)
    learning = cost_model.freeze(config.model.freeze)
    lora = config.model.lora
    return learning if lora is None else learning.lora(lora.rank, lora.targets)


def memory_plan(
    config: TrainConfig,
    cost_model: CostModel,
    saved: Mapping[str, SavedActivations],
    devices: int,
    tokens: int,
    patches: int,
    padded: tuple[int, int] | None = None,
) -> MemoryPlan:
    """Plan the memory of each device of a run.

    Args:
        config: the recipe.
        cost_model: of its model, with what is frozen frozen and adapters in place.
        saved: what autograd saves of the model, by precision.
        devices: processes, a device each.
        tokens: of the largest pack.
        patches: of the pack with the most.
        padded: both if segments were all as long as their pack's longest; None for packs of one segment.

    Raises:
        ConfigError: a mesh that the devices do not fit, or a setting that has no effect on one device.
    """
    shape = config.parallel.mesh_shape(devices)
    if devices == 1 and config.parallel.offload:
        raise ConfigError("parallel.offload has no effect on one process, which keeps its model whole.")
    bucket = config.data.bucket_tokens or 1
    slots = -(-tokens // bucket) * bucket
    pack = Workload([tokens], images=one_picture(patches, cost_model), slots=slots)
    precision = precision_of(config, devices)
    state = state_of(config, precision, recompute_of(config, cost_model, saved, shape))
    if config.speed.attention == "cudnn":
        state = replace(state, padded=padded or (tokens, patches))
    return plan_memory(cost_model, saved[precision], pack, state, sharing_of(config, shape))


def memory_and_ways(
    config: TrainConfig,
    cost_model: CostModel,
    saved: Mapping[str, SavedActivations],
    devices: int,
    device: Device | None,
    largest: tuple[int, int],
    padded: tuple[int, int] | None = None,
) -> tuple[MemoryPlan, tuple[Way, ...]]:
    """Plan the memory of each device, and find what would make it fit where it does not.

    Args:
        config: the recipe.
        cost_model: of its model, with what is frozen frozen and adapters in place.
        saved: what autograd saves of the model, by precision.
        devices: processes, a device each.
        device: whose memory it must fit; None to look for no ways.
        largest: tokens of the fullest pack, and patches of the pack with the most.
        padded: as for `memory_plan`.

    Raises:
        ConfigError: as for `memory_plan`.
    """
    tokens, patches = largest

    def memory(changed: TrainConfig, devices: int) -> MemoryPlan:
        fill = min(1.0, changed.data.tokens_per_pack / tokens)
        # of adapters that are tried, what autograd saves is not traced
        learning, saved_by = cost_model, saved
        if changed.model.lora is not None and config.model.lora is None:
            learning = cost_model.lora(changed.model.lora.rank, changed.model.lora.targets)
            precision = precision_of(changed, devices)
            bytes_of_result = compute_bytes_of(precision)
            saved_by = {precision: saved_with_adapters(saved[precision], learning, bytes_of_result)}
        sizes = math.ceil(fill * tokens), math.ceil(fill * patches)
        filled = None if padded is None else (math.ceil(fill * padded[0]), math.ceil(fill * padded[1]))
        return memory_plan(changed, learning, saved_by, devices, *sizes, filled)

    planned, room = memory(config, devices), room_of(device)
    if room is None or planned.peak <= room:
        return planned, ()
    return planned, ways_to_fit(config, devices, room, lambda changed, devices: memory(changed, devices).peak)


def room_of(device: Device | None) -> int | None:
    """Memory of a device that a plan may fill [bytes]."""
    return None if device is None or device.memory_bytes is None else int(USABLE * device.memory_bytes)


def precision_of(config: TrainConfig, devices: int) -> Precision:
    """Precision of forward: sharded weights are gathered in bfloat16, those of a lone device go through autocast."""
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
    """Tell whether what enters recomputed blocks leaves the device; a CPU's memory is the host's."""
    return config.speed.offload == "inputs" and not config.run.device.startswith("cpu")


def state_of(config: TrainConfig, precision: Precision, recompute: str) -> State:
    """Dtypes and bytes of what a recipe holds, and how its forward computes."""
    weight = BFLOAT16 if config.run.dtype == "bfloat16-params" else FLOAT32
    moments = {"auto": float(weight), "float32": 4.0, "bfloat16": 2.0, "8bit": 1 + 4 / 256}
    return State(
        weight_bytes=weight,
        compute_bytes=compute_bytes_of(precision),
        moment_bytes=moments[config.optim.state],
        base=config.model.base,
        muon=config.optim.name == "muon",
        clips=config.optim.clip is not None,
        averaged=config.optim.ema is not None,
        average_every=1 if config.optim.ema is None else config.optim.ema.every,
        float8=config.run.dtype == "float8",
        offload=config.parallel.offload,
        one_pass=not config.run.device.startswith("cpu"),
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


def plan_packs(
    config: TrainConfig,
    cost_model: CostModel,
    shape: MeshShape,
    recompute: str,
    lengths: tuple[str, LengthTable] | None = None,
) -> Packs | None:
    """Plan the packs of some steps with the planner that training uses.

    Args:
        config: the recipe.
        cost_model: of its model, with what is frozen frozen.
        shape: how the devices share the work.
        recompute: blocks to compute again, as `CostModel.count` takes them.
        lengths: name and table of the samples' lengths; those of the recipe's plan section when None.

    Returns:
        None where there are no lengths.

    Raises:
        ConfigError: none of the lengths fits a pack, or too many samples would have to be planned.
        DataError: a sample exceeds a pack and the policy for those is "error".
    """
    named_lengths = lengths or lengths_of(config, cost_model, shape)
    if named_lengths is None:
        return None
    name, table = named_lengths
    cost_model = cost_model.with_splits() if table.branches else cost_model
    data, accumulation = config.data, config.optim.accumulation
    # the planner of training, over one epoch of these lengths
    budget = Budget(data.tokens_per_pack, data.patches_per_pack, data.samples_per_pack)
    ranks = shape.data_ranks
    # Each dataset has a policy of its own for samples that exceed a pack; of mere lengths nobody knows the dataset.
    parts = {name: part.table for name, part in table.parts.items()}
    items, counts = Items.build(parts, budget, policies_of(table, data.overlong_of_all), cost_model)
    if not len(items):
        raise ConfigError(f"of the lengths {name} none fits a pack of {budget.tokens} tokens; raise it.")
    order = Order.epochs(items.sizes, 1, seed=data.seed)
    plan = Plan(items, order, budget, ranks * accumulation, strategy=data.strategy, accumulation=accumulation)
    steps = [step for step, _ in plan.steps()]
    report, _ = report_on(steps, items, order, budget, ranks, data.strategy, 0.0)
    # the last step of an epoch is short, and no mean step is like it
    full_steps = steps[:-1] or steps
    chosen = np.concatenate([pack for step in full_steps for pack in step.packs])
    origins = items.locate(chosen)
    numbered = [part.rows for part in table.parts.values()]  # rows of the table, dataset by dataset
    first = np.cumsum([0, *map(len, numbered[:-1])])
    rows = np.concatenate(numbered)[first[origins.source] + origins.row]
    assert table.grids is not None
    assert table.grid_rows is not None
    grids = table.grids[np.isin(table.grid_rows, rows)]
    # the FLOPs of all these packs, divided by their steps, are those of a mean step
    segments_N, splits_N = _segments_of(table, rows, origins.start, origins.stop)
    work = Workload(segments_N, images=grids, splits=splits_N, packs=len(full_steps) * ranks * accumulation)
    recompute = with_head(recompute) if config.weighs_losses else recompute
    count = cost_model.count(work, recompute=recompute).split(len(full_steps))[0]
    second = frozen_forward(config, cost_model)
    reference = None if second is None else second.cost_model.count(work).split(len(full_steps))[0]
    num_packs = sum(len(step.packs) for step in full_steps)
    # of the largest packs, tokens and patches need not be of the same one
    most = [
        max(int(sizes[pack].sum()) for step in full_steps for pack in step.packs)
        for sizes in (items.tokens, items.patches)
    ]
    padded = [
        max(
            int(np.count_nonzero(sizes[pack]) * sizes[pack].max(initial=0))
            for step in full_steps
            for pack in step.packs
        )
        for sizes in (items.tokens, items.patches)
    ]
    segments, patches = len(chosen) / num_packs, float(items.patches[chosen].sum()) / num_packs
    epoch = int(items.tokens.sum())
    return Packs(
        name,
        report,
        OverlongCounts.of_all(counts.values()),
        segments,
        most[0],
        most[1],
        (padded[0], padded[1]),
        patches,
        count,
        epoch,
        reference,
    )


def _segments_of(
    table: LengthTable, rows: NDArray[Any], start: NDArray[Any], stop: NDArray[Any]
) -> tuple[NDArray[Any] | list[int], list[list[tuple[str, int]]]]:
    """List the segments of the pieces of samples in packs; a sample is one piece, or several if it is split.

    Args:
        table: of the samples' lengths.
        rows: row of each piece's sample in the table, shape (P,).
        start: first token of each piece in its sample, shape (P,).
        stop: the token behind its last, shape (P,).

    Returns:
        Lengths of the segments [tokens], and their splits, as `Workload` takes them.
    """
    if not table.segments and not table.branches:  # a segment each: packs of many devices are tens of millions
        return stop - start, []
    lengths, splits = list[int](), list[list[tuple[str, int]]]()
    for row, first, end in zip(rows.tolist(), start.tolist(), stop.tolist(), strict=True):
        own = segments_within(table.segments_of(row), first, end) or (end - first,)
        lengths += own
        prompt, *answers = table.branches.get(row, [0])
        splits += [branched(prompt, answers)] if answers else [[] for _ in own]
    return lengths, splits if table.branches else []


def _flops_json(count: FlopCount) -> dict[str, Any]:
    phases = {"forward": count.forward, "dgrad": count.dgrad, "wgrad": count.wgrad, "recompute": count.recompute}
    return {"convention": count.convention, "total": count.total, **phases, "components": count.by_component()}
