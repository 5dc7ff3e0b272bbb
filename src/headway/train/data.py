"""From the configuration's data section to a feed of packs."""

import inspect
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedModel

from headway.config import TrainConfig
from headway.config.data import DataConfig, DatasetConfig, MixPart, SourceConfig
from headway.count import CostModel
from headway.data.bad_rows import BadSamples
from headway.data.collate import Collator
from headway.data.encode import Encoder
from headway.data.encoders import collator_of
from headway.data.feed import FILES, Feed, IndexedFeed, PackMaker, Share, StreamFeed, Streaming
from headway.data.feed.make import RowRule
from headway.data.index import LengthIndex, build_index
from headway.data.media.sizes import MediaSizes
from headway.data.sample_cache import SampleCache
from headway.data.sample_cache import folder_of as samples_folder
from headway.data.samples import SampleError
from headway.data.sources import Source, open_source
from headway.data.sources.identity import changes_since, refusal
from headway.data.sources.opening import own_names
from headway.errors import CheckpointError, ConfigError, DataError
from headway.log.working import measuring_rows
from headway.models.parallel.ranks import Ranks
from headway.models.vision import vision_geometry
from headway.packing.budget import Budget
from headway.packing.items import Items, OverlongCounts, Policies
from headway.packing.order import Order, Stage, StageSource
from headway.packing.parts import Dropout
from headway.packing.plan import Plan
from headway.plugins import objective_of
from headway.train.agreement import agree, agreed_files, files_facts
from headway.version import code_digest, library_versions

_LOOKED_AT = 20  # rows of a source, to find some that can be used
QUARANTINE = "bad_samples.jsonl"


def budget_of(data: DataConfig) -> Budget:
    """Budget of a pack."""
    return Budget(data.tokens_per_pack, data.patches_per_pack, data.samples_per_pack)


def open_feed(
    config: TrainConfig,
    encoder: Encoder,
    model: PreTrainedModel,
    cost_model: CostModel,
    ranks: Ranks,
    *,
    pin_memory: bool,
    position: Mapping[str, Any] = MappingProxyType({}),
) -> Feed:
    """Open the sources, index them unless they are streamed, and feed packs from the beginning.

    Args:
        config: of the run.
        encoder: makes samples.
        model: that is trained.
        cost_model: of the model.
        ranks: the processes.
        pin_memory: whether packs are handed out in page-locked memory.
        position: of the checkpoint that the run goes on from, whose files must be those of the sources.

    Raises:
        CheckpointError: the files are not those of the checkpoint.
        ConfigError: sources that cannot be told apart, or a setting that cannot take effect.
        DataError: a source cannot be read, or samples cannot be used.
    """
    data = config.data
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if data.prefetch_bytes > memory_bytes:
        raise ConfigError(
            f"data.prefetch_bytes {data.prefetch_bytes} is more than this machine's memory of {memory_bytes} bytes, "
            "so packs made ahead would fill the memory. Lower data.prefetch_bytes. The default is 2**30 (1 GiB)."
        )
    # Sources of packs, and the share of the packs that this rank takes.
    sources, stages = open_stages(data, config.optim.epochs)
    files = agreed_files(sources, data.verify, ranks)
    if position:  # ranks on other machines may read copies of the files, with other times
        own = changes_since(position.get(FILES), files, data.verify, times=ranks.is_first)
        if clauses := list(dict.fromkeys(chain.from_iterable(ranks.gather_all(own)))):
            raise CheckpointError(refusal(clauses))
    bad = bad_samples(config)
    collator = make_collator(data, encoder, model, ranks, tuple(source.name for source in sources))
    dropout = encoder.dropout(config.run.seed)
    objective = objective_of(config.objective_name)
    rule_of = None if objective is None else objective.hook("rows")
    rule = RowRule() if rule_of is None else rule_of(config.objective_section)
    _check_kinds(sources, rule)
    maker = PackMaker(sources, encoder, collator, bad.skips, dropout, rule, _cache(data, sources, encoder, rule, model))
    accumulation = config.optim.accumulation
    share = Share(ranks.data_rank, ranks.num_data_ranks, accumulation, data.workers, data.prefetch_bytes, pin_memory)
    # Packs as samples come, without an index of lengths.
    if data.stream is not None:
        streaming = Streaming(
            maker,
            stages,
            budget_of(data),
            strategy=data.strategy,
            overlong=overlong_of(data),
            lanes=data.stream.lanes,
            shuffle=data.stream.shuffle,
            open_packs=data.stream.open_packs,
            seed=data.seed,
            cost_model=cost_model,
            skips_unlabelled=config.skips_unlabelled,
        )
        return StreamFeed(streaming, share, bad, files=files)
    # Packs planned over all lengths.
    indices = _indices(sources, encoder, data.workers, bad, ranks)
    plan, planned = plan_of(config, stages, indices, cost_model, ranks.num_data_ranks, dropout)
    feed = IndexedFeed(plan, maker, share, bad, planned=planned, files=files)
    agree(ranks, lambda: files_facts(feed.files))  # lengths of rows tell files apart that are too large to be hashed
    return feed


def plan_of(
    config: TrainConfig,
    stages: Sequence[Stage],
    indices: Mapping[str, LengthIndex],
    cost_model: CostModel,
    num_ranks: int,
    dropout: Dropout | None,
) -> tuple[Plan, dict[str, OverlongCounts]]:
    """Plan a run's packs over the lengths of its samples, and count what the plan leaves out of each source."""
    data, accumulation = config.data, config.optim.accumulation
    items, counts = Items.build(
        indices, budget_of(data), overlong_of(data), cost_model, dropout, skips_unlabelled=config.skips_unlabelled
    )
    plan = Plan(
        items,
        Order(items.sizes, stages, seed=data.seed, tells_epochs=dropout is not None),
        budget_of(data),
        num_ranks * accumulation,
        strategy=data.strategy,
        seed=data.seed,
        window=data.window,
        accumulation=accumulation,
    )
    return plan, counts


def _cache(
    data: DataConfig, sources: tuple[Source, ...], encoder: Encoder, rule: RowRule, model: PreTrainedModel
) -> SampleCache | None:
    """The cache of encoded samples; None where each is encoded as often as it is trained on."""
    if data.cache_encoded == "off" or data.stream is not None or rule.needs_rows:
        return None
    # Positions follow the model's configuration, and a family's encoder may be of another package.
    settings = {name: value for name, value in model.config.to_dict().items() if not name.startswith("_")}
    encoding = encoder.fingerprint(), encoder.shares_prompts, json.dumps(settings, sort_keys=True, default=str)
    package = Path(inspect.getfile(type(encoder))).parent
    code = library_versions(), code_digest("data", "models"), code_digest(package=package)
    folder = samples_folder(type(rule).__qualname__, *encoding, *code)
    return SampleCache(sources, folder, data.cache_bytes, with_text=data.cache_bytes is not None)


def _check_kinds(sources: Sequence[Source], rule: RowRule) -> None:
    """Make sure that the first rows of each source are not all of a kind that the objective does not learn from.

    Raises:
        ConfigError: they are.
    """
    for source in sources:
        reason: DataError | None = None
        for number in range(min(_LOOKED_AT, len(source))):
            try:
                sample = source[number]
            except SampleError:
                continue  # told when it is used
            try:
                rule.check(sample)
            except DataError as error:
                reason = reason or error
            else:
                break
        else:
            if reason is not None:
                raise ConfigError(f"Headway cannot train on the first rows of {source.name}: {reason}") from reason


def make_collator(
    data: DataConfig, encoder: Encoder, model: PreTrainedModel, ranks: Ranks, sources: tuple[str, ...] = ()
) -> Collator:
    """Build the collator for a run's settings.

    Raises:
        ConfigError: buckets that the model has no use for.
    """
    return collator_of(
        encoder,
        geometry=vision_geometry(model),
        pixel_scale=encoder.pixel_scale,
        position_rows=1 if encoder.rope_index is None else 3,
        blank=encoder.blank_image(),
        sources=sources,
        bucket_tokens=math.lcm(data.bucket_tokens or 1, ranks.sequence),  # ranks of a shared pack have equal numbers
        bucket_patches=data.bucket_patches,
        shares_prompts=encoder.shares_prompts,
    )


def _indices(
    sources: tuple[Source, ...], encoder: Encoder, workers: int, bad: BadSamples, ranks: Ranks
) -> dict[str, LengthIndex]:
    """Length index of every source: measured by the first rank, read by all."""
    if not ranks.is_first:
        bad = replace(bad, quarantine=None)  # the first rank has named them

    def build() -> dict[str, LengthIndex]:
        indices = {}
        for source in sources:
            with measuring_rows(source.name) as progress:
                index = build_index(source, encoder, workers=workers, policy=bad, progress=progress)
            indices[source.name] = index.with_prompts_once() if encoder.shares_prompts else index
        return indices

    return ranks.after_first(build)


def bad_samples(config: TrainConfig) -> BadSamples:
    """The policy for samples that cannot be used; skipped ones are listed in the run folder."""
    bad = config.data.bad
    if bad.policy == "error":
        return BadSamples("error")
    return BadSamples("skip", bad.limit, bad.fraction, config.run.folder / QUARANTINE)


def open_stages(data: DataConfig, epochs: float | None = None) -> tuple[tuple[Source, ...], tuple[Stage, ...]]:
    """Open every source once, and say which play in which stage.

    Args:
        data: the configuration's section.
        epochs: times through the data; None to go on as long as there are steps [epochs].

    Raises:
        ConfigError: two sources of one name.
        DataError: a source cannot be found.
    """
    names = {_identity(part): name for name, part in named_parts(data)}
    opened: dict[str, tuple[SourceConfig, Source]] = {}
    stages = []
    for stage in data.played:
        plays = []
        for part in stage.parts:
            name = names[_identity(part)]
            if name not in opened:
                opened[name] = part, open_dataset(part, name)
            if _identity(opened[name][0]) != _identity(part):
                raise ConfigError(
                    f"the training data have two sources called {name!r}: {opened[name][0].path} and {part.path}, or "
                    "the same path with other settings. Give each source its own 'name'."
                )
            weight = part.weight if isinstance(part, MixPart) else None
            if weight is None and part.epochs is None and epochs is None and not stage.mix:  # alone in an endless stage
                weight = 1.0
            plays.append(StageSource(name, weight, part.epochs, part.limit))
        times = epochs if len(data.played) == 1 or stage.is_endless else None
        stages.append(Stage(tuple(plays), stage.samples, times))
    return tuple(source for _, source in opened.values()), tuple(stages)


def overlong_of(data: DataConfig) -> Policies:
    """Policy for samples that exceed a pack: the run's, or where a source has its own, that of each by its name."""
    policies = {name: part.overlong or data.overlong for name, part in named_parts(data)}
    return policies if set(policies.values()) - {data.overlong} else data.overlong


def named_parts(data: DataConfig) -> list[tuple[str, SourceConfig]]:
    """Every source as often as it plays, by its name in the run."""
    parts = [part for stage in data.played for part in stage.parts]
    own = own_names([part.path or "" for part in parts], [part.name for part in parts])
    return list(zip(own, parts, strict=True))


def open_dataset(part: DatasetConfig, name: str | None = None) -> Source:
    """Open a dataset as its settings say.

    Raises:
        ConfigError: a setting that no file of it takes.
        DataError: it cannot be found.
    """
    assert part.path is not None
    return open_source(
        part.path,
        name=name or part.name,
        format=part.format,
        schema=part.schema_name,
        columns=part.columns,
        root=part.root,
        allow_remote=part.allow_remote,
        sample_by=part.sample_by,
        token_dtype=part.token_dtype,
        end_token=part.end_token,
        sizes=MediaSizes.of(part),
    )


def _identity(part: SourceConfig) -> str:
    """Identity of a source: every setting that decides its samples."""
    names = [*DatasetConfig.model_fields, "overlong"]
    return json.dumps({name: getattr(part, name) for name in names}, default=str, sort_keys=True)
