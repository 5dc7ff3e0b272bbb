"""Datasets measured with the model's own processor, for a plan: those of the command line, or a recipe's own."""

import os
from typing import TYPE_CHECKING

from headway.cli.index import build_indices
from headway.cli.output import needs_extra, warn
from headway.errors import DataError, HeadwayError

if TYPE_CHECKING:
    from headway.config import TrainConfig
    from headway.packing.lengths import LengthTable
    from headway.predict.measured_data import MeasuredData


def measured_data(data: list[str], config: "TrainConfig") -> "MeasuredData":
    """Index datasets, or read their indices, and time how fast their samples are made.

    A dataset of the recipe is read with its settings there: its columns, bounds on media and policy for long samples.

    Args:
        data: files, folders, globs or URLs.
        config: of the run, whose model's processor measures.

    Raises:
        HeadwayError: no such model or data, or no row that can be used.
    """
    with needs_extra("indexing"):
        from headway.data.processor_settings import ProcessorSettings
        from headway.data.sources import open_source
        from headway.data.sources.opening import own_names
        from headway.train.data import named_parts, open_dataset

    data = list(dict.fromkeys(data))
    settings = ProcessorSettings.of(**config.of_processor())
    recipe = {_place(part.path or ""): (name, part) for name, part in named_parts(config.data)}
    own = [recipe.get(_place(path), (None, None)) for path in data]
    names = own_names(data, [name for name, _ in own])
    sources = [
        open_source(path, name=name) if part is None else open_dataset(part, name)
        for path, name, (_, part) in zip(data, names, own, strict=True)
    ]
    overlong = {
        name: (None if part is None else part.overlong) or config.data.overlong
        for name, (_, part) in zip(names, own, strict=True)
    }
    indices = build_indices(sources, config.model.path, config.data.max_characters, settings=settings)
    with needs_extra("encoding samples"):
        from headway.data.encoders import open_encoder
        from headway.hub import located
        from headway.predict.measured_data import MeasuredData, joined, making_s

    lengths = joined(dict(zip(names, indices, strict=True)), overlong)
    if not len(lengths.tokens):
        raise DataError(f"--data {', '.join(data)}: no row can be used; `headway index` says why.")
    encoder = open_encoder(located(config.model.path), max_characters=config.data.max_characters, settings=settings)
    return MeasuredData(", ".join(source.name for source in sources), lengths, making_s(sources, indices, encoder))


def lengths_of_data(config: "TrainConfig") -> "tuple[str, LengthTable] | None":
    """Name and lengths of a recipe's own data, where its plan section names no others.

    They are measured as training measures them, and kept. Sources of a mixture count by their samples. Data that stream
    or lie behind a URL are not read for a plan.

    Returns:
        None where there are others or the data cannot be measured here, which is warned of.
    """
    if config.plan.mix is not None or config.plan.lengths is not None or config.data.stream is not None:
        return None
    try:
        with needs_extra("measuring data.train"):
            from headway.data.processor_settings import ProcessorSettings
            from headway.predict.measured_data import joined
            from headway.train.data import open_stages, overlong_of

        if any("://" in (part.path or "") for stage in config.data.played for part in stage.parts):
            raise DataError("they lie behind a URL.")
        sources, _ = open_stages(config.data)
        settings = ProcessorSettings.of(**config.of_processor())
        names = [source.name for source in sources]
        indices = build_indices(sources, config.model.path, config.data.max_characters, settings=settings)
        lengths = joined(dict(zip(names, indices, strict=True)), overlong_of(config.data))
    except HeadwayError as error:
        warn(f"The lengths of data.train are not measured, so that no packs are planned from them: {error}")
        return None
    return (f"data.train: {', '.join(names)}", lengths) if len(lengths.tokens) else None


def _place(path: str) -> str:
    """A path or URL, in one form however it is written."""
    return path if "://" in path else os.path.realpath(path)
