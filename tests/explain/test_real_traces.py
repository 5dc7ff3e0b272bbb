"""Traces that torch.profiler really writes: of a CPU with the installed torch's fields, and a part of a GPU's.

`h200_two_blocks.json.gz` is cut out of a step of Qwen3-VL-30B-A3B on an NVIDIA H200 (torch 2.11, blocks compiled, their
products recomputed, FlashAttention-2, moments in bfloat16; 26 November 2026): a block of each tower, both ways, and
12 of the 962 groups of parts of its optimizer. Kernels keep names, shapes, durations and order, and follow
each other as they did; the host's events are eight times as fast, so that no cut makes the device wait.
"""

import gzip
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

from headway.explain.attribution import Phase
from headway.explain.breakdown import OTHERS, OUTSIDE, break_down, gemms_of
from headway.explain.text import as_text
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain


class Model(torch.nn.Module):
    """Three layers, the second recomputed in backward, each telling its path."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        for i in range(3):
            x = checkpoint(self._layer, i, x, use_reentrant=False) if i == 1 else self._layer(i, x)
        return x

    def _layer(self, i, x):
        with record_function(f"module:layers.{i}"):
            return torch.relu(self.layers[i](x))


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.json.gz"
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for step in (1, 2, 3):
            with record_function(f"ProfilerStep#{step}"):
                with record_function("phase:data_wait"):
                    x = torch.randn(256, 64)
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    profiler.export_chrome_trace(str(path))
    return read_trace(path)


def test_the_steps_of_a_cpu_are_all_there_and_add_up(trace):
    found = explain([trace])
    assert [one.step for one in found.steps] == [1, 2, 3]
    for one in found.steps:
        assert sum(line.ns for line in one.lines) == one.duration_ns
        lines = {line.key: line.ns for line in one.lines}
        assert min(lines["matmul"], lines["memory"], lines["optimizer"], lines["idle.data"], lines["idle.launch"]) > 0
        assert lines["communication"] == lines["copies"] == 0


def test_operators_of_a_cpu_belong_to_modules_and_the_checkpointed_one_runs_twice(trace):
    for waterfall in explain([trace]).steps:
        spent = {share.name: Counter(share.by_phase) for share in break_down(waterfall, "module")}
        for i in range(3):
            assert min(spent[f"layers.{i}"][phase] for phase in (Phase.FORWARD, Phase.BACKWARD)) > 0
            assert (spent[f"layers.{i}"][Phase.RECOMPUTED] > 0) == (i == 1)
        assert spent[OUTSIDE][Phase.RECOMPUTED] == 0


def test_products_of_a_cpu_are_all_attributed(trace):
    measured, _ = explain([trace]).steps[0].measured
    modules = {
        module
        for work, module in zip(measured.attribution.work, measured.attribution.module, strict=True)
        if work == "matmul"
    }
    assert modules == {"layers.0", "layers.1", "layers.2"}


def test_products_of_a_cpu_have_the_flops_that_ran_and_no_more(trace):
    for waterfall in explain([trace]).steps:
        rows = gemms_of(waterfall)
        assert sum(row.ns for row in rows) == next(line.ns for line in waterfall.lines if line.key == "matmul")
        flops = sum(row.product.flops * row.calls for row in rows if row.product is not None)
        # forward of 3 layers and 1 again, gradients of 3 weights and of 2 inputs
        assert flops == (3 + 1 + 3 + 2) * 2 * 256 * 64 * 64


GPU = Path(__file__).with_name("h200_two_blocks.json.gz")
# Kinds of work by the names of this trace's kernels alone: whatever is neither is memory-bound or the optimizer's.
BY_NAME = {"attention": re.compile("flash_(fwd|bwd)"), "products": re.compile("^nvjet|GroupProblemShape|splitKreduce")}


@pytest.fixture(scope="module")
def gpu_step():
    (waterfall,) = explain([read_trace(GPU)]).steps
    return waterfall


def kernels_of(pattern):
    """Time of the kernels whose names match [ns]; they follow each other without overlap."""
    events = json.loads(gzip.decompress(GPU.read_bytes()))["traceEvents"]
    kernels = [event for event in events if event["cat"] == "kernel" and pattern.search(event["name"])]
    return round(sum(event["dur"] for event in kernels) * 1000)


def test_compiled_blocks_on_a_gpu_are_divided_by_their_kernels(gpu_step):
    rows = {row.name: row for row in break_down(gpu_step, "component")}
    for part, pattern in BY_NAME.items():
        ns = sum(rows[f"{tower}.{part}"].ns for tower in ("vision", "language"))
        assert ns == pytest.approx(kernels_of(pattern), rel=0.005)
    assert not [name for name in rows if "compiled" in name]
    # 72 elements a head in the tower and 128 in the language model, 2,391 and 313 keys a query
    rates = {tower: rows[f"{tower}.attention"].flops_per_s for tower in ("vision", "language")}
    assert rates["vision"] > rates["language"] > 1e14


def test_all_that_needed_work_leaves_is_named_on_a_gpu(gpu_step):
    lines = {line.key: line for line in gpu_step.lines}
    assert sum(line.ns for line in gpu_step.lines) == gpu_step.duration_ns
    assert lines["unexplained"].ns == 0
    assert lines["optimizer"].share == pytest.approx(0.26, abs=0.01)
    assert lines["idle.launch"].share < 0.01
    assert set(lines["idle.other"].parts) == {"from one kernel to the next"}
    text = as_text(explain([read_trace(GPU)]))
    assert "idle: other: from one kernel to the next 0.78 ms." in text
    assert "first or last of the trace" not in text  # its edges on the host and on the device agree


def test_experts_are_products_of_all_their_rows_on_a_gpu(gpu_step):
    rows = {row.name: row for row in gemms_of(gpu_step)}
    # 8,192 tokens x 8 experts each, a width of 2,048 and gate and up of 768 together; forward, and again in backward
    up = rows["65536x1536x2048"]
    assert (up.calls, up.product.flops) == (2, 2 * 65536 * 1536 * 2048)
    attention_ns = kernels_of(BY_NAME["attention"])
    assert rows[OTHERS].ns == pytest.approx(attention_ns, rel=0.01)
    assert OTHERS in as_text(explain([read_trace(GPU)]), "gemm")  # below the sizes, of which there are more than 20


def test_findings_on_a_gpu_name_the_optimizers_passes_and_the_slower_attention():
    findings = {finding.id: finding for finding in explain([read_trace(GPU)]).findings}
    assert list(findings) == ["unfused-optimizer", "slow-attention"]
    # 12 groups of 2**24 values, of which one pass reads and writes 7 x 2 bytes; 142 bytes are moved of each
    values = 12 * 2**24
    assert f"read and wrote {values * 142 / 1e9:.3g} GB" in findings["unfused-optimizer"].seen
    assert f"moves {values * 14 / 1e9:.3g} GB" in findings["unfused-optimizer"].seen
    attention_ns = {"vision": 6.20e6, "language": 1.07e6}  # cuDNN is 1.5 times as fast in the one, 0.6 in the other
    saved_ns = attention_ns["vision"] * (1 - 1 / 1.5) + attention_ns["language"] * (1 - 1 / 0.6)
    assert findings["slow-attention"].ns == pytest.approx(saved_ns, rel=0.01)
