"""The parts of a multimodal model's inputs: which workloads exercise a tower, and which arguments carry its inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from headway.count.workload import Workload

    Floats = Callable[[Sequence[int]], torch.Tensor]  # makes an input of floats of a shape: phantoms, or random numbers

WINDOW_SIDES = range(2, 65)  # window sizes of vision attention that are tried [patches]


class Part(ABC):
    """How one tower of a model takes its inputs.

    Attributes:
        takes: the forward argument that carries them, such as `pixel_values`.
        drivers: what its tower's costs may be proportional to.
    """

    takes: ClassVar[str]
    drivers: Sequence[str]

    @classmethod
    @abstractmethod
    def of(cls, model: Any) -> Part | None:
        """Read the part from a model's signature and configuration; None where the model takes no such input."""

    @abstractmethod
    def sizes(self, run: int) -> dict[str, Any]:
        """Give the workload's arguments for run 0, 1, 2 or 3, such as `{"images": [(1, 12, 20)]}`."""

    @abstractmethod
    def positions(self, workload: Workload) -> int:
        """Count the text positions that the inputs take."""

    @abstractmethod
    def fill(self, batch: dict[str, Any], start: int, workload: Workload, floats: Floats) -> None:
        """Add the arguments, and the tokens from `batch["input_ids"][0, start]` on."""
