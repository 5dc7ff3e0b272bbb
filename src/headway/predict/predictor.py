"""Predict the runs of one model on devices of one kind: packs first, then memory over them, then the time of a step."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headway.config import TrainConfig
from headway.count import CostModel, Workload
from headway.count.activations import SavedActivations
from headway.count.recompute import choice_in_words
from headway.devices import Device
from headway.errors import ConfigError
from headway.meter.slow_code import slow_code_of_plan
from headway.packing.lengths import LengthTable
from headway.packing.mesh import MeshShape
from headway.predict.communication import Exchanges, Links
from headway.predict.engine import engine_named, float8_of
from headway.predict.exchanges import exchanges_of
from headway.predict.fitting import Way, room_of, ways_to_fit
from headway.predict.memory import MemoryPlan, plan_memory
from headway.predict.packs import Packs, plan_packs
from headway.predict.prediction import Prediction
from headway.predict.recipe import (
    State,
    compute_bytes_of,
    frozen_forward,
    most_patches,
    one_picture,
    precision_of,
    recompute_of,
    sharing_of,
    state_of,
)
from headway.predict.saved import learning_model, packages_of, saved_of_recipe, saved_with_adapters
from headway.predict.speeds import Speeds
from headway.predict.step_time import StepForecast, StepTimes, StepWork
from headway.predict.weights import padding_of, trained_of_process

Sizes = tuple[int, int]
"""Tokens and patches of a pack, or of two packs that have the most of each."""


@dataclass(frozen=True)
class Predictor:
    """Predicts the runs of one model's recipes on devices of one kind.

    Attributes:
        cost_model: of the model, with what is frozen frozen and adapters in place.
        saved: what autograd saves of it, by precision; looked up are `precision_of` and, where a run does not fit, that
            of the ways in which it would.
        device: whose memory it must fit; None not to look.
        speeds: of the device; None for no time.
        links: between devices; None where they are not known, and exchanges are taken to hide behind computing.
        making_s: that a data worker takes to make a token [s]; None where it is not known, and packs are ready.
    """

    cost_model: CostModel
    saved: Mapping[str, SavedActivations]
    device: Device | None = None
    speeds: Speeds | None = None
    links: Links | None = None
    making_s: float | None = None
    _times: dict[tuple[str, str], StepTimes] = field(default_factory=dict, init=False, repr=False, compare=False)
    _references: "dict[bool, Predictor]" = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, config: TrainConfig, cost_model: CostModel, **hardware: Any) -> "Predictor":
        """Predict a recipe's model as the recipe trains it.

        Args:
            config: the recipe.
            cost_model: of its model, as it ships or was traced.
            hardware: the other attributes.
        """
        return cls(learning_model(config.model, cost_model), saved_of_recipe(config), **hardware)

    def at(self, config: TrainConfig, devices: int, lengths: tuple[str, LengthTable] | None = None) -> Prediction:
        """Predict a recipe on so many devices.

        Args:
            config: the recipe.
            devices: processes, a device each.
            lengths: name and table of the samples' lengths; those of the recipe's plan section when None.

        Raises:
            ConfigError: a mesh that the devices do not fit, or lengths of which none fits a pack.
            UsageError: a pattern that matches nothing.
        """
        shape = config.parallel.mesh_shape(devices)
        recompute = recompute_of(config, self.cost_model, self.saved, shape)
        return self.over(plan_packs(config, self.cost_model, shape, recompute, lengths), config, devices)

    def over(self, packs: Packs | None, config: TrainConfig, devices: int) -> Prediction:
        """Predict a recipe over packs that are planned; arguments and errors as for `at`."""
        shape, cost_model, room = config.parallel.mesh_shape(devices), self.cost_model, room_of(self.device)
        # the largest packs decide the memory; without lengths, of as many tokens and patches as there may be
        budget = config.data.tokens_per_pack, most_patches(config, cost_model)
        largest = budget if packs is None else (packs.most_tokens, packs.most_patches)
        padded = budget if packs is None else packs.padded
        memory = self.memory(config, devices, largest, padded)
        fits = room is None or memory.peak <= room
        second = frozen_forward(config, cost_model)
        return Prediction(
            config,
            cost_model.name,
            shape,
            cost_model.params,
            memory,
            packs,
            None if packs is None or self.speeds is None else self.time(config, packs, devices),
            self.device,
            () if room is None or fits else self.ways(config, devices, room, largest, padded),
            tuple(self._notes(config, shape, packs, largest[1])),
            "each step" if second is not None and second.each_step else "once",
            self.speeds,
            self.links,
            self.making_s,
            padding=padding_of(cost_model, shape.fsdp, shape.expert),
        )

    def memory(self, config: TrainConfig, devices: int, largest: Sizes, padded: Sizes | None = None) -> MemoryPlan:
        """Plan the memory of each device of a run.

        Args:
            config: the recipe.
            devices: processes, a device each.
            largest: tokens of the fullest pack, and patches of the pack with the most.
            padded: both if segments were all as long as their pack's longest; None for packs of one segment.

        Raises:
            ConfigError: a mesh that the devices do not fit, or a setting that has no effect on one device.
        """
        shape = config.parallel.mesh_shape(devices)
        if devices == 1 and config.parallel.offload:
            raise ConfigError("parallel.offload has no effect on one process, which keeps its model whole.")
        precision = precision_of(config, devices)
        state = state_of(config, precision, recompute_of(config, self.cost_model, self.saved, shape))
        if config.speed.attention == "cudnn":
            state = replace(state, padded=padded or largest)
        engine, pack = engine_named(config.plan.engine), self._pack(config, *largest)
        state = replace(state, logit_bytes=engine.logit_bytes, update_copies=engine.update_copies)
        if engine.keeps and state.recompute.endswith("-attention"):  # chosen by operation, in each block
            rows = [row for row in self.cost_model.rows if row.features and row.module.endswith(engine.keeps)]
            num_results = sum(row.forward // (2 * row.features[0]) for row in rows if row.features)
            state = replace(state, recompute="full,-attention", kept_results=num_results)
        return plan_memory(self.cost_model, self.saved[precision], pack, state, sharing_of(config, shape))

    def ways(
        self, config: TrainConfig, devices: int, room_bytes: int, largest: Sizes, padded: Sizes | None = None
    ) -> tuple[Way, ...]:
        """Find settings, or a number of devices, with which a run fits; shorter packs are as full as these.

        Args:
            config: the recipe, and the other arguments as for `memory`.
            devices: likewise.
            room_bytes: what each device may hold [bytes].
            largest: likewise.
            padded: likewise.
        """

        def peak(changed: TrainConfig, devices: int) -> int:
            fill = min(1.0, changed.data.tokens_per_pack / largest[0])
            sizes, padded_sizes = (
                None if pack is None else (math.ceil(fill * pack[0]), math.ceil(fill * pack[1]))
                for pack in (largest, padded)
            )
            assert sizes is not None
            is_adapted = changed.model.lora is not None and config.model.lora is None
            predictor = self._adapted(changed, devices) if is_adapted else self
            return predictor.memory(changed, devices, sizes, padded_sizes).peak

        return ways_to_fit(config, devices, room_bytes, peak)

    def _adapted(self, changed: TrainConfig, devices: int) -> "Predictor":
        """Predictor of the model with adapters that are tried, whose activations are estimated, not traced."""
        adapters, precision = changed.model.lora, precision_of(changed, devices)
        assert adapters is not None
        learning = self.cost_model.lora(adapters.rank, adapters.targets)
        saved = saved_with_adapters(self.saved[precision], learning, compute_bytes_of(precision))
        return Predictor(learning, {precision: saved})

    def time(self, config: TrainConfig, packs: Packs, devices: int) -> StepForecast:
        """Predict a mean step of a recipe; a millisecond once the first is known.

        Args:
            config: the recipe.
            packs: planned for it.
            devices: processes, a device each.

        Raises:
            ConfigError: of the model no saved activations are known, which tell what elementwise operations move.
            UsageError: its recomputation chooses no block.
        """
        links = self.links if devices > 1 else None
        shape, precision = config.parallel.mesh_shape(devices), precision_of(config, devices)
        state = state_of(config, precision, recompute_of(config, self.cost_model, self.saved, shape))
        # the mean pack: its tokens in one segment, in slots of whole buckets, with its pictures as one
        tokens = packs.report.fill * config.data.tokens_per_pack
        pack = self._pack(config, math.ceil(tokens), round(packs.mean_patches))
        if packs.headed < 1:
            pack = pack.with_counts(logits=math.ceil(tokens * packs.headed))
        # gradients are added up over a step's packs: slices where each pack's are summed over devices, else all
        gradients = self.cost_model.params.trainable // shape.fsdp
        if config.parallel.reduce != "pack":
            gradients = trained_of_process(self.cost_model, shape.expert)
        times = self._step_times(config, precision)
        # tokens of the step are counted over all ranks; making packs is shared among the workers
        work = StepWork(
            flops=packs.flops,
            pack=pack,
            packs=config.optim.accumulation,
            segments=packs.samples_per_pack,
            tokens=tokens * (shape.world_size // shape.sequence) * config.optim.accumulation,
            devices=devices,
            sequence=shape.sequence,
            expert=shape.expert,
            shards=shape.fsdp,
            gradients=gradients,
            balance=packs.report.balance,
            exchanges=None if links is None else self.exchanges(config, pack, state, shape),
            links=links,
            making_s=(self.making_s or 0.0) * tokens * config.optim.accumulation / max(1, config.data.workers),
        )
        step = times.predict(work, state)
        return step if packs.reference is None else self._with_reference(step, config, packs, devices)

    def exchanges(self, config: TrainConfig, pack: Workload, state: State, shape: MeshShape) -> Exchanges:
        """List the exchanges of a process for a pack; arguments as for `exchanges_of`."""
        saved, sharing = self.saved[precision_of(config, shape.world_size)], sharing_of(config, shape)
        engine = engine_named(config.plan.engine)
        return exchanges_of(self.cost_model, saved, pack, state, sharing, shape, engine.ranks_of_token)

    def _pack(self, config: TrainConfig, tokens: int, patches: int) -> Workload:
        """A pack of one segment and one picture, in slots of whole buckets."""
        bucket = config.data.bucket_tokens or 1
        return Workload([tokens], images=one_picture(patches, self.cost_model), slots=-(-tokens // bucket) * bucket)

    def _step_times(self, config: TrainConfig, precision: str) -> StepTimes:
        """Times of the model's parts, whose rows are read once for each precision of its forward and each engine."""
        key = precision, config.plan.engine
        if key not in self._times:
            saved, engine = self.saved[precision], engine_named(config.plan.engine)
            if not saved.blocks:
                raise ConfigError(
                    f"no saved activations of {self.cost_model.name} are known, so the time of its elementwise "
                    "operations cannot be predicted. Name the folder of its config.json, so that its code is traced."
                )
            assert self.speeds is not None
            float8 = config.run.dtype == "float8"
            speeds = engine.speeds(self.speeds, self.device, self.cost_model, float8=float8)
            self._times[key] = StepTimes(self.cost_model, saved, speeds, engine=engine)
        return self._times[key]

    def _with_reference(self, step: StepForecast, config: TrainConfig, packs: Packs, devices: int) -> StepForecast:
        """Add the forward of a model that does not learn: to the step, or to the time before the first step."""
        second = frozen_forward(config, self.cost_model)
        assert second is not None
        assert packs.reference is not None
        each_step = second.each_step
        if each_step not in self._references:
            making_s = None if each_step else self.making_s  # a step's packs are made once
            self._references[each_step] = replace(self, cost_model=second.cost_model, making_s=making_s)
        packs = replace(packs, flops=packs.reference, reference=None)
        forward = self._references[each_step].time(second.config, packs, devices)
        if not each_step:
            return replace(step, reference=forward.seconds)
        lines = {line.key: line for line in step.lines}
        for line in forward.lines:
            mine = lines.get(line.key)
            lines[line.key] = line if mine is None else replace(mine, seconds=mine.seconds + line.seconds)
        launches, launching = step.launches + forward.launches, step.launching + forward.launching
        flops = step.flops + forward.flops
        return replace(step, lines=tuple(lines.values()), flops=flops, launches=launches, launching=launching)

    def _notes(self, config: TrainConfig, shape: MeshShape, packs: Packs | None, most_patches: int) -> list[str]:
        """Describe the recomputation of a size, its known slow code and the gaps of its numbers, a clause each."""
        cost_model, speed = self.cost_model, config.speed
        saved = self.saved[precision_of(config, shape.world_size)]
        notes = []
        if config.plan.engine != "headway":
            notes.append(f"priced as {engine_named(config.plan.engine).title} runs it (plan.engine)")
        if speed.recompute_bytes is not None:
            chosen = choice_in_words(recompute_of(config, cost_model, self.saved, shape), cost_model.block_towers)
            notes.append(f"speed.recompute={speed.recompute} {chosen}")
        if packs is None:
            notes.append("no lengths: with data.train here, plan.mix or plan.lengths, packs and FLOPs are planned too")
        if cost_model.has_vision and not most_patches:
            notes.append("no pictures are in the lengths, so the vision tower holds no activations")
        if speed.kernels == "liger" and speed.compile is False:
            notes.append(
                "activations are those of fused kernels, which Liger has for most elementwise operations, not all"
            )
        if config.run.dtype == "float8" and float8_of(config.plan.engine).copies:
            notes.append("float8 copies of weights and activations are not counted")
        if saved.left_out:
            notes.append(f"activations of {', '.join(saved.left_out[:3])} are not explained, and missing")
        if saved.note:
            notes.append(saved.note)
        patches = packs.mean_patches if packs is not None else 0.0
        notes += [
            f"known slow code ({row.name}), unless it is mended where the run is: {row.text.removesuffix('.')}"
            for row in slow_code_of_plan({row.module for row in cost_model.rows}, patches, packages_of(config))
        ]
        if config.objective is not None:
            notes.append(
                f"what {config.objective.path} computes beside the model is not planned: a plan does not run it"
            )
        return notes
