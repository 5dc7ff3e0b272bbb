"""What integrations put into another loop's log: numbers of a window under names that trackers sort together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.errors import UsageError
from headway.log.sink import flatten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headway.meter import Window

LOGGED = ("mfu", "hfu", "tokens_per_s", "tokens_per_s_per_device", "padding_share", "balance")


def logged(window: Window, names: Sequence[str] = LOGGED, prefix: str = "headway") -> dict[str, int | float]:
    """Pick the numbers of a window that a loop logs, such as `headway/mfu`.

    Args:
        window: steps of a loop.
        names: keys of `Window.as_record()`; one that holds others, such as `flops`, gives each of them.
        prefix: of the names in the log.

    Returns:
        Numbers by name, nested names joined by "/"; without what is not known.

    Raises:
        UsageError: a name is no key of a record.
    """
    record = window.as_record()
    if missing := [name for name in names if name not in record]:
        raise UsageError(f"a window has no {', '.join(missing)} to log; it has {', '.join(record)}.")
    flat = flatten({"step": window.step, **{name: record[name] for name in names}})
    if "step" not in names:
        del flat["step"]
    return {f"{prefix}/{name}": value for name, value in flat.items() if isinstance(value, int | float)}
