"""Numbers of a step that the device computes: summed over the ranks in one message, read by name once they arrive.

Tensor letters: S sources, M further sums, K numbers of a step, N losses of a pack.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from headway.errors import ConfigError
from headway.meter.clock import HostCopy
from headway.models.experts import RouterSummary


class PackSums(NamedTuple):
    """Losses that the forward of a pack gave.

    Attributes:
        total: its part of the step's loss, a scalar to differentiate, once.
        loss_N: each loss that is logged, without gradient; None where another process logs them.
        source_N: number of the source that each is of.
        terms: further sums by name.
    """

    total: torch.Tensor
    loss_N: torch.Tensor | None = None
    source_N: torch.Tensor | None = None
    terms: Mapping[str, torch.Tensor] = MappingProxyType({})


class StepNumbers(NamedTuple):
    """Numbers of one step over all ranks, on the host.

    Attributes:
        losses: summed losses of each source, such as cross-entropies [nats].
        terms: further sums, by the names of the objective's `terms`.
        recompiles: guards of compiled code that failed.
        grad_norm: norm of the gradient before it was clipped.
        router: how evenly experts were used; None without experts.
    """

    losses: Sequence[float]
    terms: dict[str, float]
    recompiles: int
    grad_norm: float
    router: RouterSummary | None

    @property
    def is_finite(self) -> bool:
        """True if all losses and the gradient are finite."""
        return all(map(math.isfinite, (*self.losses, *self.terms.values(), self.grad_norm)))


class DeviceNumbers(NamedTuple):
    """The same numbers on the device, where they may not have been computed yet.

    Attributes:
        vector_K: summed losses of each source, further sums, guards that failed, norm of the gradient, and the numbers
            of a `RouterSummary`, if there are experts.
        terms: names of the further sums.
    """

    vector_K: torch.Tensor
    num_sources: int
    terms: Sequence[str]

    @property
    def grad_norm(self) -> torch.Tensor:
        """Norm of the gradient, a scalar."""
        return self.vector_K[self.num_sources + len(self.terms) + 1]

    def arriving(self) -> Callable[[], StepNumbers]:
        """Send the numbers to the host; returns what reads them, and waits where the device has not passed them."""
        copy = HostCopy(self.vector_K)

        def read_numbers() -> StepNumbers:
            values = copy.read()
            losses, values = values[: self.num_sources], values[self.num_sources :]
            recompiles, grad_norm, *router = values[len(self.terms) :]
            summary = RouterSummary(router[0], router[1], int(router[2])) if router else None
            return StepNumbers(
                losses, dict(zip(self.terms, values, strict=False)), round(recompiles), grad_norm, summary
            )

        return read_numbers


class StepSums:
    """Sums to which the packs of a step add, on the device.

    Args:
        num_sources: of the data.
        terms: names of the further sums that the objective has.
        device: of the model.
    """

    def __init__(self, num_sources: int, terms: Sequence[str], device: torch.device) -> None:
        self._terms = terms
        self._loss_S = torch.zeros(num_sources, device=device)
        self._term_M = torch.zeros(len(terms), device=device)

    def add(self, pack: PackSums) -> None:
        """Add a pack's losses and further sums."""
        if pack.loss_N is not None and pack.source_N is not None:
            self._loss_S.index_add_(0, pack.source_N, pack.loss_N.to(self._loss_S.dtype))
        if pack.terms:
            self.add_terms(pack.terms)

    def add_terms(self, sums: Mapping[str, torch.Tensor]) -> None:
        """Add to further sums by their names; those that are not named stay as they are.

        Raises:
            ConfigError: the objective has not said before that it has a sum of such a name.
        """
        if unknown := [name for name in sums if name not in self._terms]:
            raise ConfigError(
                f"the objective gives the sum {unknown[0]!r}, but its attribute `terms` {tuple(self._terms)} does "
                "not name this sum. Name the sum there, so that all ranks add up the same numbers."
            )
        zero = self._term_M.new_zeros(())
        self._term_M += torch.stack([sums.get(name, zero).to(self._term_M.dtype) for name in self._terms])

    def over_ranks(
        self,
        recompiles: int,
        sum_: Callable[[torch.Tensor], None],
        *,
        norm: Callable[[], torch.Tensor],
        router: Callable[[Callable[[torch.Tensor], None]], torch.Tensor],
    ) -> DeviceNumbers:
        """Sum over the ranks, in one message; then take the gradient's norm and the routers' numbers.

        Args:
            recompiles: guards that failed on this rank.
            sum_: replaces a tensor by its sum over the ranks.
            norm: gives the norm of the gradients.
            router: gives the numbers of a `RouterSummary`, summed by what it is given.
        """
        recompiles_1 = torch.full((1,), recompiles, device=self._loss_S.device)
        sums = torch.cat([self._loss_S, self._term_M, recompiles_1])
        sum_(sums)
        vector_K = torch.cat([sums, norm().to(sums)[None], router(sum_)])
        return DeviceNumbers(vector_K, len(self._loss_S), self._terms)
