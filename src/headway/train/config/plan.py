"""What `headway train --dry-run` assumes about a run; training itself reads none of it."""

from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from headway.packing.lengths import MIXES
from headway.train.config.sections import Positive, Section


class PlanConfig(Section):
    """Devices and lengths that a dry run plans for; training takes what is there."""

    devices: Positive | None = Field(
        default=None, description="Devices of the run, a process each; --devices goes before it [processes]"
    )
    device: str | None = Field(
        default=None, description="Whose memory the run must fit, as `headway devices` names it; --device goes before"
    )
    mix: str | None = Field(
        default=None, description=f"Typical lengths to plan packs over, one of {', '.join(MIXES)}; null with 'lengths'"
    )
    lengths: Path | None = Field(
        default=None, description="Measured lengths instead: CSV or Parquet as `headway pack --lengths` reads"
    )

    @field_validator("mix")
    @classmethod
    def _mix_is_known(cls, mix: str | None) -> str | None:
        if mix is not None and mix not in MIXES:
            raise ValueError(f"no such mix of lengths; known are {', '.join(MIXES)}")
        return mix

    @model_validator(mode="after")
    def _lengths_come_from_one_place(self) -> Self:
        if self.mix is not None and self.lengths is not None:
            raise ValueError("give either 'mix' or 'lengths'")
        return self
