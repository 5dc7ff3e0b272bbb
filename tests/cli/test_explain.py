import json

import pytest

from helpers.traces import US, shapes, sidecar, two_kernels_a_step


@pytest.fixture
def trace(tmp_path):
    return two_kernels_a_step(5).write(tmp_path / "t.json.gz", headway=sidecar())


def test_json_has_the_schema_and_adds_up(headway, trace):
    code, out, err = headway("explain", trace, "--json", "--by", "module")
    record = json.loads(out)
    assert (code, err) == (0, "")
    assert record["schema_version"] == 1
    (found,) = record["findings"]
    assert {*found} == {"id", "seen", "cause", "next", "ns", "share", "mfu_from", "mfu_to", "when"}
    assert (found["id"], found["ns"]) == ("padding", 15_000)  # a sixth of the slots, of 90 us
    assert [(step["step"], step["rank"], step["duration_ns"]) for step in record["steps"]] == [
        (2, 0, 100_000),
        (3, 0, 100_000),
        (4, 0, 100_000),
    ]
    for step in record["steps"]:
        assert sum(line["ns"] for line in step["lines"]) == step["duration_ns"]
        assert all({"name", "ns", "share", "key", "mfu_from", "mfu_to", "parts"} == {*line} for line in step["lines"])
        assert sum(row["ns"] for row in step["by"]["rows"]) == step["duration_ns"]


def test_json_by_component_has_the_share_that_is_attributed(headway, trace):
    _, out, _ = headway("explain", trace, "--json", "--by", "component")
    by = json.loads(out)["steps"][0]["by"]
    assert (by["key"], by["attributed"]) == ("component", 0.0)  # the trace names no modules
    assert [row["name"] for row in by["rows"]] == ["other modules", "(no kernel runs)"]


def test_a_step_as_markdown(headway, trace):
    code, out, _ = headway("explain", trace, "--step", "1", "--rank", "0", "--md")
    assert code == 0
    first, title = (
        "**What to do first**\n\n1. **",
        "**Step 1 of rank 0 on A device: 1.09 ms (0.05 ms on the host), MFU 2.8 %**",
    )
    assert out.startswith(first)
    assert f"{title}\n\n| where the time went |" in out


def test_two_outputs_at_once_are_a_wrong_use(headway, trace):
    code, _, err = headway("explain", trace, "--md", "--json")
    assert (code, err) == (2, "Error: --json and --md are two outputs; give one of them.\n")


def test_a_file_that_is_no_trace_is_one_sentence(headway, tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": 1}\n')
    code, out, err = headway("explain", path)
    assert (code, out) == (2, "")
    assert "is no whole trace of PyTorch's profiler" in " ".join(err.split())
    assert len(err.strip().splitlines()) <= 4


def test_a_trace_of_others_is_explained_by_a_shipped_model_and_a_workload(headway, tmp_path):
    path = two_kernels_a_step(5).write(tmp_path / "t.json.gz")
    work = ("--model", "gpt2", "--segments", "4*2", "--lora", "8", "--slots", "10", "--device", "312e12")
    code, out, err = headway("explain", path, *work, "--json")
    assert (code, err) == (0, "")
    record = json.loads(out)
    useful = json.loads(headway("flops", *work[1:6], "--slots", "10", "--json").out)["flops"]["total"]
    for step in record["steps"]:
        lines = {line["key"]: line["ns"] for line in step["lines"]}
        assert sum(lines.values()) == step["duration_ns"]
        assert lines["useful"] == round(useful / 312e12 * 1e9)
        assert lines["padding"] > 0
    assert record["notes"][0].startswith("work is that of gpt2")


def test_products_by_size_are_json_too(headway, tmp_path):
    trace = two_kernels_a_step(3)
    trace.operator("aten::mm", 1053 * US, 1 * US, **shapes([[512, 128], [128, 256]]))  # around the launch in step 2
    trace.call("cudaLaunchKernel", 1053 * US, 500, 77)
    trace.kernel("gemm", 2191 * US, 5 * US, 77)
    code, out, _ = headway("explain", trace.write(tmp_path / "t.json"), "--by", "gemm", "--json")
    (step,) = json.loads(out)["steps"]
    assert code == 0
    assert step["by"]["key"] == "gemm"
    assert [(row["shape"], row["calls"], row["ns"]) for row in step["by"]["rows"]] == [
        ([1, 512, 256, 128], 1, 5 * US),
        (None, 0, 60 * US),
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--segments", "4"), "--segments cannot take effect without --model. Name the model, or leave it out."),
        (("--recompute", "full"), "--recompute cannot take effect without --model"),
        (("--forward-only",), "--forward-only cannot take effect without --model"),
        (("--forward-only", "--recompute", "full"), "--recompute cannot take effect with --forward-only"),
        (("--model", "gpt2"), "--segments is missing, so there is nothing to count"),
        (("--model", "gpt2", "--segments", "4", "--device", "9e99", "--step", "99"), "--step 99: "),
        (("--model", "gpt2", "--segments", "4000", "--device", "1e12"), "is no trace of gpt2 with this workload"),
        (("--device", "H1000"), "The peak of 'H1000' is not known"),
        (("--by", "gemm"), "has no shapes of operators"),
    ],
)
def test_options_that_do_not_fit_the_trace_are_one_error(headway, trace, options, said):
    code, out, err = headway("explain", trace, *options)
    assert (code, out) == (2, "")
    assert said in " ".join(err.split())
