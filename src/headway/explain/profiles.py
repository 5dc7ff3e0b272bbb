"""Traces that stand in a run's folder: those of the steps that were profiled last."""

import re
from pathlib import Path

TRACES = "steps-*-rank-*.json.gz"  # as `headway.profile` names them
_TRACE = re.compile(r"steps-(\d+)-(\d+)-rank-(\d+)\.json\.gz")


def newest_window(folder: Path) -> tuple[list[Path], str]:
    """Find the traces of the steps that were profiled last, of all ranks, with a phrase about them.

    Args:
        folder: of a run, with its traces in profile/; or one that holds traces itself.
    """
    windows: dict[tuple[int, int], dict[int, Path]] = {}
    for where in (folder / "profile", folder):
        for path in where.glob(TRACES):
            if match := _TRACE.fullmatch(path.name):
                windows.setdefault((int(match[1]), int(match[2])), {})[int(match[3])] = path
        if windows:
            break
    if not windows:
        return [], ""
    newest = max(windows)
    by_rank = windows[newest]
    traces = [by_rank[rank] for rank in sorted(by_rank)]
    others = (
        "" if len(windows) == 1 else f", the last of {len(windows)} windows there; name a file of another to see it"
    )
    ranks = "1 rank" if len(traces) == 1 else f"{len(traces)} ranks"
    return traces, f"of the profile of steps {newest[0]} to {newest[1]}, {ranks}, in {traces[0].parent}{others}."
