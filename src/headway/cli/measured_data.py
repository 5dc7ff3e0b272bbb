"""Datasets measured with the model's own processor, for a plan: those of the command line, or a recipe's own."""

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

    sources = [open_source(path, name=name) for path, name in zip(data, own_names(data), strict=True)]
    settings = ProcessorSettings.of(**config.of_processor())
    indices = build_indices(sources, config.model.path, config.data.max_characters, settings=settings)
    with needs_extra("encoding samples"):
        from headway.data.encoders import open_encoder
        from headway.hub import located
        from headway.predict.measured_data import MeasuredData, joined, making_s

    lengths = joined(indices)
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
            from headway.train.data import open_stages

        if any("://" in (part.path or "") for stage in config.data.played for part in stage.parts):
            raise DataError("they lie behind a URL.")
        sources, _ = open_stages(config.data)
        settings = ProcessorSettings.of(**config.of_processor())
        lengths = joined(build_indices(sources, config.model.path, config.data.max_characters, settings=settings))
    except HeadwayError as error:
        warn(f"The lengths of data.train are not measured, so that no packs are planned from them: {error}")
        return None
    return (f"data.train: {', '.join(source.name for source in sources)}", lengths) if len(lengths.tokens) else None
