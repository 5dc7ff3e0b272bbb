"""What is read off a model as a loop has set it up: what it trains, what it checkpoints, how many bytes it holds."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headway.errors import UsageError
from headway.tracing.classify import checkpointable_blocks
from headway.tracing.unwrap import whole

if TYPE_CHECKING:
    import torch
    from torch import nn

    from headway.count import CostModel


@dataclass(frozen=True, slots=True)
class Setup:
    """How a model is set up while a block runs.

    Attributes:
        trained: of each parameter, whether it is.
        checkpointed: paths of the blocks that are run again in the backward.
        num_blocks: blocks that could be.
        to_the_end: whether they are run again to their ends, as `use_reentrant=True` does.
        version: of the model: another number for other parameters.
    """

    trained: tuple[bool, ...]
    checkpointed: tuple[str, ...]
    num_blocks: int
    to_the_end: bool
    version: int

    def recompute(self) -> str:
        """Say what is run again, as `CostModel.count` takes it.

        Raises:
            UsageError: a choice of blocks is run again to their ends, which no term says.
        """
        if not self.checkpointed:
            return "none"
        if len(self.checkpointed) == self.num_blocks:
            return "reentrant" if self.to_the_end else "full"
        if self.to_the_end:
            raise UsageError(
                f"{len(self.checkpointed)} of {self.num_blocks} blocks are checkpointed with use_reentrant=True, and "
                "what that runs again cannot be said. Checkpoint with use_reentrant=False, or pass recompute= (see "
                "`CostModel.count`)."
            )
        return ",".join(self.checkpointed)

    def applied_to(self, cost_model: CostModel) -> CostModel:
        """Return the cost model of the same model with these parameters trained."""
        pairs = zip(cost_model.parameters, self.trained, strict=True)
        return replace(cost_model, parameters=tuple(replace(p, trainable=trained) for p, trained in pairs))


class SetupReader:
    """Read how a model is set up, over and over, in microseconds.

    Args:
        model: is not kept alive; once it is gone, its last setup stands.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._version = 0
        self._marks: list[tuple[int, torch.Size]] = []
        self._parameters: list[Any] = []
        self.look_again()

    def look_again(self) -> None:
        """Find the model's parameters and blocks anew, as after some were added."""
        model = self._model()
        if model is None:
            return
        inner = whole(model)
        marks = [(id(parameter), parameter.shape) for parameter in inner.parameters()]
        self._version += marks != self._marks
        self._marks = marks
        self._parameters = [weakref.ref(parameter) for parameter in inner.parameters()]
        paths = checkpointable_blocks(inner)
        self._blocks = [(path, weakref.ref(module)) for path, module in inner.named_modules() if path in paths]
        self._last = self._read()

    def read(self) -> Setup:
        """Return how the model is set up now."""
        try:
            self._last = self._read()
        except AttributeError:  # one is gone: sharding puts others in their places
            self.look_again()
        return self._last

    def _read(self) -> Setup:
        on: list[tuple[str, Any]] = []
        for path, block in self._blocks:
            module = block()
            if getattr(module, "gradient_checkpointing", False):
                on.append((path, getattr(module, "_gradient_checkpointing_func", None)))
        return Setup(
            tuple([parameter().requires_grad for parameter in self._parameters]),
            tuple([path for path, _ in on]),
            len(self._blocks),
            any(getattr(function, "keywords", {}).get("use_reentrant", False) for _, function in on),
            self._version,
        )


def param_bytes(model: nn.Module, *, trainable_only: bool = False) -> int:
    """Count the bytes of a model's parameters; tied ones once.

    Args:
        model: any module; of a sharded one the whole's.
        trainable_only: leave frozen parameters out.

    >>> from torch import nn
    >>> param_bytes(nn.Linear(8, 4))
    144
    """
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad or not trainable_only)
