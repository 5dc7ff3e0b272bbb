"""Time of a recipe's step: its packs, its settings and a device's speeds, put together."""

import math
from collections.abc import Mapping
from dataclasses import replace

from headway.config import TrainConfig
from headway.count import CostModel, Workload
from headway.count.activations import SavedActivations
from headway.errors import ConfigError
from headway.packing.mesh import MeshShape
from headway.predict.collectives import Links
from headway.predict.exchanges import exchanges_of
from headway.predict.kernel_bytes import HEADWAY, Kernels
from headway.predict.packs import Packs
from headway.predict.recipe import (
    frozen_forward,
    one_picture,
    precision_of,
    recompute_of,
    sharing_of,
    state_of,
)
from headway.predict.slices import trained_of_process
from headway.predict.speeds import Speeds
from headway.predict.step_time import StepForecast, StepTimes, StepWork


class Forecaster:
    """Predicts the steps of one model's recipes on one kind of device.

    Args:
        cost_model: of the model, with what is frozen frozen and adapters in place.
        saved: what autograd saves of it, by precision.
        speeds: of the device.
        devices: processes, a device each.
        links: between them; None where they are not known, and exchanges are taken to hide behind computing.
        making_s: that a data worker takes to make a token of a pack [s]; None where it is not known, and packs are
            taken to be ready.
        kernels: that compute what is no product.

    Raises:
        PlanError: the devices are on several nodes, and the network between these is not known.
    """

    def __init__(
        self,
        cost_model: CostModel,
        saved: Mapping[str, SavedActivations],
        speeds: Speeds,
        devices: int,
        links: Links | None = None,
        *,
        making_s: float | None = None,
        kernels: Kernels = HEADWAY,
    ) -> None:
        if links is not None:
            links.require(devices)
        self._cost_model, self._saved, self._devices = cost_model, saved, devices
        self._speeds, self._links, self._making_s, self._kernels = speeds, links, making_s or 0.0, kernels
        self._times: dict[str, StepTimes] = {}
        self._references: dict[bool, Forecaster] = {}  # by whether each step computes it

    def predict(self, config: TrainConfig, packs: Packs) -> StepForecast:
        """Predict a mean step of a recipe; a millisecond once the first is known.

        Args:
            config: the recipe.
            packs: planned for it.

        Raises:
            ConfigError: of the model no saved activations are known, which tell what elementwise operations move.
            UsageError: its recomputation chooses no block.
        """
        # a model's rows are read once for each precision of its forward
        shape = config.parallel.mesh_shape(self._devices)
        precision = precision_of(config, self._devices)
        if precision not in self._times:
            saved = self._saved[precision]
            if not saved.blocks:
                raise ConfigError(
                    f"no saved activations of {self._cost_model.name} are known, so the time of its elementwise "
                    "operations cannot be predicted. Name the folder of its config.json, so that its code is traced."
                )
            self._times[precision] = StepTimes(self._cost_model, saved, self._speeds, kernels=self._kernels)
        recompute = recompute_of(config, self._cost_model, self._saved, shape)
        # the mean pack: its tokens in one segment, in slots of whole buckets, with its pictures as one
        ranks = shape.world_size // shape.sequence
        tokens = packs.report.fill * config.data.tokens_per_pack
        bucket = config.data.bucket_tokens or 1
        pack_tokens = math.ceil(tokens)
        pack = Workload(
            [pack_tokens],
            images=one_picture(round(packs.mean_patches), self._cost_model),
            slots=-(-pack_tokens // bucket) * bucket,
        )
        # tokens of the step are counted over all ranks; making packs is shared among the workers
        state = state_of(config, precision, recompute)
        exchanges = None
        if self._links is not None:
            saved, sharing = self._saved[precision], sharing_of(config, shape)
            exchanges = exchanges_of(self._cost_model, saved, pack, state, sharing, shape)
        work = StepWork(
            flops=packs.flops,
            pack=pack,
            packs=config.optim.accumulation,
            tokens=tokens * ranks * config.optim.accumulation,
            devices=self._devices,
            sequence=shape.sequence,
            expert=shape.expert,
            shards=shape.fsdp,
            gradients=self._gradients(config, shape),
            balance=packs.report.balance,
            exchanges=exchanges,
            links=self._links,
            making_s=self._making_s * tokens * config.optim.accumulation / max(1, config.data.workers),
        )
        step = self._times[precision].predict(work, state)
        return step if packs.reference is None else self._with_reference(step, config, packs)

    def _with_reference(self, step: StepForecast, config: TrainConfig, packs: Packs) -> StepForecast:
        """Add the forward of a model that does not learn: to the step, or to the time before the first step."""
        second = frozen_forward(config, self._cost_model)
        assert second is not None
        assert packs.reference is not None
        each_step = second.each_step
        if each_step not in self._references:
            self._references[each_step] = Forecaster(
                second.cost_model,
                self._saved,
                self._speeds,
                self._devices,
                self._links,
                making_s=None if each_step else self._making_s,  # a step's packs are made once
                kernels=self._kernels,
            )
        packs = replace(packs, flops=packs.reference, reference=None)
        forward = self._references[each_step].predict(second.config, packs)
        if not each_step:
            return replace(step, reference=forward.seconds)
        lines = {line.key: line for line in step.lines}
        for line in forward.lines:
            mine = lines.get(line.key)
            lines[line.key] = line if mine is None else replace(mine, seconds=mine.seconds + line.seconds)
        return replace(step, lines=tuple(lines.values()), flops=step.flops + forward.flops)

    def _gradients(self, config: TrainConfig, shape: MeshShape) -> int:
        """Numbers of gradients that a device adds up over the packs of a step."""
        if config.parallel.reduce == "pack":
            return self._cost_model.params.trainable // shape.fsdp
        return trained_of_process(self._cost_model, shape.expert)
