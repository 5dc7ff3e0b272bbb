"""Samples that a plan is made over, and length of the planned run: in tokens, epochs or samples."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.index import build_indices
from headway.cli.output import needs_extra, warn
from headway.errors import DataError, HeadwayError, PlanError

if TYPE_CHECKING:
    from headway.config import TrainConfig
    from headway.count import CostModel
    from headway.data.encode import Encoder
    from headway.data.index import LengthIndex
    from headway.data.sources import Source
    from headway.packing.items import Policies
    from headway.packing.lengths import LengthTable
    from headway.predict.packs import Packs
    from headway.predict.prediction import Prediction, RunTotals
    from headway.predict.predictor import Predictor


_MOST_S, _MOST_SAMPLES = 2.0, 512  # time and samples that making packs is timed with


@dataclass(frozen=True)
class RunLength:
    """Length of a run, as one of three options says."""

    tokens: Annotated[
        float | None, typer.Option(metavar="T", min=1, help="Tokens to train on, such as 2e9, for time and cost.")
    ] = None
    epochs: Annotated[
        float | None,
        typer.Option(metavar="E", min=0, help="Passes over --data, --lengths or --samples, instead of --tokens."),
    ] = None
    samples: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Samples to train on, instead of --tokens. --segments or plan.mix describe a sample.",
        ),
    ] = None

    @property
    def is_given(self) -> bool:
        """True if any says it."""
        return any(value is not None for value in (self.tokens, self.epochs, self.samples))

    @property
    def passes(self) -> float:
        """Times that the run plays its data, at least 1; 1 if no epochs are set."""
        return max(1.0, self.epochs or 1.0)

    def rows(self, own: "tuple[str, LengthTable] | None", lengths: Path | None) -> int:
        """Samples of the data that --epochs repeats; 0 where something else says how long the run is."""
        from headway.packing.lengths import read_lengths

        if self.epochs is None or self.samples:
            return 0
        return len((own[1] if own else read_lengths(lengths or "")).tokens)

    def total(self, packs: "Packs", rows: int) -> float | None:
        """Count the tokens to train on; None if the length of the run is unknown.

        Args:
            packs: planned, whose samples stand for all.
            rows: samples of the data that --epochs repeats, where --samples does not say it.
        """
        if self.tokens is not None or not self.is_given:
            return self.tokens
        passes = 1.0 if self.epochs is None else self.epochs
        return passes * (rows if self.samples is None else self.samples) * packs.tokens_per_sample


@dataclass(frozen=True)
class RunRequest:
    """A run that is asked about.

    Attributes:
        config: the recipe.
        cost_model: of its model, before anything is frozen or adapted.
        predictor: of the model as it learns, on the device that was named.
        pattern: name and table of samples that repeat, as options describe them; None without such options.
        own: name and table of the recipe's own data, where these say the lengths.
        length: of the run.
        rows: samples of the data that --epochs repeats.
        price: of a device-hour; None without one.
    """

    config: "TrainConfig"
    cost_model: "CostModel"
    predictor: "Predictor"
    pattern: "tuple[str, LengthTable] | None"
    own: "tuple[str, LengthTable] | None"
    length: RunLength
    rows: int
    price: float | None

    def totals(self, planned: "Prediction", rows: int | None = None) -> "RunTotals | None":
        """Totals of the run by a prediction; None if the length of the run is unknown.

        Args:
            planned: whose samples stand for all.
            rows: samples of the data, where others than the request's own.
        """
        total = self.length.total(planned.work, self.rows if rows is None else rows)
        return None if total is None else planned.totals(total, passes=self.length.passes, price=self.price)


@dataclass(frozen=True)
class MeasuredData:
    """Measurements of datasets before they are trained on.

    Attributes:
        name: of all of them.
        lengths: of every row that can be used.
        making_s: that one process takes to read and encode a token [s].
    """

    name: str
    lengths: "LengthTable"
    making_s: float


def measured_data(data: list[str], config: "TrainConfig", cost_model: "CostModel") -> MeasuredData:
    """Index datasets, or read their indices, and time how fast their samples are made.

    A dataset of the recipe is read with its settings there: its columns, bounds on media and policy for long samples.

    Args:
        data: files, folders, globs or URLs.
        config: of the run, whose model's processor measures.
        cost_model: of its model.

    Raises:
        HeadwayError: no such model or data, or no row that can be used.
    """
    with needs_extra("indexing"):
        from headway.data.encoders import open_encoder
        from headway.data.processor_settings import ProcessorSettings
        from headway.data.sources import open_source
        from headway.data.sources.opening import own_names
        from headway.hub import located
        from headway.train.data import named_parts, open_dataset

    data = list(dict.fromkeys(data))
    # A dataset that the recipe names is read with the recipe's columns and policy, others with the defaults.
    recipe = {_place(part.path or ""): (name, part) for name, part in named_parts(config.data)}
    own = [recipe.get(_place(path), (None, None)) for path in data]
    names = own_names(data, [name for name, _ in own])
    sources, overlong = [], {}
    for path, name, (_, part) in zip(data, names, own, strict=True):
        sources.append(open_source(path, name=name) if part is None else open_dataset(part, name))
        overlong[name] = (None if part is None else part.overlong) or config.data.overlong
    indices, lengths = _indexed(sources, names, overlong, config, cost_model)
    # Lengths decide packs and memory; the time of making packs comes from encoding a few rows.
    settings = ProcessorSettings.of(**config.of_processor())
    encoder = open_encoder(located(config.model.path), **config.data.limits, settings=settings)
    return MeasuredData(", ".join(source.name for source in sources), lengths, making_s(sources, indices, encoder))


def making_s(sources: "Sequence[Source]", indices: "Sequence[LengthIndex]", encoder: "Encoder") -> float:
    """Time that a process takes to read and encode a token [s], by samples from all over the data, for two seconds.

    Args:
        sources: the datasets.
        indices: theirs, in the same order.
        encoder: of the model.

    Raises:
        DataError: a sample cannot be used any more.
    """
    import numpy as np

    places = [(source, row) for source, index in zip(sources, indices, strict=True) for row in np.flatnonzero(index.ok)]
    chosen = [places[number] for number in np.random.default_rng(0).permutation(len(places))[:_MOST_SAMPLES]]
    first, row = chosen[0]
    encoder.encode(first[int(row)])  # opens files and compiles templates
    tokens, begin = 0, perf_counter()
    for source, row in chosen:
        tokens += encoder.encode(source[int(row)]).tokens
        if perf_counter() - begin > _MOST_S:
            break
    return (perf_counter() - begin) / tokens


def _indexed(
    sources: "Sequence[Source]",
    names: Sequence[str],
    overlong: "Policies",
    config: "TrainConfig",
    cost_model: "CostModel",
) -> "tuple[list[LengthIndex], LengthTable]":
    """Indices of datasets, and their lengths as packs hold them: a prompt once where the run and the model do so."""
    from headway.data.index.length_index import length_table
    from headway.data.processor_settings import ProcessorSettings

    settings = ProcessorSettings.of(**config.of_processor())
    indices = build_indices(sources, config.model.path, config.data.limits, settings=settings)
    section = config.objective_section
    if section is not None and section.shares_prompts and not cost_model.mixed_otherwise:
        indices = [index.with_prompts_once() for index in indices]
    return indices, length_table(dict(zip(names, indices, strict=True)), overlong)


def lengths_of_data(
    config: "TrainConfig", cost_model: "CostModel", *, strict: bool = False
) -> "tuple[str, LengthTable] | None":
    """Name and lengths of a recipe's own data, if its plan section names no other data.

    They are measured as training measures them, and kept. Sources of a mixture count by their samples. Data that stream
    or lie behind a URL are not read for a plan.

    Args:
        config: the recipe.
        cost_model: of its model.
        strict: raise what training would refuse of the data, of which a command with other lengths warns.

    Returns:
        None where the recipe names other lengths or nothing here measures the data, which is warned of.

    Raises:
        DataError: the data are missing, or have no row that can be used, and `strict` is set.
    """
    planned = config.plan
    if planned.mix or planned.lengths is not None:
        return None
    try:
        with needs_extra("measuring data.train"):
            from headway.train.data import open_stages, overlong_of

            find_data(config)
        if config.data.stream is not None:
            return None
        if any("://" in (part.path or "") for stage in config.data.played for part in stage.parts):
            raise PlanError("they lie behind a URL.")
        sources, _ = open_stages(config.data)
        names = [source.name for source in sources]
        _, lengths = _indexed(sources, names, overlong_of(config.data), config, cost_model)
    except HeadwayError as error:
        if strict and isinstance(error, DataError):
            raise
        warn(f"The lengths of data.train are not measured, so that no packs are planned from them: {error}")
        return None
    return f"data.train: {', '.join(names)}", lengths


def find_data(config: "TrainConfig") -> None:
    """Look for the data of a recipe that lie on this machine; a store is asked when it is opened.

    Raises:
        DataError: a path names nothing.
    """
    from headway.data.sources.files import find_files

    for part in (*(part for stage in config.data.played for part in stage.parts), config.data.eval):
        if part is not None and part.path is not None and "://" not in part.path:
            find_files(part.path)


def _place(path: str) -> str:
    """A path or URL, in one form for all its spellings."""
    return path if "://" in path else os.path.realpath(path)
