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

    start: Positive = Field(description="First step recorded; the steps before it warm up [steps]")
    steps: Positive = Field(default=3, description="Steps recorded [steps]")
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(0,), min_length=1, description="Processes that record, each a trace of its own"
    )
    memory: bool = Field(default=False, description="Record what holds the GPU's memory too; CUDA only")

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
        default="auto", description="'cpu', 'cuda', 'cuda:1', or 'auto' for CUDA where there is one"
    )
    dtype: Literal["auto", "float32", "bfloat16-autocast", "bfloat16-params", "float8"] = Field(
        default="auto",
        description="float32; bfloat16-autocast (fp32 weights) or bfloat16-params, both on CUDA only; float8, which is "
        "bfloat16-autocast with the blocks' linear layers in float8, on CUDA 8.9 or newer; auto is bfloat16-autocast "
        "on CUDA and float32 on CPU",
    )
    threads: Annotated[Positive | None, FREE_ON_RESUME] = Field(
        default=None, le=4096, description="CPU threads of PyTorch; null for its choice [threads]"
    )
    log_every: Annotated[Positive, FREE_ON_RESUME] = Field(
        default=1, description="Steps between printed lines; metrics.jsonl has all [steps]"
    )
    trackers: Annotated[tuple[str, ...], FREE_ON_RESUME] = Field(
        default=(),
        description="Where records go besides metrics.jsonl: 'tensorboard:FOLDER', 'wandb:PROJECT', 'mlflow:URI', ...; "
        "docs/measure.md lists them",
    )
    profile: Annotated[ProfileConfig | None, FREE_ON_RESUME] = Field(
        default=None, description="Steps to profile; null for those that run.auto_profile chooses"
    )
    auto_profile: bool = Field(
        default=True,
        description="Profile two steps by itself once a run is warm, and when its speed changes for long, where that "
        "takes at most 0.5 % of its time; false for never",
    )
    watchdog_s: Annotated[float | None, FREE_ON_RESUME] = Field(
        default=1800.0,
        gt=0.0,
        le=1e8,
        description="A rank without progress for so long writes where it stands and ends; null for no watch [s]",
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
        default=None, description="Optimizer steps between checkpoints; the end of the run always has one [steps]"
    )
    keep: Positive = Field(default=2, description="Newest checkpoints that stay; older ones are deleted [checkpoints]")
    keep_best: Literal[True, False, "exact_match"] = Field(
        default=False,
        description="Save a checkpoint after each evaluation that is the best so far, and keep that one besides, for "
        "`headway chat RUN --best`, generate, evaluate and export. The best has the lowest loss (true), or the most "
        "samples answered exactly, or the most compared answers in the right order (exact_match)",
    )
    asynchronous: bool = Field(
        default=True, description="Write while training goes on, from a copy of the state in the host's memory"
    )
    export: Literal["never", "end", "every"] = Field(
        default="end",
        description="Which checkpoints become a folder that from_pretrained opens: none, the last, or every one",
    )


class EvalConfig(Section):
    """Exact match of greedy answers on held-out samples, and some answers in words."""

    every: Positive | None = Field(default=None, description="Steps between evaluations; null for none [steps]")
    at_end: bool = Field(default=False, description="Evaluate once more after the last step")
    stop_after: Positive | None = Field(
        default=None,
        description="End the run after so many evaluations in a row that did not better the best one, which is that of "
        "checkpoint.keep_best, else the lowest loss; null for never [evaluations]",
    )
    max_samples: Positive | None = Field(default=None, description="Only the first so many [samples]")
    generate: Positive | None = Field(
        default=None,
        description="Chats whose answers are written out after each evaluation; null for none [samples]",
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
        description="Devices of the run, a process each; a command's option of that name goes first [processes]",
    )
    device: str | None = Field(
        default=None,
        description="Whose memory the run must fit, as `headway devices` names it; a command's option of that name "
        "goes first",
    )
    engine: str = Field(
        default="headway",
        description="Code that runs the recipe: headway, or another tool's engine with its kernels and rates, such as "
        "megatron or automodel (docs/plan-accuracy.md lists them)",
    )
    power_w: float | None = Field(
        default=None,
        gt=0.0,
        description="Limit of each device's power, where it is set below its own; null for none [W]",
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
        names = [name for name in ("mix", "lengths") if getattr(self, name) is not None]
        if len(names) > 1:
            raise ValueError(f"give either {' or '.join(map(repr, names))}; null switches a setting off")
        return self
