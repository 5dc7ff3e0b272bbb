"""Configuration of the data: sources and how they mix, packs, and how they are fed."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from headway.config.sections import FREE_ON_RESUME, Positive, Section, Share, Slots, settings_off_default
from headway.report.quantity import SIZE_UNITS, bytes_in

Overlong = Literal["error", "drop", "truncate", "split"]
Pixels = Annotated[int, Field(ge=1, le=2**40)]
Formats = Literal["auto", "jsonl", "json", "csv", "parquet", "arrow", "webdataset", "text", "tokens"]


class MediaConfig(Section):
    """Sizes at which images and videos are read, and frames; a source's value comes before the run's."""

    min_pixels: Pixels | None = Field(
        default=None,
        description="Smallest image. Smaller images are enlarged. Null means the run's value, or the model folder's "
        "[pixels]",
    )
    max_pixels: Pixels | None = Field(
        default=None,
        description="Largest image. Larger images are shrunk. Models that bound edges, tiles or tokens refuse both "
        "settings [pixels]",
    )
    video_min_pixels: Pixels | None = Field(
        default=None,
        description="Smallest video: pixels of each frame, or of all frames, as the model counts [pixels]",
    )
    video_max_pixels: Pixels | None = Field(
        default=None, description="Largest video, in the pixels of video_min_pixels [pixels]"
    )
    fps: float | None = Field(default=None, gt=0, le=1000, description="Frames read per second of video [1/s]")
    max_frames: int | None = Field(default=None, ge=2, le=10**6, description="Most frames read of a video [frames]")


class RowsConfig(Section):
    """Where rows are, and how they become samples."""

    path: str | None = Field(default=None, description="File, folder, glob or URL of samples")
    name: str | None = Field(
        default=None,
        description="Name in metrics. Null means the file's name, with its folder if two sources have one name",
    )
    format: Formats = Field(default="auto", description="Format of the files. Auto means by extension")
    schema_name: str = Field(default="auto", alias="schema", description="Layout of rows. Auto means by their columns")
    columns: dict[str, str] = Field(
        default={}, description="Names of columns in the dataset, by the names that layouts read: {question: Frage}"
    )
    root: str | None = Field(
        default=None,
        description="Folder or URL that media paths start from and may not leave. Null means each file's own folder",
    )
    allow_remote: bool = Field(default=False, description="Let rows name media by URL")
    sample_by: Literal["paragraph", "line", "document"] | None = Field(
        default=None, description="Unit of a text file that is a document. Null means paragraph. Text files only"
    )
    token_dtype: Literal["uint16", "uint32", "int32", "int64"] | None = Field(
        default=None, description="Type of the ids in files of bare token ids (.bin). Required for these"
    )
    end_token: int | None = Field(
        default=None, ge=0, le=2**63 - 1, description="Id that ends a document in files of token ids [token id]"
    )


class DatasetConfig(MediaConfig, RowsConfig):  # in the order of the last, as pydantic collects fields
    """One dataset, and how its rows become samples."""


class SourceConfig(DatasetConfig):
    """A dataset to train on, and how often it plays."""

    epochs: Share | None = Field(
        default=None,
        ge=1e-6,
        le=1e6,
        description="Passes over the source. Null means until the run ends, or as often as optim.epochs says [passes]",
    )
    limit: Positive | None = Field(default=None, description="Most samples of the source [samples]")
    overlong: Overlong | None = Field(
        default=None, description="Treatment of samples that are longer than a pack. Null means data.overlong"
    )


def _listed(value: Any) -> Any:
    return [_dataset(entry) for entry in value] if isinstance(value, list | tuple) else [_dataset(value)]


def _dataset(value: Any) -> Any:
    if value is not None and not isinstance(value, str | dict | Section):
        raise ValueError(f"{value!r} is no dataset. Give its path, or its settings, such as {{path: chats.jsonl}}")
    return {"path": value} if isinstance(value, str) else value


class MixPart(SourceConfig):
    """One of the sources that play together."""

    weight: Share | None = Field(
        default=None,
        description="Share of the samples, relative to other weights. Without weights each source has a share by its "
        "size",
    )

    @model_validator(mode="after")
    def _is_a_source_with_a_share(self) -> Self:
        if self.path is None:
            raise ValueError("a part of a mix needs 'path'")
        if self.weight is not None and self.epochs is not None:
            raise ValueError(f"{self.path}: give either 'weight' or 'epochs'")
        return self


class StageConfig(SourceConfig):
    """One stretch of the training data: a source, or a mix of them; stages play one after the other."""

    mix: Annotated[tuple[MixPart, ...], BeforeValidator(_listed, json_schema_input_type=list[str | MixPart])] = Field(
        default=(), description="Sources that play together, instead of one path"
    )
    samples: Positive | None = Field(default=None, description="Length of a mix with weights [samples]")

    @model_validator(mode="after")
    def _is_one_source_or_a_mix(self) -> Self:
        if (self.path is None) == (not self.mix):
            raise ValueError("a source needs either 'path', or 'mix' with several sources")
        if self.mix:
            unused = sorted(settings_off_default(self) - {"mix", "samples"})
            if unused:
                raise ValueError(f"{', '.join(unused)} have no effect beside 'mix'. Set them in the parts of the mix")
        _check_shares(self.mix)
        if self.samples is not None and not (self.mix and self.mix[0].epochs is None):
            raise ValueError("'samples' is the length of a mix with weights. Without weights, set 'epochs' instead")
        return self

    @property
    def parts(self) -> tuple[SourceConfig, ...]:
        """The sources that play."""
        return self.mix or (self,)

    @property
    def is_endless(self) -> bool:
        """True if it never ends by itself."""
        return self.samples is None and all(part.epochs is None for part in self.parts)


class TrainSource(StageConfig):
    """An entry of `data.train`: a source, which plays together with the others."""

    weight: Share | None = Field(
        default=None,
        description="Share of the samples, relative to other weights. Without weights each source has a share by its "
        "size",
    )


def _check_shares(parts: Sequence[MixPart | TrainSource]) -> None:
    if len({(part.weight is None, part.epochs is None) for part in parts}) > 1:
        raise ValueError("sources of a mix need a 'weight' each, or 'epochs' each, or neither")


class BadSamplesConfig(Section):
    """Handling of samples that cannot be used."""

    policy: Literal["error", "skip"] = Field(
        default="error", description="'error' ends the run. 'skip' leaves bad samples out and lists them"
    )
    limit: int | None = Field(
        default=1000,
        ge=0,
        le=10**12,
        description="Most bad samples before the run ends. Null means any number [samples]",
    )
    fraction: float | None = Field(
        default=0.05, ge=0.0, le=1.0, description="Largest share of bad samples before the run ends. Null means any"
    )

    @model_validator(mode="after")
    def _limits_take_effect(self) -> Self:
        if self.policy == "error" and settings_off_default(self):
            raise ValueError("limit and fraction have no effect with policy 'error'")
        return self


class StreamConfig(Section):
    """Reading and packing of data that are not indexed, as they come."""

    lanes: Positive = Field(
        default=16, le=2**20, description="Parts that are read side by side, a multiple of the number of ranks [lanes]"
    )
    shuffle: Positive = Field(
        default=128,
        le=2**24,
        description="Samples of each lane that wait to be drawn at random. 1 keeps the order [samples]",
    )
    open_packs: Positive = Field(default=8, le=2**16, description="Packs that are open at a time in each lane [packs]")


class SourcesConfig(Section):
    """Datasets to train on, and the one that is held out."""

    train: Annotated[
        tuple[TrainSource, ...],
        BeforeValidator(_listed, json_schema_input_type=str | TrainSource | list[str | TrainSource]),
    ] = Field(
        default=(),
        description="Training data: a path, a source with settings, or a list of sources that are mixed",
    )
    stages: Annotated[
        tuple[StageConfig, ...], BeforeValidator(_listed, json_schema_input_type=list[str | StageConfig])
    ] = Field(default=(), description="Sources or mixes that follow one another, instead of data.train")
    eval: Annotated[
        DatasetConfig | None,
        BeforeValidator(_dataset, json_schema_input_type=str | DatasetConfig | None),
        FREE_ON_RESUME,
    ] = Field(default=None, description="Held-out samples for eval.every and eval.at_end: a path, or a source")


class DataConfig(MediaConfig, SourcesConfig):
    """Sources, packing and feeding."""

    tokens_per_pack: Slots = Field(description="Token budget of a pack, one micro-batch [tokens]")
    patches_per_pack: Slots | None = Field(default=None, description="Vision patch budget of a pack [patches]")
    samples_per_pack: Slots | None = Field(default=None, description="Most samples in a pack [samples]")
    strategy: Literal["balanced", "best_fit", "first_fit", "next_fit", "none"] = Field(
        default="balanced", description="Rule by which samples are dealt into packs"
    )
    window: Positive | None = Field(
        default=None,
        le=2**26,
        description="Samples that are planned together. Null means the plan's choice [samples]",
    )
    overlong: Overlong = Field(
        default="error",
        description="Treatment of samples that are longer than a pack, if their source does not say. Only text is cut",
    )
    bad: BadSamplesConfig = BadSamplesConfig()
    bucket_tokens: Slots | None = Field(
        default=None, description="Packs are padded to a multiple of this number. Null means no padding [tokens]"
    )
    bucket_patches: Slots | None = Field(
        default=None,
        description="Patch buffers are padded to a multiple of this number. Null means no padding [patches]",
    )
    max_characters: Positive = Field(
        default=5_000_000,
        description="Longest rendered text of a sample. A longer one is a bad row [characters]",
    )
    max_image_pixels: int = Field(
        default=89_478_485,
        ge=1,
        le=178_956_970,
        description="Largest image of a sample. A sample with a larger one is bad [pixels]",
    )
    verify: Annotated[Literal["size-and-time", "hash", "size"], FREE_ON_RESUME] = Field(
        default="size-and-time",
        description="Comparison of data files at a resume: sizes, times and hashes up to 1 GiB, hashes of any size, or "
        "names and sizes alone, for copies",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of the order in which samples are read")
    stream: StreamConfig | None = Field(
        default=None,
        description="Read without an index, for data without end or too far away. Null means with an index",
    )
    workers: Annotated[int, FREE_ON_RESUME] = Field(
        default=4,
        ge=0,
        le=1024,
        description="Processes per rank that load and encode. 0 means a thread of the trainer",
    )
    prefetch_bytes: Annotated[int, FREE_ON_RESUME] = Field(
        default=2**30, ge=0, le=2**50, description="Size of the packs that are made ahead, per rank [bytes]"
    )

    cache_encoded: Annotated[str, BeforeValidator(lambda value: "off" if value is False else value), FREE_ON_RESUME] = (
        Field(
            default="auto",
            description="Encoded samples that the cache keeps: auto, off, or a size such as 200GiB. Auto keeps samples "
            "with media, in a tenth of the disk's free space",
        )
    )

    @property
    def cache_bytes(self) -> int | None:
        """Size that encoded samples may take [bytes]; None where the disk decides."""
        return bytes_in(self.cache_encoded)

    @field_validator("cache_encoded")
    @classmethod
    def _cache_is_understood(cls, cache_encoded: str) -> str:
        if cache_encoded not in ("auto", "off") and not bytes_in(cache_encoded):
            raise ValueError(
                f"{cache_encoded!r} is not auto, off or a size such as 200GiB; units are {', '.join(SIZE_UNITS)}"
            )
        return cache_encoded

    @property
    def limits(self) -> dict[str, Any]:
        """Limits of a sample, by which an encoder refuses larger ones."""
        return {"max_image_pixels": self.max_image_pixels, "max_characters": self.max_characters}

    @property
    def played(self) -> tuple[StageConfig, ...]:
        """The stages of the training data, one after the other; what `train` lists is one."""
        if self.stages or len(self.train) == 1:
            return self.stages or self.train
        names = MixPart.model_fields
        mix = [MixPart.model_validate({name: getattr(source, name) for name in names}) for source in self.train]
        return (StageConfig(mix=tuple(mix)),)

    @property
    def overlong_of_all(self) -> Overlong:
        """Policy for long samples of which nobody knows the source: what all sources say, else the run's."""
        policies = {part.overlong or self.overlong for stage in self.played for part in stage.parts}
        return policies.pop() if len(policies) == 1 else self.overlong

    @model_validator(mode="after")
    def _sources_play_together_or_one_after_the_other(self) -> Self:
        if bool(self.train) == bool(self.stages):
            raise ValueError(
                "give the training data either in 'train' (a file, or a list that is mixed), or in 'stages' (one "
                "after the other)"
            )
        for index, source in enumerate(self.train if len(self.train) > 1 else ()):
            unclear = [name for name in ("mix", "samples", "epochs") if name in settings_off_default(source)]
            if unclear:
                raise ValueError(
                    f"train lists {len(self.train)} sources that play together, and entry {index} has "
                    f"'{unclear[0]}'. To play them one after the other, write data.stages instead of data.train. To "
                    "mix them, give weights, or leave weights out to read all samples equally often, and set "
                    "optim.epochs. To give each source its own epochs, write data.train: {mix: [{path: ..., epochs: "
                    "...}, ...]}"
                )
        _check_shares(self.train)
        return self

    @model_validator(mode="after")
    def _everything_takes_effect(self) -> Self:
        for index, stage in enumerate(self.stages[:-1]):
            if stage.is_endless:
                raise ValueError(f"stage {index} needs 'epochs', because the stages after it would never be reached")
        if self.stream is not None and self.window is not None:
            raise ValueError(
                "window has no effect on a stream, because a stream is packed as it comes. See stream.open_packs"
            )
        if self.stream is not None and self.cache_bytes:
            raise ValueError("cache_encoded has no effect on a stream, whose samples are not known beforehand")
        return self
