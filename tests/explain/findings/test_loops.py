"""Loops in Python, in traces written by hand: over small products, parameters and numbers."""

import pytest

from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from helpers.traces import US, WrittenTrace, paced_steps, products_in_a_row, shapes, sidecar


def findings_of(tmp_path, trace, **beside):
    found = explain([read_trace(trace.write(tmp_path / "t.json", **beside))])
    return {one.id: one for one in found.findings}


def test_products_that_take_less_than_their_launch_are_found(tmp_path):
    found = findings_of(tmp_path, products_in_a_row([[1, 8], [8, 8]], count=20, us=2))["small-gemms"]
    assert found.ns == 40 * US
    assert "20 matrix products a step, 100.0 % of them aten::addmm" in found.seen
    assert "as a loop over" in found.cause


@pytest.mark.parametrize("modules", [[], ["encoder.layer.{}.attention", "encoder.layer.{}.mlp"]])
def test_small_products_of_many_layers_are_no_loop(tmp_path, modules):
    """A narrow model, such as TraceLens' bert-small of width 512 on one sentence: each module runs its own few."""

    def step(trace, at, number):
        trace.launched("adds", at, at + US, 40 * US, number + 90, operator="aten::add")
        for i in range(20):
            launch = at + (1 + i) * US
            trace.operator("aten::addmm", launch, US, **shapes([[], [16, 512], [512, 2048 if i % 2 else 512]]))
            trace.launched("gemm", launch, at + (40 + 3 * i) * US, 3 * US, number + i + 1)
            for name in modules[i % 2 : i % 2 + 1]:
                trace.annotation(f"module:{name.format(i)}", launch, US)

    found = findings_of(tmp_path, paced_steps(step))["small-gemms"]
    assert "loop" not in found.cause + found.next
    assert "narrow" in found.cause


@pytest.mark.parametrize("gap", [0, 2])
def test_large_products_are_not_small_where_the_step_ends_before_they_do(tmp_path, gap):
    """The device waits for the first product of the next step, of which nothing is within this one."""

    def step(trace, at, number):
        for i in range(4):
            launch = at + (1 + i) * US
            trace.operator("aten::mm", launch, US, **shapes([[512, 512], [512, 512]]))
            trace.launched("gemm", launch, at + (2 + gap + 20 * i) * US, 20 * US, number + i + 1)

    found = findings_of(tmp_path, paced_steps(step))
    assert "small-gemms" not in found
    assert found["largest-loss"].share == pytest.approx(0.2, abs=0.03) if gap == 0 else "largest-loss" in found


def test_products_are_judged_by_their_flops_where_a_peak_is_known(tmp_path):
    trace = products_in_a_row([[512, 64], [64, 64]], count=4, us=20)
    for peak, is_small in ((1e12, True), (1e11, False)):
        beside = {"headway": sidecar(peak_flops_per_s=peak, ceiling_flops_per_s=None)}
        assert ("small-gemms" in findings_of(tmp_path, trace, **beside)) == is_small


def optimizer_findings(tmp_path, operators, *, average=""):
    """Findings of steps with a product, and so many operators of the optimizer, of 100 ns each; an average before."""

    def step(trace, at, number):
        trace.launched("gemm", at, at + 1000 * US, 60 * US, number * 10 + 999, operator="aten::mm")
        if average:
            trace.launched("k", at + US, at + 1059 * US, US, number * 10 + 998, operator=average)
        trace.annotation("Optimizer.step#AdamW.step", at + 2 * US, 90 * US)
        for i, operator in enumerate(operators):
            launch = at + 3 * US + i * 100
            trace.operator(operator, launch, 90)
            trace.call("cudaLaunchKernel", launch, 80, number * 10 + i + 1)
            trace.kernel("k", at + 1060 * US + i * 100, 100, number * 10 + i + 1)

    return findings_of(tmp_path, paced_steps(step))


def test_an_optimizer_that_takes_tensors_one_by_one_is_found(tmp_path):
    found = optimizer_findings(tmp_path, ["aten::mul_"] * 400)["optimizer-loop"]
    assert found.ns == pytest.approx(40 * US * (1 - 7 / 20))  # fused it moves 7 tensors where the loop moves 20
    assert "400 operators a step" in found.seen


def test_an_optimizer_that_takes_all_at_once_is_no_finding(tmp_path):
    assert "optimizer-loop" not in optimizer_findings(tmp_path, ["aten::_foreach_mul_"] * 400)
    assert "optimizer-loop" not in optimizer_findings(tmp_path, ["aten::mul_"] * 90)


def test_an_optimizer_that_is_one_kernel_a_tensor_is_no_loop(tmp_path):
    kernels = ["bitsandbytes::optimizer_update_8bit_blockwise"] * 400
    assert "optimizer-loop" not in optimizer_findings(tmp_path, kernels)


def test_an_average_in_lists_leaves_a_loop_of_the_optimizer_a_finding(tmp_path):
    loop = ["aten::mul_", "aten::addcdiv_"] * 200
    assert "optimizer-loop" in optimizer_findings(tmp_path, loop, average="aten::_foreach_lerp_")


def on_a_cpu(*groups):
    """Steps of 1 ms: a forward of 500 us, then operators of 2 us with 1 us between them, as (name, number, sizes)."""
    trace = WrittenTrace()
    trace.steps(*(1000 * US + 1000 * US * i for i in range(4)))
    for i in range(3):
        at = 1000 * US + 1000 * US * i
        trace.annotation("phase:forward", at, 500 * US)
        trace.operator("aten::mm", at + US, 490 * US, **shapes([[64, 64], [64, 64]]))
        moment = at + 501 * US
        for name, number, sizes in groups:
            for k in range(number):
                trace.operator(name, moment, 2 * US, **shapes([[sizes[k % len(sizes)]]]))
                moment += 3 * US
        trace.annotation("phase:forward", at + 998 * US, US)
        trace.operator("aten::mm", at + 998 * US, US, **shapes([[64, 64], [64, 64]]))
    return trace


MANY, FEW = [100, 200, 300, 400, 500], [100]


@pytest.mark.parametrize(("number", "sizes", "is_found"), [(120, MANY, True), (50, MANY, False), (120, FEW, False)])
def test_a_loop_over_tensors_beside_the_model_is_found_by_their_sizes(tmp_path, number, sizes, is_found):
    found = findings_of(tmp_path, on_a_cpu(("aten::mul_", number, sizes)))
    assert ("parameter-loop" in found) == is_found
    if is_found:
        assert found["parameter-loop"].ns == pytest.approx(3 * number * US, rel=0.05)


@pytest.mark.parametrize(("number", "is_found"), [(60, True), (10, False)])
def test_numbers_that_are_read_anywhere_in_the_step_are_found_with_what_makes_them(tmp_path, number, is_found):
    found = findings_of(tmp_path, on_a_cpu(("aten::norm", number, MANY), ("aten::item", number, FEW)))
    assert ("read-back" in found) == is_found
    assert "parameter-loop" not in found
    if is_found:
        assert found["read-back"].ns == pytest.approx(6 * number * US, rel=0.05)
        assert "60 numbers a step" in found["read-back"].seen


def test_anomaly_mode_reads_numbers_that_the_loop_does_not(tmp_path):
    trace = on_a_cpu(("aten::norm", 60, MANY), ("aten::item", 60, FEW))
    assert "read-back" not in findings_of(tmp_path, trace, headway=sidecar(host={"anomaly_mode": True}))


@pytest.mark.parametrize(("frames", "rule"), [(["measure (mine/train.py:7)"], "parameter-loop"), (None, "host-pause")])
def test_a_long_gap_at_the_line_of_a_loop_over_tensors_is_the_loops(tmp_path, frames, rule):
    """150 tensors in steps of 20 ms: 20 us of other code before each, and 8 ms of it before the largest."""
    trace, begins, runs = WrittenTrace(), {}, []
    trace.steps(*(1000 * US + 20_000 * US * i for i in range(4)))
    for i in range(3):
        at = 1000 * US + 20_000 * US * i
        begins[str(i + 1)] = at
        trace.annotation("phase:forward", at, 500 * US)
        trace.operator("aten::mm", at + US, 490 * US, **shapes([[64, 64], [64, 64]]))
        moment = at + 501 * US
        for k in range(150):
            moment += 8000 * US if k == 75 else 250 * US if k % 10 == 0 else 20 * US
            trace.operator("aten::detach", moment, 2 * US, **shapes([[100 + k % 7]]))
            moment += 2 * US
        runs.append([at + 501 * US, moment, 0])
        trace.annotation("phase:forward", at + 19_998 * US, US)
        trace.operator("aten::mm", at + 19_900 * US, 99 * US, **shapes([[64, 64], [64, 64]]))
    host = {"step_ns": begins, "stacks": [frames or []], "runs": runs if frames else [], "preempted": []}
    found = findings_of(tmp_path, trace, headway=sidecar(host=host))
    # without a look at the stack nobody knows that the long gap is the loop's
    assert found[rule].ns >= 8000 * US
    loop_ns = (8000 if frames else 0) * US + (150 * 2 + 15 * 250 + 134 * 20) * US
    assert found["parameter-loop"].ns == pytest.approx(loop_ns, rel=0.05)


NUMEL = 1_000_000
SIZES = [[NUMEL // 4], [NUMEL // 2, 1], [NUMEL // 4]]  # of one list
FLOATS, COPY_OUT = "Functor<float, 4>", "CopyFunctor<c10::BFloat16, float, 2, 1, 1>"
COPY_IN = "CopyFunctor<float, c10::BFloat16, 2, 1, 1>"


def lists(count, sizes=None):
    """Operands of an operator on so many lists, with the sizes that a profiler writes of up to 30 tensors."""
    return {"Input Dims": [sizes or []] * count + [[]], "Input type": ["TensorList"] * count + ["Scalar"]}


def tensor(kind):
    return {"Input Dims": [[NUMEL]], "Input type": [kind]}


def optimizer_findings_of(tmp_path, operators, *, around=()):
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
    found, line = optimizer_findings_of(tmp_path, operators)
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
    found, line = optimizer_findings_of(tmp_path, operators)
    assert line.ns == 24 * US
    assert "unfused-optimizer" not in found


# Lists that an operator is given, in PyTorch's AdamW with foreach=True: it writes one more, so 21 in all.
FOREACH_ADAMW = [("mul_", 1), ("lerp_", 2), ("mul_", 1), ("addcmul_", 3), ("sqrt", 1), ("div_", 1), ("add_", 1),
                 ("addcdiv_", 3)]  # fmt: skip


def test_an_update_in_many_operators_on_long_lists_is_counted_in_passes(tmp_path):
    operators = [(f"aten::_foreach_{name}", FLOATS, lists(count)) for name, count in FOREACH_ADAMW]
    found, line = optimizer_findings_of(tmp_path, operators * 2)  # two groups of tensors
    assert found["unfused-optimizer"].ns == pytest.approx(line.ns * (1 - 7 / 21), abs=1)
    assert "as much as 21 tensors of each weight's size" in found["unfused-optimizer"].seen
    assert "AdamW(fused=True)" in found["unfused-optimizer"].next


def test_clipping_belongs_to_the_optimizer_with_what_its_operators_call(tmp_path):
    clipping = [
        ("aten::_foreach_norm", "LpNormFunctor<float, 1>", lists(1, SIZES)),
        ("aten::_foreach_mul_", FLOATS, lists(1, SIZES)),
        ("aten::norm", "norm", tensor("float")),
    ]
    _, line = optimizer_findings_of(tmp_path, [UPDATE], around=clipping)
    assert line.ns == 3 * 2 * US  # the norm of one tensor is anybody's
