"""One product that a model ran: how much work it did, and what its backward must compute."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from headway.tracing.phantom import Phantom, is_identity


class Running(Protocol):
    """The place in a model at which an operation runs."""

    @property
    def module(self) -> str:
        """Path of the innermost module that runs."""

    @property
    def block_of(self) -> Callable[[str], str]:
        """From a module's path to that of the checkpointable block that holds it."""


@dataclass(frozen=True)
class Operand:
    """The past of a product's input: what it depends on."""

    fed: bool  # whether it depends on the batch
    sources: int  # the parameters that it depends on, bit i for parameter i

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Operand":
        """Read an operand's past; a real tensor has none."""
        if not isinstance(tensor, Phantom):
            return cls(not is_identity(tensor), 0)
        return cls(tensor.fed, tensor.sources if tensor.requires_grad else 0)


@dataclass(frozen=True)
class ConvolutionWindow:
    """The arithmetic of a convolution along one direction."""

    num_inputs: int  # positions of its input
    num_outputs: int  # positions of its output
    span: int  # input positions that one output position reads, holes included
    stride: int  # input positions from one output position to the next
    padding: int  # positions added on each side


@dataclass
class Operation:
    """One product that forward ran."""

    module: str  # path of the innermost module running
    kind: str  # `matmul`, `convolution`, `experts`, `attention` or `recurrence`
    # work in units of the repeated kind: rows of a matrix product, output positions of a convolution, pairs, tokens of
    # a recurrence
    units: int
    unit_flops: int  # FLOPs per unit
    # the backward's products as (phase, FLOPs per unit, sources of the gradient's operand)
    products: tuple[tuple[str, int, int], ...]
    block: str  # path of the checkpointable block that holds the module, "" for none
    # known driver, or several joined by a plus, where the mask says it; else found by comparing workloads
    driver: str = ""
    weight: tuple[int, ...] = ()  # shape of the weight, () where there is none
    stacked: int = 1  # matrices of that shape that the weight is a stack of, each for rows of its own
    fed: bool = True  # whether it depends on the batch; a product of weights alone is done once per forward pass
    from_input: bool = False
    backward_flops: int = 0  # FLOPs that backward really dispatched
    saves_after: bool = False  # whether a tensor was saved for backward after it, inside its block
    by_hand: bool = False  # whether it is a product of attention whose softmax is written out by hand
    masked: bool = False  # whether its pairs come from a mask that names no window
    scored: "list[Operation]" = field(default_factory=list)  # earlier products that its scores were made from
    executed_flops: int = 0  # FLOPs that forward dispatched, where these are more than count
    windows: tuple[ConvolutionWindow, ...] = ()  # the windows of a convolution, one for each direction
    longest: int = 0  # length of the longest piece of attention over packed pieces [positions]
    cached: int = 0  # elements of one token's keys and values, which each pair of attention reads

    @property
    def forward_flops(self) -> int:
        """FLOPs of this call's forward."""
        return self.units * self.unit_flops

    @property
    def expected_backward_flops(self) -> int:
        """FLOPs that backward should dispatch, from the operands' pasts."""
        needed = sum(flops for _, flops, sources in self.products if sources)
        if not self.unit_flops:  # a gradient of what forward did without a product
            return self.units * needed
        return (self.executed_flops or self.forward_flops) * needed // self.unit_flops

    def count_picked(self, picks: int) -> None:
        """Count only the rows of a stack of weights that were picked: so many for each that all matrices ran on."""
        self.kind, self.executed_flops = "experts", self.forward_flops
        per_row = 2 * math.prod(self.weight)
        self.units = self.forward_flops // (per_row * self.stacked) * picks
        self.products = tuple((phase, per_row, sources) for phase, _, sources in self.products)
        self.unit_flops, self.weight = per_row, (self.stacked, *self.weight)

    def count_pairs(self, pairs: int, scores: int) -> None:
        """Count only the pairs that the mask allows, of the scores that each head really computes."""
        self.kind, self.executed_flops = "attention", self.forward_flops
        per_pair = self.forward_flops // scores
        self.products = tuple((phase, per_pair, sources) for phase, _, sources in self.products)
        self.units, self.unit_flops = pairs, per_pair
