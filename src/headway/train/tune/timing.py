"""The time of a choice's step, with the FLOPs that it computes again put to packs that were planned without."""

from collections.abc import Mapping
from dataclasses import replace

from headway.count import CostModel, FlopCount, Workload
from headway.count.activations import SavedActivations
from headway.count.flop_count import FlopRow
from headway.plan.speeds import Speeds
from headway.plan.step_time import StepTime
from headway.train.config import TrainConfig
from headway.train.dry_run import Packs, one_picture, recompute_of
from headway.train.forecast import Forecaster


class StepTimer:
    """Predicts the steps of one recipe's choices.

    Args:
        cost_model: of the model, with what is frozen frozen and adapters in place.
        saved: what autograd saves of it, by precision.
        speeds: of the device.
        devices: processes, a device each.

    Raises:
        ConfigError: no saved activations of the model are known.
    """

    def __init__(
        self, cost_model: CostModel, saved: Mapping[str, SavedActivations], speeds: Speeds, devices: int
    ) -> None:
        self.speeds = speeds
        self._cost_model, self._saved, self._devices = cost_model, saved, devices
        self._forecaster = Forecaster(cost_model, saved, speeds, devices)

    def __call__(self, config: TrainConfig, packs: Packs) -> StepTime:
        """Predict the time of a mean step.

        Args:
            config: the recipe with a choice's settings.
            packs: planned for it, with nothing computed again.
        """
        shape = config.parallel.mesh_shape(self._devices)
        recompute = recompute_of(config, self._cost_model, self._saved, shape)
        pictures = one_picture(packs.most_patches, self._cost_model) if packs.most_patches else []
        pack = Workload([packs.most_tokens], images=pictures)
        again = _computed_again(packs.flops, self._cost_model.count(pack, recompute=recompute))
        return self._forecaster.predict(config, replace(packs, flops=again))


def _computed_again(step: FlopCount, pack: FlopCount) -> FlopCount:
    """FLOPs of a step with those that are computed again: of each driver the same share of forward as in any pack."""
    shares = {(row.name, row.driver): row.recompute / row.forward for row in pack.rows if row.forward}
    return FlopCount(
        tuple(
            FlopRow(
                row.name,
                row.driver,
                row.forward,
                row.dgrad,
                row.wgrad,
                round(row.forward * shares.get((row.name, row.driver), 0.0)),
            )
            for row in step.rows
        )
    )
