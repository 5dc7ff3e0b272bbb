"""Interface of a place for records: it takes records in one by one, and is closed."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Self

from headway.errors import UsageError

Scalar = str | int | float | bool | None


class Sink(ABC):
    """A place that records go to."""

    @abstractmethod
    def write(self, record: Mapping[str, Any]) -> None:
        """Take in a record.

        Raises:
            UsageError: the record has no integer `step`, or holds what JSON cannot.
            Exception: whatever the place fails with; `Sinks` turns it into a warning.
        """

    @abstractmethod
    def close(self) -> None:
        """Write the records held back and let go of the place; closing twice is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def flatten(record: Mapping[str, Any]) -> dict[str, Scalar]:
    """Lay a nested record flat, names joined by "/", items of a list by their number.

    Raises:
        UsageError: the record has no integer `step`, or holds what JSON cannot.

    >>> flatten({"step": 3, "flops": {"total": 7, "by_rank": [3, 4]}})
    {'step': 3, 'flops/total': 7, 'flops/by_rank/0': 3, 'flops/by_rank/1': 4}
    """
    step = record.get("step")
    if not isinstance(step, int) or isinstance(step, bool):
        raise UsageError(f"a record needs an integer 'step', but this one has step={step!r}.")
    return dict(_leaves(record, ""))


def _leaves(node: Any, name: str) -> Iterator[tuple[str, Scalar]]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _leaves(value, f"{name}/{key}" if name else str(key))
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from _leaves(value, f"{name}/{index}")
    elif node is None or isinstance(node, str | int | float):
        yield name, node
    else:
        raise UsageError(
            f"the record's {name} is a {type(node).__module__}.{type(node).__name__}, which JSON cannot hold. Give a "
            "number, a text, or nested dictionaries and lists of these. For a tensor call .item(), but only at log "
            "points, because .item() waits for the device."
        )
