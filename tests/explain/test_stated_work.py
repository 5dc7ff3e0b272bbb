import pytest

from headway.count import CostModel, Workload
from headway.count.rows import ALWAYS, Gradient, Row
from headway.errors import ConfigError, UsageError
from headway.explain.breakdown import break_down
from headway.explain.stated_work import StatedWork
from headway.explain.text import as_text
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from helpers.traces import US, WrittenTrace, sidecar, two_kernels_a_step

pytestmark = pytest.mark.own_peak

LAYER, HEAD = 100, 50  # FLOPs per token of forward; there is no backward, so that all is known


def model_of(num_layers, name="m"):
    rows = [Row(f"blocks.{i}.mlp", "linear", "mlp", "tokens", LAYER) for i in range(num_layers)]
    return CostModel(name, (*rows, Row("head", "linear", "head", "tokens", HEAD)), ())


def given(num_layers=1, tokens=100, slots=None):
    return StatedWork("my model", model_of(num_layers), Workload([tokens], slots=slots))


def traced(tmp_path, modules=(("blocks.0.mlp", 45), ("head", 15)), *, beside=None):
    """Three steps of 100 us on the device, of which products of these modules take so many."""
    trace = WrittenTrace()
    trace.steps(*(1000 * US + 50 * US * i for i in range(4)))
    for i in range(3):
        host, device = 1000 * US + 50 * US * i, 2000 * US + 100 * US * i
        for j, (module, duration) in enumerate(modules):
            if module is not None:
                trace.annotation(f"module:{module}", host + (2 + 5 * j) * US, 4 * US)
            operands = [[8, 4], [4, 8]], "c10::BFloat16"
            launch = host + (3 + 5 * j) * US
            trace.launched("k", launch, device, duration * US, 9 * i + j + 1, operator="aten::mm", operands=operands)
            device += duration * US
    return read_trace(trace.write(tmp_path / "t.json", **(beside or {"deviceProperties": [{"name": "NVIDIA H200"}]})))


def lines_of(waterfall):
    assert sum(line.ns for line in waterfall.lines) == waterfall.duration_ns
    return {line.key: line.ns / US for line in waterfall.lines if line.ns}


def test_a_model_a_workload_and_a_peak_split_the_products_of_other_peoples_traces(tmp_path):
    found = explain([traced(tmp_path)], work=given(slots=120), device="1e9")
    (step,) = found.steps
    # 100 tokens x 150 FLOPs, and 20 slots of padding, at 1e9/s
    assert lines_of(step) == {
        "useful": 15, "padding": 3, "slow.mlp": 45 - 10 - 2, "slow.head": 15 - 5 - 1, "idle.other": 40,
    }  # fmt: skip
    assert step.mfu == pytest.approx(0.15)
    assert [row.name for row in break_down(step, "component")][:2] == ["mlp", "head"]
    assert any("work is that of my model, 15.0 kFLOP in each step" in note for note in found.notes)


def test_a_trace_of_inference_needs_the_forward_alone(tmp_path):
    rows = [
        Row(
            module,
            "linear",
            component,
            "tokens",
            flops,
            (Gradient("dgrad", flops, ALWAYS), Gradient("wgrad", flops, ALWAYS)),
        )
        for module, component, flops in (("blocks.0.mlp", "mlp", LAYER), ("head", "head", HEAD))
    ]
    model = CostModel("m", tuple(rows), ())
    trace = traced(tmp_path)
    for forward_only, useful in ((False, 45), (True, 15)):
        work = StatedWork("my model", model, Workload([100], slots=120), forward_only=forward_only)
        (step,) = explain([trace], work=work, device="1e9").steps
        lines = lines_of(step)
        assert (lines["useful"], lines["padding"]) == (useful, useful / 5)


def test_without_paths_all_products_are_one_component(tmp_path):
    found = explain([traced(tmp_path, [(None, 60)])], work=given(), device="1e9")
    assert lines_of(found.steps[0]) == {"useful": 15, "slow.all components": 45, "idle.other": 40}
    assert any("no modules by path" in note for note in found.notes)


def test_the_peak_is_that_of_the_traces_own_device_in_the_precision_of_its_products(tmp_path):
    text = " ".join(as_text(explain([traced(tmp_path)], work=given(tokens=10**6))).split())
    assert "peak: 989.4 TFLOP/s, NVIDIA H200 in bf16." in text
    assert explain([traced(tmp_path)], work=given(), device="A100").steps[0].rates.peak_flops_per_s == 312e12


def test_a_model_given_takes_the_place_of_the_traces_own_and_a_note_says_so(tmp_path):
    found = explain([traced(tmp_path, beside={"headway": sidecar()})], work=given())
    assert lines_of(found.steps[0])["useful"] == 15
    assert any("and not that of m, which the trace names" in note for note in found.notes)


def test_a_device_gives_headways_own_trace_the_peak_that_it_lacks(tmp_path):
    trace = traced(tmp_path, beside={"headway": sidecar(peak_flops_per_s=None)})
    assert explain([trace]).steps[0].mfu is None
    assert explain([trace], device="1e9").steps[0].mfu == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("modules", "num_layers", "said"),
    [
        ([("blocks.0.mlp", 30), ("blocks.1.mlp", 30)], 1, "runs the module blocks.1.mlp, and my model has none"),
        ([("blocks.0.mlp", 30), ("head", 30)], 2, "runs blocks.1.mlp, and the trace has no module of that number"),
        ([("layers.0", 30), ("head", 30)], 1, "modules such as layers.0, and none of blocks.0.mlp .* 66.7 %"),
    ],
)
def test_a_model_that_is_not_the_traces_is_seen_by_its_modules(tmp_path, modules, num_layers, said):
    with pytest.raises(ConfigError, match=rf"t\.json is no trace of my model.*{said}.*Give model the model"):
        explain([traced(tmp_path, modules)], work=given(num_layers), device="1e9")


@pytest.mark.parametrize(
    "modules",
    [
        [("blocks.0", 30), ("blocks.1", 20), ("head", 10)],  # compiled blocks are units
        [("blocks.0.mlp", 30), ("blocks.1.mlp", 20), ("blocks.0.norm", 10)],  # a fused loss runs no head
    ],
)
def test_a_unit_stands_for_what_it_holds_and_a_head_may_be_fused(tmp_path, modules):
    assert explain([traced(tmp_path, modules)], work=given(2), device="1e9").steps[0].mfu > 0


def test_a_workload_that_no_such_device_computes_in_that_time_is_an_error(tmp_path):
    words = r"is no trace of my model .* needs 150.0 kFLOP, .* for 0.06 ms of step 2.* 2.5 GFLOP/s .* 1.0 GFLOP/s"
    with pytest.raises(ConfigError, match=words):
        explain([traced(tmp_path)], work=given(tokens=1000), device="1e9")


def test_a_stated_peak_holds_for_a_device_that_is_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_PEAK_FLOPS", "1e9")
    found = explain([traced(tmp_path)], work=given())
    assert found.steps[0].mfu == pytest.approx(0.15)
    assert "peak: 1.0 GFLOP/s, HEADWAY_PEAK_FLOPS=1e9." in found.notes


def test_a_workload_that_leaves_out_products_that_ran_is_a_note(tmp_path):
    trace = traced(tmp_path)  # two products of 8 x 8 x 4 in a step, 1,024 FLOPs
    notes = explain([trace], work=given(tokens=5), device="1e9").notes  # 750
    words = "products of 1.0 kFLOP ran in step 2, and my model with this workload has 750 FLOP of them: model or segm"
    assert any(words in note for note in notes)
    assert not any("ran in step" in note for note in explain([trace], work=given(tokens=6), device="1e9").notes)


def test_no_peak_is_an_error_that_says_how_to_name_one(tmp_path):
    mine = {"deviceProperties": [{"name": "a device of mine"}]}
    with pytest.raises(ConfigError, match=r"no peak in bf16 is known of 'a device of mine'.*device=312e12"):
        explain([traced(tmp_path, beside=mine)], work=given())
    path = two_kernels_a_step(3).write(tmp_path / "plain.json", deviceProperties=[{"name": "NVIDIA H200"}])
    with pytest.raises(ConfigError, match="does not say in which precision its products ran"):
        explain([read_trace(path)], work=given())


@pytest.mark.parametrize("device", ["H1000", "-3", "nan"])
def test_a_device_that_is_none_is_an_error(tmp_path, device):
    with pytest.raises(UsageError, match="device"):
        explain([traced(tmp_path)], device=device)
