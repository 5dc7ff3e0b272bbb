from dataclasses import replace

import pytest

from headway.errors import ConfigError
from headway.explain.breakdown import break_down
from headway.explain.explanation import Finding
from headway.explain.text import as_text
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from helpers.traces import US, WrittenTrace, sidecar, two_kernels_a_step


def long_names(tmp_path, beside=None):
    """Steps of 100 us with a module of a long path and a kernel of a long name."""
    trace = two_kernels_a_step(5)
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
    for i in range(5):
        host = 1000 * US + 50 * US * i
        trace.annotation("module:model.language_model.layers.17.self_attn.q_proj", host + US, 3 * US)
        trace.launched(name, host + 20 * US, 2000 * US + 100 * US * i + 90 * US, 2 * US, 90 + i)
    beside = {} if beside is None else {"headway": beside}
    return explain([read_trace(trace.write(tmp_path / "t.json", **beside))])


def test_a_waterfall_reads_at_80_columns(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for by in ("module", "kernel"):
        text = as_text(long_names(tmp_path), by)
        assert max(map(len, text.splitlines())) <= 80
    assert "...ayers.17.self_attn.q_proj" not in text
    assert "vectorized_elementwise_..." in text


@pytest.mark.parametrize(("mfu_to", "is_shown"), [(0.0123, False), (0.013, True)])
def test_an_mfu_that_a_finding_does_not_change_in_print_is_not_shown(tmp_path, mfu_to, is_shown):
    explanation = long_names(tmp_path)
    finding = Finding("slow-steps", "seen.", "a cause.", "advice.", 1, 0.027, mfu_from=0.0121, mfu_to=mfu_to)
    text = as_text(replace(explanation, findings=(finding,)))
    assert ("MFU 1.2 % -> 1.3 %" in text) == is_shown
    assert ("->" in text) == is_shown


@pytest.mark.parametrize(("num_layers", "joins"), [(18, False), (19, True)])
def test_layers_of_one_kind_are_a_row_where_modules_are_too_many(tmp_path, num_layers, joins):
    trace = WrittenTrace()
    trace.steps(0, 1000 * US)
    for i, path in enumerate(["head", "embed", *(f"layers.{i}.mlp" for i in range(num_layers))]):
        trace.annotation(f"module:{path}", i * 10 * US, 2 * US)
        trace.launched("gemm", i * 10 * US, (i + 5) * 10 * US, 10 * US, i + 1, operator="aten::mm")
    text = as_text(explain([read_trace(trace.write(tmp_path / "t.json"))]), "module")
    assert (f"layers.*.mlp ({num_layers})" in text) == joins
    assert ("layers.7.mlp" in text) != joins
    assert "more (" not in text


def test_a_waterfall_shows_all_lines_that_took_time_and_the_sum(tmp_path):
    text = as_text(long_names(tmp_path))
    assert text.startswith("What to do first\n\n1. largest-loss: up to 32.0 % of the time\n")  # then the tables
    assert (
        "\n\nstep  rank    ms  largest loss           share\n"
        "----  ----  ----  --------------------  ------\n"
        "   2     0  0.10  memory-bound kernels  32.0 %\n"
    ) in text
    assert (
        "The mean of 3 steps of rank 0 on unknown device: 0.10 ms; the median is step 3, 0.10 ms (step and rank show "
        "another)\n"
        "\n"
        "where the time went     ms    share  median ms\n"
        "--------------------  ----  -------  ---------  ----------\n"
        "matmul-class kernels  0.06   60.0 %       0.06  ######\n"
        "memory-bound kernels  0.03   32.0 %       0.03        ###\n"
        "idle: other           0.01    8.0 %       0.01           #\n"
        "--------------------  ----  -------  ---------  ----------\n"
        "the step              0.10  100.0 %       0.10\n"
    ) in text


def test_a_late_batch_every_fourth_step_has_its_line_in_the_mean_though_the_median_step_has_none(tmp_path):
    trace = WrittenTrace()
    bounds = [1000 * US]
    for i in range(9):
        wait = 400 * US if i % 4 == 0 else 0
        begin = bounds[-1]
        trace.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", begin, wait)
        trace.launched("gemm", begin + wait + 10 * US, begin + wait + 20 * US, 70 * US, i + 1, operator="aten::mm")
        bounds.append(begin + wait + 100 * US)
    trace.steps(*bounds)
    explanation = explain([read_trace(trace.write(tmp_path / "t.json"))])
    text = as_text(explanation)
    # Of steps 2 to 8, which are shown, one waits.
    assert "The mean of 7 steps" in text
    assert "idle: waiting for data      0.06   36.4 %       0.00" in text
    mean = explanation.to_dict()["mean"]
    assert mean["duration_ns"] == sum(line["ns"] for line in mean["lines"]) == (7 * 100 + 400) * US // 7
    assert (mean["num_steps"], mean["left_out"]) == (7, [])


def test_a_breakdown_of_several_steps_names_the_step_that_it_is_of(tmp_path):
    assert "By module, of step 3, the median:" in as_text(long_names(tmp_path), "module")


def test_with_a_workload_each_line_says_what_mfu_would_be_without_it(tmp_path):
    text = " ".join(as_text(long_names(tmp_path, sidecar())).split())
    assert "on A device: 0.10 ms, MFU 30.0 %" in text
    assert "memory-bound kernels 0.03 32.0 % 44.1 % 0.03" in text
    assert "slow: head -0.01 -13.8 %" in text


def test_markdown_keeps_the_bars_as_code(tmp_path):
    text = as_text(long_names(tmp_path), "module", markdown=True)
    assert "| memory-bound kernels | 0.03 | 32.0 % | 0.03 | `      ###` |" in text
    assert "| model.language_model.layers.17.self_attn.q_proj | 0.06 | 60.0 % | 0.06 | 0.00 | 0.00 | 0.00 |" in text


@pytest.mark.parametrize("by", ["component", "module", "kernel"])
def test_a_breakdown_adds_up_to_the_step(tmp_path, by):
    for waterfall in long_names(tmp_path, sidecar()).steps:
        shares = break_down(waterfall, by)
        assert sum(share.ns for share in shares) == waterfall.duration_ns
        assert all(sum(share.by_phase.values()) == share.ns for share in shares[:-1])


def test_components_show_their_rate_and_what_is_attributed(tmp_path):
    components = {"model.language_model.layers.17.self_attn.q_proj": "mlp"}
    text = " ".join(as_text(long_names(tmp_path, sidecar(components=components)), "component").split())
    # 27,000 FLOPs in 60 us; of the 92 us in which something ran, 32 are nobody's
    assert "mlp 0.06 60.0 % 0.06 0.00 0.00 0.5" in text
    assert "attributed: 65.22 % of the time in which something ran" in text


def test_a_module_belongs_to_the_component_of_the_nearest_module_around_it(tmp_path):
    components = {"model.language_model": "language", "model.language_model.layers.17.self_attn": "attention"}
    (waterfall, *_) = long_names(tmp_path, sidecar(components=components)).steps
    shares = {share.name: share.ns for share in break_down(waterfall, "component")}
    assert shares == {"attention": 60 * US, "other modules": 32 * US, "(no kernel runs)": 8 * US}


def test_a_module_takes_the_component_of_its_siblings_where_they_have_but_one(tmp_path):
    components = {
        "model.language_model.layers.17.self_attn.k_proj": "projections",
        "model.language_model.layers.17.self_attn.v_proj": "projections",
        "model.language_model.layers.17.mlp.up_proj": "mlp",
    }
    (waterfall, *_) = long_names(tmp_path, sidecar(components=components)).steps
    assert break_down(waterfall, "component")[0].name == "projections"


def test_components_of_a_trace_that_has_none_are_an_error_with_a_way_out(tmp_path):
    with pytest.raises(ConfigError, match=r"by='component': .*t\.json does not say.*by='module'"):
        break_down(long_names(tmp_path).steps[0], "component")


def test_what_to_do_first_stands_below_the_waterfall(tmp_path):
    beside = sidecar(clocks={"sm_mhz": 1000, "most_sm_mhz": 2000})
    explained = long_names(tmp_path, beside)
    (first, *_) = explained.findings
    assert (
        as_text(explained)
        .partition("What to do first\n\n1. ")[2]
        .startswith(
            "throttled-clocks: up to 30.0 % of the time, MFU 30.0 % -> 42.9 %\n"
            "The device's clock was 50.0 % below its highest at the end of the profile.\n"
            "Likely cause: the device is at its power limit or too hot, or its clocks are set low.\n"
            "Try: ask nvidia-smi"
        )
    )
    marked = as_text(explained, markdown=True)
    assert "1. **throttled-clocks: up to 30.0 % of the time, MFU 30.0 % -> 42.9 %.** The device's clock" in marked
    assert first.to_dict() == {
        "id": "throttled-clocks", "seen": first.seen, "cause": first.cause, "next": first.next, "ns": 30 * US,
        "share": pytest.approx(0.3), "mfu_from": pytest.approx(0.3), "mfu_to": pytest.approx(3 / 7),
        "when": "",
    }  # fmt: skip


def test_what_waited_is_named_below_the_waterfall(tmp_path):
    trace = WrittenTrace()
    trace.launched("first", 90 * US, 100 * US, 10 * US, 1, operator="aten::add")
    trace.operator("aten::item", 92 * US, 25 * US)
    trace.call("cudaStreamSynchronize", 93 * US, 20 * US, 50)
    trace.launched("second", 150 * US, 200 * US, 10 * US, 2, operator="aten::add")
    text = as_text(explain([read_trace(trace.write(tmp_path / "t.json"))], as_one_step=True))
    assert "idle: host waits (sync): aten::item (cudaStreamSynchronize) 0.09 ms." in text
    assert text.startswith("What to do first\n\n1. synchronisation: ")
    assert "\n\nThe whole trace of rank 0" in text
