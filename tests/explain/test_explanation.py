from headway.explain.explanation import num_first_steps
from headway.explain.text import as_text
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from helpers.traces import US, WrittenTrace


def memory_bound(tmp_path, *, device="NVIDIA H200"):
    """A kernel of 40 us of aten::mul, two of 10 us of one aten::sum, and 30 us of an operator without shapes."""
    trace = WrittenTrace()
    mib = [1024, 256]  # of fp32
    trace.launched("mul", 0, 100 * US, 40 * US, 1, operator="aten::mul", operands=([mib, mib],))
    trace.operator("aten::sum", 5 * US, 4 * US, **{"Input Dims": [mib, []], "Input type": ["float", "Scalar"]})
    for i in (0, 1):
        trace.call("cudaLaunchKernel", (6 + i) * US, 500, 2 + i)
        trace.kernel(f"reduce {i}", (140 + 10 * i) * US, 10 * US, 2 + i)
    trace.launched("add", 12 * US, 160 * US, 30 * US, 4, operator="aten::add")
    path = trace.write(tmp_path / "t.json", deviceProperties=[{"name": device}])
    return explain([read_trace(path)], as_one_step=True)


def test_operators_count_once_and_those_without_shapes_not_at_all(tmp_path):
    found = memory_bound(tmp_path).steps[0]
    assert found.traffic.num_bytes == 3 * 2**20 + 2**20
    assert (found.traffic.known_ns, found.traffic.all_ns) == (60 * US, 90 * US)
    assert found.traffic.at_bandwidth_ns == round(2**22 / 4.8e12 * 1e9)
    assert found.to_dict()["memory_bound"]["bytes"] == 2**22


def test_the_bytes_stand_below_the_waterfall_beside_the_time_at_full_bandwidth(tmp_path):
    text = " ".join(as_text(memory_bound(tmp_path)).split())
    assert "their operands are 4.19 MB, 0.00 ms at 4.8 TB/s (the operands of 0.06 ms are known)." in text


def test_a_device_whose_bandwidth_is_not_known_has_the_bytes_alone(tmp_path):
    found = memory_bound(tmp_path, device="a device of mine")
    assert found.steps[0].traffic.at_bandwidth_ns is None
    assert "their operands are 4.19 MB (the operands of" in as_text(found).replace("\n", " ")


def test_nothing_is_said_where_no_shapes_were_recorded(tmp_path):
    trace = WrittenTrace()
    trace.launched("mul", 0, 100 * US, 40 * US, 1, operator="aten::mul")
    found = explain([read_trace(trace.write(tmp_path / "t.json"))], as_one_step=True)
    assert found.steps[0].traffic is None
    assert "operands" not in as_text(found)


def test_operands_that_the_memory_cannot_have_moved_are_not_counted(tmp_path):
    """A table of 4 GB in 40 us would be 100 TB/s: the operator read some rows of it, and which is not told."""
    trace = WrittenTrace()
    table = [2**20, 1024]
    trace.launched("look", 0, 100 * US, 40 * US, 1, operator="aten::add", operands=([table],))
    trace.launched("mul", 20 * US, 150 * US, 60 * US, 2, operator="aten::mul", operands=([[1024, 256]],))
    path = trace.write(tmp_path / "t.json", deviceProperties=[{"name": "NVIDIA H200"}])
    explanation = explain([read_trace(path)], as_one_step=True)
    traffic = explanation.steps[0].traffic
    assert (traffic.num_bytes, traffic.known_ns, traffic.implausible_ns) == (2 * 2**20, 60 * US, 40 * US)
    text = " ".join(as_text(explanation).split())
    assert "in 0.04 ms operators read an unknown part of their operands" in text


def test_a_small_operand_may_come_out_of_a_cache_faster_than_memory_is(tmp_path):
    trace = WrittenTrace()
    trace.launched("mul", 0, 100 * US, 2 * US, 1, operator="aten::mul", operands=([[1024, 2048]],))  # 16.8 MB in 2 us
    path = trace.write(tmp_path / "t.json", deviceProperties=[{"name": "NVIDIA H200"}])
    assert explain([read_trace(path)], as_one_step=True).steps[0].traffic.num_bytes == 2 * 2**23


def test_on_a_cpu_views_move_nothing_and_what_an_operator_calls_moves_its_bytes(tmp_path):
    trace = WrittenTrace()
    sizes = {"Input Dims": [[1024, 256]], "Input type": ["float"]}
    trace.operator("aten::reshape", 0, 100 * US, **sizes)
    trace.operator("aten::clone", 5 * US, 90 * US, **sizes)
    trace.operator("aten::copy_", 10 * US, 80 * US, **{"Input Dims": [[1024, 256]] * 2, "Input type": ["float"] * 2})
    trace.operator("aten::transpose", 110 * US, 10 * US, **sizes)
    trace.operator("aten::as_strided", 112 * US, 5 * US, **sizes)
    (step,) = explain([read_trace(trace.write(tmp_path / "t.json"))], as_one_step=True).steps
    assert step.traffic.num_bytes == 2 * 2**20
    assert step.traffic.known_ns == 110 * US


def test_the_first_steps_end_where_one_is_as_fast_as_the_others():
    assert num_first_steps([50, 30, 10, 40, 10, 11, 12, 9]) == 2
    assert num_first_steps([50, 10, 10]) == 0


def test_a_virtual_function_of_a_card_has_the_cards_bandwidth(tmp_path):
    for name in ("AMD Instinct MI300X", "AMD Instinct MI300X VF"):
        assert memory_bound(tmp_path, device=name).steps[0].traffic.bytes_per_s == 5.3e12
    assert memory_bound(tmp_path, device="AMD Instinct MI300X MIG 3g").steps[0].traffic.bytes_per_s is None
