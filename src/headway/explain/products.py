"""The matrix products that ran in a step, by their sizes, where the trace has shapes."""

from collections import Counter

from headway.explain.measure import MATMUL, MeasuredStep, MeasuredTrace
from headway.explain.operands import Product
from headway.explain.trace import NONE


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
    for operator in sorted(products, reverse=True):  # of a thread, an operator stands before those that it calls
        calls_it = called != NONE and host.track[called] == host.track[operator]
        if calls_it and host.end_ns[called] <= host.end_ns[operator]:
            products[operator] = products[called]  # aten::linear is the aten::addmm that it calls
        else:
            calls[products[operator]] += 1
        spent[products[operator]] += of_operator[operator]
        called = operator
    return spent, calls
