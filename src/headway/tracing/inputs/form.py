"""The interface of a form of input: workloads that exercise a tower, and the arguments that carry its inputs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from headway.count.workload import Workload
from headway.errors import TraceError
from headway.tracing.build import subconfigs

Floats = Callable[[Sequence[int]], torch.Tensor]  # makes an input of floats of a shape: phantoms, or random numbers
WINDOW_SIDES = range(2, 65)  # window sizes of vision attention that are tried [patches]


class InputForm(ABC):
    """A way in which one tower of a model takes its inputs."""

    takes: ClassVar[str]  # the forward argument that carries them, such as `pixel_values`
    drivers: Sequence[str]  # candidates for what the tower's costs are proportional to
    # drivers, up to the slash, that may count frames after strided convolutions, as `audio` in `audio/2`
    strided: Sequence[str] = ()
    routes: Sequence[str] = ()  # arguments that choose another route through the model, as a finer connector
    fills: ClassVar[bool] = False  # whether the inputs fix the length of the text
    # for the ledger's `source`, such as that only single frames were traced
    notes: Mapping[str, str] = MappingProxyType({})

    @classmethod
    @abstractmethod
    def of(cls, model: Any) -> "InputForm | None":
        """Read the form off a model's signature and configuration; None where the model takes no such input."""

    def along(self, route: str) -> "InputForm":
        """Copy the form so that it gives one of its routes' arguments."""
        raise TraceError(f"{type(self).__name__} has no other way named {route}.")

    @abstractmethod
    def sizes(self, run: int) -> dict[str, Any]:
        """Give the workload's arguments for run 0, 1, 2 or 3, such as `{"images": [(1, 12, 20)]}`."""

    def positions(self, _workload: Workload) -> int:
        """Count the text positions that the inputs take: none where they lie beside the segment, as a source does."""
        return 0

    @abstractmethod
    def fill(self, batch: dict[str, Any], start: int, workload: Workload, floats: Floats) -> None:
        """Add the arguments, and the tokens from `batch["input_ids"][0, start]` on."""


def plain_token(config: Any) -> int:
    """Pick a token number that is no special token of the model or of its towers."""
    special = {
        value
        for part in (subconfigs(config) if config is not None else ())
        for name, value in vars(part).items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    return next(token for token in range(1, len(special) + 2) if token not in special)  # 0 often means padding
