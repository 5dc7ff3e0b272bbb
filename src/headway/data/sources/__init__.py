"""Sources: rows on disk or behind a URL as typed samples.

`open_source` finds files and their format; a `Source` gives any row by its number, its `shards` give rows in order.
"""

from headway.data.sources.layouts import SCHEMAS
from headway.data.sources.opening import FORMATS, open_source, read_samples
from headway.data.sources.source import Shard, Source

__all__ = ["FORMATS", "SCHEMAS", "Shard", "Source", "open_source", "read_samples"]
