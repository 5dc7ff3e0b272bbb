"""Conventions: named, versioned rules that bill a step, and the parts of their bills."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from headway.conventions.architecture import Architecture
from headway.count.workload import Workload
from headway.errors import NotExpressibleError, UsageError

PARTS = ("linear", "experts", "attention", "recurrence", "head", "embedding", "vision", "audio", "recompute")
"""Parts of a bill.

`linear`: projections, dense MLPs and whatever else is billed per token; `experts`: routed and shared ones, and routers.
"""

Number: TypeAlias = int | float  # exact integers, except where a tool itself divides
Parts: TypeAlias = "Mapping[str, Number]"


def _divided(square: int, packs: int) -> Number:
    quotient, remainder = divmod(square, packs or 1)
    return square / packs if remainder else quotient


@dataclass(frozen=True, slots=True)
class Step:
    """One step as a tool sees it."""

    workload: Workload  # segments, grids and slots, all devices together
    seq_len: int  # the row length that the tool is configured with [tokens]; some bill it whatever the rows hold
    recompute: str = "none"  # activation checkpointing, as `CostModel.count` takes it; only `hardware` looks at it

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise UsageError(f"seq_len must be at least 1 token, got {self.seq_len}.")

    @property
    def num_rows(self) -> int:
        """Rows of `seq_len` that the slots fill, the last one perhaps in part."""
        return -(-self.workload.slots // self.seq_len)

    @property
    def row_slots(self) -> int:
        """Positions in those rows [tokens]."""
        return self.num_rows * self.seq_len

    @property
    def pack_square_sum(self) -> Number:
        """Sum of the squared tokens of each pack, the packs taken as equally full [tokens^2]."""
        return _divided(self.workload.tokens**2, self.workload.num_packs)

    @property
    def filling_square_sum(self) -> Number:
        """Sum of the squared padding of each pack, the packs taken as equally full [slots^2]."""
        return _divided((self.workload.slots - self.workload.tokens) ** 2, self.workload.num_packs)

    @property
    def square_sum(self) -> int:
        """Sum of squared segment lengths [tokens^2]."""
        lengths = self.workload.segments
        return sum(s * s for s in lengths.tolist())


@dataclass(frozen=True, slots=True)
class Bill:
    """The FLOPs that a convention charges for a step."""

    convention: str  # name of the rule
    flops: Number | None  # FLOPs of the step, all devices together; None where the convention cannot express the model
    parts: Parts = field(default_factory=dict)  # the sum's terms by `PARTS`; empty where there is no number
    tokens: int = 0  # token positions that it charges for
    reason: str = ""  # reason why there is no number; "" if there is one
    note: str = ""  # part that the number leaves out though its tool may bill it; "" for none


@dataclass(frozen=True, slots=True)
class Convention:
    """A named rule of counting."""

    name: str  # name of the rule, such as "torchtitan"
    version: str  # a number for our own rules, else the date of the code that was read
    tool: str  # tool whose peak rule divides the number (`tool_peaks`); "" for the datasheet
    why: str  # one line on what it counts differently from `useful/1`
    price: Callable[[Architecture, Step], Parts]  # the rule itself, a pure function; raises `NotExpressibleError`
    # token positions that the rule charges for: "real", "slots", "rows" (of the configured length), or "joint" (with
    # those of the text beside latents)
    tokens: Literal["real", "slots", "rows", "joint"]
    # positions that its attention spans: "segments", or "rows" of the configured length; "none" without attention
    scope: Literal["segments", "rows", "none"]
    # "sizes" for a formula of the configuration's sizes, "rows" where the cost model or its parameters decide
    reads: Literal["sizes", "rows"] = "sizes"
    only: str = ""  # the one model type that its tool trains, "" for more
    towers: bool = False  # whether it is a formula of a vision tower's sizes too
    delta: bool = False  # whether it is a formula of the gated delta rule's sizes too
    seq_len: bool = False  # whether the configured row length is in its formula beside what `tokens` and `scope` say
    releases: tuple[str, ...] = ()  # releases of the tool that were compared and print by this rule

    @property
    def full_name(self) -> str:
        """Name and version, such as "useful/1"."""
        return f"{self.name}/{self.version}"

    @property
    def uses_seq_len(self) -> bool:
        """True if the configured row length changes the bill."""
        return "rows" in (self.tokens, self.scope) or self.seq_len

    def billed_tokens(self, step: Step) -> int:
        """Token positions that it charges for."""
        workload = step.workload
        joint = workload.tokens + int(workload.sources.sum())
        return {"real": workload.tokens, "slots": workload.slots, "rows": step.row_slots, "joint": joint}[self.tokens]

    def bill(self, model: Architecture, step: Step) -> Bill:
        """Charge for a step; a model that the rule cannot express gives a bill without a number and the reason."""
        try:
            if self.reads == "sizes" and model.unread:
                raise NotExpressibleError(model.unread)
            if self.reads == "sizes" and model.recurrent and not (self.delta and model.delta):
                raise NotExpressibleError(f"{model.name} has recurrent layers, which this rule is not kept for here")
            parts = self.price(model, step)
        except NotExpressibleError as refusal:
            return Bill(self.name, None, reason=str(refusal))
        left_out = self.towers and model.unread_tower and step.workload.patches
        note = f"the vision tower is left out: {model.unread_tower}" if left_out else ""
        return Bill(self.name, sum(parts.values()), dict(parts), self.billed_tokens(step), note=note)
