"""The length index: exact tokens, patches and grids of every sample, without decoding a pixel.

`build_index` measures a source with the model's own encoder, in parallel, and keeps the result as Parquet;
`LengthIndex` holds it as numpy columns, which is all that planning needs.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.data.index.build import build_index, index_folder
    from headway.data.index.length_index import IndexSummary, LengthIndex, RaggedArray

__all__ = ["IndexSummary", "LengthIndex", "RaggedArray", "build_index", "index_folder"]

_MODULES = {"build_index": "build", "index_folder": "build"}


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for, so that reading an index needs no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'length_index')}"), name)
