"""The sections together, and what must hold between them."""

from typing import Any, Self

from pydantic import model_validator

from headway.train.config.data import DataConfig
from headway.train.config.model import ModelConfig
from headway.train.config.optim import OptimConfig
from headway.train.config.parallel import ParallelConfig
from headway.train.config.plan import PlanConfig
from headway.train.config.run import CheckpointConfig, EvalConfig, RunConfig
from headway.train.config.sections import Section, as_written
from headway.train.config.speed import SpeedConfig


class TrainConfig(Section):
    """Everything that a training run can be told."""

    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    parallel: ParallelConfig = ParallelConfig()
    speed: SpeedConfig = SpeedConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    plan: PlanConfig = PlanConfig()
    run: RunConfig

    @model_validator(mode="after")
    def _evaluation_has_samples(self) -> Self:
        evaluates = self.eval.every is not None or self.eval.at_end
        if evaluates and self.data.eval is None:
            raise ValueError("eval.every or eval.at_end is set, but data.eval names no file of held-out samples")
        if self.data.eval is not None and not evaluates:
            raise ValueError("data.eval is given, but neither eval.every nor eval.at_end uses it")
        if self.eval.generate is not None and not evaluates:
            raise ValueError("eval.generate has no effect without an evaluation; set eval.every or eval.at_end")
        if self.run.profile is not None and self.run.profile.last > self.optim.steps:
            raise ValueError(
                f"run.profile ends with step {self.run.profile.last}, never reached in {self.optim.steps} steps"
            )
        if self.optim.ema is not None and not self.optim.ema.evaluate and not evaluates:
            raise ValueError("optim.ema.evaluate is false, but there is no evaluation; take it out")
        if self.eval.every is not None and self.eval.every > self.optim.steps:
            raise ValueError(f"eval.every {self.eval.every} is never reached in {self.optim.steps} steps")
        if self.checkpoint.every is not None and self.checkpoint.every > self.optim.steps:
            raise ValueError(f"checkpoint.every {self.checkpoint.every} is never reached in {self.optim.steps} steps")
        return self

    @model_validator(mode="after")
    def _gradients_are_summed_over_packs(self) -> Self:
        if self.parallel.reduce == "step" and self.optim.accumulation == 1:
            raise ValueError("parallel.reduce 'step' has no effect with one pack per step; see optim.accumulation")
        return self

    def as_dict(self) -> dict[str, Any]:
        """The resolved configuration as plain YAML and JSON types."""
        return as_written(self)
