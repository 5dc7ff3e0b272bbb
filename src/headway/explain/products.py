"""The matrix products of a step by their sizes, where a trace has shapes: the time of each size, and its rate."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from headway.errors import ConfigError
from headway.explain.events import NONE, Product
from headway.explain.explanation import StepWaterfall
from headway.explain.measurement import MATMUL, MeasuredStep, MeasuredTrace
from headway.words import Argument

OTHERS = "convolutions, attention, sizes not recorded"


@dataclass(frozen=True, slots=True)
class GemmRow:
    """All products of a step that have one size."""

    product: Product | None  # the sizes; None of what is no product, or has none recorded
    ns: int  # time in which their kernels ran [ns]
    calls: int  # number of calls; 0 where there is no product
    flops_per_s: float | None  # FLOPs of all of them / time [FLOP/s]; None where there is no product
    of_ceiling: float | None  # the same / the best rate that the device reaches; None where that is not known

    @property
    def name(self) -> str:
        """The sizes as `MxNxK`, of batches as `B*MxNxK`."""
        if self.product is None:
            return OTHERS
        batch, m, n, k, _ = self.product
        return f"{m}x{n}x{k}" if batch == 1 else f"{batch}*{m}x{n}x{k}"

    def to_dict(self) -> dict[str, Any]:
        """Give the JSON-ready record."""
        return {
            "name": self.name,
            "ns": self.ns,
            "shape": None if self.product is None else list(self.product[:4]),
            "dtype": None if self.product is None else self.product.dtype,
            "calls": self.calls,
            "flops": 0 if self.product is None else self.product.flops * self.calls,
            "flops_per_s": self.flops_per_s,
            "of_ceiling": self.of_ceiling,
        }


def products_of(measured: MeasuredTrace, step: MeasuredStep) -> tuple[Counter[Product | None], Counter[Product | None]]:
    """Find the matrix products that ran in a step.

    Args:
        measured: the trace.
        step: one of its steps.

    Returns:
        Time [ns] of each size, under None that of matmul-class kernels that are no product or have no sizes; and calls
        of each size.
    """
    trace, host = measured.trace, measured.trace.host
    spent: Counter[Product | None] = Counter()
    of_operator: Counter[int] = Counter()
    products: dict[int, Product] = {}
    for owned in (owned for owned in step.owned if owned.line == MATMUL):
        operator, operands = measured.operator_of(owned.event), measured.operands_of(owned.event)
        product = None if operands is None else operands.product(trace.names[host.name[operator]])
        if product is None:
            spent[None] += owned.ns
        else:
            products[operator] = product
            of_operator[operator] += owned.ns
    calls: Counter[Product | None] = Counter()
    called = NONE
    # An operator stands before the operators of its thread that it calls.
    for operator in sorted(products, reverse=True):
        calls_it = called != NONE and host.track[called] == host.track[operator]
        if calls_it and host.end_ns[called] <= host.end_ns[operator]:
            products[operator] = products[called]  # aten::linear is the aten::addmm that it calls
        else:
            calls[products[operator]] += 1
        spent[products[operator]] += of_operator[operator]
        called = operator
    return spent, calls


def gemms_of(waterfall: StepWaterfall) -> list[GemmRow]:
    """Divide the matmul-class time of a step among products by size; the rows add up to it exactly.

    Returns:
        The dearest first; last what is no product of two matrices, or has no sizes.

    Raises:
        ConfigError: there is no trace, or it has no shapes.
    """
    if waterfall.measured is None:
        raise ConfigError(Argument("by", "gemm"), ": records tell nothing of products; a profile does (run.profile).")
    measured, step = waterfall.measured
    if not measured.trace.operands:
        raise ConfigError(
            Argument("by", "gemm"),
            f": {measured.trace.path} has no shapes of operators. Profile with record_shapes=True, as Headway does; ",
            Argument("by", "kernel"),
            " shows the kernels by name.",
        )
    best = waterfall.rates.best_flops_per_s if waterfall.rates is not None else None
    spent, calls = products_of(measured, step)
    rows = []
    for product, ns in spent.items():
        rate = None if product is None else product.flops * calls[product] / ns * 1e9
        share = None if rate is None or not best else rate / best
        rows.append(GemmRow(product, ns, calls[product], rate, share))
    return sorted(rows, key=lambda row: (row.product is None, -row.ns, row.name))


def gemms_record(waterfall: StepWaterfall) -> dict[str, Any]:
    """A step's products, JSON-ready; see `gemms_of`."""
    return {"key": "gemm", "rows": [row.to_dict() for row in gemms_of(waterfall)]}
