"""Configuration of the data: sources and how they mix, packs, and how they are fed."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from headway.train.config.sections import Positive, Section, Share, Slots, changed


class SourceConfig(Section):
    """One dataset, and how often it plays."""

    path: str | None = Field(default=None, description="File, folder, glob or URL of samples in any format it knows")
    name: str | None = Field(default=None, description="What metrics call it; the file's name if not given")
    schema_name: str = Field(
        default="auto", alias="schema", description="How rows become samples; told by their keys if not given"
    )
    text_column: str = Field(default="text", description="Column that holds the words of documents")
    columns: dict[str, str] = Field(
        default={}, description="The dataset's own names of columns, by those that schemas read: {question: Frage}"
    )
    root: Path | None = Field(default=None, description="Folder that media paths start from and may not leave")
    allow_remote: bool = Field(default=False, description="Whether rows may name media by URL")
    epochs: Share | None = Field(
        default=None,
        ge=1e-6,
        le=1e6,
        description="Passes over it; without it, the last stage goes on until optim.steps [passes]",
    )
    limit: Positive | None = Field(default=None, description="Only so many of its samples [samples]")


class MixPart(SourceConfig):
    """One of the sources that play together."""

    weight: Share | None = Field(default=None, description="Share of the samples, relative to the others' weights")

    @model_validator(mode="after")
    def _is_a_source_with_a_share(self) -> Self:
        if self.path is None:
            raise ValueError("a part of a mix needs 'path'")
        if (self.weight is None) == (self.epochs is None):
            raise ValueError(f"{self.path}: give either 'weight' or 'epochs'")
        return self


class StageConfig(SourceConfig):
    """One stretch of the training data: a source, or a mix of them; stages play one after the other."""

    mix: tuple[MixPart, ...] = Field(default=(), description="Sources that play together, instead of one path")
    samples: Positive | None = Field(default=None, description="Length of a mix with weights [samples]")

    @model_validator(mode="after")
    def _is_one_source_or_a_mix(self) -> Self:
        if (self.path is None) == (not self.mix):
            raise ValueError("a stage needs either 'path' or 'mix'")
        if self.mix:
            given = sorted(changed(self) - {"mix", "samples"})
            if given:
                raise ValueError(f"{', '.join(given)} have no effect beside 'mix'; give them in its parts")
            if len({part.weight is None for part in self.mix}) > 1:
                raise ValueError("the parts of a mix have weights, or all have epochs")
        if self.samples is not None and not (self.mix and self.mix[0].weight is not None):
            raise ValueError("'samples' is the length of a mix with weights; elsewhere 'epochs' say how long it is")
        return self

    @property
    def parts(self) -> tuple[SourceConfig, ...]:
        """The sources that play."""
        return self.mix or (self,)

    @property
    def is_endless(self) -> bool:
        """Whether it never ends by itself."""
        return self.samples is None and all(part.epochs is None for part in self.parts)


class BadSamplesConfig(Section):
    """How samples that cannot be used are handled."""

    policy: Literal["error", "skip"] = Field(
        default="error", description="'error' ends the run; 'skip' goes on without them and lists them"
    )
    limit: int | None = Field(
        default=1000,
        ge=0,
        le=10**12,
        description="Most that are skipped before the run ends; null for any number [samples]",
    )
    fraction: float | None = Field(
        default=0.05, ge=0.0, le=1.0, description="Largest share of those read that is skipped; null for any"
    )

    @model_validator(mode="after")
    def _limits_take_effect(self) -> Self:
        if self.policy == "error" and changed(self):
            raise ValueError("limit and fraction have no effect with policy 'error'")
        return self


class StreamConfig(Section):
    """How data that are not indexed are read and packed as they come."""

    lanes: Positive = Field(
        default=16, le=2**20, description="Parts that are read side by side; a multiple of the number of ranks [lanes]"
    )
    shuffle: Positive = Field(
        default=128,
        le=2**24,
        description="Samples that wait in each lane to be drawn at random; 1 keeps the order [samples]",
    )
    open_packs: Positive = Field(default=8, le=2**16, description="Packs that are open at a time in each lane [packs]")


class DataConfig(Section):
    """Sources, packing and feeding."""

    train: tuple[StageConfig, ...] = Field(min_length=1, description="Stages of training data, played in order")
    eval: Path | None = Field(default=None, description="Held-out samples, for eval.every and eval.at_end")
    tokens_per_pack: Slots = Field(description="Token budget of a pack, one micro-batch [tokens]")
    patches_per_pack: Slots | None = Field(default=None, description="Vision patch budget of a pack [patches]")
    samples_per_pack: Slots | None = Field(default=None, description="Most samples in a pack [samples]")
    strategy: Literal["balanced", "best_fit", "first_fit", "next_fit", "none"] = Field(
        default="balanced", description="How samples are dealt into packs"
    )
    window: Positive | None = Field(
        default=None, description="Samples that are packed together; null for the plan's choice [samples]"
    )
    overlong: Literal["error", "drop", "truncate", "split"] = Field(
        default="error", description="What becomes of samples longer than a pack; only text is cut"
    )
    bad: BadSamplesConfig = BadSamplesConfig()
    bucket_tokens: Slots | None = Field(
        default=None, description="Packs are padded to a multiple of this, for compilation; null for none [tokens]"
    )
    bucket_patches: Slots | None = Field(
        default=None, description="Patch buffers are padded to a multiple of this; null for none [patches]"
    )
    max_characters: Positive = Field(
        default=5_000_000,
        description="Longest text of a sample, as its chat template renders it; a longer one cannot be used, since "
        "tokenising takes up to 400 bytes of memory per character [characters]",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of the order in which samples are read")
    stream: StreamConfig | None = Field(
        default=None, description="Read without an index, as for data without end or too far away; null to index"
    )
    workers: int = Field(
        default=4,
        ge=0,
        le=1024,
        description="Processes that load and encode, per rank; 0 for a thread of the trainer's own",
    )
    prefetch_bytes: int = Field(
        default=2**30, ge=0, le=2**50, description="Packs made ahead, by their estimated size, per rank [bytes]"
    )

    @model_validator(mode="after")
    def _everything_takes_effect(self) -> Self:
        for index, stage in enumerate(self.train[:-1]):
            if stage.is_endless:
                raise ValueError(f"stage {index} needs 'epochs', or the stages after it would never be reached")
        if self.stream is not None and self.window is not None:
            raise ValueError("window has no effect on a stream, which is packed as it comes; see stream.open_packs")
        return self
