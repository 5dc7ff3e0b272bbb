"""Datasets named on the command line, measured with the model's own processor, for a plan."""

from typing import TYPE_CHECKING

from headway.cli.index import build_indices
from headway.cli.output import needs_extra
from headway.errors import DataError

if TYPE_CHECKING:
    from headway.train.config import TrainConfig
    from headway.train.measured_data import MeasuredData


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
        from headway.train.measured_data import MeasuredData, joined, making_s

    lengths = joined(indices)
    if not len(lengths.tokens):
        raise DataError(f"--data {', '.join(data)}: no row can be used; `headway index` says why.")
    encoder = open_encoder(located(config.model.path), max_characters=config.data.max_characters, settings=settings)
    return MeasuredData(", ".join(source.name for source in sources), lengths, making_s(sources, indices, encoder))
