"""Optimizers on lists of tensors, in traces written by hand, whose bytes and passes are known."""

import pytest

from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from helpers.traces import US, paced_steps

NUMEL = 1_000_000
SIZES = [[NUMEL // 4], [NUMEL // 2, 1], [NUMEL // 4]]  # of one list
FLOATS, COPY_OUT = "Functor<float, 4>", "CopyFunctor<c10::BFloat16, float, 2, 1, 1>"
COPY_IN = "CopyFunctor<float, c10::BFloat16, 2, 1, 1>"


def lists(count, sizes=None):
    """Operands of an operator on so many lists, with the sizes that a profiler writes of up to 30 tensors."""
    return {"Input Dims": [sizes or []] * count + [[]], "Input type": ["TensorList"] * count + ["Scalar"]}


def tensor(kind):
    return {"Input Dims": [[NUMEL]], "Input type": [kind]}


def findings_of(tmp_path, operators, *, around=()):
    """Findings of steps with a product, and an optimizer of (operator, kernel, operands) of 2 us each; and its line.

    Others, around the step of the optimizer, come before it.
    """

    def step(trace, at, number):
        trace.launched("gemm", at, at + 1000 * US, 50 * US, number + 99, operator="aten::mm")
        trace.annotation("Optimizer.step#AdamW.step", at + 40 * US, 55 * US)
        for i, (operator, kernel, operands) in enumerate([*around, *operators]):
            launch = at + (i + 2) * US + (40 * US if i >= len(around) else 0)
            trace.operator(operator, launch, US - 100, **operands)
            trace.call("cudaLaunchKernel", launch, US - 200, number + i + 1)
            trace.kernel(f"multi_tensor_apply_kernel<{kernel}>", at + 1050 * US + i * 2 * US, 2 * US, number + i + 1)

    found = explain([read_trace(paced_steps(step).write(tmp_path / "t.json"))])
    (line,) = (line for line in found.steps[0].lines if line.key == "optimizer")
    return {one.id: one for one in found.findings}, line


COPIES = ("aten::_foreach_copy_", COPY_IN, lists(2, SIZES))
UPDATE = ("aten::_fused_adamw_", FLOATS, lists(4, SIZES))
ROUNDING = [
    ("aten::random_", "distribution<int>", tensor("int")),
    ("aten::add_", "add<int>", {"Input Dims": [[NUMEL], [NUMEL]], "Input type": ["int", "int"]}),
    ("aten::bitwise_and_", "and<int>", tensor("int")),
    ("aten::_foreach_copy_", COPY_OUT, lists(2, SIZES)),
]


def test_an_update_on_copies_is_held_against_one_pass_over_what_is_held(tmp_path):
    operators = [COPIES] * 4 + [UPDATE] + ROUNDING * 3
    found, line = findings_of(tmp_path, operators)
    assert line.ns == 2 * US * len(operators)
    # Bytes of an element: 2 + 4 of a copy; 7 x 4 of the update; 4, 12, 8 and 6 of rounding. One pass: 7 x 2.
    moved, least = 4 * 6 + 28 + 3 * (4 + 12 + 8 + 6), 7 * 2
    assert found["unfused-optimizer"].ns == pytest.approx(line.ns * (1 - least / moved), abs=1)
    assert f"read and wrote {moved} MB a step, where one pass" in found["unfused-optimizer"].seen
    assert f"moves {least} MB" in found["unfused-optimizer"].seen
    assert "largest-loss" not in found


@pytest.mark.parametrize(
    "operators",
    [
        [UPDATE] * 12,
        [("aten::_fused_adamw_", "Functor<c10::BFloat16, 4>", lists(4, SIZES))] * 12,
        [("MyOptimizer", "kOptimizerStatic8bit2StateBlockwise", {})] * 12,  # nobody knows what it reads
        [("aten::_foreach_copy_", COPY_IN, lists(2))] * 12,  # no update among them that tells the state
    ],
)
def test_an_update_of_one_pass_or_of_an_unknown_kind_is_no_finding(tmp_path, operators):
    found, line = findings_of(tmp_path, operators)
    assert line.ns == 24 * US
    assert "unfused-optimizer" not in found


# Lists that an operator is given, in PyTorch's AdamW with foreach=True: it writes one more, so 21 in all.
FOREACH_ADAMW = [("mul_", 1), ("lerp_", 2), ("mul_", 1), ("addcmul_", 3), ("sqrt", 1), ("div_", 1), ("add_", 1),
                 ("addcdiv_", 3)]  # fmt: skip


def test_an_update_in_many_operators_on_long_lists_is_counted_in_passes(tmp_path):
    operators = [(f"aten::_foreach_{name}", FLOATS, lists(count)) for name, count in FOREACH_ADAMW]
    found, line = findings_of(tmp_path, operators * 2)  # two groups of tensors
    assert found["unfused-optimizer"].ns == pytest.approx(line.ns * (1 - 7 / 21), abs=1)
    assert "as much as 21 tensors of each weight's size" in found["unfused-optimizer"].seen
    assert "AdamW(fused=True)" in found["unfused-optimizer"].next


def test_clipping_belongs_to_the_optimizer_with_what_its_operators_call(tmp_path):
    clipping = [
        ("aten::_foreach_norm", "LpNormFunctor<float, 1>", lists(1, SIZES)),
        ("aten::_foreach_mul_", FLOATS, lists(1, SIZES)),
        ("aten::norm", "norm", tensor("float")),
    ]
    _, line = findings_of(tmp_path, [UPDATE], around=clipping)
    assert line.ns == 3 * 2 * US  # the norm of one tensor is anybody's
