from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from helpers.written_traces import US, paced_steps


def found_in(tmp_path, operators):
    """Findings of steps with a product, and so many operators of the optimizer, of 100 ns each."""

    def step(trace, at, number):
        trace.launched("gemm", at, at + 1000 * US, 60 * US, number * 10 + 999, operator="aten::mm")
        trace.annotation("Optimizer.step#AdamW.step", at + 2 * US, 90 * US)
        for i, operator in enumerate(operators):
            launch = at + 3 * US + i * 100
            trace.operator(operator, launch, 90)
            trace.call("cudaLaunchKernel", launch, 80, number * 10 + i + 1)
            trace.kernel("k", at + 1060 * US + i * 100, 100, number * 10 + i + 1)

    found = explain([read_trace(paced_steps(step).write(tmp_path / "t.json"))])
    return {one.id: one for one in found.findings}


def test_an_optimizer_that_takes_tensors_one_by_one_is_found(tmp_path):
    found = found_in(tmp_path, ["aten::mul_"] * 400)["optimizer-loop"]
    assert found.ns == 40 * US
    assert "400 operators a step" in found.seen


def test_an_optimizer_that_takes_all_at_once_is_no_finding(tmp_path):
    assert "optimizer-loop" not in found_in(tmp_path, ["aten::_foreach_mul_"] * 400)
    assert "optimizer-loop" not in found_in(tmp_path, ["aten::mul_"] * 90)
