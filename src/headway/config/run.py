"""Sections on a run: its place, what it leaves behind, how it is judged, what a dry run assumes about it."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from headway.config.sections import FREE_ON_RESUME, Positive, Section
from headway.errors import ConfigError
from headway.log.sinks import check_spec
from headway.packing.lengths import MIXES


class ProfileConfig(Section):
    """A window of steps under torch.profiler."""

    start: Positive = Field(description="First step recorded. The steps before it warm up [steps]")
    steps: Positive = Field(default=3, description="Steps recorded [steps]")
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(0,), min_length=1, description="Processes that record, each a trace of its own"
    )
    memory: bool = Field(default=False, description="Record the owners of GPU memory too. CUDA only")

    @property
    def last(self) -> int:
        """Last step recorded."""
        return self.start + self.steps - 1


class RunConfig(Section):
    """Where the run happens and what it leaves behind."""

    folder: Annotated[Path, FREE_ON_RESUME] = Field(
        description="Run folder: config, versions, metrics.jsonl and checkpoints"
    )
    seed: int = Field(
        default=0, ge=0, lt=2**32, description="Seed of weights and of everything random besides the data order"
    )
    device: Annotated[str, FREE_ON_RESUME] = Field(
        default="auto", description="'cpu', 'cuda', 'cuda:1' or 'auto'. Auto means CUDA if there is a device"
    )
    dtype: Literal["auto", "float32", "bfloat16-autocast", "bfloat16-params", "float8"] = Field(
        default="auto",
        description="Precision. bfloat16-autocast has float32 weights. float8 is bfloat16-autocast with the blocks' "
        "linear layers in float8. All but float32 need CUDA. Auto means bfloat16-autocast on CUDA and float32 "
        "on a CPU",
    )
    threads: Annotated[Positive | None, FREE_ON_RESUME] = Field(
        default=None, le=4096, description="CPU threads of PyTorch. Null means PyTorch's choice [threads]"
    )
    log_every: Annotated[Positive, FREE_ON_RESUME] = Field(
        default=1, description="Steps between printed lines. metrics.jsonl has every step [steps]"
    )
    trackers: Annotated[tuple[str, ...], FREE_ON_RESUME] = Field(
        default=(),
        description="Trackers that get the records besides metrics.jsonl: 'tensorboard:FOLDER', 'wandb:PROJECT', "
        "'mlflow:URI' and others, which docs/measure.md lists",
    )
    profile: Annotated[ProfileConfig | None, FREE_ON_RESUME] = Field(
        default=None, description="Steps to profile. Null means those that run.auto_profile chooses"
    )
    auto_profile: bool = Field(
        default=True,
        description="Profile two steps once a run is warm, and again if its speed changes for long. Profiling takes at "
        "most 0.5 % of the run's time",
    )
    watchdog_s: Annotated[float | None, FREE_ON_RESUME] = Field(
        default=1800.0,
        gt=0.0,
        le=1e8,
        description="Longest time without progress. A rank then writes its stack and ends. Null means no watch [s]",
    )

    @field_validator("trackers")
    @classmethod
    def _are_places(cls, trackers: tuple[str, ...]) -> tuple[str, ...]:
        for spec in trackers:
            try:
                check_spec(spec)
            except ConfigError as error:
                raise ValueError(str(error)) from error
        return trackers


class CheckpointConfig(Section):
    """Cadence at which the whole state is saved, and how much of it stays on disk."""

    every: Positive | None = Field(
        default=None, description="Optimizer steps between checkpoints. The end of the run always has one [steps]"
    )
    keep: Positive = Field(
        default=2,
        description="Newest checkpoints that stay. Older ones are deleted [checkpoints]",
    )
    keep_best: Literal[True, False, "exact_match"] = Field(
        default=False,
        description="Save and keep a checkpoint after each evaluation that is the best so far, for `headway chat RUN "
        "--best`, generate, evaluate and export. The best has the lowest loss (true), or the most exact "
        "answers or pairs in the right order (exact_match)",
    )
    asynchronous: bool = Field(
        default=True, description="Write from a copy of the state in the host's memory while training continues"
    )
    export: Literal["never", "end", "every"] = Field(
        default="end",
        description="Checkpoints that become a folder for from_pretrained: none, the last, or every one",
    )


class EvalConfig(Section):
    """Exact match of greedy answers on held-out samples, and some answers in words."""

    every: Positive | None = Field(default=None, description="Steps between evaluations. Null means none [steps]")
    at_end: bool = Field(default=False, description="Evaluate once more after the last step")
    stop_after: Positive | None = Field(
        default=None,
        description="Evaluations in a row without a better one, after which the run ends. The measure is that of "
        "checkpoint.keep_best, or else the loss. Null means never [evaluations]",
    )
    max_samples: Positive | None = Field(default=None, description="Most samples that are evaluated [samples]")
    generate: Positive | None = Field(
        default=None,
        description="Chats whose answers are written out after each evaluation. Null means none [samples]",
    )
    max_new_tokens: Positive = Field(default=64, description="Longest answer written out [tokens]")

    @property
    def evaluates(self) -> bool:
        """True if there is any evaluation."""
        return self.every is not None or self.at_end


class PlanConfig(Section):
    """Devices and lengths that `headway train --dry-run` plans for; training itself reads none of it."""

    devices: Positive | None = Field(
        default=None,
        description="Devices of the run, one process each. An option of a command comes first [processes]",
    )
    device: str | None = Field(
        default=None,
        description="Device whose memory the run must fit, as `headway devices` names it. An option of a "
        "command comes first",
    )
    engine: str = Field(
        default="headway",
        description="Engine that runs the recipe: headway, or another tool's with its kernels and rates, such as "
        "megatron or automodel (docs/plan.md lists them)",
    )
    assume: list[str] | None = Field(
        default=None,
        description="Packages of kernels on the machine that trains: none, flash-linear-attention, causal-conv1d, "
        "mamba-ssm. Null means those that are installed here",
    )
    power_w: float | None = Field(
        default=None,
        gt=0.0,
        description="Power limit of each device, if it is set lower than the device's own. Null means none [W]",
    )
    mix: str | None = Field(
        default=None, description=f"Typical lengths to plan packs over, one of {', '.join(MIXES)}; null with 'lengths'"
    )
    lengths: Path | None = Field(
        default=None,
        description="Table of measured lengths instead of plan.mix: CSV or Parquet as `headway pack --lengths` reads",
    )

    @field_validator("mix")
    @classmethod
    def _mix_is_known(cls, mix: str | None) -> str | None:
        if mix is not None and mix not in MIXES:
            raise ValueError(f"no such mix of lengths. Known mixes are {', '.join(MIXES)}")
        return mix

    @model_validator(mode="after")
    def _lengths_come_from_one_place(self) -> Self:
        names = [name for name in ("mix", "lengths") if getattr(self, name) is not None]
        if len(names) > 1:
            raise ValueError(f"give either {' or '.join(map(repr, names))}. Set the other one to null")
        return self
