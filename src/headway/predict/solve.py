"""Derive every quantity that follows from the given ones, and refuse given ones that contradict each other.

Each identity is a product of quantities that equals 1, such as tokens/s x step time / tokens per step. One with a
single unknown gives it; one without must hold.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from headway.errors import PlanError
from headway.words import Argument

_TOLERANCE = 0.005  # given values may be rounded this much before they contradict each other


@dataclass(frozen=True, slots=True)
class Quantity:
    """One quantity of a plan."""

    key: str  # the name in `solve`
    label: str  # name to print
    unit: str = ""  # "s", for example; "" for counts and fractions


QUANTITIES = (
    Quantity("flops_per_token", "FLOPs per token", "FLOP"),
    Quantity("tokens_per_step", "tokens per step", "tokens"),
    Quantity("step_flops", "FLOPs per step", "FLOP"),
    Quantity("num_chips", "chips"),
    Quantity("peak_flops_per_s", "peak of one chip", "FLOP/s"),
    Quantity("optimal_step_s", "optimal step time", "s"),
    Quantity("step_s", "step time", "s"),
    Quantity("optimal_tokens_per_s", "optimal tokens/s", "tokens/s"),
    Quantity("tokens_per_s", "tokens/s", "tokens/s"),
    Quantity("tokens_per_s_per_chip", "tokens/s per chip", "tokens/s"),
    Quantity("flops_per_s_per_chip", "useful rate per chip", "FLOP/s"),
    Quantity("mfu", "MFU"),
    Quantity("total_tokens", "total tokens", "tokens"),
    Quantity("total_flops", "total FLOPs", "FLOP"),
    Quantity("num_steps", "steps"),
    Quantity("time_s", "training time", "s"),
    Quantity("chip_hours", "chip-hours", "h"),
    Quantity("price_per_chip_hour", "price per chip-hour"),
    Quantity("cost", "cost"),
)
"""Quantities that `solve` takes and gives: the name of each, its label and its unit."""
_BY_KEY = {quantity.key: quantity for quantity in QUANTITIES}

# A dictionary of exponents: the product of quantities to these powers, times `scale`, is 1. Some follow from others;
# they are here so that going through single unknowns finds everything that is determined.
_Identity = tuple[dict[str, int], float]
_IDENTITIES: tuple[_Identity, ...] = (
    ({"step_flops": 1, "tokens_per_step": -1, "flops_per_token": -1}, 1.0),
    ({"optimal_step_s": 1, "num_chips": 1, "peak_flops_per_s": 1, "step_flops": -1}, 1.0),
    ({"mfu": 1, "step_s": 1, "optimal_step_s": -1}, 1.0),
    ({"tokens_per_s": 1, "step_s": 1, "tokens_per_step": -1}, 1.0),
    ({"optimal_tokens_per_s": 1, "optimal_step_s": 1, "tokens_per_step": -1}, 1.0),
    ({"tokens_per_s": 1, "optimal_tokens_per_s": -1, "mfu": -1}, 1.0),
    ({"optimal_tokens_per_s": 1, "flops_per_token": 1, "num_chips": -1, "peak_flops_per_s": -1}, 1.0),
    ({"tokens_per_s": 1, "tokens_per_s_per_chip": -1, "num_chips": -1}, 1.0),
    ({"flops_per_s_per_chip": 1, "mfu": -1, "peak_flops_per_s": -1}, 1.0),
    ({"flops_per_s_per_chip": 1, "tokens_per_s_per_chip": -1, "flops_per_token": -1}, 1.0),
    ({"flops_per_s_per_chip": 1, "num_chips": 1, "step_s": 1, "step_flops": -1}, 1.0),
    ({"total_flops": 1, "total_tokens": -1, "flops_per_token": -1}, 1.0),
    ({"num_steps": 1, "tokens_per_step": 1, "total_tokens": -1}, 1.0),
    ({"time_s": 1, "tokens_per_s": 1, "total_tokens": -1}, 1.0),
    ({"time_s": 1, "step_s": -1, "num_steps": -1}, 1.0),
    ({"time_s": 1, "num_chips": 1, "flops_per_s_per_chip": 1, "total_flops": -1}, 1.0),
    ({"chip_hours": 1, "time_s": -1, "num_chips": -1}, 3600.0),
    ({"chip_hours": 1, "tokens_per_s_per_chip": 1, "total_tokens": -1}, 3600.0),
    ({"cost": 1, "chip_hours": -1, "price_per_chip_hour": -1}, 1.0),
)


@dataclass(frozen=True, slots=True)
class Solution:
    """Quantities that were put in and quantities that follow."""

    values: Mapping[str, float]  # all known quantities by key
    inputs: frozenset[str]  # keys of those that it was solved from
    warnings: tuple[str, ...] = ()  # numbers that cannot be right, with likely causes

    @property
    def unknown(self) -> tuple[Quantity, ...]:
        """Quantities that nothing given determines."""
        return tuple(quantity for quantity in QUANTITIES if quantity.key not in self.values)


def solve(inputs: Mapping[str, float]) -> Solution:
    """Derive every quantity that the given ones determine.

    Args:
        inputs: values by key of `QUANTITIES`; times in seconds, MFU a fraction, rates and FLOPs of all chips together
            unless the key says per chip.

    Returns:
        The given and the derived values.

    Raises:
        PlanError: an unknown key, a value that is not positive, values that contradict each other, or so few that
            nothing follows.

    >>> plan = solve({"step_flops": 4e15, "step_s": 2.0, "num_chips": 4, "peak_flops_per_s": 1e15})
    >>> plan.values["mfu"]
    0.5
    """
    values: dict[str, float] = {}
    # positive numbers of known quantities alone
    for key, value in inputs.items():
        if key not in _BY_KEY:
            raise PlanError(f"{key!r} is no quantity of a plan; known are {', '.join(_BY_KEY)}.")
        if not (math.isfinite(value) and value > 0):
            raise PlanError(f"{_name(key)} is {value:g}: it must be a positive number.")
        values[key] = float(value)
    if inputs.get("mfu", 0.0) > 1:
        raise PlanError(
            Argument("mfu", inputs["mfu"]),
            f" is above 1, which no device reaches. Give a fraction: {inputs['mfu'] / 100:g} for {inputs['mfu']:g} %.",
        )
    changed = True
    # an identity with one unknown gives it; each new value may complete another identity
    while changed:
        changed = False
        for exponents, scale in _IDENTITIES:
            unknown = [key for key in exponents if key not in values]
            if len(unknown) == 1:
                others_product = scale * math.prod(
                    values[key] ** power for key, power in exponents.items() if key in values
                )
                values[unknown[0]] = others_product ** (-1 / exponents[unknown[0]])
                changed = True
    for exponents, scale in _IDENTITIES:
        if all(key in values for key in exponents):
            _check(exponents, scale, values, inputs)
    # nothing was derived: say what would help
    if len(values) == len(inputs):
        raise PlanError(
            f"{_list(inputs)} is too little to compute anything from. An MFU needs FLOPs per token (a model with "
            f"segments or {Argument('seq_len')}), {Argument('num_chips')}, {Argument('peak_flops_per_s')} and "
            f"{Argument('step_s')} with {Argument('tokens_per_step')}, or tokens/s; a training time needs "
            f"{Argument('total_tokens')} and tokens/s, or an MFU with chips, device and model; chips needed follow "
            f"from {Argument('time_s')}."
        )
    return Solution(values, frozenset(inputs), _warnings(values))


def _check(
    exponents: Mapping[str, int], scale: float, values: Mapping[str, float], inputs: Mapping[str, float]
) -> None:
    """Refuse values that break an identity by more than rounding."""
    product = scale * math.prod(values[key] ** power for key, power in exponents.items())
    if abs(product - 1) <= _TOLERANCE:
        return
    parts = ", ".join(f"{_name(key)} {values[key]:.6g}" for key in exponents)
    raise PlanError(
        f"the given values contradict each other: {parts} do not belong together (they differ by a factor of "
        f"{max(product, 1 / product):.4g}). Given were {_list(inputs)}. Leave one of them out, and it is derived."
    )


def _warnings(values: Mapping[str, float]) -> tuple[str, ...]:
    mfu = values.get("mfu", 0.0)
    if mfu <= 1:
        return ()
    return (
        f"an MFU of {mfu:.1%} is above 100 %, which no device reaches, so these numbers do not belong together. "
        f"Likely causes: tokens/s or step time of another number of chips ({Argument('num_chips')}), tokens per step "
        "of one chip, another device, or another model.",
    )


def _name(key: str) -> str:
    return _BY_KEY[key].label


def _list(inputs: Mapping[str, float]) -> str:
    return ", ".join(f"{_name(key)} {value:.6g}" for key, value in inputs.items()) or "no value"
