"""The picture of `headway pack --plot`: how long samples are, and how full packs become."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.cli.extras import needs_extra
from headway.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headway.packing import Budget

FORMATS = (".png", ".svg")
_BINS = 60


def check_plot_path(path: Path) -> None:
    """Refuse a file that could not be written, before anything is planned.

    Raises:
        UsageError: another format than PNG and SVG, or a folder that does not exist.
        HeadwayError: matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"--plot {path}: a plot is a {' or '.join(FORMATS)} file, got {path.suffix or 'no ending'}.")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: the folder {path.parent} does not exist. Make it, or name another.")
    with needs_extra("drawing"):
        import matplotlib  # noqa: F401  # only whether it is there


def draw(path: Path, tokens: Any, fills: "Mapping[str, Any]", budget: "Budget") -> None:
    """Draw sample lengths, and the fill of packs for each strategy.

    Args:
        path: PNG or SVG file.
        tokens: length of each sample [tokens], shape (N,).
        fills: fill of each pack, a fraction, by strategy.
        budget: what a pack holds.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    lengths, packs = figure.subplots(1, 2)
    edges = np.unique(np.geomspace(max(1, int(tokens.min())), int(tokens.max()) + 1, _BINS).astype(int))
    lengths.hist(tokens, bins=edges if len(edges) > 1 else 1, weights=tokens / tokens.sum(), color="tab:gray")
    lengths.set(xscale="log", xlabel="sample length [tokens]", ylabel="share of all tokens")
    lengths.set_title(f"{len(tokens):,} samples")
    for name, fill in fills.items():
        packs.hist(fill, bins=np.linspace(0, 1, _BINS), histtype="step", density=True, label=name)
    packs.set(xlabel=f"fill of a pack of {budget.tokens:,} tokens", ylabel="density", yscale="log")
    packs.legend()
    figure.savefig(path)
