"""The optimizer, its schedule and the size of a step."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from headway.train.config.sections import Fraction, Positive, Section, changed


class OptimConfig(Section):
    """AdamW, its schedule and the size of an optimizer step."""

    steps: Positive = Field(description="Optimizer steps of the whole run [steps]")
    lr: float = Field(gt=0.0, description="Peak learning rate")
    betas: tuple[Fraction, Fraction] = Field(
        default=(0.9, 0.95), description="AdamW's decay rates of its moments, below 1"
    )
    eps: float = Field(default=1e-8, gt=0.0, description="AdamW's epsilon")
    weight_decay: float = Field(default=0.1, ge=0.0, description="Decay of matrices; norms and biases have none")
    warmup_steps: int = Field(default=0, ge=0, description="Linear rise of the learning rate [steps]")
    schedule: Literal["cosine", "constant"] = Field(
        default="cosine", description="The learning rate's course after warm-up"
    )
    min_lr_ratio: Fraction = Field(default=0.1, description="Last learning rate of the cosine as a fraction of lr")
    clip: float | None = Field(default=1.0, gt=0.0, description="Largest global gradient norm; null for no clipping")
    accumulation: Positive = Field(default=1, description="Packs per optimizer step and rank [packs]")

    @field_validator("betas")
    @classmethod
    def _betas_below_one(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if max(betas) >= 1.0:
            raise ValueError("both must be below 1")
        return betas

    @model_validator(mode="after")
    def _everything_takes_effect(self) -> Self:
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} leaves nothing of the {self.steps} steps")
        if self.schedule == "constant" and "min_lr_ratio" in changed(self):
            raise ValueError("min_lr_ratio has no effect with schedule 'constant'; remove it or use 'cosine'")
        return self
