"""Code that is known to be slow: when a model runs it, by classes of transformers, and how a profile shows it."""

import importlib
import re
from types import SimpleNamespace

import pytest
import torch

from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from headway.meter.slow_code import SlowCode, slow_code_of, slow_code_of_loop, slow_code_of_plan, slow_code_table
from helpers.traces import PUBLISHED, US, paced_steps

ROWS = {row.name: row for row in slow_code_table()}
CONV, DELTA = ROWS["conv3d-without-cudnn"], ROWS["gated-delta-rule-in-python"]


def test_each_row_has_a_sign_a_cause_a_remedy_and_a_source():
    for row in slow_code_table():
        assert row.modules or row.setting or row.most_patches or row.num_workers is not None
        assert bool(row.paths) == bool(row.missing or row.most_patches)
        assert all(text.endswith(".") for text in (row.cause, row.remedy))
        assert row.source
        assert row.remedy in row.text


# Versions that threads name as slow and as mended: pytorch 166122, 166643, 174051 and cosmos-transfer2.5's pull 227.
@pytest.mark.parametrize(
    ("version", "cudnn", "is_slow"),
    [
        ("2.9.0+cu128", "9.10.2", True),
        ("2.9.1+cu128", "9.13.0", True),
        ("2.9.1", "9.14.0", True),
        ("2.9.1", "9.15.1", False),
        ("2.9.1", "9.21.0", False),
        ("2.8.0+cu126", "9.10.2", False),
        ("2.10.0", "9.15.1", False),
        ("2.9.1+rocm6.4", None, False),
        ("2.9.0", "9.7.1", False),
    ],
)
def test_conv3d_is_slow_with_the_versions_that_are(version, cudnn, is_slow):
    versions = {"torch": version} | ({"cudnn": cudnn} if cudnn else {})
    assert CONV.is_in({"Conv3d"}, {}, versions, ()) == is_slow
    assert not CONV.is_in({"Conv2d"}, {}, versions, ())


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"])
def test_layers_of_transformers_that_fall_back_are_known_by_class_function_and_path(family):
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    classes = {name for name in vars(module) if re.fullmatch(DELTA.modules, name)}
    assert classes
    assert any(re.search(DELTA.frames, name) for name in vars(module))
    assert DELTA.is_in(classes, {}, {}, ())
    assert not DELTA.is_in(classes, {}, {}, {"fla"})
    source = importlib.util.find_spec(module.__name__).loader.get_source(module.__name__)
    assert "self.linear_attn = " in source
    assert re.search(DELTA.paths, "model.layers.0.linear_attn")


def test_a_setting_is_slow_where_a_config_has_its_value():
    row = ROWS["eager-attention"]
    assert row.is_in((), {"_attn_implementation": "eager"}, {}, ())
    assert not row.is_in((), {"_attn_implementation": "sdpa"}, {}, ())
    experts = ROWS["experts-in-a-loop"]
    assert experts.is_in({"Qwen3MoeExperts"}, {"_experts_implementation": "eager"}, {}, ())
    assert not experts.is_in({"Linear"}, {"_experts_implementation": "eager"}, {}, ())


class OnCuda(torch.nn.Module):
    """A model that says that it is on a device."""

    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Conv3d(3, 8, 2)
        self.config = SimpleNamespace(_attn_implementation="eager")

    def parameters(self, **_options):
        yield SimpleNamespace(device=SimpleNamespace(type="cuda"))


def test_a_model_is_asked_on_a_device_alone(monkeypatch):
    assert [row.name for row in slow_code_of(OnCuda())] == ["eager-attention"]
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    assert [row.name for row in slow_code_of(OnCuda())] == ["conv3d-without-cudnn", "eager-attention"]
    assert slow_code_of(torch.nn.Conv3d(3, 8, 2)) == []  # on a CPU
    assert slow_code_of(object()) == []


# Kernels as the profiles in pytorch 166122 and 174051 have them.
@pytest.mark.parametrize(
    ("kernel", "operator"),
    [
        ("void at::native::vol2col_kernel<c10::BFloat16>(long, c10::BFloat16 const*)", "aten::slow_conv_dilated3d"),
        ("void at::native::vol2col_kernel<float>(long, float const*)", "aten::_slow_conv3d_forward"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_tilesize128x64x32", "aten::cudnn_convolution"),
    ],
)
def test_a_profile_shows_conv3d_without_cudnn(tmp_path, kernel, operator):
    def step(trace, at, number):
        trace.launched("gemm", at, at + 1000 * US, 60 * US, number + 1, operator="aten::mm")
        trace.launched(kernel, at + 2 * US, at + 1060 * US, 40 * US, number + 2, operator=operator)

    found = explain([read_trace(paced_steps(step).write(tmp_path / "t.json"))]).findings
    named = [finding for finding in found if finding.id == "known-slow-code"]
    assert len(named) == ("vol2col" in kernel)
    assert all(finding.share == pytest.approx(0.4) and "cuDNN 9.15" in finding.next for finding in named)


@pytest.mark.parametrize("has_stacks", [True, False])
def test_a_profile_shows_gated_deltas_in_python_by_its_stacks(tmp_path, has_stacks):
    def step(trace, at, number):
        trace.annotation("module:layers.0.linear_attn", at, 90 * US)
        if has_stacks:
            name = "transformers/models/qwen3_5/modeling_qwen3_5.py(412): torch_chunk_gated_delta_rule"
            trace.event("python_function", name, at, 90 * US)
        for i in range(8):
            trace.launched("mul", at + (1 + 10 * i) * US, at + (1000 + 10 * i) * US, 5 * US, number + i + 1,
                           operator="aten::mul")  # fmt: skip

    found = {finding.id for finding in explain([read_trace(paced_steps(step).write(tmp_path / "t.json"))]).findings}
    assert ("known-slow-code" in found) == has_stacks


@pytest.mark.parametrize("path", PUBLISHED)
def test_no_published_trace_is_told_to_run_slow_code_that_it_does_not_run(path):
    trace = read_trace(path)
    has_any = any(
        re.search(row.kernels or row.frames or row.paths or "$.", name)
        for row in slow_code_table()
        for name in trace.names
    )
    assert has_any or "known-slow-code" not in {finding.id for finding in explain([trace]).findings}


@pytest.mark.parametrize(("late_us", "is_told"), [(8, True), (1, False)])
def test_a_tower_that_launches_longer_than_it_computes_is_told(tmp_path, late_us, is_told):
    def step(trace, at, number):
        trace.annotation("module:visual.blocks.0", at, 90 * US)
        for i in range(8):
            start = at + (2 + 10 * i) * US
            trace.launched("gemm", start, start + US, (10 - late_us) * US, number + i + 1, operator="aten::addmm")

    found = explain([read_trace(paced_steps(step).write(tmp_path / "t.json"))]).findings
    told = [finding for finding in found if finding.id == "known-slow-code"]
    assert bool(told) == is_told
    assert all("all pictures of a batch in one call" in finding.next for finding in told)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_that_the_loops_own_process_makes_are_told_where_the_step_waits(tmp_path, num_workers):
    """PyTorch names a loader's iterator in every profile."""
    kind = "_SingleProcessDataLoaderIter" if num_workers == 0 else "_MultiProcessingDataLoaderIter"

    def step(trace, at, number):
        trace.annotation(f"enumerate(DataLoader)#{kind}.__next__", at, 50 * US)
        trace.launched("gemm", at + 51 * US, at + 52 * US, 40 * US, number + 1, operator="aten::mm")

    found = explain([read_trace(paced_steps(step).write(tmp_path / "t.json"))]).findings
    (finding,) = [finding for finding in found if finding.id == "data-bound"]
    assert ("num_workers=0" in finding.cause) == (num_workers == 0)
    names = [row.name for row in slow_code_of_loop(0, num_workers, 0.2)]
    assert names == ["data-in-the-loop"] * (num_workers == 0)
    assert slow_code_of_loop(0, 0, 0.01) == slow_code_of_loop(4000, None, 0.2) == []
    assert [row.name for row in slow_code_of_loop(300, None, 0.0)] == ["tower-of-few-patches"]


def test_a_plan_names_the_fallbacks_and_the_small_towers_of_its_model():
    paths = {"model.layers.0.linear_attn.in_proj_qkv", "model.visual.blocks.0.mlp"}
    names = [row.name for row in slow_code_of_plan(paths, 256, set())]
    assert names == ["gated-delta-rule-in-python", "tower-of-few-patches"]
    assert slow_code_of_plan({"model.layers.0.self_attn.q_proj"}, 256, set()) == []
    assert slow_code_of_plan(paths, 4096, {"fla"}) == []


def test_the_table_reads_as_rows():
    assert all(isinstance(row, SlowCode) for row in slow_code_table())
    assert len(ROWS) == len(slow_code_table())
