"""Muon's update: the momentum of a matrix with all its singular values brought near 1.

Newton-Schulz needs whole matrices. Where a parameter is sharded, the processes of its mesh swap slices, so that each of
them orthogonalises some whole matrices alone and sends the slices of the results back: every matrix is computed once
per mesh, by the arithmetic of one process. A matrix travels there and back once, in bfloat16, the way there while the
matrices before it are computed. Stacks of experts' matrices that are sharded over experts need no swap.

Letters: W processes of a mesh, N matrices of a stack, A rows and B columns of a matrix.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from headway.count.updating import AT_ONCE, NEWTON_SCHULZ
from headway.errors import ConfigError
from headway.optim.parts import Update, Values, cut_parameters, laid_as, open_moment, spread_of
from headway.tracing.unwrap import local

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7
_Alike = list[tuple[torch.Tensor, torch.Tensor]]  # parameters of one shape, each with its update
_IN_FLIGHT = 2  # swaps under way at a time: one arrives while the one before is computed


def update(step: Update) -> None:
    """Run Muon on the parameters of a group."""
    lr, decay, muon = step.group["lr"], 1.0 - step.group["lr"] * step.group["weight_decay"], step.settings.muon
    for updates in orthogonalised(_momenta(step, muon.momentum)):
        directions, (parameter, _) = dict(updates), updates[0]
        noise, scale = step.noise_of(parameter, stream=1), step_scale(parameter.shape, muon.scale)
        for parts in cut_parameters(directions):
            weights = Values([part.of(part.parameter) for part in parts], copied=True)
            direction = Values([part.of(directions[part.parameter].contiguous()) for part in parts], copied=True)
            weight = (weights.flat * decay).sub_(direction.flat, alpha=lr * scale)
            weights.put(weight if step.skip is None else torch.where(step.skip, weights.flat, weight))
            weights.write(noise, step.skip)


def _momenta(step: Update, decay: float) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the parameters with this process's part of the update before orthogonalisation, in bfloat16."""
    for first, groups in step.lists(step.states):
        noise, updates = step.noise_of(first, stream=0), []
        for parts in groups:
            states = [step.states[part.parameter] for part in parts]
            momentum = open_moment(states, "momentum_buffer", parts, signed=True, copied=True)
            gradients = Values([part.gradient for part in parts], copied=True)
            gradients.scale(step.factor)
            # momentum, and Nesterov's step further, both in float32
            if step.skip is not None:  # the mean of a number and itself is that number
                gradients.put(torch.where(step.skip, momentum.flat, gradients.flat))
            momentum.flat.lerp_(gradients.flat, 1.0 - decay)
            direction = gradients.flat.lerp_(momentum.flat, decay).to(torch.bfloat16)
            momentum.write(noise, step.skip)
            # a parameter that was cut is put together again
            for part, values in zip(parts, laid_as(gradients.parts, direction), strict=True):
                updates.append(values)
                if part.is_last:
                    update_of_all = updates[0] if len(updates) == 1 else torch.cat(updates)
                    updates = []
                    yield part.parameter, update_of_all.view(local(part.parameter).shape)


def newton_schulz(matrices: torch.Tensor) -> torch.Tensor:
    """Bring the singular values of matrices near 1, in bfloat16.

    Args:
        matrices: shape (..., A, B).

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/, whose coefficients are chosen for speed: the
    singular values end between about 0.7 and 1.2, not at 1. PyTorch's `torch.optim.Muon` computes the same.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(torch.bfloat16)
    x = x.mT if is_tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(NEWTON_SCHULZ):
        gram = x @ x.mT
        x = _add_product(x, _add_product(gram, gram, gram, b, c), x, a, 1.0)
    return x.mT if is_tall else x


def step_scale(shape: torch.Size, scale: str) -> float:
    """The factor of the learning rate for matrices of a shape (..., A, B).

    Source: `original` as in Jordan et al. 2024; `match_rms_adamw` from Liu et al. 2025 (arXiv:2502.16982), equation 4.
    """
    rows, columns = shape[-2:]
    return math.sqrt(max(1.0, rows / columns)) if scale == "original" else 0.2 * math.sqrt(max(rows, columns))


def orthogonalised(
    updates: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Orthogonalise the updates of matrices and of stacks of matrices, sharded or not; one shape goes together.

    All processes of a mesh must come with the same parameters in the same order.

    Args:
        updates: each parameter with this process's part of its update.

    Yields:
        Parameters of one shape, each with this process's part of its orthogonalised update; lists in some order.

    Raises:
        ConfigError: a parameter is sharded in a way that leaves no whole matrices to put together.
    """
    under_way: deque[_Swap] = deque()
    stacks: dict[Any, _Alike] = {}
    waiting: dict[tuple[_Layout, torch.Size], _Alike] = {}

    def finished(at_most: int) -> Iterator[_Alike]:
        while len(under_way) > at_most:
            yield under_way.popleft().finish()

    turn = 0
    for parameter, update in updates:
        layout = _layout(parameter)
        if layout is None:  # this process has the whole matrix: gather others of its shape, up to the memory budget
            kind = (parameter.shape, spread_of(parameter))  # copies of a stack must draw alike
            stack = stacks.setdefault(kind, [])
            stack.append((parameter, update))
            if sum(update.numel() for _, update in stack) >= AT_ONCE:
                yield _all_here(stacks.pop(kind))
            continue
        # Sharded matrices are exchanged in batches of one shape, at least one matrix for each process to compute.
        alike = waiting.setdefault((layout, parameter.shape), [])
        alike.append((parameter, update))
        if sum(layout.stack(parameter) for parameter, _ in alike) >= layout.size:
            under_way.append(_Swap(layout, waiting.pop((layout, parameter.shape)), turn))
            yield from finished(_IN_FLIGHT - 1)  # compute on what has arrived while the next ones are on their way
    for (layout, _), alike in waiting.items():  # fewer matrices than processes: not always the same ones compute
        under_way.append(_Swap(layout, alike, turn))
        turn += len(alike)
        yield from finished(_IN_FLIGHT - 1)
    for stack in stacks.values():
        yield _all_here(stack)
    yield from finished(0)


def _all_here(alike: _Alike) -> _Alike:
    parameter, first = alike[0]
    matrices = torch.cat([update.view(-1, *update.shape[-2:]) for _, update in alike]).to(_device(parameter))
    results = _by_stacks(matrices).to(first.device).reshape(-1)
    pieces = laid_as((update for _, update in alike), results)
    return [(p, piece.view(update.shape)) for (p, update), piece in zip(alike, pieces, strict=True)]


def _by_stacks(matrices_NAB: torch.Tensor) -> torch.Tensor:
    if len(matrices_NAB) == 0:
        return matrices_NAB
    at_once = max(1, AT_ONCE // matrices_NAB[0].numel())
    # One alone is an ordinary matrix product, which libraries choose their kernels for with more care.
    stacks = [
        newton_schulz(s[0])[None] if len(s) == 1 else newton_schulz(s) for s in torch.split(matrices_NAB, at_once)
    ]
    return stacks[0] if len(stacks) == 1 else torch.cat(stacks)


@dataclass(frozen=True)
class _Layout:
    """Sharding of a parameter's matrices: along rows or columns, over which processes."""

    group: Any
    dim: int  # 0 for rows, 1 for columns
    rank: int
    size: int
    device: torch.device  # device on which the processes exchange

    @staticmethod
    def stack(parameter: torch.Tensor) -> int:
        return math.prod(parameter.shape[:-2])

    def lengths(self, total: int) -> list[int]:
        """Length of each process's slice of a dimension. Source: DTensor cuts as `torch.chunk` does."""
        most = -(-total // self.size)
        return [max(0, min(most, total - rank * most)) for rank in range(self.size)]


def _layout(parameter: torch.Tensor) -> _Layout | None:
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    cuts = [
        (axis, placement.dim - (parameter.ndim - 2))
        for axis, placement in enumerate(parameter.placements)
        if isinstance(placement, Shard) and mesh.size(axis) > 1
    ]
    if all(dim < 0 for _, dim in cuts):
        return None
    if len(cuts) > 1 or type(parameter.placements[cuts[0][0]]) is not Shard:
        raise ConfigError(
            f"optim.name 'muon' cannot put together the matrices of a parameter of shape {tuple(parameter.shape)} "
            f"that is sharded as {parameter.placements}. Muon supports sharding over one axis of the mesh. Use "
            "'adamw'."
        )
    axis, dim = cuts[0]
    return _Layout(mesh.get_group(axis), dim, mesh.get_local_rank(axis), mesh.size(axis), _device(parameter))


def _device(parameter: torch.Tensor) -> torch.device:
    """Device that computes a parameter's matrices: the mesh's, even if the parameter is offloaded to the host."""
    if isinstance(parameter, DTensor) and parameter.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return parameter.device


class _Swap:
    """Parameters of one shape on their way to the processes that orthogonalise them, and back."""

    def __init__(self, layout: _Layout, alike: _Alike, turn: int) -> None:
        self._layout = layout
        self._alike = alike
        *_, rows, columns = alike[0][0].shape
        self._across = (columns, rows)[layout.dim]
        self._lengths = layout.lengths((rows, columns)[layout.dim])
        # Slices with the cut dimension first: those of all processes, one after the other, are the whole.
        slices = [
            matrix.mT if layout.dim else matrix
            for parameter, update in alike
            for matrix in update.to(layout.device, torch.bfloat16).view(layout.stack(parameter), *update.shape[-2:])
        ]
        owners = [(turn + i) % layout.size for i in range(len(slices))]
        order = sorted(range(len(slices)), key=owners.__getitem__)  # by owner, as the exchange wants it
        self._place = {index: place for place, index in enumerate(order)}
        self._counts = [owners.count(rank) for rank in range(layout.size)]
        sent = torch.cat([slices[i].reshape(-1) for i in order])
        self._received, self._work = self._exchange(sent, back=False)

    def _exchange(self, sent: torch.Tensor, *, back: bool) -> tuple[torch.Tensor, Any]:
        """Start sending slices to the owners of their matrices, or back; does not wait for their arrival."""
        rank = self._layout.rank
        # values of this rank's slices of each rank's matrices
        mine = [count * self._lengths[rank] * self._across for count in self._counts]
        # values of each rank's slices of this rank's matrices
        theirs = [self._counts[rank] * length * self._across for length in self._lengths]
        leaving, arriving = (theirs, mine) if back else (mine, theirs)
        received = sent.new_empty(sum(arriving))
        work = dist.all_to_all_single(received, sent, arriving, leaving, group=self._layout.group, async_op=True)
        return received, work

    def finish(self) -> _Alike:
        """Wait for the matrices, orthogonalise them, send them back; this process's parts."""
        self._work.wait()
        # The slices of each of this process's matrices, put together along the dimension that they were cut in.
        count, across, rank = self._counts[self._layout.rank], self._across, self._layout.rank
        parts = [
            part.view(count, length, across)
            for part, length in zip(
                torch.split(self._received, [count * length * across for length in self._lengths]),
                self._lengths,
                strict=True,
            )
        ]
        matrices = torch.cat(parts, dim=1)
        if count:  # the way round in which a single process would have them
            matrices = _by_stacks(matrices.mT).mT if self._layout.dim else _by_stacks(matrices)
        # Cut again, and every slice back to the process that holds it.
        sent = torch.cat([part.reshape(-1) for part in torch.split(matrices, self._lengths, dim=1)])
        returned, work = self._exchange(sent, back=True)
        work.wait()
        slices = returned.view(len(self._place), self._lengths[rank], across)
        results, first = [], 0
        for parameter, update in self._alike:
            stack = self._layout.stack(parameter)
            own = torch.stack([slices[self._place[i]] for i in range(first, first + stack)])
            first += stack
            results.append((parameter, (own.mT if self._layout.dim else own).reshape(update.shape).to(update.device)))
        return results


def _add_product(
    base: torch.Tensor, left: torch.Tensor, right: torch.Tensor, beta: float, alpha: float
) -> torch.Tensor:
    if base.ndim == 2:
        return torch.addmm(base, left, right, beta=beta, alpha=alpha)
    return torch.baddbmm(base, left, right, beta=beta, alpha=alpha)
