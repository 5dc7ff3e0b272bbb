"""The optimizer, its schedule and the size of a step."""

import math
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from headway.config.sections import FREE_ON_RESUME, Fraction, Positive, Section, Share, settings_off_default
from headway.report.quantity import parse_number

WSD = ("wsd", "wsd-linear", "wsd-cosine")
"""Schedules that stay and then fall: by 1 - sqrt, or as their names say."""
_USES = {  # settings of the schedule, and the schedules that read them
    "min_lr_ratio": ("cosine", "linear", *WSD),
    "decay_share": WSD,
}


def factor_of(value: float | str, lr: float) -> float:
    """Turn a learning rate of `lr_of`, absolute or "x0.1" times the common one, into a factor of the common one.

    >>> factor_of("x0.1", 1e-3), factor_of(2e-3, 1e-3)
    (0.1, 2.0)
    """
    if isinstance(value, str):
        factor = _factor(value)
        assert factor is not None  # the configuration has checked it
        return factor
    return value / lr


def _factor(text: str) -> float | None:
    """The number behind an x; None of a text without."""
    number = parse_number(text[1:]) if text.startswith("x") else None
    return None if number is None else float(number)


def _rate(value: float | str) -> float | str:
    if isinstance(value, str) and _factor(value) is None:
        number = parse_number(value)  # YAML reads 1e-5 as a text
        if number is None:
            raise ValueError("give a learning rate, such as 2.0e-6, or a factor of optim.lr, such as 'x0.1'")
        value = float(number)
    if not 0.0 < factor_of(value, 1.0) < math.inf:
        raise ValueError("a learning rate must be above 0. To freeze a part, name it in model.freeze")
    return value


class MuonConfig(Section):
    """Muon's own settings."""

    momentum: Fraction = Field(default=0.95, description="Decay rate of Muon's momentum, below 1")
    scale: Literal["match_rms_adamw", "original"] = Field(
        default="match_rms_adamw",
        description="Step size of a matrix of A x B: 0.2 sqrt(max(A, B)) lr, which is as large as AdamW's, or Muon's "
        "first form, sqrt(max(1, A / B)) lr",
    )
    lr: Share | None = Field(default=None, description="Peak learning rate of Muon's matrices. Null means optim.lr")

    @field_validator("momentum")
    @classmethod
    def _below_one(cls, momentum: float) -> float:
        if momentum >= 1.0:
            raise ValueError("must be below 1")
        return momentum


class EmaConfig(Section):
    """An exponential moving average of the weights that learn, in float32, which evaluations judge and exports have."""

    decay: Fraction = Field(
        description="Weight of the old average at an update, below 1. 0.999 averages about 1000 updates",
    )
    every: Positive = Field(default=1, description="Optimizer steps between updates of the average [steps]")
    warmup: bool = Field(
        default=True, description="Begin with a short memory. Update n decays by min(decay, (1 + n) / (10 + n))"
    )

    @field_validator("decay")
    @classmethod
    def _below_one(cls, decay: float) -> float:
        if decay >= 1.0:
            raise ValueError("must be below 1, or the average would never move")
        return decay


class OptimConfig(Section):
    """The optimizer, its schedule and the size of an optimizer step."""

    name: Literal["adamw", "muon"] = Field(
        default="adamw", description="Optimizer. muon updates the matrices of hidden layers, and AdamW the rest"
    )
    steps: Annotated[Positive | None, FREE_ON_RESUME] = Field(
        default=None, description="Optimizer steps of the whole run. Null if epochs is set [steps]"
    )
    epochs: Annotated[Share | None, FREE_ON_RESUME] = Field(
        default=None,
        ge=1e-6,
        le=1e6,
        description="Passes through data.train, instead of steps. A fraction ends within a pass [epochs]",
    )
    lr: float = Field(gt=0.0, description="Peak learning rate")
    lr_of: dict[str, Annotated[float | str, AfterValidator(_rate)]] = Field(
        default={},
        description="Peak learning rates of parts, by patterns as in model.freeze: a rate, or a factor of lr ('x0.1'). "
        "The last pattern that matches a parameter holds",
    )
    betas: tuple[Fraction, Fraction] = Field(
        default=(0.9, 0.95), description="AdamW's decay rates of its moments, below 1"
    )
    eps: float = Field(default=1e-8, gt=0.0, description="AdamW's epsilon")
    weight_decay: float = Field(
        default=0.1,
        ge=0.0,
        description="Weight decay of matrices. Norms and biases have none",
    )
    muon: MuonConfig = Field(default=MuonConfig(), description="Muon's own settings")
    state: Literal["auto", "float32", "bfloat16", "8bit"] = Field(
        default="auto",
        description="Precision of the optimizer's moments. Auto means that of the parameters. bfloat16 is rounded "
        "stochastically. 8bit has a scale per block",
    )
    warmup_steps: int = Field(default=0, ge=0, description="Linear rise of the learning rate [steps]")
    schedule: Literal["cosine", "constant", "linear", "wsd", "wsd-linear", "wsd-cosine", "inverse_sqrt"] = Field(
        default="cosine",
        description="Course of the learning rate after warm-up. wsd stays and then decays by 1-sqrt, or as named",
    )
    min_lr_ratio: Fraction = Field(
        default=0.1, description="Last learning rate of cosine, linear and wsd, as a fraction of lr"
    )
    decay_share: Fraction = Field(
        default=0.2, gt=0.0, description="Fraction of all steps that wsd's decay takes, at the end"
    )
    on_nonfinite: Literal["error", "skip"] = Field(
        default="error",
        description="End the run if a loss or gradient is not finite, or skip that update. After ten skipped updates in"
        " a row, the next one ends the run",
    )
    ema: EmaConfig | None = Field(default=None, description="Moving average of the weights. Null means none")
    clip: float | None = Field(
        default=1.0,
        gt=0.0,
        description="Largest global gradient norm. Null means no clipping",
    )
    accumulation: Annotated[Positive, FREE_ON_RESUME] = Field(
        default=1, le=2**20, description="Packs per optimizer step and rank [packs]"
    )

    @field_validator("betas")
    @classmethod
    def _betas_below_one(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if max(betas) >= 1.0:
            raise ValueError("both must be below 1")
        return betas

    @model_validator(mode="after")
    def _everything_takes_effect(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(
                "say how long the run is, with 'steps' or with 'epochs'"
                + ("" if self.steps is None else ". Both are given, so set one of them to null")
            )
        for setting in settings_off_default(self) & _USES.keys():
            if self.schedule not in (readers := _USES[setting]):
                raise ValueError(
                    f"{setting} has no effect with schedule {self.schedule!r}. Remove it, or use {' or '.join(readers)}"
                )
        if self.schedule == "inverse_sqrt" and not self.warmup_steps:
            raise ValueError("schedule 'inverse_sqrt' needs warmup_steps, because it falls from the end of the warm-up")
        if self.name != "muon" and self.muon != MuonConfig():
            raise ValueError(f"optim.muon has no effect with optimizer {self.name!r}. Remove it, or use name 'muon'")
        return self
